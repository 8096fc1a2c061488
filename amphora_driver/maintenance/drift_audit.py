# SPDX-License-Identifier: Apache-2.0
"""Drift audit: compares the configuration that amphorae report with the one that would be pushed now.

Invariant: one controller at a time holds the duty `audit`, and the audit only changes rows. The audit revokes a
confirmation if the row still holds the audited value, and the next job repairs the amphora. An amphora with a
generation other than the confirmed one is due at once. The right generation with a different content was rendered by
another version or with other options. Such load balancers become due one at a time, with pauses, and only once for the
same content. An upgrade of the controllers therefore pushes one load balancer at a time.

An error with one load balancer or amphora postpones only its own audit. A round ends after its time-out, also if an
agent does not answer, and at once when the controller stops or drains.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import object_status
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.maintenance.duty_loop import run_duty
from amphora_driver.maintenance.settings_update import SettingsUpdate
from amphora_driver.model.amphora import Amphora
from amphora_driver.model.enums import Provisioning
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import secrets_of_tree
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.reconcile import vip_allocation, vrrp_peers
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.desired_bundle import BundleInputs, build_bundles, read_omitted_objects
from amphora_driver.reconcile.reconciler import needed_networks
from amphora_driver.store import amphorae, config_drift, desired_objects, sealed_secrets
from amphora_driver.store.config_drift import AuditCandidate

if TYPE_CHECKING:
    from amphora_driver.agent.client import BundleState

LOG = logging.getLogger(__name__)
DUTY = "audit"
# Longest and shortest time in seconds between two rounds of the drift audit.
_LONGEST_ROUND, _SHORTEST_ROUND = 5.0, 0.2
# Number of rounds in one audit interval.
_ROUNDS = 10
# A round may query this multiple of the amphorae that the audit interval requires. The reserve leaves time to repeat
# failed queries.
_RESERVE = 1.5
# Time-out in seconds of a query to an agent.
_AGENT_TIMEOUT = 5.0
# Maximum seconds until a failed or postponed audit of an amphora is repeated.
_RETRY_AFTER = 60.0
_MOST_REMEMBERED = 10_000
# Longest pause in seconds between two comparisons of the agents' settings with the configuration.
_SETTINGS_PAUSE = 10.0
# Maximum duration of a round in seconds.
_ROUND_TIMEOUT = 20.0
# Seconds between two checks whether the round must end.
_CHECK_EVERY = 0.2
# Seconds after which the lease of the drift audit expires without a renewal. One controller at a time holds this lease.
_DUTY_LEASE = 60.0
# Seconds between two renewals of the lease.
_RENEW_EVERY = 10.0
# Maximum number of unanswered queries for each thread: one runs, and one waits for the thread.
_QUEUED = 2
# If an agent reports a generation that exceeds the recorded generation by more than this number, the report is
# implausible.
_IMPLAUSIBLE = 2**31
# Result of `next` if no amphora is due.
_END = object()
# Maximum number of audits without drift that one transaction records.
_MOST_TOGETHER = 100


class Drift(str, Enum):
    """Difference between the recorded and the reported configuration of an amphora.

    RENDERER: the generation is equal, the content differs. IMPLAUSIBLE: no controller pushed the reported generation.
    """

    NONE = "none"
    BEHIND = "behind"
    AHEAD = "ahead"
    IMPLAUSIBLE = "implausible"
    RENDERER = "renderer"


def classify_drift(generation: int, digest: str, reported: BundleState) -> Drift:
    """Return the drift of an amphora that has confirmed `generation`.

    `digest` is of the bundle that would be pushed now.
    """
    if (reported.generation or 0) < generation:
        return Drift.BEHIND
    if reported.generation is not None and reported.generation > generation:
        return Drift.IMPLAUSIBLE if reported.generation - generation > _IMPLAUSIBLE else Drift.AHEAD
    return Drift.NONE if reported.digest == digest else Drift.RENDERER


def load_record(connection: sa.Connection, load_balancer_id: str, catalogue: Any) -> BundleInputs | None:
    """Load all rows that determine the bundles; None if the load balancer is deleted or incomplete."""
    row, everyone = amphorae.load_with_work(connection, load_balancer_id)
    if row is None or row.op != "apply" or row.read_back:
        return None
    tree = desired_objects.load_tree(connection, load_balancer_id)
    if not vip_allocation.addresses_known(tree):
        return None
    needed = needed_networks(tree, everyone, catalogue.network(row.network))
    uses_some = next(secrets_of_tree(tree), None) is not None
    return BundleInputs(
        tree=tree,
        generation=row.generation,
        amphorae=everyone,
        networks=frozenset(needed.ordinary),
        sr_iov_networks=frozenset(needed.sr_iov),
        failed={
            **_in_error(connection, load_balancer_id),
            **needed.failed,
            **vip_allocation.read_refusal(connection, load_balancer_id, vip_allocation.read_applied_options(row)),
            **read_omitted_objects(row),
        },
        secrets=sealed_secrets.load_secrets(connection, load_balancer_id) if uses_some else {},
        tickets=row.tickets,
        priorities=vrrp_peers.find_priorities(catalogue, row.topology, everyone),
        vips_held=row.vips_held,
        takes_vips=row.takes_vips,
    )


def _in_error(connection: sa.Connection, load_balancer_id: str) -> dict[str, str]:
    """Return the objects in ERROR with their reasons: HAProxy may have rejected them."""
    status = object_status.c
    query = sa.select(status.object_id, status.reason).where(
        status.load_balancer_id == load_balancer_id,
        status.provisioning == Provisioning.ERROR.value,
        status.pending.is_(None),
        status.object_id != load_balancer_id,
    )
    return {row.object_id: row.reason or "" for row in connection.execute(query)}


class _Target(msgspec.Struct, frozen=True):
    """An amphora to audit; `digest` is the one of the bundle that would be pushed now."""

    recorded: BundleInputs
    amphora: Amphora
    digest: str


# The configuration state that an agent reports, and a text about its different settings (empty if the settings are
# equal).
_Answer: TypeAlias = "tuple[BundleState, str]"


class DriftAuditor:
    """Audits every amphora once in an interval, a few in each round.

    The auditor calls `on_due` when a load balancer becomes due.
    """

    def __init__(self, context: ReconcileContext, owner: str, on_due: Callable[[], None]) -> None:
        self._context = context
        self._database = context.database
        self._owner = owner
        self._on_due = on_due
        self._settings = SettingsUpdate(context)
        self._settings_at = 0.0
        audit = context.conf.amp_drift
        self._interval: float = audit.interval
        self._most: int = audit.most_at_once
        self._pause: float = audit.renderer_pause
        self._round = min(max(self._interval / _ROUNDS, _SHORTEST_ROUND), _LONGEST_ROUND)
        # Amphorae whose audit failed or was postponed, and the times of the next attempts (`time.monotonic()`).
        self._retry_at: dict[str, float] = {}
        # Load balancers whose amphorae have a configuration from another version of the renderer, in the order of
        # detection.
        self._outdated: dict[str, None] = {}
        # Amphorae without drift whose audits are not in the database yet. If the write of these audits fails, a later
        # round repeats the audits.
        self._agreeing: list[str] = []
        self._pushed_at = time.monotonic()
        # For each load balancer: the fingerprint of the configuration that the audit requested to push because of drift
        # RENDERER. The audit requests no second push for an equal fingerprint.
        self._pushed: dict[str, str] = {}
        self._renewed_at = 0.0

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        pool = ThreadPoolExecutor(self._most, "audit")

        def work() -> None:
            if self._hold_duty(at_once=True):
                self.run_round(pool, self._until_end(stopping, draining))
                self._update_settings(pool, self._until_end(stopping, draining))

        def release() -> None:
            release_duty(self._database, DUTY, self._owner)

        try:
            run_duty(DUTY, self._round, stopping, draining, work=work, release=release)
        finally:
            pool.shutdown(cancel_futures=True)

    def _until_end(self, stopping: threading.Event, draining: threading.Event) -> Callable[[], bool]:
        ends = time.monotonic() + _ROUND_TIMEOUT

        def goes_on() -> bool:
            ended = stopping.is_set() or draining.is_set() or time.monotonic() >= ends
            return not ended and self._hold_duty()

        return goes_on

    def _hold_duty(self, *, at_once: bool = False) -> bool:
        begun = time.monotonic()
        if at_once or begun >= self._renewed_at + _RENEW_EVERY:
            if not acquire_duty(self._database, DUTY, self._owner, _DUTY_LEASE):
                return False
            self._renewed_at = begun
        return True

    def _update_settings(self, pool: ThreadPoolExecutor, goes_on: Callable[[], bool]) -> None:
        # A comparison of settings reads the addresses of all amphorae from the database, so the comparison does not run
        # in each round.
        if time.monotonic() >= self._settings_at:
            self._settings.run_round(pool, goes_on)
            self._settings_at = time.monotonic() + min(_SETTINGS_PAUSE, self._interval)

    def run_round(self, pool: ThreadPoolExecutor, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Run one round; return the number of audited amphorae. `goes_on` returns whether the round continues."""
        now, moment = self._database.now(), time.monotonic()
        self._retry_at = {one: at for one, at in self._retry_at.items() if at > moment}

        def read(connection: sa.Connection) -> list[AuditCandidate]:
            many = math.ceil(config_drift.count_auditable(connection) * _RESERVE * self._round / self._interval)
            limit = max(many, self._most) + len(self._retry_at)
            return config_drift.list_audit_candidates(connection, now - self._interval, limit)

        by_balancer: dict[str, list[AuditCandidate]] = {}
        for one in self._database.read(read):
            if one.amphora_id not in self._retry_at:
                by_balancer.setdefault(one.load_balancer_id, []).append(one)
        done = self._compare(pool, self._targets(by_balancer.values()), goes_on)
        if self._outdated and goes_on() and time.monotonic() >= self._pushed_at + self._pause:
            of = next(iter(self._outdated))
            del self._outdated[of]
            try:
                self._push_outdated(pool, of)
            except Exception as error:  # noqa: BLE001 - an error must not stop the audit; a later round tries again
                _log_failure(f"load balancer {of}", error)
        return done

    def _compare(self, pool: ThreadPoolExecutor, targets: Iterator[_Target | None], goes_on: Callable[[], bool]) -> int:
        asked: dict[Future[_Answer], _Target] = {}
        done, more = 0, True
        try:
            while goes_on() and (asked or more):
                if more and len(asked) < _QUEUED * self._most:
                    target = next(targets, _END)
                    more = target is not _END
                    if isinstance(target, _Target):
                        asked[pool.submit(self._query, target.amphora, target.recorded.tree)] = target
                    if more:
                        continue
                for answer in wait(asked, _CHECK_EVERY, FIRST_COMPLETED).done:
                    done += self._handle_answer(asked.pop(answer), answer)
        finally:
            for answer, target in asked.items():
                # `cancel` returns False for a query that is already running and may never end. The auditor postpones
                # this amphora, so that the next round queries other amphorae.
                if answer.done():
                    done += self._handle_answer(target, answer)
                elif not answer.cancel():
                    self._put_off([target.amphora.id])
            self._record_agreeing()
        return done

    def _targets(self, due: Iterable[list[AuditCandidate]]) -> Iterator[_Target | None]:
        """Yield the amphorae to audit; None after each load balancer lets the caller check its limits."""
        for found in due:
            try:
                yield from self._targets_of(found)
            except Exception as error:  # noqa: BLE001 - an error must not stop the audit of others
                _log_failure(f"load balancer {found[0].load_balancer_id}", error)
                self._put_off(one.amphora_id for one in found)
            yield None

    def _targets_of(self, due: list[AuditCandidate]) -> Iterator[_Target]:
        load_balancer_id, ids = due[0].load_balancer_id, {one.amphora_id for one in due}
        recorded = self._database.read(lambda c: load_record(c, load_balancer_id, self._context.catalogue))
        if recorded is None or recorded.generation != due[0].generation:
            # The load balancer has changed since its selection or is incomplete in the database, so a later round
            # audits its amphorae.
            self._put_off(ids)
            return
        expected = self._expected_digests(recorded)
        for one in recorded.amphorae:
            if one.id in ids:
                yield _Target(recorded=recorded, amphora=one, digest=expected[one.id])

    def _expected_digests(self, recorded: BundleInputs) -> dict[str, str]:
        made = build_bundles(recorded, self._context.conf, self._context.vault)
        return {one: hashlib.sha256(body).hexdigest() for one, body in made.items()}

    def _handle_answer(self, target: _Target, answer: Future[_Answer]) -> int:
        """Record the result of one amphora; return 1 if the amphora was audited, 0 otherwise."""
        try:
            reported, settings = answer.result()
            drift = classify_drift(target.recorded.generation, target.digest, reported)
            if drift is Drift.NONE and not settings:
                self._record_agreement(target)
            else:
                self._record(target.recorded, target.amphora, drift, reported, settings)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - an error must not stop the audit of others
            _log_failure(f"amphora {target.amphora.id}", error)
            self._put_off([target.amphora.id])
            return 0
        return 1

    def _record_agreement(self, target: _Target) -> None:
        """Note an audit without drift. One transaction records many of them."""
        self._outdated.pop(target.recorded.tree.id, None)
        self._agreeing.append(target.amphora.id)
        if len(self._agreeing) >= _MOST_TOGETHER:
            self._record_agreeing()

    def _record_agreeing(self) -> None:
        ids, self._agreeing = self._agreeing, []
        if not ids:
            return
        try:
            now = self._database.now()
            self._database.write(lambda connection: config_drift.record_audit(connection, ids, now))
        except Exception as error:  # noqa: BLE001 - an error must not stop the audit of others
            _log_failure(f"{len(ids)} amphorae", error)
            self._put_off(ids)

    def _put_off(self, amphora_ids: Iterable[str]) -> None:
        at = time.monotonic() + min(_RETRY_AFTER, self._interval)
        self._retry_at |= dict.fromkeys(amphora_ids, at)

    def _query(self, amphora: Amphora, root: LoadBalancer) -> _Answer:
        reported = self._get_state(amphora)
        failure = self._settings.compare(amphora.id, str(amphora.management_address), reported, root)
        return reported, failure

    def _get_state(self, amphora: Amphora) -> BundleState:
        deadline = Deadline(_AGENT_TIMEOUT, f"audit amphora {amphora.id}")
        return self._context.agents.bundle_state(amphora.id, str(amphora.management_address), deadline=deadline)

    def _record(
        self, recorded: BundleInputs, amphora: Amphora, drift: Drift, reported: BundleState, settings: str
    ) -> None:
        of, generation = recorded.tree.id, recorded.generation
        now = self._database.now()
        why = f"generation: it confirmed {generation} and reports {reported.generation}"
        if drift is Drift.NONE:
            why = settings
            self._outdated.pop(of, None)
        elif drift is Drift.RENDERER:
            why = "renderer: another version or other options rendered the same generation"
            if self._pushed.get(of) == _fingerprint(recorded):
                why = f"{why}; it was pushed once, no further push"
            else:
                self._outdated.setdefault(of)
        elif drift is Drift.IMPLAUSIBLE:
            remedy = "replace it with `amphoractl amphora failover`"
            why = f"{why}, which no controller has pushed; it now refuses every push: {remedy}"
            LOG.warning(
                "amphora %s of load balancer %s reports an invalid configuration number (generation), so "
                "the drift audit does not trust its report: %s",
                amphora.id,
                of,
                why,
            )

        def write(connection: sa.Connection) -> bool:
            repaired = drift in {Drift.BEHIND, Drift.AHEAD}
            if repaired:
                config_drift.lock_work_of_amphorae(connection, [amphora.id])
            config_drift.record_audit(connection, [amphora.id], now, why or None)
            if drift is Drift.AHEAD:
                return config_drift.advance_generation_beyond(connection, of, generation, reported.generation or 0)
            return repaired and config_drift.revoke_confirmation(connection, amphora.id, generation, why)

        if self._database.write(write):
            LOG.warning(
                "the drift audit requests another push of the configuration of load balancer %s, because amphora %s "
                "has a different configuration: %s",
                of,
                amphora.id,
                why,
            )
            self._on_due()

    def _push_outdated(self, pool: ThreadPoolExecutor, of: str) -> None:
        """Make a load balancer with drift RENDERER due."""
        recorded = self._database.read(lambda c: load_record(c, of, self._context.catalogue))
        if recorded is None:
            return
        # A push may have repaired the drift since the audit, so the agents are queried again before another push.
        expected = self._expected_digests(recorded)
        ready = [one for one in recorded.amphorae if one.confirmed == recorded.generation]
        different = []
        for one, answer in [(one, pool.submit(self._get_state, one)) for one in ready]:
            # An amphora that does not answer causes no push. A later round queries this amphora again.
            if not isinstance(answer.exception(), AmphoraDriverError):
                drift = classify_drift(recorded.generation, expected[one.id], answer.result())
                if drift is Drift.RENDERER:
                    different.append(one)
        if not different:
            return
        self._pushed_at = time.monotonic()
        if len(self._pushed) >= _MOST_REMEMBERED:
            self._pushed.clear()
        self._pushed[of] = _fingerprint(recorded)
        # One revoked confirmation suffices, because the controller then pushes the configuration to all amphorae of the
        # load balancer.
        first = different[0]
        why = "renderer: this version renders the load balancer in another way"
        if self._database.write(lambda c: config_drift.revoke_confirmation(c, first.id, recorded.generation, why)):
            LOG.info(
                "the drift audit requests another push of the configuration of load balancer %s, because this "
                "version of the driver renders a different configuration",
                of,
            )
            self._on_due()


def _log_failure(what: str, error: BaseException) -> None:
    if isinstance(error, AmphoraDriverError):
        LOG.info("the drift audit of %s failed, and the controller repeats the audit later: %s", what, error)
    else:
        LOG.error(
            "the drift audit of %s failed unexpectedly, and the controller repeats the audit later",
            what,
            exc_info=error,
        )


def _fingerprint(recorded: BundleInputs) -> str:
    """Return a digest of the recorded content without its generation: only users change this content."""
    ids = tuple(sorted(one.id for one in recorded.amphorae))
    parts = (recorded.tree, recorded.tickets, tuple(sorted(recorded.failed)), ids)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
