# SPDX-License-Identifier: Apache-2.0
"""What is known of every amphora, from its heartbeats.

Invariant: an amphora's heartbeats are taken in the order it sent them, each at most once; a datagram says
nothing of what it does not name; and nothing is believed longer than `expiry` seconds after it was last said.
All of it is in memory: what is lost with this process is said again a few seconds later. Only the place of the last
heartbeat is given to the next process (`resume`), so that what was taken once is not taken again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from amphora_driver.health.heartbeat_codec import Heartbeat
from amphora_driver.health.status import Drifted, ListenerReport, PoolReport, Report

# Names remembered for one amphora. One that names ever new objects loses what it said before, not our memory.
_MOST_NAMES = 50_000
# What the database's columns hold. Who counts on beyond that is no agent of ours.
_LARGEST = 2**63 - 1

# (epoch, sequence)
Order = tuple[int, int]
_BEFORE_ALL: Order = (-1, -1)


class Seen(msgspec.Struct, frozen=True):
    """When an amphora was heard last, on `time.monotonic()`'s clock and in seconds since 1970.

    `generation` is what it said to serve; 0 for nothing yet. `order` is that heartbeat's (epoch, sequence).
    `holds_vip` is whether it has the VIPs, None if it does not say. `drift` and `drifted` are what it said of changes
    by hand, `agent_version` is its agent's; None if it does not say.
    """

    monotonic: float
    wall: float
    generation: int
    order: Order
    holds_vip: bool | None = None
    drift: tuple[str, ...] = ()
    drifted: Drifted | None = None
    agent_version: str | None = None


class Ledger:
    """Usable from any thread.

    Args:
        expiry: seconds after which what was said and not repeated is no longer believed.
        wall_clock: the current time in seconds since 1970.
    """

    def __init__(self, expiry: float = 15.0, wall_clock: Callable[[], float] = time.time) -> None:
        self.expiry = expiry
        self._wall_clock = wall_clock
        self._pages: dict[str, _Page] = {}
        self._orders: dict[str, Order] = {}
        self._heard: set[str] = set()
        self._lock = threading.Lock()

    def resume(self, orders: Mapping[str, Order]) -> None:
        """Take nothing any more of these amphorae that is not after what was taken before, by whatever process."""
        with self._lock:
            for amphora_id, order in orders.items():
                self._orders[amphora_id] = max(order, self._orders.get(amphora_id, _BEFORE_ALL))

    def is_newer(self, amphora_id: str, order: Order) -> bool:
        """Whether this is after all that was taken of this amphora, and what an agent can count to."""
        with self._lock:
            return max(order) <= _LARGEST and order > self._orders.get(amphora_id, _BEFORE_ALL)

    def accept(self, heartbeat: Heartbeat, now: float) -> bool:
        """Take a heartbeat in.

        Args:
            heartbeat: its signature has been checked.
            now: on `time.monotonic()`'s clock.

        Returns:
            False if it is not newer than what this amphora already said: a replay, or overtaken on its way; or if
            its numbers are no agent's.
        """
        order = (heartbeat.epoch, heartbeat.sequence)
        if max(order) > _LARGEST:
            return False
        with self._lock:
            if order <= self._orders.get(heartbeat.amphora_id, _BEFORE_ALL):
                return False
            self._orders[heartbeat.amphora_id] = order
            page = self._pages.get(heartbeat.amphora_id)
            if page is None:
                page = self._pages[heartbeat.amphora_id] = _Page()
            held = heartbeat.report.holds_vip
            page.claim(now, holds_vip=held)
            said = heartbeat.report
            page.seen = Seen(
                monotonic=now,
                wall=self._wall_clock(),
                generation=said.generation or 0,
                order=order,
                holds_vip=held,
                drift=said.drift,
                drifted=said.drifted,
                agent_version=said.agent_version,
            )
            page.merge(heartbeat.report, now)
            self._heard.add(heartbeat.amphora_id)
        return True

    def reports(self, amphora_ids: Iterable[str], now: float) -> dict[str, Report]:
        """What these amphorae say at the moment, by amphora id; those that say nothing are left out.

        Args:
            amphora_ids: usually those of one load balancer.
            now: on `time.monotonic()`'s clock.
        """
        earliest = now - self.expiry
        with self._lock:
            pages = [(amphora_id, self._pages.get(amphora_id)) for amphora_id in amphora_ids]
            return {
                amphora_id: page.report(amphora_id, earliest)
                for amphora_id, page in pages
                if page is not None and page.seen.monotonic >= earliest
            }

    def speaker(self, amphora_ids: Iterable[str], now: float) -> str | None:
        """Of amphorae that take over from each other, the one whose word counts; None where they do not.

        It is the one with the VIPs. Of two that say so it is the one that said it last for the first time: the other
        one is dead, or wrong. While nobody says so it is the one that had them last. So no word counts now and then.

        Args:
            amphora_ids: those of one load balancer, the oldest first.
            now: on `time.monotonic()`'s clock.
        """
        earliest = now - self.expiry
        with self._lock:
            pages = [(amphora_id, self._pages.get(amphora_id)) for amphora_id in amphora_ids]
            fresh = [(one, page) for one, page in pages if page is not None and page.seen.monotonic >= earliest]
            if all(page.seen.holds_vip is None for _, page in fresh):
                return None
            return max(fresh, key=lambda one: (one[1].seen.holds_vip is True, one[1].claimed))[0]

    def last_seen(self, amphora_id: str) -> Seen | None:
        """When this amphora was heard last; None if never, since this process began."""
        with self._lock:
            page = self._pages.get(amphora_id)
            return None if page is None else page.seen

    def silent_since(self, amphora_ids: Iterable[str], moment: float) -> set[str]:
        """Those of these amphorae not heard after `moment` (on `time.monotonic()`'s clock), or never."""
        with self._lock:
            return {
                amphora_id
                for amphora_id in amphora_ids
                if (page := self._pages.get(amphora_id)) is None or page.seen.monotonic <= moment
            }

    def heard_since(self, moment: float) -> set[str]:
        """All that were heard at or after `moment` (on `time.monotonic()`'s clock)."""
        with self._lock:
            return {amphora_id for amphora_id, page in self._pages.items() if page.seen.monotonic >= moment}

    def take_heard(self) -> dict[str, Seen]:
        """The amphorae heard since this was asked last: what a batch has to write down or compute again."""
        with self._lock:
            heard = {amphora_id: self._pages[amphora_id].seen for amphora_id in self._heard}
            self._heard.clear()
        return heard

    def forget(self, amphora_ids: Iterable[str]) -> None:
        """Drop amphorae that are gone."""
        with self._lock:
            for amphora_id in amphora_ids:
                self._pages.pop(amphora_id, None)
                self._orders.pop(amphora_id, None)
                self._heard.discard(amphora_id)

    def known(self) -> Mapping[str, Seen]:
        """Every amphora that was ever heard and not forgotten."""
        with self._lock:
            return {amphora_id: page.seen for amphora_id, page in self._pages.items()}

    def remembered(self) -> set[str]:
        """Every amphora that takes memory: those that were heard, and those of which only `resume` told."""
        with self._lock:
            return set(self._orders)


class _Page:
    """One amphora's page: each thing it named, with the moment it did."""

    __slots__ = ("_at_most", "_listeners", "_pools", "claimed", "generation", "seen")

    def __init__(self) -> None:
        self.seen = Seen(0.0, 0.0, 0, _BEFORE_ALL)
        # When it said for the first time in a row that it has the VIPs, the last time it did.
        self.claimed = -1.0
        self.generation: int | None = None
        self._listeners: dict[str, tuple[float, ListenerReport]] = {}
        self._pools: dict[str, _PoolPage] = {}
        self._at_most = 0

    def merge(self, report: Report, now: float) -> None:
        """Add what a newer datagram says; what belongs to another generation is forgotten."""
        if report.generation != self.generation or self._too_many():
            self.generation = report.generation
            self._listeners.clear()
            self._pools.clear()
            self._at_most = 0
        for listener_id, listener in report.listeners.items():
            self._listeners[listener_id] = (now, listener)
        for key, pool in report.pools.items():
            page = self._pools.get(key)
            if page is None:
                page = self._pools[key] = _PoolPage()
            page.say(now, pool)
            self._at_most += len(pool.members) + 2
        self._at_most += len(report.listeners)

    def claim(self, now: float, *, holds_vip: bool | None) -> None:
        """Note whether it has the VIPs; to be called before `seen` changes."""
        if holds_vip is True and self.seen.holds_vip is not True:
            self.claimed = now

    def report(self, amphora_id: str, earliest: float) -> Report:
        """All that was said since `earliest`; what was said before that is dropped for good."""
        self._listeners = {key: said for key, said in self._listeners.items() if said[0] >= earliest}
        self._pools = {key: pool for key, pool in self._pools.items() if pool.seen >= earliest}
        return Report(
            generation=self.generation,
            listeners={key: listener for key, (_, listener) in self._listeners.items()},
            pools={key: pool.report(earliest) for key, pool in self._pools.items()},
            amphora_id=amphora_id,
        )

    def _too_many(self) -> bool:
        # Counting takes longer than merging: it is done only when the sum of all that came could be too much.
        if self._at_most <= _MOST_NAMES:
            return False
        self._at_most = len(self._listeners) + sum(pool.names() for pool in self._pools.values())
        return self._at_most > _MOST_NAMES // 2


class _PoolPage:
    """One pool: its members may be spread over several datagrams, of which the later one is right."""

    __slots__ = ("parts", "seen", "status")

    def __init__(self) -> None:
        self.seen = 0.0
        self.status = ""
        self.parts: list[tuple[float, dict[str, str]]] = []

    def say(self, now: float, pool: PoolReport) -> None:
        """Add what a newer datagram says; parts of which it names everything anew are of no use any more."""
        self.seen, self.status = now, pool.status
        names = pool.members.keys()
        # The members of one datagram share its time: a time for each would cost more than all the rest.
        self.parts = [part for part in self.parts if not part[1].keys() <= names]
        self.parts.append((now, pool.members))

    def report(self, earliest: float) -> PoolReport:
        self.parts = [part for part in self.parts if part[0] >= earliest]
        members: dict[str, str] = {}
        for _, part in self.parts:
            members.update(part)
        return PoolReport(status=self.status, members=members)

    def names(self) -> int:
        # A part counts even if it names nobody: parts are what takes memory.
        return sum(len(members) + 1 for _, members in self.parts) + 1
