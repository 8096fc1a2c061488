# SPDX-License-Identifier: Apache-2.0
"""Certificates in the real job loop: at boot, at renewal and after a failure; the certificate maintenance duty."""

import msgspec
import pytest
import sqlalchemy as sa
from control import LB, TREE, FakeCloud, controlled

from amphora_driver.agent.client import Info
from amphora_driver.certificates import ca_rotation
from amphora_driver.certificates import renewal as renewing
from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.certificates.renewal import CertificateMaintenance, renew_certificates
from amphora_driver.certificates.trust_store import AmphoraCredentials
from amphora_driver.database.tables import amphora, job
from amphora_driver.errors import AgentUntrusted, CertificateError, ComputeError, StoreError
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import CaKind, CaState, NewCa
from amphora_driver.topology import SingleTopology

DAY = 86400.0
AUTHORITY = Authority(*create_authority("amphorae"))


class Trusted:
    """The desired certificates and CAs, set by a test."""

    def __init__(self):
        self.wanted = ca_rotation.DesiredTrust(authority=None, trusts="files-x/y")
        self.error = None

    def credentials(self):
        if self.error is not None:
            raise self.error
        return AmphoraCredentials(desired=self.wanted, client_ca=b"callers", server_ca=b"signers", issuer=AUTHORITY)


class Certified(FakeCloud):
    """A fake amphora that accepts certificates."""

    roles = SingleTopology.roles
    priorities = SingleTopology.priorities

    def __init__(self):
        super().__init__()
        self.taken = []
        self.files = {}
        self.refusal = None
        self.shows_another = False

    def boot(self, order):
        self.files = {name: content.reveal() for name, content in order.files.items()}
        if self.refusal is not None:
            raise self.refusal
        return super().boot(order)

    def info(self, amphora_id, _address, *, deadline=None):
        return Info(amphora_id=amphora_id, agent_version="1")

    def renew(self, amphora_id, _address, certificate, *, client_ca, server_ca, deadline):
        assert deadline.left() <= 10, "a renewal must not delay user requests"
        self._reach(amphora_id)
        self.taken.append((certificate, client_ca, server_ca))

    def verify_certificate(self, amphora_id, _address, _fingerprint, *, deadline):
        self._reach(amphora_id)
        if self.shows_another:
            raise AgentUntrusted("see the new certificate", "another one")


@pytest.fixture
def trust():
    return Trusted()


@pytest.fixture
def control(tmp_path, trust):
    with controlled(tmp_path, Certified()) as made:
        made.reconciler._context = msgspec.structs.replace(made.reconciler._context, trust=trust)
        yield made


def begun(control):
    control.recorder.create_load_balancer(TREE, read_back=False)
    control.work()
    (one,) = control.observed().values()
    return one


def due(control):
    """Run the maintenance duty once for the load balancer."""
    return control.database.write(lambda c: ca_records.make_load_balancers_due(c, [LB], 1.0))


def age(control, days):
    def write(connection):
        row = connection.execute(sa.select(amphora)).one()
        at = row.certificate_issued_at - days * DAY
        connection.execute(amphora.update().values(certificate_issued_at=at, certificate_expires_at=at + 7 * DAY))

    control.database.write(write)


def test_the_boot_certificate_is_recorded_first(control):
    control.cloud.refusal = ComputeError("boot", "not now")
    control.recorder.create_load_balancer(TREE, read_back=False)
    control.reconciler.reconcile(control.jobs.claim())
    (one,) = control.observed().values()
    assert one.management_address is None
    assert (one.trusts, one.certificate_authority) == ("files-x/y", None)
    assert one.certificate_issued_at is not None
    assert (control.cloud.files["client_ca.pem"], control.cloud.files["server_ca.pem"]) == (b"callers", b"signers")


@pytest.mark.parametrize(
    ("first", "second", "there", "counts"),
    [
        ((1, "1"), (1, "1"), True, (1, "1")),
        ((1, "1"), (1, "1,2"), True, (1, "1")),
        ((1, "1,2"), (2, "1,2"), True, (None, "1,2")),
        ((1, "1"), (1, "1,2"), False, (1, "1,2")),
    ],
)
def test_two_boot_attempts_record_only_what_both_files_contain(
    control, trust, monkeypatch, first, second, there, counts
):
    """The machine may have the first attempt's files, so a CA rotation must not count on the second attempt's."""
    control.cloud.refusal = ComputeError("boot", "the answer was lost")
    monkeypatch.setattr(control.cloud, "get", FakeCloud.get.__get__(control.cloud) if there else lambda _: None)
    control.recorder.create_load_balancer(TREE, read_back=False)
    for authority, trusts in (first, second):
        trust.wanted = ca_rotation.DesiredTrust(authority=authority, trusts=trusts)
        control.make_all_due()
        control.reconciler.reconcile(control.jobs.claim())
    (one,) = control.observed().values()
    assert (one.certificate_authority, one.trusts) == counts


def test_a_due_certificate_is_renewed_alone(control):
    one = begun(control)
    assert control.cloud.taken == []
    age(control, 4)
    before = control.row()
    assert due(control) == 1
    assert control.work() == 1
    [(certificate, client_ca, server_ca)] = control.cloud.taken
    assert str(certificate) == "***"
    assert (client_ca, server_ca) == (b"callers", b"signers")
    (now,) = control.observed().values()
    assert now.certificate_expires_at > one.certificate_expires_at - 60
    after = control.row()
    assert (after.generation, after.applied, after.dirty) == (before.generation, before.applied, False)
    assert due(control) == 1
    control.work()
    assert len(control.cloud.taken) == 1, "the new certificate is not due"


def test_a_changed_ca_causes_a_renewal(control, trust):
    begun(control)
    trust.wanted = ca_rotation.DesiredTrust(authority=2, trusts="1,2")
    due(control)
    control.work()
    (now,) = control.observed().values()
    assert (now.certificate_authority, now.trusts) == (2, "1,2")


@pytest.mark.parametrize("trouble", ["dead", "another"])
def test_a_failed_renewal_does_not_affect_the_load_balancer(control, trouble, monkeypatch):
    one = begun(control)
    age(control, 4)
    (before,) = control.observed().values()
    control.cloud.dead = {one.id} if trouble == "dead" else set()
    control.cloud.shows_another = trouble == "another"
    due(control)
    assert control.work() == 1, "a job makes one attempt"
    (after,) = control.observed().values()
    assert after.certificate_expires_at == before.certificate_expires_at, "an unverified certificate is not recorded"
    row = control.row()
    assert (row.attempts, row.dirty, row.error) == (0, False, None)
    assert control.provisioning()[LB] == "ACTIVE"
    control.cloud.dead, control.cloud.shows_another = set(), False
    taken = len(control.cloud.taken)
    due(control)
    control.work()
    assert len(control.cloud.taken) == taken, "the renewal waits for its retry time"
    monkeypatch.setattr(renewing, "_RETRY_AFTER", 0.0)
    due(control)
    control.work()
    (now,) = control.observed().values()
    assert now.certificate_expires_at > before.certificate_expires_at


def test_a_ca_that_cannot_sign_does_not_affect_the_load_balancer(control, trust, monkeypatch):
    begun(control)
    age(control, 4)

    def refuse(*_):
        raise CertificateError("issue a certificate", "the authority itself expired")

    monkeypatch.setattr(AUTHORITY, "issue_server", refuse)
    due(control)
    assert control.work() == 1
    assert (control.row().attempts, control.cloud.taken) == (0, [])
    assert control.provisioning()[LB] == "ACTIVE"


def test_an_unknown_ca_causes_no_renewal(control, trust):
    begun(control)
    age(control, 4)
    trust.error = StoreError("read the authorities", "away")
    due(control)
    assert control.work() == 1
    assert control.cloud.taken == []
    assert control.row().attempts == 0


def test_the_maintenance_duty_makes_a_load_balancer_due_once(control, trust):
    begun(control)
    duty = CertificateMaintenance(control.conf, control.database, trust)
    assert duty.make_renewals_due() == 0
    age(control, 4)
    assert duty.make_renewals_due() == 1
    assert duty.make_renewals_due() == 0, "the load balancer is due already"
    control.work()
    assert duty.make_renewals_due() == 0
    trust.error = StoreError("read", "away")
    renew_certificates(duty)


def test_the_maintenance_duty_advances_a_ca_rotation(control, trust, monkeypatch, caplog):
    one = begun(control)
    duty = CertificateMaintenance(control.conf, control.database, trust)
    assert not duty.advance(CaKind.CONTROLLER), "no CA rotation is open"
    new = NewCa(certificate=b"", sealed_key=b"sealed", expires_at=0.0)
    number = control.database.write(lambda c: ca_records.begin_ca_rotation(c, CaKind.CONTROLLER, new, new, 1.0))
    before, after = number - 1, number

    def trusting(text):
        control.database.write(lambda c: c.execute(amphora.update().values(trusts=text)))

    def states():
        return {each.id: each.state for each in control.database.read(lambda c: ca_records.list_cas(c, gone=True))}

    def later():
        at = control.database.now() - 1000
        control.database.write(lambda c: c.execute(ca_records.certificate_authority.update().values(changed_at=at)))

    caplog.set_level("WARNING")
    for _ in range(2):
        assert not duty.advance(CaKind.CONTROLLER)
    assert [one.id in each.message for each in caplog.records] == [True], "the log names the amphora once"
    trusting(f"{before},{after}")
    assert duty.advance(CaKind.CONTROLLER)
    assert states() == {before: CaState.FORMER, after: CaState.CURRENT}
    assert not duty.advance(CaKind.CONTROLLER), "the rotation waits for the settle time"
    later()
    settle = control.conf.amp_certificates.settle
    monkeypatch.setattr(control.database, "seconds_since_clock_jump", lambda: settle - 1)
    assert not duty.advance(CaKind.CONTROLLER), "a clock jump does not shorten the settle time"
    monkeypatch.setattr(control.database, "seconds_since_clock_jump", lambda: settle)
    assert duty.advance(CaKind.CONTROLLER)
    assert states() == {before: CaState.LEAVING, after: CaState.CURRENT}
    later()
    assert not duty.advance(CaKind.CONTROLLER), "an amphora still trusts the former CA"
    trusting(str(after))
    assert duty.advance(CaKind.CONTROLLER)
    assert states() == {before: CaState.GONE, after: CaState.CURRENT}
    assert control.database.read(lambda c: c.execute(sa.select(job.c.dirty)).scalar_one()) is False
