# SPDX-License-Identifier: Apache-2.0
"""Push of a generation to amphorae.

Invariant: the confirmations of a wave are recorded before the next wave begins. A configuration that one amphora
refuses is not sent to later waves. An unreachable amphora is no refusal: the controller pushes to the others, and the
load balancer stays unconfirmed until that amphora serves the generation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver import log_context, metrics
from amphora_driver.errors import AgentError, AgentRefused, ModelError
from amphora_driver.health.initial_status import InitialStatuses, initial_statuses
from amphora_driver.health.status import Statuses
from amphora_driver.model.amphora import Amphora, AmphoraState, Partner
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import SecretName, ticket_secret_name
from amphora_driver.queue.jobs import oldest_open_request, record_outcome
from amphora_driver.reconcile import secret_files, steps, vrrp_peers
from amphora_driver.reconcile.context import ReconcileContext, WriteUnderLease
from amphora_driver.reconcile.defaults import with_process_limits
from amphora_driver.reconcile.desired_bundle import BundleInputs, build_bundle, record_omitted_objects, render_servable
from amphora_driver.reconcile.job import Job
from amphora_driver.reconcile.tls_tickets import create_ticket_state
from amphora_driver.render.bundle import Served
from amphora_driver.render.tls import File
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, failovers, generations, status_outbox
from amphora_driver.store import sealed_secrets as kept
from amphora_driver.store.failovers import Event
from amphora_driver.store.sealed_secrets import SealedSecret
from amphora_driver.untrusted_text import printable

# For each amphora: None if it serves the generation, otherwise the error of the push.
Answers = dict[str, AgentError | None]

LOG = logging.getLogger(__name__)
# Maximum number of attempts to push one generation. After each refusal by HAProxy, the next attempt omits the refused
# objects.
_MAX_REJECTED_OBJECTS = 16
_NO_UDP_SUPPORT = "its amphorae do not support UDP and SCTP: rotate them (amphoractl rotate)"
# Time-out in seconds of a push to a retiring amphora.
_RETIRING_TIMEOUT = 5.0
# Time-out in seconds of the query whether an amphora holds the VIPs.
_VIP_QUERY_TIMEOUT = 3.0


class _GenerationConflict(Exception):
    """An amphora serves this generation already, with a different content."""


class _Wave(msgspec.Struct, frozen=True):
    view: steps.LoadBalancerView
    recorded: BundleInputs
    targets: tuple[Amphora, ...]
    optional: frozenset[str]


class BundlePush:
    """Pushes of one load balancer under one lease."""

    def __init__(self, context: ReconcileContext, job: Job, write: WriteUnderLease) -> None:
        self._conf = context.conf
        self._agents = context.agents
        self._database = context.database
        self._vault = context.vault
        self._job = job
        self._write = write
        # Reasons by id of the objects that are omitted, because an amphora refuses them.
        self._omitted: dict[str, str] = {}
        # The rendered configuration without the omitted objects; None if the next push must render the configuration.
        self._served: Served | None = None
        # Encrypted seed of the TLS ticket keys; None if this job has created no seed.
        self._new_seed: SealedSecret | None = None
        # Time of the oldest request that this job has confirmed, for the latency metric; None without an open request.
        self._accepted_at: float | None = None

    def push(self, step: steps.Push, view: steps.LoadBalancerView, everyone: Sequence[Amphora]) -> None:
        """Push the newest generation to the step's amphorae, wave after wave.

        Raises:
            AgentRefused: an amphora refuses the configuration; the later waves did not receive it.
            AgentError: an amphora cannot be reached; all others received the configuration.
            ModelError: no object of the load balancer can be served.
        """
        if view.tree is None:
            raise ModelError("push a configuration", "the load balancer is being deleted")
        self._omitted = secret_files.pools_without_secret(view.tree, view.secrets) | view.failed
        self._served = self._new_seed = None
        by_id = {one.id: one for one in everyone}
        recorded = BundleInputs(
            tree=with_process_limits(view.tree, self._conf),
            generation=view.generation,
            amphorae=tuple(everyone),
            networks=frozenset(view.networks),
            sr_iov_networks=frozenset(view.sr_iov_networks),
            failed=view.failed,
            secrets=view.secrets,
            tickets=view.tickets,
            priorities=view.priorities,
            vips_held=view.vips_held,
            takes_vips=view.takes_vips,
        )
        unreachable: AgentError | None = None
        try:
            for number, targets in enumerate(step.waves, start=1):
                wave = _Wave(view, recorded, tuple(by_id[one] for one in targets), step.optional)
                if number > 1:
                    self._job.ensure_may_act()
                whole = step.whole and number == len(step.waves) and unreachable is None
                unreachable = self._push_wave(wave, whole=whole) or unreachable
        except _GenerationConflict:
            of, generation = view.load_balancer_id, view.generation
            LOG.info(
                "load balancer %s: an amphora serves different content under generation number %d, so the controller "
                "pushes its configuration under the next number",
                of,
                generation,
            )
            self._write(lambda c: generations.bump_generation(c, of, generation))
            return
        if unreachable is not None:
            raise unreachable

    def confirm(self, view: steps.LoadBalancerView) -> None:
        """Record that every amphora serves the newest generation, also after pushes of earlier jobs."""
        self._write(lambda c: self._record_confirmation(c, view), applied=view.generation)
        self._observe_latency()

    def query_vips_taken(self, everyone: Sequence[Amphora]) -> bool:
        """Return whether an amphora has the VIPs; True without an answer, so that the job continues."""
        deadline = self._job.deadline.within(_VIP_QUERY_TIMEOUT)
        try:
            said = [self._agents.info(one.id, str(one.management_address), deadline=deadline) for one in everyone]
        except AgentError as error:
            of = self._job.lease.load_balancer_id
            LOG.warning(
                "load balancer %s: an amphora did not answer whether it holds the VIPs, so the controller continues "
                "without the answers: %s",
                of,
                error,
            )
            return True
        return any(one.holds_vip for one in said) or all(one.holds_vip is None for one in said)

    def _push_wave(self, wave: _Wave, *, whole: bool) -> AgentError | None:
        """Push to the amphorae of one wave; return the error of an unreachable amphora."""
        of = wave.view.load_balancer_id
        for _ in range(_MAX_REJECTED_OBJECTS):
            if self._served is None:
                self._served = self._render(wave.view, wave.recorded.tree)
            answers = self._push_to_all(wave, self._served)
            refusal = _find_refusal(answers, wave.recorded.generation, wave.optional)
            if refusal is None:
                return self._record_wave(wave, answers, whole=whole)
            rejected = _rejected_objects(refusal, self._served)
            if rejected.keys() <= self._omitted.keys():
                raise refusal
            for object_id in rejected:
                LOG.warning(
                    "load balancer %s: the controller omits object %s from the configuration, because an "
                    "amphora refuses the object, and repeats the push: %s",
                    of,
                    object_id,
                    refusal.happened,
                )
            self._omitted |= rejected
            self._served = None
        happened = f"it was refused {_MAX_REJECTED_OBJECTS} times: {next(iter(self._omitted.values()))}"
        raise ModelError(f"find a configuration of load balancer {of} that HAProxy accepts", happened)

    def _push_to_all(self, wave: _Wave, served: Served) -> Answers:

        def push(amphora: Amphora) -> AgentError | None:
            # The log context belongs to one thread, so each thread of the pool sets it.
            with log_context.about(wave.recorded.tree.id, amphora.id, wave.recorded.generation):
                try:
                    self._push_to(wave, amphora, served)
                except AgentError as error:
                    metrics.count_push_failure(error)
                    return error
            return None

        if len(wave.targets) == 1:
            return {wave.targets[0].id: push(wave.targets[0])}
        with ThreadPoolExecutor(len(wave.targets)) as pool:
            return dict(zip((one.id for one in wave.targets), pool.map(push, wave.targets), strict=True))

    def _push_to(self, wave: _Wave, amphora: Amphora, served: Served) -> None:
        body = build_bundle(wave.recorded, amphora, served, self._conf)
        deadline = self._job.deadline
        if amphora.drains_until is not None:
            # A draining amphora may answer slowly. The short time-out limits the delay of the pushes to other amphorae.
            deadline = deadline.within(_RETIRING_TIMEOUT)
        applied = self._agents.put_bundle(amphora.id, str(amphora.management_address), body, deadline=deadline)
        # Another controller may have pushed a newer generation meanwhile. So only an older generation is an error.
        if applied.generation < wave.recorded.generation:
            attempted = f"have amphora {amphora.id} serve generation {wave.recorded.generation}"
            raise AgentRefused(attempted, f"the amphora still serves generation {applied.generation}")
        words = (amphora.id, wave.recorded.generation, printable(applied.how, 20), printable(applied.reason, 500))
        LOG.info(
            "amphora %s now serves generation %d of its configuration, which the controller has "
            "pushed (HAProxy changed by: %s; reason of a reload: %s)",
            *words,
        )
        metrics.count_push(applied.how)

    def _record_wave(self, wave: _Wave, answers: Answers, *, whole: bool) -> AgentError | None:
        view, generation = wave.view, wave.view.generation
        unreachable = None
        for amphora_id, error in answers.items():
            if error is not None and amphora_id in wave.optional:
                LOG.warning(
                    "amphora %s, which is being replaced, did not accept the push of generation %d; the controller "
                    "continues without this amphora: %s",
                    amphora_id,
                    generation,
                    error,
                )
            elif error is not None:
                unreachable = error
        served = [one for one in wave.targets if answers[one.id] is None]
        all_serve = whole and unreachable is None
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            for one in served:
                values: dict[str, Any] = {"confirmed": generation, "confirmed_at": now, "drifts": False}
                if view.priorities or one.partners:
                    values["partners"] = _recorded_partners(one, wave.recorded)
                amphorae.update_amphora(connection, one.id, **values)
                if view.replacing and one.state is not AmphoraState.RETIRING:
                    failovers.record_event(connection, view.load_balancer_id, Event.CONFIRMED, now, one.id)
            if all_serve:
                # One transaction confirms the generation for the last amphora and for the load balancer. So a crash
                # cannot leave only one of these confirmations.
                self._record_confirmation(connection, view)
            elif served and self._omitted and view.applied < generation:
                # A later job may confirm this generation without a push to these amphorae. That job needs the record of
                # the omitted objects.
                omitted, of = self._all_omitted(view), view.load_balancer_id
                record_omitted_objects(connection, of, generation, omitted)

        self._write(write, applied=generation if all_serve else None)
        self._observe_latency()
        return unreachable

    def _record_confirmation(self, connection: sa.Connection, view: steps.LoadBalancerView) -> None:
        of, failed = self._job.lease.load_balancer_id, self._all_omitted(view)
        known = InitialStatuses({}, {}) if view.tree is None else initial_statuses(view.tree, failed)
        certain, first = _observations(known.certain), _observations(known.first)
        status_outbox.confirm_generation(connection, of, view.generation, failed, certain, first)
        if view.replacing and not view.gone:
            failovers.record_served(connection, of, self._database.now(), but=self._job.staying)
        outcome = "served" if not failed else "served without " + ", ".join(sorted(failed))
        self._accepted_at = oldest_open_request(connection, of, view.generation)
        record_outcome(connection, of, view.generation, outcome)
        if failed:
            record_omitted_objects(connection, of, None, {})

    def _observe_latency(self) -> None:
        metrics.observe_apply(self._accepted_at, time.time())
        self._accepted_at = None

    def _all_omitted(self, view: steps.LoadBalancerView) -> dict[str, str]:
        return {} if view.gone else {**view.failed, **view.omitted, **self._omitted}

    def _render(self, view: steps.LoadBalancerView, tree: LoadBalancer) -> Served:
        """Render the load balancer without the objects that cannot be served, and record these objects."""
        rendered = render_servable(
            tree, self._omitted, self._conf, self._vault, lambda files: self._secrets_with_seed(view, files)
        )
        for object_id, reason in rendered.without_secret.items():
            LOG.warning(
                "load balancer %s: the controller omits object %s from the configuration, because a "
                "secret that the object refers to is not usable: %s",
                tree.id,
                object_id,
                reason,
            )
        self._omitted = rendered.omitted
        return rendered.served

    def _secrets_with_seed(self, view: steps.LoadBalancerView, files: Sequence[File]) -> dict[SecretName, SealedSecret]:
        """Return the load balancer's secrets, with the seed of its TLS ticket keys if a file needs it.

        A missing seed is created, and a seed that no key of the vault opens is replaced. A replacement costs each
        client one full handshake.
        """
        name = ticket_secret_name(view.load_balancer_id)
        usable = isinstance(secret_files.open_secret(name, view.secrets, self._vault), Secret)
        if not any(file.secret == name for file in files) or (view.tickets is not None and usable):
            return view.secrets
        if self._new_seed is None:
            self._new_seed = SealedSecret(content=self._vault.seal(create_ticket_state(), kept.secret_location(name)))
            made, due = {name: self._new_seed}, self._database.now() + self._conf.amp_tls.ticket_key_period

            def write(connection: sa.Connection) -> None:
                kept.replace_secrets(connection, view.load_balancer_id, made)
                generations.start_ticket_rotation(connection, view.load_balancer_id, due)

            self._write(write)
        return {**view.secrets, name: self._new_seed}


def _recorded_partners(amphora: Amphora, recorded: BundleInputs) -> tuple[Partner, ...]:
    """Return the VRRP peers that the bundle of an amphora contains; empty without VRRP."""
    if amphora.role not in recorded.priorities:
        return ()
    everyone = vrrp_peers.participants(recorded.amphorae, recorded.priorities)
    return vrrp_peers.partners(amphora, everyone, recorded.tree.vip)


def _observations(found: Statuses) -> list[status_outbox.Observation]:
    return [
        status_outbox.Observation(object_id=one, kind=known.kind, operating=known.status, reason=known.reason)
        for one, known in found.items()
    ]


def _rejected_objects(refusal: AgentRefused, served: Served) -> dict[str, str]:
    """Return the objects to omit, with the reasons by object id; empty if the refusal names no object."""
    if refusal.object_id is not None:
        return {refusal.object_id: refusal.happened}
    # An agent without UDP support answers 400 to a bundle with UDP listeners, so these listeners are omitted.
    if refusal.status == HTTPStatus.BAD_REQUEST:
        return {one.id: _NO_UDP_SUPPORT for one in served.virtual}
    return {}


def _find_refusal(answers: Answers, generation: int, optional: frozenset[str]) -> AgentRefused | None:
    """Return the first refusal of the configuration by an amphora; None without a refusal.

    A server error (5xx) or an unreachable amphora is no refusal of the configuration.
    """
    said = [error for one, error in answers.items() if one not in optional and isinstance(error, AgentRefused)]
    if any(error.status == HTTPStatus.CONFLICT and error.generation == generation for error in said):
        raise _GenerationConflict
    return next((error for error in said if error.status < HTTPStatus.INTERNAL_SERVER_ERROR), None)
