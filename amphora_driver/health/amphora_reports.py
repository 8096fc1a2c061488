# SPDX-License-Identifier: Apache-2.0
"""The current reports of all amphorae, collected from their heartbeats in memory.

Invariant: the health manager accepts the heartbeats of an amphora in the order of sending, each at most once. A
datagram changes nothing about an object that it does not name. A value that no heartbeat repeats expires after
`expiry` seconds. A restarted process gets the values back from the next heartbeats. The process reads only the
(epoch, sequence) of each last heartbeat from the database (`load_orders`), and so accepts no heartbeat again.
Counters are kept until `take_counters`, also of listeners that a later heartbeat does not name.

Most heartbeats repeat the previous one with other counters. Such a heartbeat costs one comparison, and its amphora is
not in the result of `take_changed`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import LastDrift, ListenerReport, PoolReport, Report

# Limit of the object ids in memory for one amphora. A faulty amphora may report new ids for ever; above the limit, its
# earlier reports are dropped.
_MAX_NAMES = 50_000
# Differences refer only to complete reports with at most this number of names; agents know this limit. A difference
# costs its sender almost nothing, but may cost the health manager as much as the complete report.
_MAX_BASE_NAMES = 5_000
# The health manager keeps the counters of at most this number of listeners of one amphora between two writes.
_MAX_COUNTED = 5_000
# Longest silence before a heartbeat, as a fraction of the expiry time (0.3 of five heartbeat intervals). After a longer
# silence, the heartbeat counts as changed, because another process may have recorded the silence.
_SILENCE_OF_EXPIRY = 0.3
# The database columns for epoch and sequence have 64 bits with a sign.
_MAX_INTEGER = 2**63 - 1
# Maximum number of ids and words in `_SHARED`. `sys.intern` is not used, because in Python 3.12 it never frees a text.
_MAX_SHARED = 500_000
_SHARED: dict[str, str] = {}

Order = tuple[int, int]
"""The epoch and the sequence of a heartbeat."""
_BEFORE_ALL: Order = (-1, -1)


class LastReport(msgspec.Struct, frozen=True, gc=False):
    """The last heartbeat of an amphora without the states of its objects, and the times of its receipt.

    `monotonic` is a time of `time.monotonic()`, `wall` is in seconds since 1970. `read_at` is the `monotonic` of the
    last heartbeat whose values were read (`accept`, not `accept_time`). A generation of 0 means none.
    """

    monotonic: float
    wall: float
    generation: int
    order: Order
    holds_vip: bool | None = None
    drift: tuple[str, ...] = ()
    drifted: LastDrift | None = None
    agent_version: str | None = None
    usage: Mapping[str, int] = {}
    read_at: float = 0.0


class AmphoraReports:
    """The current reports of all amphorae. Thread-safe.

    Each `now` is a time of `time.monotonic()`; `wall_clock` returns the time in seconds since 1970.
    """

    def __init__(self, expiry: float = 15.0, wall_clock: Callable[[], float] = time.time) -> None:
        self.expiry = expiry
        self._wall_clock = wall_clock
        self._states: dict[str, _AmphoraState] = {}
        self._orders: dict[str, Order] = {}
        self._updated: set[str] = set()
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def load_orders(self, orders: Mapping[str, Order]) -> None:
        """Refuse heartbeats up to the given orders, because another process has accepted them."""
        with self._lock:
            for amphora_id, order in orders.items():
                self._orders[amphora_id] = max(order, self._orders.get(amphora_id, _BEFORE_ALL))

    def is_newer(self, amphora_id: str, order: Order) -> bool:
        """Return whether this order is valid and after all accepted heartbeats of this amphora."""
        with self._lock:
            return max(order) <= _MAX_INTEGER and order > self._orders.get(amphora_id, _BEFORE_ALL)

    def accept(self, heartbeat: Heartbeat, now: float) -> bool:
        """Merge a verified heartbeat into the report of its amphora. Return False for a replay."""
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
            report, before = heartbeat.report, state.last
            if report.holds_vip is True and before.holds_vip is not True:
                state.vip_claimed_at = now
            state.last = LastReport(
                monotonic=now,
                wall=self._wall_clock(),
                generation=report.generation or 0,
                order=order,
                holds_vip=report.holds_vip,
                drift=report.drift,
                drifted=report.drifted,
                agent_version=report.agent_version,
                usage=report.usage,
                read_at=now,
            )
            is_same = (
                state.merge(report, now, order)
                and report.holds_vip is before.holds_vip
                and report.drift == before.drift
                and report.drifted == before.drifted
                and report.agent_version == before.agent_version
                and now - before.monotonic <= _SILENCE_OF_EXPIRY * self.expiry
            )
            if not is_same:
                self._changed.add(heartbeat.amphora_id)
            self._updated.add(heartbeat.amphora_id)
        return True

    def accept_time(self, amphora_id: str, order: Order, now: float) -> bool:
        """Record that a verified heartbeat arrived, without its values.

        Return False if this process knows no values of the amphora, or for a replay. Values that no complete heartbeat
        repeats expire as usual.
        """
        with self._lock:
            state = self._states.get(amphora_id)
            if state is None or order <= self._orders.get(amphora_id, _BEFORE_ALL):
                return False
            self._orders[amphora_id] = order
            state.last = msgspec.structs.replace(state.last, monotonic=now, wall=self._wall_clock(), order=order)
            self._updated.add(amphora_id)
        return True

    def live_reports(self, amphora_ids: Iterable[str], now: float) -> dict[str, Report]:
        """Return the unexpired reports of these amphorae by amphora id, without the silent amphorae."""
        with self._lock:
            earliest = now - self.expiry
            return {one: state.build_report(one, earliest) for one, state in self._fresh(amphora_ids, now)}

    def authoritative_amphora(self, amphora_ids: Iterable[str], now: float) -> str | None:
        """Return the amphora of a pair (the oldest first) whose report counts; None without VIP reports.

        The report of the VIP holder counts. If two amphorae report that they hold the VIPs, the later first claim
        counts, because the other amphora is dead or wrong. Without a holder the last holder counts, which prevents
        flapping. A claim expires like other values: during overload, the values of heartbeats are not read.
        """
        earliest = now - self.expiry

        def rank(one: tuple[str, _AmphoraState]) -> tuple[bool, float]:
            state = one[1]
            return state.last.holds_vip is True and state.last.read_at >= earliest, state.vip_claimed_at

        with self._lock:
            fresh = self._fresh(amphora_ids, now)
            if all(state.last.holds_vip is None for _, state in fresh):
                return None
            return max(fresh, key=rank)[0]

    def _fresh(self, amphora_ids: Iterable[str], now: float) -> list[tuple[str, _AmphoraState]]:
        states = [(amphora_id, self._states.get(amphora_id)) for amphora_id in amphora_ids]
        earliest = now - self.expiry
        return [(one, state) for one, state in states if state is not None and state.last.monotonic >= earliest]

    def last_report(self, amphora_id: str) -> LastReport | None:
        """Return the last heartbeat of this amphora; None if this process has received none."""
        with self._lock:
            state = self._states.get(amphora_id)
        return None if state is None else state.last

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

    def take_changed(self) -> set[str]:
        """Return the amphorae with a changed value since the previous call.

        Counters and the usage of resources do not count. A heartbeat after a silence counts as a change.
        """
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def take_counters(self, amphora_ids: Iterable[str]) -> dict[str, Mapping[str, ListenerReport]]:
        """Return the counters that these amphorae reported since the previous call, by amphora and listener."""
        with self._lock:
            states = [(one, self._states.get(one)) for one in amphora_ids]
            return {one: counters for one, state in states if state is not None and (counters := state.take_counters())}

    def live_ids(self, amphora_ids: Iterable[str], now: float) -> list[str]:
        """Return the amphorae that are not silent."""
        with self._lock:
            return [one for one, _ in self._fresh(amphora_ids, now)]

    def forget(self, amphora_ids: Iterable[str]) -> None:
        with self._lock:
            for amphora_id in amphora_ids:
                self._states.pop(amphora_id, None)
                self._orders.pop(amphora_id, None)
                self._updated.discard(amphora_id)
                self._changed.discard(amphora_id)

    def known_ids(self) -> set[str]:
        """Return every amphora that uses memory, including those known from `load_orders` only."""
        with self._lock:
            return set(self._orders)


class _AmphoraState:
    """The values that one amphora reported, each with the time of the report.

    If the last datagram names all objects, `_whole` is its report, and the values of single objects are empty. `_base`
    is the last complete report, to which differences refer, unless it has too many names.
    """

    __slots__ = (
        *("_base", "_base_order", "_counters", "_listeners", "_name_bound", "_pools", "_whole", "_whole_at"),
        *("generation", "last", "vip_claimed_at"),
    )

    def __init__(self) -> None:
        self.last = LastReport(0.0, 0.0, 0, _BEFORE_ALL)
        # Time at which the heartbeats of the amphora began to report that the amphora holds the VIPs.
        self.vip_claimed_at = -1.0
        self.generation: int | None = None
        self._whole: Report | None = None
        self._whole_at = 0.0
        self._base: Report | None = None
        self._base_order = _BEFORE_ALL
        self._listeners: dict[str, tuple[float, ListenerReport]] = {}
        self._pools: dict[str, _PoolState] = {}
        # The counters since the last `take_counters`. The dictionary may belong to a report, so it is never changed.
        self._counters: Mapping[str, ListenerReport] = {}
        # Upper bound of the number of reported object ids. An id in two heartbeats counts twice.
        self._name_bound = 0

    def merge(self, report: Report, now: float, order: Order) -> bool:
        """Add the values of a newer datagram, and drop the values of another generation.

        Return whether no status changes: the datagram names all objects and repeats everything but counters, or it is
        a difference to an unknown report, of which only counters are used.
        """
        if report.full is None:
            report = _share_texts(report, self._whole)
            self._base, self._base_order = (report if _has_few_names(report) else None), order
        elif self._base is not None and self._base_order == (order[0], report.full):
            report = _apply_difference(self._base, report)
        else:
            # This difference refers to an unknown report. The changed objects alone do not determine the statuses, so
            # only the counters are used.
            self._add_counters(report.listeners)
            return True
        self._add_counters(report.listeners)
        whole = self._whole
        if whole is not None:
            if _is_repetition(whole, report):
                self._whole, self._whole_at = report, now
                return True
            self._whole = None
            self._add(whole, self._whole_at)
        if report.generation != self.generation or self._has_too_many_names():
            self.generation = report.generation
            self._listeners.clear()
            self._pools.clear()
            self._name_bound = 0
        if self._is_covered_by(report):
            self._listeners.clear()
            self._pools.clear()
            self._name_bound = 0
            self._whole, self._whole_at = report, now
        else:
            self._add(report, now)
        return False

    def take_counters(self) -> Mapping[str, ListenerReport]:
        counters, self._counters = self._counters, {}
        return counters

    def _add_counters(self, listeners: dict[str, ListenerReport]) -> None:
        before = self._counters
        if not before or before.keys() <= listeners.keys() or len(before) > _MAX_COUNTED:
            self._counters = listeners
        else:
            self._counters = {**before, **listeners}

    def _is_covered_by(self, report: Report) -> bool:
        return (
            self._listeners.keys() <= report.listeners.keys()
            and self._pools.keys() <= report.pools.keys()
            and all(pool.is_covered_by(report.pools[key]) for key, pool in self._pools.items())
        )

    def _add(self, report: Report, now: float) -> None:
        for listener_id, listener in report.listeners.items():
            self._listeners[listener_id] = (now, listener)
        for key, pool in report.pools.items():
            state = self._pools.get(key)
            if state is None:
                state = self._pools[key] = _PoolState()
            state.add(now, pool)
            self._name_bound += len(pool.members) + 2
        self._name_bound += len(report.listeners)

    def build_report(self, amphora_id: str, earliest: float) -> Report:
        """Return the values reported since `earliest`, and drop all older values."""
        whole = self._whole
        if whole is not None:
            if self._whole_at < earliest:
                self._whole = None
                return Report(generation=self.generation, amphora_id=amphora_id)
            return Report(self.generation, whole.listeners, whole.pools, amphora_id)
        self._listeners = {key: value for key, value in self._listeners.items() if value[0] >= earliest}
        self._pools = {key: pool for key, pool in self._pools.items() if pool.at >= earliest}
        return Report(
            generation=self.generation,
            listeners={key: listener for key, (_, listener) in self._listeners.items()},
            pools={key: pool.build_report(earliest) for key, pool in self._pools.items()},
            amphora_id=amphora_id,
        )

    def _has_too_many_names(self) -> bool:
        # `_name_bound` is at least the number of stored ids. To count the ids is slow, so this function counts only if
        # the bound exceeds the limit. The result must be at most half of the limit. Otherwise, the next count would
        # follow soon.
        if self._name_bound <= _MAX_NAMES:
            return False
        self._name_bound = len(self._listeners) + sum(pool.count_names() for pool in self._pools.values())
        return self._name_bound > _MAX_NAMES // 2


class _PoolState:
    """The reported state of one pool, whose members may be in several datagrams."""

    __slots__ = ("at", "parts", "status")

    def __init__(self) -> None:
        self.at = 0.0
        self.status = ""
        # Arrival time of each heartbeat datagram, and the statuses of the pool's members in it.
        self.parts: list[tuple[float, dict[str, str]]] = []

    def add(self, now: float, pool: PoolReport) -> None:
        """Add the values of a newer datagram, and drop the parts that it replaces completely."""
        self.at, self.status = now, pool.status
        # All members of a datagram share one arrival time, which saves memory.
        self.parts = [part for part in self.parts if not part[1].keys() <= pool.members.keys()]
        self.parts.append((now, pool.members))

    def build_report(self, earliest: float) -> PoolReport:
        self.parts = [part for part in self.parts if part[0] >= earliest]
        members = {member_id: word for _, part in self.parts for member_id, word in part.items()}
        return PoolReport(status=self.status, members=members)

    def is_covered_by(self, pool: PoolReport) -> bool:
        return all(members.keys() <= pool.members.keys() for _, members in self.parts)

    def count_names(self) -> int:
        # A datagram without members uses memory too, so each datagram counts as one id in addition to its members.
        return sum(len(members) + 1 for _, members in self.parts) + 1


def _is_repetition(before: Report, report: Report) -> bool:
    """Return whether a report names the same objects with the same statuses."""
    known, listeners = before.listeners, report.listeners
    if report.generation != before.generation or len(listeners) != len(known) or report.pools != before.pools:
        return False
    for key, listener in listeners.items():
        same = known.get(key)
        if same is None or same.status != listener.status:
            return False
    return True


def share_text(text: str) -> str:
    """Return an equal text that other reports use too, to save memory."""
    if len(_SHARED) >= _MAX_SHARED:
        _SHARED.clear()
    return _SHARED.setdefault(text, text)


def _share_texts(report: Report, before: Report | None) -> Report:
    """Return a report whose ids and words use the memory of equal ones in this process.

    The heartbeats of a pair repeat the same ids for as long as the pair exists, and so do its statuses.
    """
    if before is not None and report.pools == before.pools:
        return msgspec.structs.replace(report, pools=before.pools)
    pools = {
        share_text(key): PoolReport(
            share_text(pool.status), {share_text(member): share_text(word) for member, word in pool.members.items()}
        )
        for key, pool in report.pools.items()
    }
    return msgspec.structs.replace(report, pools=pools)


def _has_few_names(report: Report) -> bool:
    members = sum(len(pool.members) for pool in report.pools.values())
    return len(report.listeners) + len(report.pools) + members <= _MAX_BASE_NAMES


def _apply_difference(base: Report, difference: Report) -> Report:
    """Return the complete report that follows from a complete one and a later difference."""
    pools = base.pools
    if difference.pools:
        pools = dict(pools)
        for key, pool in difference.pools.items():
            known = pools.get(key)
            members = pool.members if known is None else {**known.members, **pool.members}
            pools[key] = PoolReport(pool.status, members)
    return Report(difference.generation, {**base.listeners, **difference.listeners}, pools)
