# SPDX-License-Identifier: Apache-2.0
"""Certificates in the real loop: at boot, at renewal, and after a failure; the round of the duty."""

import msgspec
import pytest
import sqlalchemy as sa
from control import LB, TREE, World, controlled

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
    """What amphorae are to have, as a test says."""

    def __init__(self):
        self.wanted = ca_rotation.DesiredTrust(authority=None, trusts="files-x/y")
        self.error = None

    def credentials(self):
        if self.error is not None:
            raise self.error
        return AmphoraCredentials(desired=self.wanted, client_ca=b"callers", server_ca=b"signers", issuer=AUTHORITY)


class Certified(World):
    """One amphora, that takes certificates."""

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
        assert deadline.left() <= 10, "users may wait for something else"
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
    control.intents.create_load_balancer(TREE, read_back=False)
    control.work()
    (one,) = control.observed().values()
    return one


def due(control):
    """The duty has looked."""
    return control.database.write(lambda c: ca_records.make_load_balancers_due(c, [LB], 1.0))


def age(control, days):
    def write(connection):
        row = connection.execute(sa.select(amphora)).one()
        at = row.certificate_issued_at - days * DAY
        connection.execute(amphora.update().values(certificate_issued_at=at, certificate_expires_at=at + 7 * DAY))

    control.database.write(write)


def test_the_boot_certificate_is_recorded_first(control):
    control.world.refusal = ComputeError("boot", "not now")
    control.intents.create_load_balancer(TREE, read_back=False)
    control.reconciler.reconcile(control.jobs.claim())
    (one,) = control.observed().values()
    assert one.management_address is None
    assert (one.trusts, one.certificate_authority) == ("files-x/y", None)
    assert one.certificate_issued_at is not None
    assert (control.world.files["client_ca.pem"], control.world.files["server_ca.pem"]) == (b"callers", b"signers")


@pytest.mark.parametrize(
    ("first", "second", "there", "counts"),
    [
        ((1, "1"), (1, "1"), True, (1, "1")),
        ((1, "1"), (1, "1,2"), True, (1, "1")),
        ((1, "1,2"), (2, "1,2"), True, (None, "1,2")),
        ((1, "1"), (1, "1,2"), False, (1, "1,2")),
    ],
)
def test_of_two_boots_only_what_both_gave_counts(control, trust, monkeypatch, first, second, there, counts):
    """The machine may be that of the first: a rotation must not go on as if it had more."""
    control.world.refusal = ComputeError("boot", "the answer was lost")
    monkeypatch.setattr(control.world, "get", World.get.__get__(control.world) if there else lambda _: None)
    control.intents.create_load_balancer(TREE, read_back=False)
    for authority, trusts in (first, second):
        trust.wanted = ca_rotation.DesiredTrust(authority=authority, trusts=trusts)
        control.hurry()
        control.reconciler.reconcile(control.jobs.claim())
    (one,) = control.observed().values()
    assert (one.certificate_authority, one.trusts) == counts


def test_a_due_certificate_is_renewed_alone(control):
    one = begun(control)
    assert control.world.taken == []
    age(control, 4)
    before = control.row()
    assert due(control) == 1
    assert control.work() == 1
    [(certificate, client_ca, server_ca)] = control.world.taken
    assert str(certificate) == "***"
    assert (client_ca, server_ca) == (b"callers", b"signers")
    (now,) = control.observed().values()
    assert now.certificate_expires_at > one.certificate_expires_at - 60
    after = control.row()
    assert (after.generation, after.applied, after.dirty) == (before.generation, before.applied, False)
    assert due(control) == 1
    control.work()
    assert len(control.world.taken) == 1, "it is not due any more"


def test_a_changed_ca_causes_a_renewal(control, trust):
    begun(control)
    trust.wanted = ca_rotation.DesiredTrust(authority=2, trusts="1,2")
    due(control)
    control.work()
    (now,) = control.observed().values()
    assert (now.certificate_authority, now.trusts) == (2, "1,2")


@pytest.mark.parametrize("trouble", ["dead", "another"])
def test_a_renewal_that_fails_costs_no_user_anything(control, trouble, monkeypatch):
    one = begun(control)
    age(control, 4)
    (before,) = control.observed().values()
    control.world.dead = {one.id} if trouble == "dead" else set()
    control.world.shows_another = trouble == "another"
    due(control)
    assert control.work() == 1, "once in a turn"
    (after,) = control.observed().values()
    assert after.certificate_expires_at == before.certificate_expires_at, "nothing is written down that was not seen"
    row = control.row()
    assert (row.attempts, row.dirty, row.error) == (0, False, None)
    assert control.provisioning()[LB] == "ACTIVE"
    control.world.dead, control.world.shows_another = set(), False
    taken = len(control.world.taken)
    due(control)
    control.work()
    assert len(control.world.taken) == taken, "not in every turn: users may wait for something else in it"
    monkeypatch.setattr(renewing, "_RETRY_AFTER", 0.0)
    due(control)
    control.work()
    (now,) = control.observed().values()
    assert now.certificate_expires_at > before.certificate_expires_at


def test_an_authority_that_cannot_sign_costs_no_user_anything(control, trust, monkeypatch):
    begun(control)
    age(control, 4)

    def refuse(*_):
        raise CertificateError("issue a certificate", "the authority itself expired")

    monkeypatch.setattr(AUTHORITY, "issue_server", refuse)
    due(control)
    assert control.work() == 1
    assert (control.row().attempts, control.world.taken) == (0, [])
    assert control.provisioning()[LB] == "ACTIVE"


def test_an_unknown_ca_causes_no_renewal(control, trust):
    begun(control)
    age(control, 4)
    trust.error = StoreError("read the authorities", "away")
    due(control)
    assert control.work() == 1
    assert control.world.taken == []
    assert control.row().attempts == 0


def test_the_look_of_the_duty(control, trust):
    begun(control)
    duty = CertificateMaintenance(control.conf, control.database, trust)
    assert duty.make_renewals_due() == 0
    age(control, 4)
    assert duty.make_renewals_due() == 1
    assert duty.make_renewals_due() == 0, "it is looked at already"
    control.work()
    assert duty.make_renewals_due() == 0
    trust.error = StoreError("read", "away")
    renew_certificates(duty)


def test_a_rotation_moves_on_by_the_duty(control, trust, monkeypatch, caplog):
    one = begun(control)
    duty = CertificateMaintenance(control.conf, control.database, trust)
    assert not duty.advance(CaKind.CONTROLLER), "nothing is rotated"
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
    assert [one.id in each.message for each in caplog.records] == [True], "the log names it once"
    trusting(f"{before},{after}")
    assert duty.advance(CaKind.CONTROLLER)
    assert states() == {before: CaState.FORMER, after: CaState.CURRENT}
    assert not duty.advance(CaKind.CONTROLLER), "each step takes its time"
    later()
    settle = control.conf.amp_certificates.settle
    monkeypatch.setattr(control.database, "seconds_since_clock_jump", lambda: settle - 1)
    assert not duty.advance(CaKind.CONTROLLER), "and not only by a clock that was set meanwhile"
    monkeypatch.setattr(control.database, "seconds_since_clock_jump", lambda: settle)
    assert duty.advance(CaKind.CONTROLLER)
    assert states() == {before: CaState.LEAVING, after: CaState.CURRENT}
    later()
    assert not duty.advance(CaKind.CONTROLLER), "it is trusted still"
    trusting(str(after))
    assert duty.advance(CaKind.CONTROLLER)
    assert states() == {before: CaState.GONE, after: CaState.CURRENT}
    assert control.database.read(lambda c: c.execute(sa.select(job.c.dirty)).scalar_one()) is False
