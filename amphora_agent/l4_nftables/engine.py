# SPDX-License-Identifier: Apache-2.0
"""The forwarding engine on nftables: loads the table of `ruleset` into the kernel.

Invariant: one transaction for each change. `check_servers` refuses everything that the engine does not support, before
anything is changed. `apply` disturbs no flow of a member that stays, not even in a new process: the new process
reads the assigned marks from the kernel.

The kernel counts the changes to its rules. While only the engine changes them, the engine compares no rules. Otherwise
it compares the whole table at the next change and at the drift check.

A count of flows requires a dump of all flows. The dump takes at most one part in `COUNT_SHARE` of the time. For
LEAST_CONNECTIONS the count and the resulting change take at most one part in `LEAST_SHARE`. While no flow begins, the
engine counts flows every `IDLE_SECONDS`.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from amphora_agent.errors import VirtualServersError
from amphora_agent.l4.counters import Counters, MemberCounters, MemberPlace
from amphora_agent.l4.eligible_members import MemberHealth
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_nftables import conntrack, conntrack_marks, kernel_table, limits, ruleset, table_listing
from amphora_agent.l4_nftables.conntrack_marks import SERVER_MASK, Marks
from amphora_agent.l4_nftables.least_connections import NO_LOADS, Loads
from amphora_agent.l4_nftables.ruleset import FAMILY, TABLE, ServicePlace, Table
from amphora_agent.network import libnftables
from amphora_agent.network.libnftables import STATELESS, NftError

COUNT_SHARE, LEAST_SHARE = 100, 20
PERIOD_SECONDS, MIN_PERIOD_SECONDS, IDLE_SECONDS = 1.0, 0.2, 10.0
_LIST = f"list table {FAMILY} {TABLE}\n"
_REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_DECLARED = re.compile(r"^\t(chain|map|set|counter) (\S+) \{", re.MULTILINE)
_LIST_SET = f"list set {FAMILY} {TABLE} {{}}\n"
_ELEMENT = re.compile(r"(0x[0-9a-f]{8}) counter packets (\d+) bytes (\d+)")
_BASE = re.compile(r'(0x[0-9a-f]{8}) : "in-([0-9a-f-]{36})"')
_TARGET = re.compile(r"(0x[0-9a-f]{8}) : ([0-9a-f.:]+) \. (\d+)")


class NftablesEngine:
    """The table and the flows of one namespace, which has the VIPs. Used by one thread.

    In all methods, ``up`` is the health by virtual server id and member id; a member without an entry is up. ``paired``
    is whether another amphora may have to continue the flows of this one.
    """

    def __init__(self) -> None:
        self._table: Table | None = None
        self._marks = conntrack_marks.NO_MARKS
        # The checksum of the kernel's chains and rules, and the generation of the kernel's ruleset, both read after the
        # L4 daemon's last change. If the generation differs later, the L4 daemon compares the whole table.
        self._structure: int | None = None
        self._generation: int | None = None
        # Flows that the L4 daemon must still end: flows with these marks, and flows without a mark to these VIPs (with
        # protocol and port).
        self._marks_to_end: set[int] = set()
        self._unmarked_places: set[ServicePlace] = set()
        # Latest count of flows by mark.
        self._flows: dict[int, int] = {}
        self._flow_count_due = 0.0
        self._loads = NO_LOADS
        self._loads_read_at = self._counted_at = self._loads_due = 0.0

    def check_servers(self, servers: Sequence[VirtualServer]) -> None:
        """Refuse virtual servers that the rules do not support; raises ConfigurationRefused."""
        limits.check_servers(servers)

    def apply(self, servers: Sequence[VirtualServer], up: MemberHealth, *, paired: bool = False) -> None:
        """Forward exactly for these virtual servers, and end the flows of all other members.

        Raises VirtualServersError if nftables refuses the rules; the previous rules are still in force.
        """
        self.check_servers(servers)
        with suppress(VirtualServersError):
            # If the kernel cannot count the flows now, the L4 daemon distributes new flows by the previous counts.
            self._update_loads(servers, at_once=self._loads_due - self._loads_read_at < PERIOD_SECONDS)
        former = self._table if self._table is not None and self._is_unchanged() else None
        if former is None or not self._apply_difference(former, servers, up, paired=paired):
            self._table = None
            self._rebuild(servers, up, paired=paired)
            self._record_structure()
        # Packets create flows to removed members until the kernel has the new rules, so the flows are ended afterwards.
        self._end_flows()

    def _apply_difference(
        self, former: Table, servers: Sequence[VirtualServer], up: MemberHealth, *, paired: bool
    ) -> bool:
        """Apply the difference; returns False if the kernel refuses it."""
        marks = conntrack_marks.assign_marks(self._marks, servers)
        table = ruleset.build_table(servers, up, marks, paired=paired, loads=self._loads, former=former)
        generation = self._generation
        try:
            if commands := ruleset.diff_commands(former, table):
                libnftables.run_commands(commands)
        except NftError:
            return False
        gone = {int(mark, 16) for mark in ruleset.target_marks(former) - ruleset.target_marks(table)}
        self._record_table(table, marks, gone, ruleset.service_places(former))
        if commands:
            self._record_structure(None if generation is None else generation + 1)
        return True

    def _rebuild(self, servers: Sequence[VirtualServer], up: MemberHealth, *, paired: bool) -> None:
        """Rebuild the table, whatever a previous process or an operator left."""
        listed = self._list_table()
        before = self._marks.whole
        # A missing table does not mean that flows with marks are gone. So the L4 daemon then uses the assignment of
        # marks in its memory.
        self._marks = _parse_marks(listed) if _BASE.search(listed) else self._marks
        before |= self._marks.whole
        marks = conntrack_marks.assign_marks(self._marks, servers)
        table = ruleset.build_table(servers, up, marks, paired=paired, loads=self._loads)
        present = {name: word for word, name in _DECLARED.findall(listed)}
        try:
            libnftables.run_commands(ruleset.rebuild_commands(present, table))
        except NftError:
            # nftables refuses the change if another program has changed the table. So the whole table is created again,
            # which loses its counters.
            self._run(ruleset.DELETE_COMMANDS + ruleset.diff_commands(ruleset.EMPTY, table))
        kept = {int(mark, 16) for mark in ruleset.target_marks(table)}
        self._record_table(table, marks, before - kept, set())

    def _record_table(self, table: Table, marks: Marks, gone: set[int], places: set[ServicePlace]) -> None:
        """Record the new table, and the flows that have to end: those of ``gone`` members, and to new places.

        ``places`` are those of the former table.
        """
        self._table, self._marks = table, marks
        self._marks_to_end |= gone
        served = ruleset.service_places(table)
        self._unmarked_places = (self._unmarked_places | served - places) & served

    def _end_flows(self) -> None:
        """End the flows of removed members and virtual servers. After an error the next call retries."""
        whole = {mark & SERVER_MASK for mark in self._marks_to_end} - {*self._marks.servers.values()}
        conntrack.end_flows(
            {mark for mark in self._marks_to_end if mark & SERVER_MASK not in whole},
            [(base, SERVER_MASK) for base in sorted(whole)],
        )
        self._marks_to_end.clear()
        conntrack.end_unmarked_flows(self._unmarked_places)
        self._unmarked_places.clear()

    def _record_structure(self, expected: int | None = None) -> None:
        """Record the chains and rules after a change, and whether only the expected change has happened."""
        self._generation = None
        generation = libnftables.ruleset_generation()
        self._structure = self._read_structure()
        self._generation = generation if expected in (None, generation) else None

    def _is_unchanged(self) -> bool:
        """Return whether the table is unchanged. Lists it only if any rule of the namespace has changed."""
        generation = libnftables.ruleset_generation()
        if generation is not None and generation == self._generation:
            return True
        if self._table is None or self._read_structure() != self._structure:
            return False
        if not table_listing.has_elements(self._list_table(), self._table):
            return False
        self._generation = generation
        return True

    def _read_structure(self) -> int | None:
        try:
            return kernel_table.structure(TABLE) if libnftables.table_exists(FAMILY, TABLE) else None
        except NftError as error:
            raise VirtualServersError("forward UDP and SCTP", str(error), _REMEDY) from error

    def _list_table(self) -> str:
        return self._run(_LIST, STATELESS) if libnftables.table_exists(FAMILY, TABLE) else ""

    def find_drift(self, servers: Sequence[VirtualServer], up: MemberHealth, *, paired: bool = False) -> list[str]:
        """Return the differences from the state that `apply` would leave; raises VirtualServersError."""
        if self._table is None:
            return ["the state of the forwarding rules is unknown"]
        found = []
        marks = conntrack_marks.assign_marks(self._marks, servers)
        wanted = ruleset.build_table(servers, up, marks, paired=paired, loads=self._loads, former=self._table)
        if ruleset.diff_commands(self._table, wanted):
            found.append("the forwarding rules belong to another configuration")
        if not self._is_unchanged():
            # Another program has changed the table, so the next change rebuilds it.
            self._table = None
            found.append("the forwarding rules were changed")
        if self._marks_to_end or self._unmarked_places:
            found.append("flows of removed members still continue")
        return found

    def rebalance(self, servers: Sequence[VirtualServer], up: MemberHealth, *, paired: bool = False) -> None:
        """Replace the turns of LEAST_CONNECTIONS, if flows have begun or ended; raises VirtualServersError."""
        former = self._table
        begun = time.monotonic()
        if former is None or begun < self._loads_due or not self._is_unchanged() or not self._update_loads(servers):
            return
        if not self._apply_difference(former, servers, up, paired=paired):
            self._table = None
            raise VirtualServersError("distribute new flows by LEAST_CONNECTIONS", "the kernel refused", _REMEDY)
        self._loads_due = (ended := time.monotonic()) + LEAST_SHARE * (ended - begun)

    def _update_loads(self, servers: Sequence[VirtualServer], *, at_once: bool = False) -> bool:
        """Count flows for LEAST_CONNECTIONS if due or ``at_once``; returns whether the loads have changed."""
        busy = [one.id for one in servers if ruleset.uses_least_connections(one)]
        now = time.monotonic()
        if not busy or (now < self._loads_due and not at_once):
            return False
        total = self._named_counters()
        begun = {name: total.get(name, {}).get("flows", (0, 0))[0] for name in busy}
        if begun == self._loads.begun and now < self._counted_at + IDLE_SECONDS and not at_once:
            self._loads_read_at = now
            return False
        found = {mark: count for mark, count in self._count_flows().items() if mark}
        rest = LEAST_SHARE * (time.monotonic() - now)
        # The number of new flows until the next count is predicted from the rate since the last count. `ahead` is the
        # predicted period divided by the measured period.
        ahead = max(PERIOD_SECONDS, rest) / max(now - self._loads_read_at, MIN_PERIOD_SECONDS)
        former, self._loads_due = self._loads, time.monotonic() + rest
        self._loads_read_at = self._counted_at = now
        if (begun, found) == (former.begun, former.flows):
            return False
        recent = {name: max(0, count - former.begun.get(name, count)) for name, count in begun.items()}
        expected = {name: math.ceil(count * ahead) for name, count in recent.items()}
        self._loads = Loads(found, begun, expected, former.number + 1)
        return True

    def counters(self) -> Mapping[str, Counters]:
        """Return the counters by virtual server id, with IP headers in bytes; raises VirtualServersError."""
        found = self._named_counters()
        open_: dict[int, int] = {}
        for mark, count in self._flows_by_mark().items() if found else ():
            open_[mark & SERVER_MASK] = open_.get(mark & SERVER_MASK, 0) + count
        nothing = (0, 0)
        return {
            name: Counters(
                active_connections=open_.get(self._marks.servers.get(name, 0), 0),
                total_connections=one.get("flows", nothing)[0],
                bytes_in=one.get("in", nothing)[1],
                bytes_out=one.get("out", nothing)[1],
                request_errors=one.get("refused", nothing)[0],
            )
            for name, one in found.items()
        }

    def _named_counters(self) -> dict[str, dict[str, tuple[int, int]]]:
        found: dict[str, dict[str, tuple[int, int]]] = {}
        try:
            counted = kernel_table.counters(TABLE) if libnftables.table_exists(FAMILY, TABLE) else {}
        except NftError as error:
            raise VirtualServersError("count the flows of UDP and SCTP", str(error), _REMEDY) from error
        for name, values in counted.items():
            word, _, server = name.partition("-")
            found.setdefault(server, {})[word] = values
        return found

    def member_counters(self) -> Mapping[MemberPlace, MemberCounters]:
        """Return the counters of members, slower than `counters`; raises VirtualServersError."""
        if self._table is None or not libnftables.table_exists(FAMILY, TABLE):
            return {}
        flows_, in_, out = (
            {int(mark, 16): (int(packets), int(size)) for mark, packets, size in _ELEMENT.findall(text)}
            for text in (self._run(_LIST_SET.format(name)) for name in ruleset.MEMBER_COUNTERS)
        )
        open_, nothing = self._flows_by_mark(), (0, 0)
        return {
            (owner, place): MemberCounters(
                active_connections=open_.get(mark, 0),
                total_connections=flows_.get(mark, nothing)[0],
                bytes_in=in_.get(mark, nothing)[1],
                bytes_out=out.get(mark, nothing)[1],
            )
            for owner, marks in self._marks.members.items()
            for place, mark in ((place, int(text, 16)) for place, text in marks.items())
        }

    def _flows_by_mark(self) -> Mapping[int, int]:
        """Return the number of flows by mark; from the latest count, if the next one is not due."""
        return self._flows if time.monotonic() < self._flow_count_due else self._count_flows()

    def _count_flows(self) -> Mapping[int, int]:
        begun = time.monotonic()
        self._flows = conntrack.count_flows(0xFFFFFFFF)
        self._flow_count_due = (ended := time.monotonic()) + COUNT_SHARE * (ended - begun)
        return self._flows

    def release(self) -> None:
        """Remove everything that `apply` made, and end all flows; raises VirtualServersError."""
        listed = self._list_table()
        if listed:
            self._run(ruleset.DELETE_COMMANDS)
        for one in (_parse_marks(listed), self._marks):
            # The marks in the kernel and in memory may differ. The L4 daemon ends the flows of all these marks, because
            # another virtual server may get a mark later.
            self._marks_to_end |= {*one.servers.values(), *one.whole}
        self._table, self._marks, self._structure, self._generation = None, conntrack_marks.NO_MARKS, None, None
        self._loads = NO_LOADS
        self._unmarked_places.clear()
        self._end_flows()

    def _run(self, commands: str, flags: int = 0) -> str:
        try:
            return libnftables.run_commands(commands, flags)
        except NftError as error:
            raise VirtualServersError("forward UDP and SCTP", str(error), _REMEDY) from error


def _parse_marks(listed: str) -> Marks:
    owners = {int(base, 16): name for base, name in _BASE.findall(listed)}
    members: dict[str, dict[str, str]] = {}
    for mark, address, port in _TARGET.findall(listed):
        if owner := owners.get(int(mark, 16) & SERVER_MASK):
            members.setdefault(owner, {})[f"{ipaddress.ip_address(address)} . {port}"] = mark
    return Marks({name: base for base, name in owners.items()}, members)
