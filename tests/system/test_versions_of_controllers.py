# SPDX-License-Identifier: Apache-2.0
"""Controllers of two versions on one database during a CA rotation: neither loses access.

Versions with the same contract migrations know the same steps of a rotation and can run together. A controller whose
expand migrations are missing does not start. A contract migration is refused while older controllers run, and an
overlooked process stops.
"""

import time

import kill_lab
import previous
import pytest
import sqlalchemy as sa
from kill_lab import ContinuousClient
from two_versions import amphoractl, controllers, left_to, second_controller

from amphora_driver.database.tables_fleet import process
from amphora_driver.store import ca_records, process_registry
from amphora_driver.store.ca_records import CaKind, CaState

pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.lasts(600)]

SETTLE = 6.0


@pytest.fixture(scope="module")
def lab():
    # Minimum duration of a step: time to suspend the next check.
    with kill_lab.lab(haste={"amp_certificates": {"settle": str(SETTLE)}}) as made:
        yield made


@pytest.fixture(autouse=True)
def no_waiting_process(lab):
    """Disarm the failpoints and end the draining that a failed test has left."""
    yield
    lab.disarm()
    undrained = process.update().values(draining=False)
    lab.database.write(lambda c: c.execute(undrained))


@pytest.fixture(scope="module")
def client(lab):
    balancer = lab.cloud.served("steady", ("member1", "member2"))
    with ContinuousClient(lab.cloud, balancer.vip_address) as client:
        client.balancer = balancer
        yield client
    assert client.failed == []
    assert client.answered > 100
    assert lab.replacements(balancer.id) == []


def log_of(lab, name):
    return lab.stack.supervision.log(name).read_text(encoding="utf-8")


def change(lab, balancer, weight):
    cloud = lab.cloud
    pool = cloud.pool_of(balancer)
    cloud.balancers.update_member(next(iter(cloud.balancers.members(pool))), pool, weight=weight)
    cloud.active(balancer.id)


def phase_of(connection, kind):
    found = {one.state for one in ca_records.list_cas(connection) if one.kind is kind}
    return next((state for state in (CaState.NEXT, CaState.FORMER, CaState.LEAVING) if state in found), None)


@pytest.mark.parametrize("kind", [CaKind.CONTROLLER, CaKind.AMPHORA])
def test_an_authority_is_replaced_by_controllers_of_two_versions(lab, client, tmp_path, kind):
    """The controllers alternate: each continues the other's work, and each reaches every amphora."""
    cloud, looks = lab.cloud, f"Authority-{kind.value}-before"
    previous.release(tmp_path)
    (ours,) = controllers(lab)
    before = cloud.amphorae(client.balancer)
    with second_controller(lab, tmp_path):
        cloud.until(lambda: len(controllers(lab)) == 2, "the second controller is registered")
        (theirs,) = controllers(lab) - {ours}
        # The check waits: each step lasts as long as both versions need.
        lab.hold(looks)
        status, begun = amphoractl(lab, "ca", "rotate", "--kind", kind.value)
        assert status == 0, begun
        made, weight = [], 10
        turns = [(ours, theirs), (theirs, ours)]
        for phase in (CaState.NEXT, CaState.FORMER, CaState.LEAVING, None):
            cloud.until(lambda p=phase: lab.database.read(lambda c: phase_of(c, kind)) is p, f"the phase is {phase}")
            lab.hold(looks)
            for works, rests in turns:
                left_to(lab, works, rests)
                for balancer in (client.balancer, *made):
                    weight += 1
                    change(lab, balancer, weight)
                made.append(cloud.served(f"meanwhile-{len(made)}", ("member1",)))
            # The other controller takes the next step.
            turns.reverse()
            assert lab.database.read(lambda c: phase_of(c, kind)) is phase
            lab.disarm()
        lab.database.write(lambda c: process_registry.set_process_draining(c, ours, draining=False))
    (now,) = [one for one in lab.database.read(ca_records.list_cas) if one.kind is kind]
    assert (now.id, now.state) == (begun["ID"], CaState.CURRENT)
    for balancer in made:
        assert lab.replacements(balancer.id) == []
        change(lab, balancer, 1)
        cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    for balancer in made:
        cloud.gone(balancer.id)
    assert cloud.amphorae(client.balancer) == before
    lab.settled()


def test_controllers_of_another_schema_do_nothing(lab, client, tmp_path):
    """The next version starts beside the current one: neither continues the other's work."""
    (expand, new), kind = previous.next_schema(tmp_path), CaKind.CONTROLLER
    old = f"{int(expand) - 1:04}"
    # The driver's own engine would also check the schema.
    engine = sa.create_engine(lab.settings.database_url)

    def phase():
        with engine.connect() as connection:
            return phase_of(connection, kind)

    looks = f"Authority-{kind.value}-before"
    lab.hold(looks)
    status, begun = amphoractl(lab, "ca", "rotate", "--kind", kind.value)
    assert status == 0, begun
    lab.held(looks)
    try:
        with second_controller(lab, tmp_path) as program:
            lab.cloud.until(lambda: lab.stack.supervision.running(program.name) is None, "the controller has ended")
            assert f"this version requires {expand}" in log_of(lab, program.name)
        # A running process prevents contract migrations, and the message names it.
        (ours,) = controllers(lab)
        status, said = amphoractl(lab, "database", "upgrade", "--contract", folder=tmp_path)
        assert (status, ours in said) == (1, True), said
        change(lab, client.balancer, 50)

        # The operator forces the upgrade.
        status, said = amphoractl(lab, "database", "upgrade", "--contract", "--force", folder=tmp_path)
        assert (status, said["After"]) == (0, new), said
        newer = f"the contract migration {new} has changed the schema"
        for name in ("amphora-controller", "amphora-health-manager", "octavia-driver-agent"):
            lab.cloud.until(lambda one=name: newer in log_of(lab, one), f"{name} refuses the schema")
        lab.disarm()
        # The old controller checks each second: if it still worked, the rotation would be in its next phase.
        time.sleep(SETTLE + 4)
        assert phase() is CaState.NEXT
        with second_controller(lab, tmp_path):
            lab.cloud.until(lambda: phase() is None, "the next version completes the rotation")
    finally:
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE alembic_version SET version_num = :old"), {"old": old})
            connection.execute(sa.text("DELETE FROM schema_minimum WHERE revision = :new"), {"new": new})
        engine.dispose()
        lab.disarm()
    # The current version's processes are the same: they have checked the schema again.
    change(lab, client.balancer, 51)
    (now,) = [one for one in lab.database.read(ca_records.list_cas) if one.kind is kind]
    assert (now.id, now.state) == (begun["ID"], CaState.CURRENT)
    lab.settled()
