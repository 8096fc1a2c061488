# SPDX-License-Identifier: Apache-2.0
"""Certificates of amphorae: issued at boot, renewed in time, moved to another CA.

Invariant: the row of an amphora never claims a trust that the amphora does not have, so a CA rotation based on these
rows breaks no connection. A certificate is therefore recorded before a boot, which may succeed unnoticed, and after a
renewal that a new connection has confirmed. A failed renewal affects no user: a later job repeats it, after a pause.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts

from amphora_driver import failpoints
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates import ca_rotation
from amphora_driver.certificates.ca import Issued, fingerprint
from amphora_driver.certificates.ca_rotation import CertificateLifetime
from amphora_driver.certificates.trust_store import AmphoraCredentials, TrustStore
from amphora_driver.errors import AgentError, AmphoraDriverError, CertificateError, StoreError
from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.queue.jobs import guard_lease
from amphora_driver.store import amphorae, ca_records
from amphora_driver.store.ca_records import AmphoraCertificate, CaKind

if TYPE_CHECKING:
    from amphora_driver.database.engine import Database
    from amphora_driver.reconcile.job import Job

LOG = logging.getLogger(__name__)
# Time-out in seconds of the renewal of one certificate. The time-out is short, because changes by users wait in the
# same job until the renewal ends.
_RENEWAL_TIMEOUT = 10.0
_RETRY_AFTER = 60.0
# Times of the last failed renewals by amphora id, on the clock of `time.monotonic()`.
_FAILED: dict[str, float] = {}
# Maximum number of load balancers with renewals in one round. Without a limit, the whole fleet could renew its
# certificates at once.
_MOST = 100
_NAMED = 5


def certificate_lifetime(conf: ConfigOpts) -> CertificateLifetime:
    """Return the configured lifetime of certificates."""
    options = conf.amp_certificates
    return CertificateLifetime(validity=options.validity_days * ca_rotation.DAY, renew_at=options.renew_at)


def _held(one: Amphora) -> AmphoraCertificate:
    return AmphoraCertificate(
        amphora_id=one.id,
        load_balancer_id=one.load_balancer_id,
        ready=True,
        issued_at=one.certificate_issued_at,
        expires_at=one.certificate_expires_at,
        authority=one.certificate_authority,
        trusts=one.trusts,
    )


class CertificateRenewer:
    """Issues and renews the certificates of one load balancer's amphorae in one job.

    `tried` are the amphorae whose renewal this job has attempted.
    """

    def __init__(
        self, conf: ConfigOpts, database: Database, agents: AgentClient, trust: TrustStore | None, job: Job
    ) -> None:
        self.tried: frozenset[str] = frozenset()
        self._days: int = conf.amp_certificates.validity_days
        self._lifetime = certificate_lifetime(conf)
        self._database = database
        self._agents = agents
        self._trust = trust
        self._job = job
        # The CA and the trust list that each amphora should have. If the CAs are unreadable, the value is None and no
        # certificate is renewed.
        self._desired: ca_rotation.DesiredTrust | None = None
        try:
            self._desired = None if trust is None else trust.credentials().desired
        except (CertificateError, StoreError) as error:
            LOG.warning(
                "the controller cannot read the certificate authorities, so the current job renews no certificates: %s",
                error,
            )

    def due(self, observed: Sequence[Amphora], now: float) -> dict[str, str]:
        """Return the amphorae whose certificate this job should renew, with the reason."""
        if self._desired is None:
            return {}
        desired, lifetime, asked = self._desired, self._lifetime, [one for one in observed if self._may_renew(one)]
        found = {one.id: ca_rotation.renewal_reason(_held(one), desired, lifetime, now) for one in asked}
        return {amphora_id: why for amphora_id, why in found.items() if why}

    def _may_renew(self, one: Amphora) -> bool:
        failed_at = _FAILED.get(one.id)
        if one.id in self.tried or (failed_at is not None and time.monotonic() - failed_at < _RETRY_AFTER):
            return False
        # A retiring amphora still serves connections, so it needs a valid certificate. A retiring amphora without a
        # confirmed generation may have no machine.
        exists = one.state is AmphoraState.READY or (one.state is AmphoraState.RETIRING and one.confirmed > 0)
        return exists and one.management_address is not None and not one.dead

    def issue_for_boot(self, amphora: Amphora, exists: Callable[[], bool]) -> tuple[AmphoraCredentials, Issued] | None:
        """Issue and record the credentials of a boot; None without a trust store, in tests.

        An earlier boot of the same amphora may have succeeded with other credentials. If its machine exists (`exists`),
        the row records only the common part.
        """
        if self._trust is None:
            return None
        credentials = self._trust.credentials()
        issued = credentials.issuer.issue_server(amphora.id, self._days)
        by, trusts = credentials.desired.authority, credentials.desired.trusts
        if amphora.certificate_issued_at is not None and exists():
            by = by if by == amphora.certificate_authority else None
            trusts = ca_rotation.common_trust(amphora.trusts, trusts)
        # The boot of this amphora may crash every controller. So this write is no progress, which would reset the job's
        # crash count.
        self._record(amphora.id, by, trusts, issued.expires_at, is_progress=False)
        return credentials, issued

    def renew(self, amphora: Amphora) -> None:
        """Give an amphora a new certificate and trust list; a later job repeats a failed renewal.

        Raises:
            LeaseLost: another process owns the load balancer.
            Superseded: this job is preempted.
        """
        if self._trust is None:
            return
        self.tried |= {amphora.id}
        deadline = self._job.deadline.within(_RENEWAL_TIMEOUT)
        address = str(amphora.management_address)
        try:
            credentials = self._trust.credentials()
            issued = credentials.issuer.issue_server(amphora.id, self._days)
        except (CertificateError, StoreError) as error:
            LOG.warning(
                "the controller cannot issue a certificate to amphora %s and tries again later: %s", amphora.id, error
            )
            return
        self._job.ensure_may_act()
        try:
            cas = {"client_ca": credentials.client_ca, "server_ca": credentials.server_ca}
            self._agents.renew(amphora.id, address, issued.bundle(), **cas, deadline=deadline)
            self._agents.verify_certificate(amphora.id, address, fingerprint(issued.certificate), deadline=deadline)
        except (AgentError, CertificateError) as error:
            # The error may only mean that a more urgent request has interrupted this job. Then `ensure_may_act` ends
            # the job before the renewal counts as failed.
            self._job.ensure_may_act()
            _FAILED[amphora.id] = time.monotonic()
            LOG.warning(
                "the controller could not renew the certificate of amphora %s and tries again later: %s",
                amphora.id,
                error,
            )
            return
        _FAILED.pop(amphora.id, None)
        failpoints.reach_step("RenewCertificate", failpoints.Moment.DONE)
        self._record(amphora.id, credentials.desired.authority, credentials.desired.trusts, issued.expires_at)
        LOG.info(
            "the controller renewed the certificate of amphora %s, which now trusts the certificate authorities %s",
            amphora.id,
            credentials.desired.trusts,
        )

    def _record(
        self, amphora_id: str, authority: int | None, trusts: str, expires_at: float, *, is_progress: bool = True
    ) -> None:
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            guard_lease(connection, self._job.lease, is_progress=is_progress)
            amphorae.update_amphora(
                connection,
                amphora_id,
                certificate_issued_at=now,
                certificate_expires_at=expires_at,
                certificate_authority=authority,
                trusts=trusts,
            )

        self._database.write(write)


class CertificateFleet(msgspec.Struct, frozen=True, kw_only=True):
    """CAs and the certificates of all amphorae at one moment."""

    recorded: tuple[ca_records.CaRecord, ...]
    held: tuple[AmphoraCertificate, ...]
    now: float


def load_fleet(database: Database) -> CertificateFleet:
    """Load the CAs and the certificates of all amphorae.

    Raises:
        StoreError: the database refused the query.
    """
    now = database.now()
    recorded, held = database.read(lambda c: (ca_records.list_cas(c), ca_records.list_amphora_certificates(c)))
    return CertificateFleet(recorded=recorded, held=held, now=now)


class CertificateMaintenance:
    """Periodic work of one controller: makes renewals due and advances CA rotations."""

    def __init__(self, conf: ConfigOpts, database: Database, trust: TrustStore) -> None:
        self._lifetime = certificate_lifetime(conf)
        self._settle: float = conf.amp_certificates.settle
        self._database = database
        self._trust = trust
        self._logged: dict[CaKind, tuple[str, ...]] = {}

    def run_once(self) -> None:
        for kind in CaKind:
            self.advance(kind)
        self.make_renewals_due()

    def advance(self, kind: CaKind) -> bool:
        """Take the next step of the rotation of one kind of CA; return whether a step was possible."""
        failpoints.reach_step(f"Authority-{kind.value}", failpoints.Moment.BEFORE)
        now = self._database.now()

        def read(connection: sa.Connection) -> ca_rotation.RotationPhase:
            recorded = ca_records.list_cas(connection)
            if not ca_rotation.is_rotating(kind, recorded):
                return ca_rotation.RotationPhase()
            held = ca_records.list_amphora_certificates(connection)
            return ca_rotation.rotation_phase(kind, recorded, held, now, self._settle)

        def write(connection: sa.Connection) -> ca_rotation.RotationPhase:
            # Another controller may have changed the CAs since the first read, so the write transaction reads the CAs
            # again.
            found = read(connection)
            changed = found.moves and ca_records.change_ca_states(connection, found.moves, now)
            return found if changed else ca_rotation.RotationPhase()

        found = self._database.read(read)
        if found.moves:
            # After a jump of the database clock, the age of a rotation step is unreliable. So the controller waits for
            # the minimum duration of a step before the next step.
            reliable = self._database.seconds_since_clock_jump() >= self._settle
            found = self._database.write(write) if reliable else ca_rotation.RotationPhase()
        if found.moves:
            failpoints.reach_step(f"Authority-{kind.value}", failpoints.Moment.MARKED)
            steps = ", ".join(f"{one.id} is {state.value}" for one, state in found.moves.items())
            LOG.info(
                "the controller took the next step in the rotation of the %s certificate authority; new states by "
                "id of the authority: %s",
                kind.value,
                steps,
            )
        self._log_waiting(kind, found)
        return bool(found.moves)

    def _log_waiting(self, kind: CaKind, found: ca_rotation.RotationPhase) -> None:
        """Log the amphorae that a rotation waits for after the minimum time of a step, once for each change."""
        waits = found.waits_for if self._database.now() > found.until else ()
        if waits and waits != self._logged.get(kind):
            names = ", ".join(waits[:_NAMED]) + (" and others" if len(waits) > _NAMED else "")
            words = (kind.value, found.reason, len(waits), names)
            LOG.warning(
                "the rotation of the %s certificate authority waits until each amphora fulfils this "
                "condition: %s. The condition is not fulfilled for %d amphorae: %s",
                *words,
            )
        self._logged[kind] = waits

    def make_renewals_due(self) -> int:
        """Make load balancers due whose amphorae need a renewal; return their number."""
        desired = self._trust.credentials().desired
        fleet = load_fleet(self._database)
        ready, lifetime = [one for one in fleet.held if one.ready], self._lifetime
        outdated = {
            one.load_balancer_id for one in ready if ca_rotation.renewal_reason(one, desired, lifetime, fleet.now)
        }
        if not outdated:
            return 0
        # The load balancers are chosen at random. With a fixed order, the same unreachable amphorae could block all
        # other renewals.
        chosen = random.sample(sorted(outdated), min(_MOST, len(outdated)))
        return self._database.write(lambda c: ca_records.make_load_balancers_due(c, chosen, fleet.now))


def renew_certificates(certificates: CertificateMaintenance) -> None:
    """Run the maintenance once; errors are only logged, so that the other housekeeping continues."""
    try:
        certificates.run_once()
    except AmphoraDriverError as error:
        LOG.warning("the certificate maintenance of the controller failed and runs again in the next round: %s", error)
    except Exception:
        # Housekeeping calls this function first, and an error must not omit its other tasks.
        LOG.exception(
            "the certificate maintenance of the controller failed unexpectedly and runs again in the next round"
        )
