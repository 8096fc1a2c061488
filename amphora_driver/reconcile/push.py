# SPDX-License-Identifier: Apache-2.0
"""Giving amphorae a generation.

Invariant: what an amphora confirmed is written down before the next wave begins, and what one refuses is given to
nobody after it. One that cannot be reached refuses nothing: the others are served, and the load balancer is not
confirmed before it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from amphora_driver import log_context, metrics
from amphora_driver.errors import AgentError, AgentRefused, ModelError, StoreError
from amphora_driver.health.initial_status import InitialStatuses, initial_statuses
from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import ticket_secret_name
from amphora_driver.queue.jobs import oldest_open_request, record_outcome
from amphora_driver.reconcile import desired_bundle, omitted_objects, secret_files, vrrp_peers
from amphora_driver.reconcile.defaults import advert_interval, defaults, limited
from amphora_driver.reconcile.tls_tickets import begun, ticket_keys
from amphora_driver.render.bundle import Served
from amphora_driver.render.haproxy import render
from amphora_driver.render.udp import virtual_servers
from amphora_driver.store import amphorae, failovers, generations, status_outbox
from amphora_driver.store import sealed_secrets as kept
from amphora_driver.store.failovers import Event
from amphora_driver.store.sealed_secrets import SealedSecret
from amphora_driver.untrusted_text import printable

if TYPE_CHECKING:
    import sqlalchemy as sa

    from amphora_driver.health.status import Statuses
    from amphora_driver.model.secret_refs import SecretName
    from amphora_driver.reconcile import plan as planning
    from amphora_driver.reconcile.executor import Backends
    from amphora_driver.reconcile.job import Turn
    from amphora_driver.render.tls import File

    # What came of a wave by amphora id; None where the generation is served.
    Answers = dict[str, AgentError | None]

    class Write(Protocol):
        """A transaction under the lease."""

        def __call__(self, change: Callable[[sa.Connection], object], applied: int | None = None) -> None:
            """Run it."""


LOG = logging.getLogger(__name__)
# A configuration HAProxy refuses at one object is pushed again without it; more than so many objects are not its fault.
_MOST_CULPRITS = 16
_TOO_OLD = "its amphorae are older than UDP and SCTP: rotate them (amphoractl rotate)"
# Seconds that one which is about to go may take for an answer; and one that only says whether it has the VIPs.
_FAREWELL_PATIENCE = 5.0
_VIP_PATIENCE = 3.0


class _Taken(Exception):
    """An amphora serves this generation already, with another content."""


class _Round(msgspec.Struct, frozen=True, kw_only=True):
    """One wave of a push: who is asked, who has to agree, and who of those is about to go."""

    tree: LoadBalancer
    generation: int
    targets: tuple[Amphora, ...]
    everyone: tuple[Amphora, ...]
    priorities: dict[str, int]
    optional: frozenset[str]
    networks: frozenset[str]


class Pushing:
    """Pushes of one load balancer under one lease.

    Args:
        backends: agents, vault and so on.
        turn: whose load balancer, and how long.
        write: runs a change of the store under the lease; with it goes the generation that every amphora serves now.
    """

    def __init__(self, backends: Backends, turn: Turn, write: Write) -> None:
        self._conf: Any = backends.conf
        self._agents: Any = backends.agents
        self._database: Any = backends.database
        self._vault: Any = backends.vault
        self._catalogue: Any = backends.catalogue
        self._turn = turn
        self._write = write
        # What could not be served in the generation being pushed: reasons by object id.
        self._failed: dict[str, str] = {}
        # What is served instead, until another object is found that cannot be.
        self._served: Served | None = None
        # What TLS ticket keys come from, if it was made since `wanted` was read.
        self._made: SealedSecret | None = None
        # When the oldest call was accepted that was confirmed last, if anybody waited for it.
        self._accepted: float | None = None

    def push(self, step: planning.Push, wanted: planning.Wanted, everyone: Sequence[Amphora]) -> None:
        """Give the step's amphorae the newest generation, wave after wave.

        Raises:
            AgentRefused: one of them does not want it; those of later waves were not asked.
            AgentError: one of them could not be asked; all others were.
            ModelError: nothing of it can be served.
        """
        if wanted.tree is None:
            raise ModelError("push a configuration", "nothing is wanted of this load balancer any more")
        self._failed = secret_files.lacking(wanted.tree, wanted.secrets) | wanted.failed
        self._served = self._made = None
        by_id = {one.id: one for one in everyone}
        missed: AgentError | None = None
        try:
            for number, wave in enumerate(step.waves, start=1):
                round_ = _Round(
                    tree=limited(wanted.tree, self._conf),
                    generation=wanted.generation,
                    targets=tuple(by_id[one] for one in wave),
                    everyone=tuple(everyone),
                    priorities=wanted.priorities,
                    optional=step.optional,
                    networks=frozenset(wanted.networks),
                )
                if number > 1:
                    self._turn.check()
                whole = step.whole and number == len(step.waves) and missed is None
                missed = self._wave(round_, wanted, whole=whole) or missed
        except _Taken:
            LOG.info("load balancer %s: generation %d is taken", wanted.load_balancer_id, wanted.generation)
            self._write(
                lambda connection: generations.bump_generation(connection, wanted.load_balancer_id, wanted.generation)
            )
            return
        if missed is not None:
            raise missed

    def confirm(self, wanted: planning.Wanted) -> None:
        """Note that every amphora serves the newest generation, whichever turn they were given it in."""
        self._write(lambda connection: self._confirmed(connection, wanted), applied=wanted.generation)
        self._note_latency()

    def vips_taken(self, everyone: Sequence[Amphora]) -> bool:
        """Whether one of them has the VIPs; also if nobody can say: nothing is to depend on that."""
        deadline = self._turn.deadline.within(_VIP_PATIENCE)
        try:
            said = [self._agents.info(one.id, str(one.management_address), deadline=deadline) for one in everyone]
        except AgentError as error:
            LOG.warning(
                "who has the VIPs of load balancer %s is not known: %s", self._turn.lease.load_balancer_id, error
            )
            return True
        return any(one.holds_vip for one in said) or all(one.holds_vip is None for one in said)

    def _wave(self, round_: _Round, wanted: planning.Wanted, *, whole: bool) -> AgentError | None:
        """Give it to those of one wave; returns why one of them could not be asked."""
        for _ in range(_MOST_CULPRITS):
            if self._served is None:
                self._served = self._rendered(wanted, round_.tree)
            answers = self._ask(round_, self._served)
            refusal = _refusal(answers, round_.generation, round_.optional)
            if refusal is None:
                return self._settle(round_, wanted, answers, whole=whole)
            culprits = _culprits(refusal, self._served)
            if culprits.keys() <= self._failed.keys():
                raise refusal
            for object_id in culprits:
                LOG.warning("load balancer %s: leaving out %s: %s", round_.tree.id, object_id, refusal.happened)
            self._failed |= culprits
            self._served = None
        raise ModelError(
            f"find a configuration of load balancer {round_.tree.id} that HAProxy takes",
            f"it was refused {_MOST_CULPRITS} times: {next(iter(self._failed.values()))}",
        )

    def _ask(self, round_: _Round, served: Served) -> Answers:
        """Give it to all of them at once."""

        def push(amphora: Amphora) -> AgentError | None:
            # Threads of their own know nothing of what the job's is about.
            with log_context.about(round_.tree.id, amphora.id, round_.generation):
                try:
                    self._give(round_, amphora, served)
                except AgentError as error:
                    metrics.count_push_failure(error)
                    return error
            return None

        if len(round_.targets) == 1:
            return {round_.targets[0].id: push(round_.targets[0])}
        with ThreadPoolExecutor(len(round_.targets)) as pool:
            return dict(zip((one.id for one in round_.targets), pool.map(push, round_.targets), strict=True))

    def _give(self, round_: _Round, amphora: Amphora, served: Served) -> None:
        # One whose connections go on holds nobody up.
        leaves = amphora.drains_until is not None
        body = desired_bundle.body(
            round_.tree,
            round_.generation,
            amphora,
            round_.everyone,
            served,
            round_.networks,
            round_.priorities,
            advert_interval(round_.tree, self._conf),
        )
        deadline = self._turn.deadline.within(_FAREWELL_PATIENCE) if leaves else self._turn.deadline
        applied = self._agents.put_bundle(amphora.id, str(amphora.management_address), body, deadline=deadline)
        # A newer one that came from another controller while ours waited has taken its place.
        if applied.generation < round_.generation:
            wanted = f"have amphora {amphora.id} serve generation {round_.generation}"
            raise AgentRefused(wanted, f"it serves {applied.generation}")
        words = (amphora.id, round_.generation, printable(applied.how, 20), printable(applied.reason, 500))
        LOG.info("amphora %s serves generation %d by %s (%s)", *words)
        metrics.count_push(applied.how)

    def _settle(self, round_: _Round, wanted: planning.Wanted, answers: Answers, *, whole: bool) -> AgentError | None:
        """Write down who serves it now; returns why one of them could not be asked."""
        missed = None
        for amphora_id, error in answers.items():
            if error is not None and amphora_id in round_.optional:
                LOG.warning("amphora %s is about to go and takes no configuration: %s", amphora_id, error)
            elif error is not None:
                missed = error
        served = [one for one in round_.targets if answers[one.id] is None]
        all_serve = whole and missed is None
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            for one in served:
                values: dict[str, Any] = {"confirmed": round_.generation, "confirmed_at": now, "drifts": False}
                if round_.priorities:
                    values["partners"] = vrrp_peers.partners(one, round_.everyone, round_.tree.vip)
                amphorae.update_amphora(connection, one.id, **values)
                if wanted.replacing and one.state is not AmphoraState.RETIRING:
                    failovers.record_event(connection, wanted.load_balancer_id, Event.CONFIRMED, now, one.id)
            if all_serve:
                # Usually this was the last one missing: one transaction for both marks.
                self._confirmed(connection, wanted)
            elif served and self._failed and wanted.applied < round_.generation:
                # Whoever confirms it may know nothing of this turn.
                omitted_objects.leave_out(connection, wanted.load_balancer_id, round_.generation, self._without(wanted))

        self._write(write, applied=round_.generation if all_serve else None)
        self._note_latency()
        return missed

    def _confirmed(self, connection: sa.Connection, wanted: planning.Wanted) -> None:
        of, failed = self._turn.lease.load_balancer_id, self._without(wanted)
        known = InitialStatuses({}, {}) if wanted.tree is None else initial_statuses(wanted.tree, failed)
        certain, first = _observations(known.certain), _observations(known.first)
        status_outbox.confirm_generation(connection, of, wanted.generation, failed, certain, first)
        if wanted.replacing and not wanted.gone:
            failovers.record_served(connection, of, self._database.now(), but=self._turn.staying)
        outcome = "served" if not failed else "served without " + ", ".join(sorted(failed))
        self._accepted = oldest_open_request(connection, of, wanted.generation)
        record_outcome(connection, of, wanted.generation, outcome)
        if failed:
            omitted_objects.forget(connection, of)

    def _note_latency(self) -> None:
        """Count how long whoever waited for what was confirmed has waited."""
        metrics.observe_apply(self._accepted, time.time())
        self._accepted = None

    def _without(self, wanted: planning.Wanted) -> dict[str, str]:
        """What the newest generation is served without, here or there; nothing is missed of what is to go."""
        return {} if wanted.gone else {**wanted.failed, **wanted.left_out, **self._failed}

    # --- what is served ---------------------------------------------------------------------------------------------

    def _rendered(self, wanted: planning.Wanted, tree: LoadBalancer) -> Served:
        """What of the load balancer can be served, whatever else was found not to be."""
        while True:
            usual = defaults(self._conf)
            rendered = render(tree, failed=self._failed, defaults=usual, shared_tickets=True)
            virtual = virtual_servers(tree, failed=self._failed, defaults=usual)
            refused = (*rendered.refused, *virtual.refused)
            self._failed |= {one.object_id: str(one) for one in refused if one.object_id}
            found = self._tickets(wanted, rendered.files)
            files, lost = secret_files.filled(rendered.files, found, self._vault)
            if not lost:
                return Served(text=rendered.text, files=files, pings=dict(rendered.pings), virtual=virtual.servers)
            if lost.keys() <= self._failed.keys():
                raise ModelError(f"leave out what cannot be served of load balancer {tree.id}", str(lost))
            for object_id, reason in lost.items():
                LOG.warning("load balancer %s: leaving out %s: %s", tree.id, object_id, reason)
            self._failed |= lost

    def _tickets(self, wanted: planning.Wanted, files: Sequence[File]) -> dict[SecretName, SealedSecret]:
        """The load balancer's secrets, with what TLS ticket keys are made from if a file asks for it.

        It is made when it is asked for the first time, and anew if no key of ours opens it any more: that costs
        clients a handshake, and nothing else.
        """
        name = ticket_secret_name(wanted.load_balancer_id)
        asked = any(file.secret == name for file in files)
        if not asked or (wanted.tickets is not None and self._usable(name, wanted.secrets.get(name))):
            return wanted.secrets
        if self._made is None:
            self._made = SealedSecret(content=self._vault.seal(begun(), kept.secret_location(name)))
            made, due = {name: self._made}, self._database.now() + self._conf.tls.ticket_key_period

            def write(connection: sa.Connection) -> None:
                kept.replace_secrets(connection, wanted.load_balancer_id, made)
                generations.start_ticket_rotation(connection, wanted.load_balancer_id, due)

            self._write(write)
        return {**wanted.secrets, name: self._made}

    def _usable(self, name: SecretName, sealed: SealedSecret | None) -> bool:
        if sealed is None or sealed.content is None:
            return False
        try:
            ticket_keys(self._vault.open(sealed.content, kept.secret_location(name)))
        except StoreError:
            return False
        return True


def _observations(found: Statuses) -> list[status_outbox.Observation]:
    return [
        status_outbox.Observation(object_id=one, kind=known.kind, operating=known.status, reason=known.reason)
        for one, known in found.items()
    ]


def _culprits(refusal: AgentRefused, served: Served) -> dict[str, str]:
    """Without what the rest can be served: reasons by object id; nothing where the refusal does not say."""
    if refusal.object_id is not None:  # HAProxy itself points at one object
        return {refusal.object_id: refusal.happened}
    # An agent that does not know virtual servers does not know the document that has some.
    if refusal.status == HTTPStatus.BAD_REQUEST:
        return {one.id: _TOO_OLD for one in served.virtual}
    return {}


def _refusal(answers: Answers, generation: int, optional: frozenset[str]) -> AgentRefused | None:
    """What keeps the configuration from everybody: an amphora understood it and said no.

    An amphora whose machine failed (5xx) or that cannot be reached says nothing about the configuration.

    Raises:
        _Taken: one serves the generation already, with another content.
    """
    said = [error for one, error in answers.items() if one not in optional and isinstance(error, AgentRefused)]
    if any(error.status == HTTPStatus.CONFLICT and error.generation == generation for error in said):
        raise _Taken
    return next((error for error in said if error.status < HTTPStatus.INTERNAL_SERVER_ERROR), None)
