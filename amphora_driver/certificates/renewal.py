# SPDX-License-Identifier: Apache-2.0
"""Certificates of amphorae: issued at boot, renewed in time, moved to another CA.

Invariant: a certificate is recorded before a boot, which may succeed unnoticed, and after a renewal that a new
connection has confirmed. A row therefore never claims a trust that the amphora does not have, and a CA rotation based
on these rows breaks no connection. A failed renewal affects no user: a later job repeats it, after a pause, so that it
does not delay other changes.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

import msgspec

from amphora_driver import failpoints
from amphora_driver.certificates import ca_rotation
from amphora_driver.certificates.ca import fingerprint
from amphora_driver.certificates.ca_rotation import CertificateLifetime
from amphora_driver.certificates.trust_store import AmphoraCredentials
from amphora_driver.errors import AgentError, AmphoraDriverError, CertificateError, StoreError
from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.queue.jobs import guard_lease
from amphora_driver.store import amphorae, ca_records
from amphora_driver.store.ca_records import AmphoraCertificate, CaKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.agent.client import AgentClient
    from amphora_driver.certificates.ca import Issued
    from amphora_driver.certificates.trust_store import TrustStore
    from amphora_driver.database.engine import Database
    from amphora_driver.reconcile.job import Job

LOG = logging.getLogger(__name__)
# Time-out of one renewal in seconds: users may wait for other changes of the same job.
_RENEWAL_TIMEOUT = 10.0
# Seconds without a further attempt after a failed renewal, and the times of the failures by amphora
# (`time.monotonic()`).
_RETRY_AFTER = 60.0
_FAILED: dict[str, float] = {}
# Load balancers that become due in one round, so that not all amphorae renew at the same time.
_MOST = 100
# Names in one log line.
_NAMED = 5


def certificate_lifetime(conf: ConfigOpts) -> CertificateLifetime:
    """Return the configured lifetime of certificates."""
    options = conf.amp_certificates
    return CertificateLifetime(validity=options.validity_days * ca_rotation.DAY, renew_at=options.renew_at)


def due(
    observed: Sequence[Amphora], desired: ca_rotation.DesiredTrust, lifetime: CertificateLifetime, now: float
) -> dict[str, str]:
    """Return the amphorae that need a new certificate now, with the reason.

    Booting and dead amphorae are excluded.
    """
    found = {
        one.id: ca_rotation.renewal_reason(_held(one), desired, lifetime, now) for one in observed if _is_callable(one)
    }
    return {amphora_id: why for amphora_id, why in found.items() if why}


def _is_callable(one: Amphora) -> bool:
    # The controller still calls a retiring amphora; one without a confirmed generation may not exist.
    there = one.state is AmphoraState.READY or (one.state is AmphoraState.RETIRING and one.confirmed > 0)
    return there and one.management_address is not None and not one.dead


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


def _failed_lately(amphora_id: str) -> bool:
    at = _FAILED.get(amphora_id)
    if at is not None and time.monotonic() - at >= _RETRY_AFTER:
        # Entries of deleted amphorae stay; each is one number.
        _FAILED.pop(amphora_id, None)
        return False
    return at is not None


class CertificateRenewer:
    """Issues and renews the certificates of one load balancer's amphorae in one job.

    Attributes:
        tried: amphorae whose renewal this job has attempted.
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
        self._desired = self._load_desired()

    def _load_desired(self) -> ca_rotation.DesiredTrust | None:
        """Return the trust that amphorae should have; None if it cannot be read: then no renewal is due."""
        if self._trust is None:
            return None
        try:
            return self._trust.credentials().desired
        except (CertificateError, StoreError) as error:
            LOG.warning("renewing no certificates, cannot read the certificate authorities: %s", error)
            return None

    def due(self, observed: Sequence[Amphora], now: float) -> dict[str, str]:
        """Return the amphorae whose certificate this job should renew, with the reason."""
        if self._desired is None:
            return {}
        found = due(observed, self._desired, self._lifetime, now)
        skipped = self.tried.union(one for one in found if _failed_lately(one))
        return {amphora_id: why for amphora_id, why in found.items() if amphora_id not in skipped}

    def issue_for_boot(
        self, amphora: Amphora, *, exists: Callable[[], bool]
    ) -> tuple[AmphoraCredentials, Issued] | None:
        """Issue and record the credentials of a boot; None without a trust store, in tests.

        An earlier boot of the same amphora may have succeeded with other credentials. Then the row records only the
        common part.

        Args:
            amphora: to be booted.
            exists: whether the machine of an earlier boot exists.
        """
        if self._trust is None:
            return None
        credentials = self._trust.credentials()
        issued = credentials.issuer.issue_server(amphora.id, self._days)
        by, trusts = credentials.desired.authority, credentials.desired.trusts
        if amphora.certificate_issued_at is not None and exists():
            by = by if by == amphora.certificate_authority else None
            trusts = ca_rotation.common_trust(amphora.trusts, trusts)
        self._record(amphora.id, by, trusts, issued.expires_at)
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
            LOG.warning("cannot issue a certificate to amphora %s, trying again later: %s", amphora.id, error)
            return
        self._job.ensure_may_act()
        try:
            self._agents.renew(
                amphora.id,
                address,
                issued.bundle(),
                client_ca=credentials.client_ca,
                server_ca=credentials.server_ca,
                deadline=deadline,
            )
            self._agents.verify_certificate(amphora.id, address, fingerprint(issued.certificate), deadline=deadline)
        except (AgentError, CertificateError) as error:
            # A preempted job raises here: this was no failure of the renewal.
            self._job.ensure_may_act()
            _FAILED[amphora.id] = time.monotonic()
            LOG.warning("could not renew the certificate of amphora %s, trying again later: %s", amphora.id, error)
            return
        failpoints.reach_step("RenewCertificate", failpoints.Moment.DONE)
        self._record(amphora.id, credentials.desired.authority, credentials.desired.trusts, issued.expires_at)
        LOG.info("amphora %s has a new certificate and trusts %s", amphora.id, credentials.desired.trusts)

    def _record(self, amphora_id: str, authority: int | None, trusts: str, expires_at: float) -> None:
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            guard_lease(connection, self._job.lease)
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
    return database.read(
        lambda connection: CertificateFleet(
            recorded=ca_records.list_cas(connection), held=ca_records.list_amphora_certificates(connection), now=now
        )
    )


class CertificateMaintenance:
    """Periodic work of one controller: makes renewals due and advances CA rotations.

    Args:
        conf: our options.
        database: of amphorae and CAs.
        trust: the trust store.
    """

    def __init__(self, conf: ConfigOpts, database: Database, trust: TrustStore) -> None:
        self._lifetime = certificate_lifetime(conf)
        self._settle: float = conf.amp_certificates.settle
        self._database = database
        self._trust = trust
        self._logged: dict[CaKind, tuple[str, ...]] = {}

    def run_once(self) -> None:
        """Advance the rotations and make renewals due.

        Raises:
            AmphoraDriverError: a read or write failed; the next call repeats it.
        """
        for kind in CaKind:
            self.advance(kind)
        self.make_renewals_due()

    def advance(self, kind: CaKind) -> bool:
        """Take the next step of the rotation of one kind of CA, if it is possible; return whether it was."""
        failpoints.reach_step(f"Authority-{kind.value}", failpoints.Moment.BEFORE)
        now = self._database.now()

        def read(connection: sa.Connection) -> ca_rotation.RotationPhase:
            recorded = ca_records.list_cas(connection)
            if not ca_rotation.is_rotating(kind, recorded):
                return ca_rotation.RotationPhase()
            return ca_rotation.rotation_phase(
                kind, recorded, ca_records.list_amphora_certificates(connection), now, self._settle
            )

        def write(connection: sa.Connection) -> ca_rotation.RotationPhase:
            # Decide again in the writing transaction: the rows may have changed.
            found = read(connection)
            return (
                found
                if found.moves and ca_records.change_ca_states(connection, found.moves, now)
                else ca_rotation.RotationPhase()
            )

        found = self._database.read(read)
        if found.moves:
            # Ages that cross a jump of the clock are not reliable: the step may have just begun.
            found = (
                self._database.write(write)
                if self._database.seconds_since_clock_jump() >= self._settle
                else ca_rotation.RotationPhase()
            )
        if found.moves:
            failpoints.reach_step(f"Authority-{kind.value}", failpoints.Moment.MARKED)
            steps = ", ".join(f"{one.id} is {state.value}" for one, state in found.moves.items())
            LOG.info("rotation of the certificate authority of kind %s: %s", kind.value, steps)
        self._log_waiting(kind, found)
        return bool(found.moves)

    def _log_waiting(self, kind: CaKind, found: ca_rotation.RotationPhase) -> None:
        """Log the amphorae that the rotation waits for after the minimum time of a step, once for each change."""
        waits = found.waits_for if self._database.now() > found.until else ()
        if waits and waits != self._logged.get(kind):
            names = ", ".join(waits[:_NAMED]) + (" and others" if len(waits) > _NAMED else "")
            LOG.warning(
                "rotation of the certificate authority of kind %s waits (%s) for %d amphorae: %s",
                *(kind.value, found.reason, len(waits), names),
            )
        self._logged[kind] = waits

    def make_renewals_due(self) -> int:
        """Make load balancers due whose amphorae need a renewal; return their number."""
        desired = self._trust.credentials().desired
        fleet = load_fleet(self._database)
        outdated = {
            one.load_balancer_id
            for one in fleet.held
            if one.ready and ca_rotation.renewal_reason(one, desired, self._lifetime, fleet.now)
        }
        if not outdated:
            return 0
        # A random choice, so that unreachable amphorae do not block the others.
        chosen = random.sample(sorted(outdated), min(_MOST, len(outdated)))
        return self._database.write(
            lambda connection: ca_records.make_load_balancers_due(connection, chosen, fleet.now)
        )


def renew_certificates(certificates: CertificateMaintenance) -> None:
    """Run the maintenance once; errors are only logged, so that the other housekeeping continues."""
    try:
        certificates.run_once()
    except AmphoraDriverError as error:
        LOG.warning("could not maintain certificates, trying again: %s", error)
    except Exception:
        # An unexpected error must not stop the rest of the housekeeping.
        LOG.exception("maintaining certificates failed, trying again")
