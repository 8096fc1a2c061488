# SPDX-License-Identifier: Apache-2.0
"""A load balancer that crashes every controller: it goes to ERROR and is retried occasionally."""

import pytest
import sqlalchemy as sa
from control import LB, TREE, FakeCloud, controlled

from amphora_driver.database.tables import job, object_status
from amphora_driver.queue.jobs import Jobs
from amphora_driver.topology import SingleTopology

DEATHS = 4


class CrashingCloud(FakeCloud):
    """A fake cloud in which a boot crashes the controller until the cause is repaired."""

    roles = SingleTopology.roles
    priorities = SingleTopology.priorities

    def __init__(self):
        super().__init__()
        self.tried = 0
        self.mended = False

    def boot(self, order):
        self.tried += 1
        if not self.mended:
            raise KeyboardInterrupt
        return super().boot(order)


@pytest.fixture(params=[False, True], ids=["without a trust store", "with a trust store"])
def control(tmp_path, request):
    options = f"give_up_after = {DEATHS}\nretry_most = 60\n"
    with controlled(tmp_path, CrashingCloud(), options=options, with_trust=request.param) as control:
        control.recorder.create_load_balancer(TREE, read_back=False)
        yield control


def crash_in_a_process(control):
    """Claim and crash with the job once it is due; return False if the controller did not crash."""
    control.make_all_due()
    jobs = Jobs(control.database, "mortal", 60.0)
    lease = jobs.claim()
    if lease is None:
        return False
    try:
        control.reconciler.reconcile(lease)
    except KeyboardInterrupt:
        return jobs.release_leases("mortal") == 1
    return False


def told(control):
    found = control.database.read(
        lambda c: c.execute(sa.select(object_status).where(object_status.c.object_id == LB)).one()
    )
    return found.provisioning, found.reason or ""


def test_a_crash_loop_sets_error_and_spares_other_load_balancers(control):
    died = 0
    while crash_in_a_process(control):
        died += 1
        assert told(control)[0] is None, "one crash is not reported as a crash loop"
        assert died <= 2 * DEATHS
    # The first job recorded the amphora before the crash, which counts as progress.
    assert (died, control.cloud.tried) == (DEATHS, DEATHS)
    state, reason = told(control)
    assert (state, f"{DEATHS} controllers in a row crashed" in reason) == ("ERROR", True)
    found = control.row()
    assert (found.owner, found.dirty) == (None, True)
    assert control.database.now() + 30 < found.due_at

    control.make_all_due()
    assert crash_in_a_process(control), "the controller retries the job occasionally"
    assert not crash_in_a_process(control)
    assert control.database.now() + 30 < control.row().due_at, "the controller does not retry before the retry time"

    control.cloud.mended = True
    control.make_all_due()
    control.work()
    assert (control.row().crashes, control.provisioning()[LB]) == (0, "ACTIVE")


def test_crashes_with_progress_in_between_do_not_count(control):
    control.database.write(lambda c: c.execute(job.update().values(crashes=DEATHS - 1)))
    assert crash_in_a_process(control)
    assert control.row().crashes == 1, "the job recorded the amphora before the crash"
