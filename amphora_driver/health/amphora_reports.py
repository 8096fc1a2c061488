# SPDX-License-Identifier: Apache-2.0
"""The current reports of all amphorae, collected from their heartbeats in memory.

Invariant: heartbeats of an amphora are accepted in the order it sent them, each at most once. A datagram changes
nothing about an object that it does not name. A value that is not repeated expires after `expiry` seconds.
A process that restarts gets the contents back from the next heartbeats. Only the (epoch, sequence) of each last
heartbeat is handed to the next process (`load_orders`), so that it does not accept a heartbeat again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import LastDrift, ListenerReport, PoolReport, Report

# Object ids remembered for one amphora. An amphora that keeps naming new objects loses its own earlier values.
_MAX_NAMES = 50_000
# Largest value of the database columns. The counters of a correct agent never reach it.
_MAX_INTEGER = 2**63 - 1

# (epoch, sequence)
Order = tuple[int, int]
_BEFORE_ALL: Order = (-1, -1)


class LastReport(msgspec.Struct, frozen=True):
    """The last heartbeat of an amphora, without the states of its objects.

    Attributes:
        monotonic: time of receipt of `time.monotonic()`.
        wall: time of receipt in seconds since 1970.
        generation: the generation that the amphora serves; 0 for none.
        order: (epoch, sequence) of the heartbeat.
        holds_vip: whether the amphora has the VIPs; None if it does not report that.
        drift: kinds of drift that the agent could not repair.
        drifted: the drift that the agent found last; None if it reports none.
        agent_version: None if the agent does not report it.
    """

    monotonic: float
    wall: float
    generation: int
    order: Order
    holds_vip: bool | None = None
    drift: tuple[str, ...] = ()
    drifted: LastDrift | None = None
    agent_version: str | None = None


class AmphoraReports:
    """The current reports of all amphorae. Thread-safe.

    Args:
        expiry: seconds after which a value that is not repeated is ignored.
        wall_clock: returns the current time in seconds since 1970.
    """

    def __init__(self, expiry: float = 15.0, wall_clock: Callable[[], float] = time.time) -> None:
        self.expiry = expiry
        self._wall_clock = wall_clock
        self._states: dict[str, _AmphoraState] = {}
        self._orders: dict[str, Order] = {}
        self._updated: set[str] = set()
        self._lock = threading.Lock()

    def load_orders(self, orders: Mapping[str, Order]) -> None:
        """Refuse heartbeats of these amphorae up to the given order: another process has accepted them."""
        with self._lock:
            for amphora_id, order in orders.items():
                self._orders[amphora_id] = max(order, self._orders.get(amphora_id, _BEFORE_ALL))

    def is_newer(self, amphora_id: str, order: Order) -> bool:
        """Return whether this order is valid and after all accepted heartbeats of this amphora."""
        with self._lock:
            return max(order) <= _MAX_INTEGER and order > self._orders.get(amphora_id, _BEFORE_ALL)

    def accept(self, heartbeat: Heartbeat, now: float) -> bool:
        """Merge a heartbeat into the report of its amphora.

        Args:
            heartbeat: a heartbeat with a verified signature.
            now: time of `time.monotonic()`.

        Returns:
            False for a replay, for a heartbeat that a later one has overtaken, and for an order above `_MAX_INTEGER`.
        """
        order = (heartbeat.epoch, heartbeat.sequence)
        if max(order) > _MAX_INTEGER:
            return False
        with self._lock:
            if order <= self._orders.get(heartbeat.amphora_id, _BEFORE_ALL):
                return False
            self._orders[heartbeat.amphora_id] = order
            state = self._states.get(heartbeat.amphora_id)
            if state is None:
                state = self._states[heartbeat.amphora_id] = _AmphoraState()
            report = heartbeat.report
            state.record_vip_claim(now, holds_vip=report.holds_vip)
            state.last = LastReport(
                monotonic=now,
                wall=self._wall_clock(),
                generation=report.generation or 0,
                order=order,
                holds_vip=report.holds_vip,
                drift=report.drift,
                drifted=report.drifted,
                agent_version=report.agent_version,
            )
            state.merge(report, now)
            self._updated.add(heartbeat.amphora_id)
        return True

    def live_reports(self, amphora_ids: Iterable[str], now: float) -> dict[str, Report]:
        """Return the unexpired reports of these amphorae by amphora id, without the silent amphorae.

        Args:
            amphora_ids: usually the amphorae of one load balancer.
            now: time of `time.monotonic()`.
        """
        earliest = now - self.expiry
        with self._lock:
            states = [(amphora_id, self._states.get(amphora_id)) for amphora_id in amphora_ids]
            return {
                amphora_id: state.build_report(amphora_id, earliest)
                for amphora_id, state in states
                if state is not None and state.last.monotonic >= earliest
            }

    def authoritative_amphora(self, amphora_ids: Iterable[str], now: float) -> str | None:
        """Return the amphora of an active-standby pair whose report counts; None without VIP reports.

        It is the amphora that holds the VIPs. If two report that they hold them, it is the one with the later first
        claim: the other one is dead or wrong. If none does, it is the last holder, so that the choice does not flap.

        Args:
            amphora_ids: the amphorae of one load balancer, the oldest first.
            now: time of `time.monotonic()`.
        """
        earliest = now - self.expiry
        with self._lock:
            states = [(amphora_id, self._states.get(amphora_id)) for amphora_id in amphora_ids]
            fresh = [(one, state) for one, state in states if state is not None and state.last.monotonic >= earliest]
            if all(state.last.holds_vip is None for _, state in fresh):
                return None
            return max(fresh, key=lambda one: (one[1].last.holds_vip is True, one[1].vip_claimed_at))[0]

    def last_report(self, amphora_id: str) -> LastReport | None:
        """Return the last heartbeat of this amphora; None if this process has received none."""
        with self._lock:
            state = self._states.get(amphora_id)
            return None if state is None else state.last

    def silent_since(self, amphora_ids: Iterable[str], moment: float) -> set[str]:
        """Return the given amphorae without a heartbeat after `moment` (time of `time.monotonic()`)."""
        with self._lock:
            return {
                amphora_id
                for amphora_id in amphora_ids
                if (state := self._states.get(amphora_id)) is None or state.last.monotonic <= moment
            }

    def heard_since(self, moment: float) -> set[str]:
        """Return all amphorae with a heartbeat at or after `moment` (time of `time.monotonic()`)."""
        with self._lock:
            return {amphora_id for amphora_id, state in self._states.items() if state.last.monotonic >= moment}

    def take_updated(self) -> dict[str, LastReport]:
        """Return the amphorae with a heartbeat since the previous call."""
        with self._lock:
            updated = {amphora_id: self._states[amphora_id].last for amphora_id in self._updated}
            self._updated.clear()
        return updated

    def forget(self, amphora_ids: Iterable[str]) -> None:
        """Drop deleted amphorae."""
        with self._lock:
            for amphora_id in amphora_ids:
                self._states.pop(amphora_id, None)
                self._orders.pop(amphora_id, None)
                self._updated.discard(amphora_id)

    def last_reports(self) -> Mapping[str, LastReport]:
        """Return the last heartbeat of every amphora that is not forgotten."""
        with self._lock:
            return {amphora_id: state.last for amphora_id, state in self._states.items()}

    def known_ids(self) -> set[str]:
        """Return every amphora that uses memory, including those known from `load_orders` only."""
        with self._lock:
            return set(self._orders)


class _AmphoraState:
    """The values that one amphora reported, each with the time of the report."""

    __slots__ = ("_listeners", "_name_bound", "_pools", "generation", "last", "vip_claimed_at")

    def __init__(self) -> None:
        self.last = LastReport(0.0, 0.0, 0, _BEFORE_ALL)
        # Start of the latest run of heartbeats that report the VIPs as held.
        self.vip_claimed_at = -1.0
        self.generation: int | None = None
        self._listeners: dict[str, tuple[float, ListenerReport]] = {}
        self._pools: dict[str, _PoolState] = {}
        # Upper bound of the number of names in memory.
        self._name_bound = 0

    def merge(self, report: Report, now: float) -> None:
        """Add the values of a newer datagram, and drop the values of another generation."""
        if report.generation != self.generation or self._has_too_many_names():
            self.generation = report.generation
            self._listeners.clear()
            self._pools.clear()
            self._name_bound = 0
        for listener_id, listener in report.listeners.items():
            self._listeners[listener_id] = (now, listener)
        for key, pool in report.pools.items():
            state = self._pools.get(key)
            if state is None:
                state = self._pools[key] = _PoolState()
            state.add(now, pool)
            self._name_bound += len(pool.members) + 2
        self._name_bound += len(report.listeners)

    def record_vip_claim(self, now: float, *, holds_vip: bool | None) -> None:
        """Record the start of a run of VIP claims. Call this before `last` changes."""
        if holds_vip is True and self.last.holds_vip is not True:
            self.vip_claimed_at = now

    def build_report(self, amphora_id: str, earliest: float) -> Report:
        """Return the values reported since `earliest`, and drop all older values."""
        self._listeners = {key: value for key, value in self._listeners.items() if value[0] >= earliest}
        self._pools = {key: pool for key, pool in self._pools.items() if pool.at >= earliest}
        return Report(
            generation=self.generation,
            listeners={key: listener for key, (_, listener) in self._listeners.items()},
            pools={key: pool.build_report(earliest) for key, pool in self._pools.items()},
            amphora_id=amphora_id,
        )

    def _has_too_many_names(self) -> bool:
        # Exact counting takes longer than merging, so it is done only when the upper bound is too large.
        if self._name_bound <= _MAX_NAMES:
            return False
        self._name_bound = len(self._listeners) + sum(pool.count_names() for pool in self._pools.values())
        return self._name_bound > _MAX_NAMES // 2


class _PoolState:
    """The reported state of one pool. Several datagrams may contain its members; the last value counts.

    Attributes:
        parts: the time and the members of each datagram that still contributes a value.
    """

    __slots__ = ("at", "parts", "status")

    def __init__(self) -> None:
        self.at = 0.0
        self.status = ""
        self.parts: list[tuple[float, dict[str, str]]] = []

    def add(self, now: float, pool: PoolReport) -> None:
        """Add the values of a newer datagram, and drop the parts that it replaces completely."""
        self.at, self.status = now, pool.status
        names = pool.members.keys()
        # All members of a datagram share one time: a time for each member would use more memory than the states.
        self.parts = [part for part in self.parts if not part[1].keys() <= names]
        self.parts.append((now, pool.members))

    def build_report(self, earliest: float) -> PoolReport:
        self.parts = [part for part in self.parts if part[0] >= earliest]
        members: dict[str, str] = {}
        for _, part in self.parts:
            members.update(part)
        return PoolReport(status=self.status, members=members)

    def count_names(self) -> int:
        # A part without members counts too, because it uses memory.
        return sum(len(members) + 1 for _, members in self.parts) + 1
