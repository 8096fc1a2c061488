# SPDX-License-Identifier: Apache-2.0
"""Applies bundles: receive, compare, change, verify, confirm, or roll back.

Invariant: one bundle at a time. After a failed step, the amphora still serves the previous configuration. HAProxy has
accepted each line of its configuration file with all TLS files, so that a restart succeeds. The agent confirms a bundle
only after HAProxy has reported its configuration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from amphora_agent.apply import bundle_check, confirmed_bundle, udp_update
from amphora_agent.apply.apply_queue import ApplyQueue
from amphora_agent.apply.change_log import UNCHANGED, ApplyResult, Change, ChangeLog
from amphora_agent.apply.components import Components
from amphora_agent.apply.confirmed_bundle import Confirmed, Draft
from amphora_agent.apply.haproxy_update import NOT_AS_CONFIGURED, HaproxyPlan, RuntimeResult
from amphora_agent.apply.network_update import NetworkUpdate
from amphora_agent.apply.recovery import RecoveryLoop
from amphora_agent.bundle import OCTAVIA_API_V1_ID, Bundle, Host, VrrpInstance, digest, parse
from amphora_agent.config import Settings
from amphora_agent.errors import AgentError, MachineError
from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy.runtime_state import Loaded
from amphora_agent.network import firewall

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Attempt:
    """An attempt to apply a bundle. A confirmed bundle has no ``draft``.

    A ``reload_reason`` makes HAProxy reload in any case.
    """

    bundle: Bundle
    draft: Draft | None
    reload_reason: str = ""


class Applier:
    """The only class that changes this amphora.

    Args:
        on_applied: called after each push that succeeded.
        set_ping_targets: receives the addresses to ping, by member id, when they change.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Components,
        *,
        on_applied: Callable[[], None],
        set_ping_targets: Callable[[Mapping[str, Host]], None],
    ) -> None:
        self._settings = settings
        self._parts = parts
        self.priority = parts.priority
        self._paths = parts.paths
        self._on_applied = on_applied
        self._lock = threading.Lock()
        self._queue: ApplyQueue[ApplyResult] = ApplyQueue()
        self._changes = ChangeLog()
        self._recovery = RecoveryLoop(lambda: not parts.swap.is_interrupted or self.apply_confirmed())
        self._change_listeners: list[Callable[[], None]] = []
        self._has_applied = False
        self._confirmed: Confirmed | None = None
        self._lost: Confirmed | None = None
        self._read_confirmed()
        self._set_ping_targets = set_ping_targets
        self._ping_targets: Mapping[str, Host] = {}
        self._ping_confirmed()

    def _read_confirmed(self) -> None:
        try:
            self._confirmed = confirmed_bundle.read(self._paths.confirmed, self._paths.configuration)
        except MachineError as error:
            _log.error(
                "The agent cannot read its last confirmed configuration from the disk, and waits until a controller "
                "pushes a configuration: %s",
                error,
            )
        found = self._confirmed
        if found is not None and not self._parts.files.holds(found.bundle.files):
            self._confirmed, self._lost = None, found
            _log.warning(
                "The TLS files of the last confirmed configuration (generation %d) are lost, so the agent waits until "
                "a controller pushes the configuration again",
                found.bundle.generation,
            )

    @property
    def confirmed(self) -> Confirmed | None:
        return self._confirmed

    @property
    def lost(self) -> Confirmed | None:
        """The last confirmed bundle if its files are lost, so that the amphora cannot serve it."""
        return self._lost

    @property
    def generation(self) -> int | None:
        """The confirmed generation; 0 if its files are lost, None before the first bundle."""
        confirmed = self._confirmed
        if confirmed is None:
            return 0 if self._lost is not None else None
        return confirmed.bundle.generation

    @property
    def vrrp_instance(self) -> VrrpInstance | None:
        """The VRRP instance of the confirmed bundle; None for a single amphora, or without a bundle."""
        confirmed = self._confirmed
        return None if confirmed is None else confirmed.bundle.vrrp_instance

    def change_counts(self) -> dict[str, Any]:
        return {**self._changes.document(), "waiting": self._queue.waiting}

    @property
    def _served(self) -> Bundle | None:
        return self._confirmed.bundle if self._confirmed is not None else None

    @property
    def _last(self) -> Bundle | None:
        last = self._confirmed or self._lost
        return None if last is None else last.bundle

    def apply_body(self, body: bytes) -> ApplyResult:
        """Apply a bundle in its wire format. Raises the errors of `apply_bundle`, and `MalformedBundle`."""
        served = self._served
        return self.apply_bundle(parse(body, () if served is None else served.virtual_servers), digest(body))

    def apply_bundle(self, bundle: Bundle, received: str) -> ApplyResult:
        """Apply a bundle, or return the result of a newer bundle in the queue.

        The agent stores the `received` digest with the bundle. Raises an AgentError as in docs/reference/agent-api.md;
        the amphora then serves the last good configuration.
        """
        bundle_check.refuse_foreign(bundle, self._settings.amphora_id, self._last)
        result = self._queue.run_in_turn(
            bundle.generation, bundle.load_balancer_id, lambda: self._apply_received(bundle, received)
        )
        if result.generation != bundle.generation:
            _log.info(
                "The agent skipped the configuration of generation %d, because the agent has applied the newer "
                "generation %d",
                bundle.generation,
                result.generation,
            )
        return result

    def _apply_received(self, bundle: Bundle, received: str) -> ApplyResult:
        with self._lock:
            reach(Point.TAKEN)
            bundle_check.refuse_stale(bundle, self._last, lost=self._lost is not None)
            # A repeated push of the confirmed bundle keeps the time of the first confirmation, so the agent writes no
            # new record.
            same = self._confirmed is not None and self._confirmed.digest == received
            record = None if same else confirmed_bundle.confirmed_now(bundle, received)
            draft = None if record is None else Draft(self._paths.confirmed, record)
            try:
                self._ping({**self._ping_targets, **bundle.pings})
                result = self._apply(_Attempt(bundle, draft))
            except AgentError:
                if self._confirmed is not None:
                    self._recovery.start()
                raise
            finally:
                self._ping_confirmed()
                self._remove_unused_files()
        self._report("applied", result)
        self._on_applied()
        return result

    def validate_bundle(self, bundle: Bundle) -> None:
        """Have HAProxy check the configuration of a bundle, without a change. Raises AgentError."""
        if bundle.haproxy is None:
            return
        with self._lock:
            try:
                served = self._served.files if self._served is not None else ()
                self._parts.haproxy_update.validate(bundle, bundle.haproxy, served)
            except OSError as error:
                raise MachineError("check the configuration", str(error)) from error
            finally:
                self._paths.candidate.unlink(missing_ok=True)
                self._remove_unused_files()

    def apply_confirmed(self) -> bool:
        """Apply the last confirmed bundle after a start of the agent or a failed change.

        Returns False if another attempt is necessary.
        """
        with self._lock:
            # The agent has nothing to apply without a confirmed bundle, or if a push since the agent's start has
            # applied the bundle completely.
            if self._confirmed is None or (self._has_applied and not self._parts.swap.is_interrupted):
                return True
            try:
                result = self._apply(_Attempt(self._confirmed.bundle, None))
            except AgentError as error:
                _log.warning("The agent cannot apply its last confirmed configuration, and retries: %s", error)
                return False
            finally:
                self._remove_unused_files()
        self._report("applied again", result)
        self._on_applied()
        return True

    def _report(self, event: str, result: ApplyResult) -> None:
        change, reason = result.change, result.change.reason or "none"
        _log.info(
            "The agent serves generation %d of its configuration (event: %s; HAProxy changed by: %s; reason of a "
            "reload: %s)",
            result.generation,
            event,
            change.how,
            reason,
        )

    def add_change_listener(self, listener: Callable[[], None]) -> None:
        """Call a function at the start of each change, under the lock."""
        self._change_listeners.append(listener)

    def run_on_confirmed(self, inspect: Callable[[Bundle], T]) -> T | None:
        """Call a function with the confirmed bundle while no change can begin; return the result.

        Returns None while a change runs or waits, and if this agent has not applied the confirmed bundle yet.
        """
        if self._queue.waiting or not self._lock.acquire(blocking=False):
            return None
        try:
            bundle = self._verifiable
            return None if bundle is None else inspect(bundle)
        finally:
            self._lock.release()

    @property
    def _verifiable(self) -> Bundle | None:
        """The confirmed bundle, if drift from that bundle has to be repaired."""
        bundle = self._served
        # If Octavia's own worker controls the amphora, that worker repairs drift. So the agent does not repair drift.
        ours = bundle is not None and bundle.load_balancer_id != OCTAVIA_API_V1_ID
        return bundle if ours and self._has_applied and not self._parts.swap.is_interrupted else None

    def reapply_confirmed(self, reload_reason: str) -> None:
        """Apply the confirmed bundle again, if this agent has applied the bundle before.

        Raises AgentError after a failure; the agent then retries. The `reload_reason` is empty if HAProxy runs the
        confirmed configuration.
        """
        with self._lock:
            bundle, confirmed = self._verifiable, self._confirmed
            if bundle is None or confirmed is None:
                return
            try:
                result = self._apply(_Attempt(bundle, None, reload_reason))
                if reload_reason and bundle.haproxy is not None:
                    confirmed_bundle.relink_text(self._paths.confirmed, confirmed, self._paths.configuration)
            except OSError as error:
                raise MachineError("repair the configuration drift", str(error)) from error
            except AgentError:
                self._recovery.start()
                raise
            finally:
                self._ping_confirmed()
                self._remove_unused_files()
        self._report("applied again to repair drift", result)

    def _apply(self, attempt: _Attempt) -> ApplyResult:
        """Change this amphora to a bundle and confirm the bundle, or roll back."""
        bundle = attempt.bundle
        try:
            self._prepare(bundle)
            self._parts.udp_update.validate(bundle)
            network = NetworkUpdate(self._parts, bundle, self._served, may_lack=attempt.draft is None)
            if bundle.haproxy is None:
                change, loaded = self._stop_haproxy(attempt, network)
            else:
                change, loaded = self._update_haproxy(attempt, bundle.haproxy, network)
            change = self._update_udp(bundle, change)
            # keepalived announces the VIPs, so it is updated last, when all other parts are ready to serve.
            self._parts.keepalived.apply(bundle.vrrp_instance)
            self._confirm(attempt.draft)
        except (AgentError, OSError) as error:
            self._roll_back(attempt)
            if isinstance(error, AgentError):
                raise
            raise MachineError(f"apply generation {bundle.generation}", str(error)) from error
        self._count(change)
        self._has_applied = True
        return ApplyResult(bundle.generation, change, loaded)

    def _prepare(self, bundle: Bundle) -> None:
        if not self._has_applied and bundle.haproxy is not None:
            self._parts.haproxy.ensure_wanted()
        for listener in self._change_listeners:
            listener()
        if self._confirmed is not None and bundle == self._confirmed.bundle:
            # A repeated push of the confirmed bundle makes the agent compare the whole amphora with the bundle. Cached
            # states would hide differences, so the agent empties its caches first.
            self._parts.plumbing.invalidate()
            self._parts.files.invalidate()
            self._parts.swap.invalidate()
            self._parts.udp_update.invalidate()

    def _stop_haproxy(self, attempt: _Attempt, network: NetworkUpdate) -> tuple[Change, Loaded]:
        """Apply a bundle without a listener for HAProxy."""
        network.begin()
        self._parts.keepalived.check_configuration(attempt.bundle.vrrp_instance)
        self._reserve_space(attempt.draft, None)
        change, loaded = self._parts.haproxy_update.stop()
        network.finish()
        return self._firewall_change(attempt.bundle) if change == UNCHANGED else change, loaded

    def _update_haproxy(self, attempt: _Attempt, text: str, network: NetworkUpdate) -> tuple[Change, Loaded]:
        haproxy = self._parts.haproxy_update
        served = self._served.files if self._served is not None else ()
        plan = haproxy.plan(attempt.bundle, text, self._last, served, attempt.reload_reason)
        early: RuntimeResult | None = None
        if plan.changes_nothing:
            loaded = self._verify_unchanged(attempt, plan, network)
            if loaded is not None:
                return self._firewall_change(attempt.bundle), loaded
            plan = replace(plan, decision=NOT_AS_CONFIGURED)
        else:
            early = self._check_candidate(attempt, plan, network)
        haproxy.commit(plan)
        change, loaded = haproxy.apply(plan, early)
        network.finish()
        haproxy.remember(plan)
        return change, loaded

    def _verify_unchanged(self, attempt: _Attempt, plan: HaproxyPlan, network: NetworkUpdate) -> Loaded | None:
        """Change the network only. Returns None if HAProxy does not run its configuration file."""
        self._reserve_space(attempt.draft, plan.file)
        network.begin()
        if network.is_needed:
            reach(Point.PLUGGED)
        network.finish()
        return self._parts.haproxy_update.verify_unchanged(plan)

    def _check_candidate(self, attempt: _Attempt, plan: HaproxyPlan, network: NetworkUpdate) -> RuntimeResult | None:
        """Have HAProxy and keepalived check their files.

        To save time, the agent carries out a runtime update before the end of the check, if the network stays the same.
        Returns the result of the runtime update.
        """
        reach(Point.CHECKING)
        self._reserve_space(attempt.draft, plan.file)
        haproxy = self._parts.haproxy_update
        actions = None if network.is_needed else plan.actions
        early: RuntimeResult | None = None
        try:
            if actions is not None:
                early = haproxy.run_actions(plan, actions)
                self.priority.served()
                if early is None and not haproxy.needs_check(plan, actions):
                    early = haproxy.verify_actions(plan, actions)
            if isinstance(early, Loaded):
                # A check also restores this file, which HAProxy reads at a start.
                self._parts.haproxy.write_machine_configuration()
                confirmed_bundle.sync_candidate(attempt.draft, plan.file)
            else:
                with haproxy.checking(plan) as check:
                    if actions is not None:
                        early = early or haproxy.verify_actions(plan, actions)
                    confirmed_bundle.sync_candidate(attempt.draft, plan.file)
                    check.wait()
            reach(Point.CHECKED)
            network.begin()
            self._parts.keepalived.check_configuration(attempt.bundle.vrrp_instance)
        except (AgentError, OSError):
            if actions is not None:
                haproxy.undo(plan.before)
            raise
        if network.is_needed:
            reach(Point.PLUGGED)
        return early

    def _update_udp(self, bundle: Bundle, change: Change) -> Change:
        self._parts.udp_update.apply(bundle)
        served = self._served.virtual_servers if self._served is not None else ()
        reason = udp_update.describe_change(served, bundle.virtual_servers)
        if not reason:
            return change
        return Change("runtime", reason) if change == UNCHANGED else Change(change.how, f"{change.reason}; {reason}")

    def _firewall_change(self, bundle: Bundle) -> Change:
        """Return the change for a bundle that does not change HAProxy."""
        before = firewall.UNRESTRICTED if self._served is None else firewall.restrictions_of(self._served)
        reason = firewall.describe_change(before, firewall.restrictions_of(bundle))
        return Change("runtime", reason) if reason else UNCHANGED

    def _reserve_space(self, draft: Draft | None, file: Path | None) -> None:
        """Reserve the disk space for the whole change; `file` is the next file of HAProxy."""
        self._parts.swap.reserve()
        if draft is not None:
            draft.reserve(file)
        reach(Point.RESERVED)

    def _confirm(self, draft: Draft | None) -> None:
        reach(Point.LOADED)
        if draft is not None:
            draft.confirm()
            self._confirmed, self._lost = draft.confirmed, None
        reach(Point.CONFIRMED)
        self._parts.swap.finish()
        reach(Point.FINISHED)

    def _roll_back(self, attempt: _Attempt) -> None:
        """Restore the previous configuration. The mark of an unfinished change makes the next change reload."""
        try:
            if attempt.draft is not None:
                attempt.draft.discard()
            if self._parts.swap.committed:
                change = self._parts.haproxy_update.restore(self._parts.swap.roll_back())
                if change is not None:
                    self._count(change)
        except (AgentError, OSError) as error:
            _log.error(
                "After a failed change, the agent could not restore the previous configuration, and will reload "
                "HAProxy at the next change: %s",
                error,
            )
        finally:
            self._parts.udp_update.roll_back(self._served, attempt.bundle)
            self._parts.plumbing.roll_back(self._served)

    def _count(self, change: Change) -> None:
        self._changes.count(change)
        while self._parts.haproxy.ended_workers:
            self._changes.count_ended_worker(self._parts.haproxy.ended_workers.pop())

    def _ping(self, targets: Mapping[str, Host]) -> None:
        try:
            self._set_ping_targets(targets)
        except OSError as error:
            raise MachineError("write the list of members for the responder's pings", str(error)) from error
        self._ping_targets = targets

    def _ping_confirmed(self) -> None:
        """Set the ping targets of the confirmed bundle; unnecessary targets after a failure are harmless.

        Without a confirmed bundle the targets stay, because HAProxy may still serve a bundle that needs them.
        """
        if self._confirmed is not None:
            with suppress(MachineError):
                self._ping(self._confirmed.bundle.pings)

    def _remove_unused_files(self) -> None:
        """Remove TLS files that neither the confirmed bundle nor a start of HAProxy needs."""
        try:
            needed = set()
            if self._confirmed is not None:
                needed.add(self._parts.files.directory(self._confirmed.bundle.files))
            if (document := self._parts.swap.current()) is not None and document.files is not None:
                needed.add(document.files)
            self._parts.files.keep_only(needed)
        except OSError as error:
            _log.error("The agent cannot remove unused TLS files, and retries at the next change: %s", error)
        reach(Point.TIDIED)
