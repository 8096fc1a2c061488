# SPDX-License-Identifier: Apache-2.0
"""The L4 daemon: it checks the members of virtual servers and applies the results to the engine.

Invariant: the kernel serves the latest desired state that could be applied. A desired state that fails leaves the
previous one in force. The L4 daemon applies a changed member state before it does anything else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from amphora_agent.errors import AgentError
from amphora_agent.l4 import model, stat_rows
from amphora_agent.l4.counters import SUMMED, MemberCounters, MemberPlace
from amphora_agent.l4.event_loop import EventLoop, Timer
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4.stderr_log import log
from amphora_agent.l4_checks import member_state
from amphora_agent.l4_checks.check import Factories, Target, target_of
from amphora_agent.l4_checks.member_state import MemberKey, States, Status
from amphora_agent.l4_checks.schedule import Schedule
from amphora_agent.l4_daemon import persisted_state
from amphora_agent.l4_daemon.persisted_state import DesiredState, StateFiles
from amphora_agent.l4_flow_log.writer import FlowLog
from amphora_agent.l4_nftables.engine import NftablesEngine

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.5, 30.0
# Seconds between two counts of flows for the algorithm LEAST_CONNECTIONS.
_REBALANCE_SECONDS = 1.0
# If check results and counters change without a new member status, the L4 daemon saves the changes after this number of
# seconds. A kill of the daemon before the save loses these changes.
_SAVE_SECONDS = 1.0


class Checker:
    """Member states, and the engine that follows them. Used by one thread."""

    def __init__(
        self, loop: EventLoop, engine: NftablesEngine, files: StateFiles, factories: Factories, version: str = ""
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._flow_log = FlowLog(loop)
        self._files = files
        self._version = version
        self._schedule = Schedule(loop, factories, self._on_check_result)
        loaded = files.load()
        self._desired = loaded.desired
        self._counters = loaded.counters
        self._states = member_state.carry_over(loaded.states, (), loaded.desired.servers, time.time())
        self._monitors: dict[MemberKey, model.Monitor] = {}
        self._targets: dict[MemberKey, tuple[model.Member, Target]] = {}
        # Member health in the kernel's rules. A new L4 daemon assumes the health that the previous process recorded.
        self._applied_health = member_state.member_health(loaded.desired.servers, self._states)
        # The previous process may have applied other states than it recorded, so the L4 daemon applies the recorded
        # states immediately.
        self._must_apply = bool(loaded.desired.servers)
        self._is_saved = True
        self._last_error: str | None = None
        self._retry_timer: Timer | None = None
        self._save_timer: Timer | None = None
        self._rebalance_timer: Timer | None = None
        self._apply_not_before = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._schedule_checks(self._desired.servers)

    def run_once(self) -> None:
        """Apply changed states, or wait for the next event and handle everything that is due."""
        must_apply = self._must_apply and self._retry_timer is None
        wait = self._apply_not_before - time.monotonic()
        if must_apply and wait <= 0:
            self._apply_states()
            return
        self._loop.run_once(wait if must_apply else None)
        if not self._is_saved and self._save_timer is None:
            self._save_timer = self._loop.call_at(time.monotonic() + _SAVE_SECONDS, self._save)

    def _on_check_result(self, key: MemberKey, good: bool, reason: str) -> None:
        before, monitor = self._states.get(key), self._monitors.get(key)
        if before is None or monitor is None:
            return
        state = member_state.next_state(
            before, good=good, reason=reason, rise=monitor.rise, fall=monitor.fall, now=time.time()
        )
        if state == before:
            return
        self._states[key] = state
        self._is_saved = False
        if state.up != before.up:
            self._must_apply = True
            log(
                f"a health check of the L4 daemon changed the status: member {key[1]} of pool {key[0]} is "
                f"now {Status.UP if state.up else Status.DOWN}: {reason}"
            )

    def _apply_states(self) -> None:
        """Apply the member states, and retry after an error. The checks get half of the time."""
        begun = time.monotonic()
        try:
            self._apply(self._desired, self._states)
        except Exception as error:  # noqa: BLE001 (checks continue after any error of the kernel)
            text = str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
            if text != self._last_error:
                log(f"the L4 daemon could not apply the states of members to the kernel's rules, and retries: {text}")
            self._last_error = text
            due = time.monotonic() + self._retry_seconds
            self._retry_timer = self._loop.call_at(due, lambda: setattr(self, "_retry_timer", None))
            self._retry_seconds = min(LAST_RETRY_SECONDS, 2 * self._retry_seconds)
        else:
            self._mark_applied()
        self._save()
        self._apply_not_before = 2 * time.monotonic() - begun

    def _mark_applied(self) -> None:
        self._must_apply, self._last_error, self._retry_seconds = False, None, FIRST_RETRY_SECONDS
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    def _save(self) -> None:
        self._is_saved = True
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None
        self._files.write_states(self._states, self._counters)

    def _apply(self, desired: DesiredState, states: States) -> None:
        """Apply a desired state to the engine, and read the counters before and after the change."""
        self._update_counters()
        up = member_state.member_health(desired.servers, states)
        self._flow_log.start(desired.servers)
        begun, done = time.time_ns(), False
        try:
            if desired.servers:
                self._engine.apply(desired.servers, up, paired=desired.paired)
            else:
                self._engine.release()
            done = True
        finally:
            self._flow_log.servers_applied(desired.servers, up, begun, done=done)
        self._applied_health = up
        self._update_counters()

    def _update_counters(self) -> None:
        with suppress(AgentError):
            if self._counters.update(self._engine.counters()):
                self._is_saved = False

    def _schedule_checks(self, servers: Sequence[VirtualServer]) -> None:
        # Equal monitors and targets stay the same objects, so that the schedule finds the changed ones quickly.
        former, present = self._targets, {id(one): one for one in self._monitors.values()}.values()
        same = {one: one for one in present}
        monitors = {one.id: same.get(one.monitor, one.monitor) for one in servers if one.monitor is not None}
        self._monitors, self._targets = {}, {}
        for key, (server, member) in member_state.checked_members(servers).items():
            monitor = self._monitors[key] = monitors[server.id]
            known = former.get(key)
            is_same = known is not None and known[0] is member and known[1].monitor is monitor
            self._targets[key] = known if is_same and known is not None else (member, target_of(member, monitor))
        self._schedule.set_targets({key: target for key, (_, target) in self._targets.items()})
        if self._rebalance_timer is None:
            self._schedule_rebalance()

    def _schedule_rebalance(self) -> None:
        self._rebalance_timer = None
        if self._uses_least_connections:
            self._rebalance_timer = self._loop.call_at(time.monotonic() + _REBALANCE_SECONDS, self._rebalance)

    @property
    def _uses_least_connections(self) -> bool:
        return any(one.algorithm == "LEAST_CONNECTIONS" for one in self._desired.servers)

    def _rebalance(self) -> None:
        if self._uses_least_connections and not self._must_apply:
            try:
                self._engine.rebalance(self._desired.servers, self._applied_health, paired=self._desired.paired)
            except AgentError:
                # The L4 daemon tries again, and logs an error only if the next attempt also fails.
                self._must_apply = True
        self._schedule_rebalance()

    def handle_request(self, request: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the answer to a request; raises AgentError, KeyError, TypeError or ValueError."""
        operation = request["op"]
        if operation == "version":
            return {"version": self._version}
        if operation == "state":
            return self._describe(with_members=request.get("members") is True)
        if operation == "rows":
            return stat_rows.render_rows(self._describe(with_members=True)["servers"])
        if operation not in ("serve", "differs"):
            raise ValueError(f"unknown operation {operation!r}")
        if operation == "differs":
            return {"differs": self._find_drift(str(request["digest"]), empty=request["empty"] is True)}
        if "change" in request and request["base"] != self._desired.digest:
            return {"unknown": True}
        self._serve(persisted_state.parse_desired(request, self._desired))
        # The agent needs the state only when it stops the L4 daemon.
        return {} if self._desired.servers else self._describe()

    def _serve(self, desired: DesiredState) -> None:
        before = self._desired
        states = member_state.carry_over(self._states, before.servers, desired.servers, time.time())
        self._engine.check_servers(desired.servers)
        try:
            self._apply(desired, states)
            self._files.write_servers(desired)
        except Exception:
            # After any error, the rules and the checks must be those of the former configuration again.
            with suppress(AgentError):
                self._apply(before, self._states)
            raise
        self._desired, self._states = desired, states
        self._mark_applied()
        self._save()
        self._schedule_checks(desired.servers)

    def _find_drift(self, digest: str, *, empty: bool) -> list[str]:
        """Return differences in the kernel. A member state that is not applied yet is not a difference."""
        present = self._desired
        if empty and not present.servers:
            return []
        if digest != present.digest:
            return ["the checker serves other virtual servers than the confirmed bundle"]
        return list(self._engine.find_drift(present.servers, self._applied_health, paired=present.paired))

    def _describe(self, *, with_members: bool = False) -> dict[str, Any]:
        """Return the whole state. Counters of members take longer, so they are optional."""
        self._update_counters()
        counters: Mapping[MemberPlace, MemberCounters] = {}
        if with_members:
            with suppress(AgentError):
                counters = self._engine.member_counters()
        present = {server.id for server in self._desired.servers}
        return {
            "digest": self._desired.digest,
            "error": self._last_error,
            "birth": self._counters.birth,
            "flow_log": self._flow_log.counts,
            "servers": {server.id: self._describe_server(server, counters) for server in self._desired.servers},
            "former": {name: self._totals(name) for name in sorted(self._counters.names - present)},
        }

    def _totals(self, name: str) -> dict[str, int]:
        found = self._counters.totals(name)
        return {field: getattr(found, field) for field in SUMMED}

    def _describe_server(self, server: VirtualServer, counters: Mapping[MemberPlace, MemberCounters]) -> dict[str, Any]:
        active = self._counters.totals(server.id).active_connections
        full = server.connection_limit is not None and active >= server.connection_limit
        pool = None
        if server.pool_id is not None:
            members = {}
            for member in server.members:
                since, reason = member_state.last_change(server, member, self._states)
                status = member_state.member_status(server, member, self._states)
                found = counters.get((server.id, member.place))
                plain = {"status": status, "since": since, "reason": reason, "weight": member.weight}
                members[member.id] = {**plain, **({} if found is None else asdict(found))}
            pool = {"id": server.pool_id, "status": member_state.pool_status(server, self._states), "members": members}
        status = Status.FULL if full else Status.OPEN
        return {"status": status, "active_connections": active, **self._totals(server.id), "pool": pool}

    def close(self) -> None:
        """Stop all checks. The kernel continues to forward."""
        self._update_counters()
        self._save()
        self._flow_log.close()
        self._schedule.close()
