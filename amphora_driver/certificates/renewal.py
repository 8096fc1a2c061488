# SPDX-License-Identifier: Apache-2.0
"""Certificates of amphorae: given at boot, renewed in time, and moved on to other authorities.

Invariant: what an amphora was given is written down before a boot that may succeed unnoticed, and after a renewal that
a new connection has shown. So a row never says that an amphora trusts what it does not trust, and a rotation that
reads these rows shuts nobody out. A renewal that fails costs no user anything: it is tried again at a later look, and
not in every turn in which somebody waits for something else.
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
from amphora_driver.certificates.ca_rotation import Terms
from amphora_driver.certificates.trust_store import Papers
from amphora_driver.errors import AgentError, AmphoraDriverError, CertificateError, StoreError
from amphora_driver.queue.jobs import guard_lease
from amphora_driver.store import amphorae, ca_records
from amphora_driver.store.amphorae import Amphora, AmphoraState
from amphora_driver.store.ca_records import AmphoraCertificate, CaKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.agent.client import AgentClient
    from amphora_driver.certificates.ca import Issued
    from amphora_driver.certificates.trust_store import Trust
    from amphora_driver.database.engine import Database
    from amphora_driver.reconcile.job import Turn

LOG = logging.getLogger(__name__)
# Seconds that one renewal may take of a turn in which users may wait for something else.
_PATIENCE = 10.0
# Seconds for which one that could not be renewed is left alone by this process, and when that was, by amphora and
# `time.monotonic()`.
_LEFT_ALONE = 60.0
_FAILED: dict[str, float] = {}
# Load balancers that are made due at one look: a thousand amphorae do not renew at once.
_MOST = 100
# How many names a line of the log has.
_NAMED = 5


def terms(conf: ConfigOpts) -> Terms:
    """How long certificates live, as configured."""
    options = conf.certificates
    return Terms(validity=options.validity_days * ca_rotation.DAY, renew_at=options.renew_at)


def due(observed: Sequence[Amphora], wanted: ca_rotation.Wanted, agreed: Terms, now: float) -> dict[str, str]:
    """Which amphorae of a load balancer are to be given another certificate now, and why.

    Those whose agents have not answered yet come later, and one that is known to be dead is not asked.
    """
    found = {one.id: ca_rotation.why(_held(one), wanted, agreed, now) for one in observed if _answers(one)}
    return {amphora_id: why for amphora_id, why in found.items() if why}


def _answers(one: Amphora) -> bool:
    # One that is being replaced is still talked to; one of which nothing was ever confirmed may not even be there.
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
    if at is not None and time.monotonic() - at >= _LEFT_ALONE:
        # Also of those that are gone meanwhile, sooner or later: it is a number for each that did not answer.
        _FAILED.pop(amphora_id, None)
        return False
    return at is not None


class Renewal:
    """Gives the amphorae of one load balancer their certificates, in one turn.

    Attributes:
        tried: amphorae that are not renewed in this turn any more.
    """

    def __init__(
        self, conf: ConfigOpts, database: Database, agents: AgentClient, trust: Trust | None, turn: Turn
    ) -> None:
        self.tried: frozenset[str] = frozenset()
        self._days: int = conf.certificates.validity_days
        self._terms = terms(conf)
        self._database = database
        self._agents = agents
        self._trust = trust
        self._turn = turn
        self._wanted = self._now()

    def _now(self) -> ca_rotation.Wanted | None:
        """What amphorae are to have; None where that is not known: then nothing is due."""
        if self._trust is None:
            return None
        try:
            return self._trust.papers().wanted
        except (CertificateError, StoreError) as error:
            LOG.warning("whether certificates are to be renewed is not known: %s", error)
            return None

    def due(self, observed: Sequence[Amphora], now: float) -> dict[str, str]:
        """Which amphorae are to be given another certificate in this turn, and why."""
        if self._wanted is None:
            return {}
        found = due(observed, self._wanted, self._terms, now)
        left_alone = self.tried.union(one for one in found if _failed_lately(one))
        return {amphora_id: why for amphora_id, why in found.items() if amphora_id not in left_alone}

    def for_boot(self, amphora: Amphora, *, there: Callable[[], bool]) -> tuple[Papers, Issued] | None:
        """What an amphora is booted with, written down already; None where only a test's authority is there.

        An earlier boot of the same amphora may have succeeded with something else: then only what both have counts.

        Args:
            amphora: whose.
            there: says whether something came of that.
        """
        if self._trust is None:
            return None
        papers = self._trust.papers()
        issued = papers.issuer.issue_server(amphora.id, self._days)
        by, trusts = papers.wanted.authority, papers.wanted.trusts
        if amphora.certificate_issued_at is not None and there():
            by = by if by == amphora.certificate_authority else None
            trusts = ca_rotation.common(amphora.trusts, trusts)
        self._note(amphora.id, by, trusts, issued.expires_at)
        return papers, issued

    def renew(self, amphora: Amphora) -> None:
        """Give an amphora another certificate, and whom it is to trust; what fails is tried at another time.

        Raises:
            LeaseLost: somebody else works on the load balancer now.
            Superseded: something goes first.
        """
        if self._trust is None:
            return
        self.tried |= {amphora.id}
        deadline = self._turn.deadline.within(_PATIENCE)
        address = str(amphora.management_address)
        try:
            papers = self._trust.papers()
            issued = papers.issuer.issue_server(amphora.id, self._days)
        except (CertificateError, StoreError) as error:
            LOG.warning("no certificate can be issued to amphora %s: %s", amphora.id, error)
            return
        self._turn.check()
        try:
            self._agents.renew(
                amphora.id,
                address,
                issued.bundle(),
                client_ca=papers.client_ca,
                server_ca=papers.server_ca,
                deadline=deadline,
            )
            self._agents.prove(amphora.id, address, fingerprint(issued.certificate), deadline=deadline)
        except (AgentError, CertificateError) as error:
            # What was only cut short is done in another turn.
            self._turn.check()
            _FAILED[amphora.id] = time.monotonic()
            LOG.warning("the certificate of amphora %s is not renewed yet: %s", amphora.id, error)
            return
        failpoints.reach_in("RenewCertificate", failpoints.Moment.DONE)
        self._note(amphora.id, papers.wanted.authority, papers.wanted.trusts, issued.expires_at)
        LOG.info("amphora %s has another certificate, and trusts %s", amphora.id, papers.wanted.trusts)

    def _note(self, amphora_id: str, authority: int | None, trusts: str, expires_at: float) -> None:
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            guard_lease(connection, self._turn.lease)
            amphorae.update_amphora(
                connection,
                amphora_id,
                certificate_issued_at=now,
                certificate_expires_at=expires_at,
                certificate_authority=authority,
                trusts=trusts,
            )

        self._database.write(write)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Authorities and what amphorae have of them, of one moment."""

    recorded: tuple[ca_records.CaRecord, ...]
    held: tuple[AmphoraCertificate, ...]
    now: float


def look(database: Database) -> Fleet:
    """Authorities and what amphorae have of them.

    Raises:
        StoreError: the database said no.
    """
    now = database.now()
    return database.read(
        lambda connection: Fleet(
            recorded=ca_records.list_cas(connection), held=ca_records.list_amphora_certificates(connection), now=now
        )
    )


class Certificates:
    """The duty of one controller: has certificates renewed in time, and rotations of authorities move on.

    Args:
        conf: our options.
        database: where amphorae and authorities are.
        trust: what amphorae are to have.
    """

    def __init__(self, conf: ConfigOpts, database: Database, trust: Trust) -> None:
        self._terms = terms(conf)
        self._settle: float = conf.certificates.settle
        self._database = database
        self._trust = trust
        self._said: dict[CaKind, tuple[str, ...]] = {}

    def attend(self) -> None:
        """One look.

        Raises:
            AmphoraDriverError: something could not be read or written; the next look does it.
        """
        for kind in CaKind:
            self.advance(kind)
        self.hasten()

    def advance(self, kind: CaKind) -> bool:
        """Take the next step of the rotation of one kind of authority, if it can be taken; whether it was."""
        failpoints.reach_in(f"Authority-{kind.value}", failpoints.Moment.BEFORE)
        now = self._database.now()

        def see(connection: sa.Connection) -> ca_rotation.Phase:
            recorded = ca_records.list_cas(connection)
            if not ca_rotation.goes_on(kind, recorded):
                return ca_rotation.Phase()
            return ca_rotation.phase(
                kind, recorded, ca_records.list_amphora_certificates(connection), now, self._settle
            )

        def move(connection: sa.Connection) -> ca_rotation.Phase:
            # Once more, in the transaction that writes: what is decided upon is what is there.
            found = see(connection)
            return (
                found
                if found.moves and ca_records.change_ca_states(connection, found.moves, now)
                else ca_rotation.Phase()
            )

        found = self._database.read(see)
        if found.moves:
            # A step that lasts for some time by a clock that was set since has perhaps just begun.
            found = (
                self._database.write(move)
                if self._database.seconds_since_clock_jump() >= self._settle
                else ca_rotation.Phase()
            )
        if found.moves:
            failpoints.reach_in(f"Authority-{kind.value}", failpoints.Moment.MARKED)
            steps = ", ".join(f"{one.id} is {state.value}" for one, state in found.moves.items())
            LOG.info("authorities of kind %s: %s", kind.value, steps)
        self._complain(kind, found)
        return bool(found.moves)

    def _complain(self, kind: CaKind, found: ca_rotation.Phase) -> None:
        """Say once who is waited for, whenever that changes after the time that a step takes anyway."""
        waits = found.waits_for if self._database.now() > found.until else ()
        if waits and waits != self._said.get(kind):
            names = ", ".join(waits[:_NAMED]) + (" and others" if len(waits) > _NAMED else "")
            LOG.warning(
                "the rotation of the authority of kind %s waits (%s) for %d amphorae: %s",
                *(kind.value, found.reason, len(waits), names),
            )
        self._said[kind] = waits

    def hasten(self) -> int:
        """Have load balancers looked at of which an amphora needs another certificate; returns how many."""
        wanted = self._trust.papers().wanted
        fleet = look(self._database)
        needy = {
            one.load_balancer_id
            for one in fleet.held
            if one.ready and ca_rotation.why(one, wanted, self._terms, fleet.now)
        }
        if not needy:
            return 0
        # Whoever cannot be reached is among them at each look, and must not keep the others from it.
        chosen = random.sample(sorted(needy), min(_MOST, len(needy)))
        return self._database.write(
            lambda connection: ca_records.make_load_balancers_due(connection, chosen, fleet.now)
        )


def attended(certificates: Certificates) -> None:
    """One look that fails without consequences for what else is looked after."""
    try:
        certificates.attend()
    except AmphoraDriverError as error:
        LOG.warning("certificates: %s", error)
    except Exception:
        LOG.exception("looking after certificates failed, and goes on")
