# SPDX-License-Identifier: Apache-2.0
"""The engine that works on every kernel with nf_tables: `ruleset` says what, this brings it into the kernel.

Invariant: one transaction for each change. A flow whose member stays is not touched, also by a process that begins
anew: what was given to whom is read back from the kernel.

Counting flows means to go through all of them. That takes no more than one part in `SHARE` of the time; where the
member with the fewest gets the next one, no more than one part in `LEAST_SHARE`, with all that follows from it, and
every `IDLE_SECONDS` where none begins.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from amphora_agent.errors import ConfigurationRefused, VirtualServersError
from amphora_agent.l4.engine import Counters, MemberCounters
from amphora_agent.l4.engine import Place as MemberPlace
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_nftables import conntrack, conntrack_marks, ruleset
from amphora_agent.l4_nftables.conntrack_marks import MOST_MEMBERS, MOST_SERVERS, SERVER_MASK, Marks
from amphora_agent.l4_nftables.least_connections import UNKNOWN, Loads
from amphora_agent.l4_nftables.ruleset import FAMILY, TABLE, Place, Table
from amphora_agent.network import libnftables
from amphora_agent.network.libnftables import STATELESS, NftError

SHARE, LEAST_SHARE = 100, 20
LEAST_SECONDS, LEAST_SHORT, IDLE_SECONDS = 1.0, 0.2, 10.0
_LIST = f"list table {FAMILY} {TABLE}\n"
_COUNT = f"list counters table {FAMILY} {TABLE}\n"
_REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_DECLARED = re.compile(r"^\t(chain|map|set|counter) (\S+) \{", re.MULTILINE)
_LIST_SET = f"list set {FAMILY} {TABLE} {{}}\n"
_ELEMENT = re.compile(r"(0x[0-9a-f]{8}) counter packets (\d+) bytes (\d+)")
_COUNTED = re.compile(r"counter (\w+)-(\S+) \{\s+packets (\d+) bytes (\d+)")
_BASE = re.compile(r'(0x[0-9a-f]{8}) : "in-([0-9a-f-]{36})"')
_TARGET = re.compile(r"(0x[0-9a-f]{8}) : ([0-9a-f.:]+) \. (\d+)")


class NftablesEngine:
    """Forwards by nftables. Used by one thread, in the namespace that has the VIPs."""

    def __init__(self) -> None:
        self._table: Table | None = None
        self._marks = conntrack_marks.NONE
        # How the kernel lists the table since we changed it, and its number for what there was then.
        self._listed = ""
        self._generation: int | None = None
        # What may still have flows that are to end: marks, and places whose flows were never led anywhere.
        self._ending: set[int] = set()
        self._unled: set[Place] = set()
        # By mark; and of each virtual server how often a flow has begun.
        self._flows: dict[int, int] = {}
        self._count_next = 0.0
        self._loads = UNKNOWN
        self._loads_at = self._weighed_at = self._weigh_next = 0.0

    def check(self, servers: Sequence[VirtualServer]) -> None:
        """Refuse what these rules cannot do.

        Raises:
            ConfigurationRefused: naming the listener.
        """
        if len(servers) > MOST_SERVERS:
            raise ConfigurationRefused("forward by nftables", f"{len(servers)} listeners are more than {MOST_SERVERS}")
        for server in servers:
            if server.algorithm == "LEAST_CONNECTIONS" and server.persistence is not None:
                raise ConfigurationRefused(
                    f"serve listener {server.id}",
                    "with persistence the client's address selects the member, so LEAST_CONNECTIONS has no effect",
                    "Choose SOURCE_IP, or go without persistence.",
                    object_id=server.id,
                )
            if len(server.members) > MOST_MEMBERS:
                raise ConfigurationRefused(
                    f"serve listener {server.id}", f"it has more than {MOST_MEMBERS} members", object_id=server.id
                )

    def bring_about(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """See `Engine.bring_about`.

        Raises:
            VirtualServersError: nftables refused; what was forwarded before is forwarded on.
        """
        self.check(servers)
        with suppress(VirtualServersError):  # then it goes on with what was known
            self._weigh(servers, at_once=self._weigh_next - self._loads_at < LEAST_SECONDS)
        if self._table is None or not self._is_as_left() or not self._change(self._table, servers, up, paired=paired):
            self._table = None
            self._renew(servers, up, paired=paired)
        self._remember()
        # Last: by now a packet that had found its member, or nobody, by the former rules is a flow, and is seen here.
        self._end()

    def _change(
        self, former: Table, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool
    ) -> bool:
        """Change what differs; False if the kernel refuses: it may not have what we think it has."""
        given = conntrack_marks.allot(self._marks, servers)
        table = ruleset.table_of(servers, up, given, paired=paired, loads=self._loads)
        try:
            if commands := ruleset.exchange(former, table):
                libnftables.run_commands(commands)
        except NftError:
            return False
        self._wrote(table, given, ruleset.targets(former), ruleset.places(former))
        return True

    def _renew(self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool) -> None:
        """Write all of it, whatever there is of a process before this one, or of somebody's hand."""
        listed = self._list()
        before = {*self._marks.members.values()}
        # Without rules there are still flows, with the marks that we gave.
        self._marks = _given(listed) if _BASE.search(listed) else self._marks
        before |= {*self._marks.members.values()}
        given = conntrack_marks.allot(self._marks, servers)
        table = ruleset.table_of(servers, up, given, paired=paired, loads=self._loads)
        present = {name: word for word, name in _DECLARED.findall(listed)}
        try:
            libnftables.run_commands(ruleset.anew(present, table))
        except NftError:
            # Somebody's hand has been in it: then without what was counted.
            self._run(ruleset.without() + ruleset.exchange(ruleset.EMPTY, table))
        self._wrote(table, given, before, set())

    def _table_of(self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool) -> Table:
        return ruleset.table_of(
            servers, up, conntrack_marks.allot(self._marks, servers), paired=paired, loads=self._loads
        )

    def _wrote(self, table: Table, given: Marks, members: set[int], places: set[Place]) -> None:
        """Know what the kernel has now, and what is to be ended since it had those members and places."""
        self._table, self._marks = table, given
        self._ending |= members - ruleset.targets(table)
        self._unled = (self._unled | ruleset.places(table) - places) & ruleset.places(table)

    def _end(self) -> None:
        """End the flows of members that are gone; those of a whole virtual server by the part that is its own.

        What could not be ended is so the next time.
        """
        whole = {mark & SERVER_MASK for mark in self._ending} - {*self._marks.servers.values()}
        conntrack.end(
            {mark for mark in self._ending if mark & SERVER_MASK not in whole},
            [(base, SERVER_MASK) for base in sorted(whole)],
        )
        self._ending.clear()
        conntrack.end_unled(self._unled)
        self._unled.clear()

    def _remember(self) -> None:
        self._listed = ""
        self._generation = libnftables.ruleset_generation()
        self._listed = self._list()

    def _is_as_left(self) -> bool:
        """Whether nobody has changed our rules. Asks for them only if somebody has changed any of this namespace."""
        generation = libnftables.ruleset_generation()
        if generation is not None and generation == self._generation and self._listed:
            return True
        if self._list() != self._listed:
            return False
        self._generation = generation
        return True

    def _list(self) -> str:
        return self._run(_LIST, STATELESS) if libnftables.table_exists(FAMILY, TABLE) else ""

    def differs(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> list[str]:
        """See `Engine.differs`: whether the rules are as they were left, and were left as wanted.

        Raises:
            VirtualServersError: the kernel does not tell.
        """
        if self._table is None:
            return ["the rules are not known to be as wanted"]
        found = []
        wanted = self._table_of(servers, up, paired=paired)
        if ruleset.exchange(self._table, wanted):
            found.append("the rules are those of another configuration")
        if not self._is_as_left():
            self._table = None  # the next change writes all of it anew
            found.append("the rules that forward are not as they were written")
        if self._ending or self._unled:
            found.append("flows go on that are to end")
        return found

    def balance(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """See `Engine.balance`: new turns, if flows have begun or ended since they were made.

        Raises:
            VirtualServersError: the kernel does not tell, or refuses; the next change writes all of it anew.
        """
        former = self._table
        begun = time.monotonic()
        if former is None or begun < self._weigh_next or not self._is_as_left() or not self._weigh(servers):
            return
        if not self._change(former, servers, up, paired=paired):
            self._table = None
            raise VirtualServersError("give flows to who has the fewest", "the kernel refused", _REMEDY)
        self._remember()
        self._weigh_next = (ended := time.monotonic()) + LEAST_SHARE * (ended - begun)

    def _weigh(self, servers: Sequence[VirtualServer], *, at_once: bool = False) -> bool:
        """Count flows, where their number decides; whether anything is otherwise than it was.

        Args:
            at_once: also if they were counted just now.

        Raises:
            VirtualServersError: the kernel does not tell.
        """
        busy = [one.id for one in servers if ruleset.is_least(one)]
        now = time.monotonic()
        if not busy or (now < self._weigh_next and not at_once):
            return False
        total = self._named()
        begun = {name: total.get(name, {}).get("flows", (0, 0))[0] for name in busy}
        if begun == self._loads.begun and now < self._weighed_at + IDLE_SECONDS and not at_once:
            self._loads_at = now
            return False
        found = {mark: count for mark, count in self._counted_flows().items() if mark}
        rest = LEAST_SHARE * (time.monotonic() - now)
        # As many as lately will begin until they are counted again.
        ahead = max(LEAST_SECONDS, rest) / max(now - self._loads_at, LEAST_SHORT)
        former, self._weigh_next = self._loads, time.monotonic() + rest
        self._loads_at = self._weighed_at = now
        if (begun, found) == (former.begun, former.flows):
            return False
        lately = {name: max(0, count - former.begun.get(name, count)) for name, count in begun.items()}
        expected = {name: math.ceil(count * ahead) for name, count in lately.items()}
        self._loads = Loads(found, begun, expected, former.number + 1)
        return True

    def counters(self) -> Mapping[str, Counters]:
        """See `Engine.counters`: bytes are those of IP packets, with their headers.

        Raises:
            VirtualServersError: the kernel does not tell.
        """
        found = self._named()
        open_: dict[int, int] = {}
        for mark, count in self._open().items() if found else ():
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

    def _named(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Packets and bytes by virtual server and word."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        if libnftables.table_exists(FAMILY, TABLE):
            for word, name, packets, size in _COUNTED.findall(self._run(_COUNT)):
                found.setdefault(name, {})[word] = int(packets), int(size)
        return found

    def member_counters(self) -> Mapping[MemberPlace, MemberCounters]:
        """See `Engine.member_counters`.

        Raises:
            VirtualServersError: the kernel does not tell.
        """
        if self._table is None or not libnftables.table_exists(FAMILY, TABLE):
            return {}
        flows_, in_, out = (
            {int(mark, 16): (int(packets), int(size)) for mark, packets, size in _ELEMENT.findall(said)}
            for said in (self._run(_LIST_SET.format(name)) for name in ruleset.MEMBER_COUNTERS)
        )
        open_, nothing = self._open(), (0, 0)
        return {
            (owner, *place): MemberCounters(
                active_connections=open_.get(mark, 0),
                total_connections=flows_.get(mark, nothing)[0],
                bytes_in=in_.get(mark, nothing)[1],
                bytes_out=out.get(mark, nothing)[1],
            )
            for (owner, place), mark in self._marks.members.items()
        }

    def _open(self) -> Mapping[int, int]:
        """How many flows there are, by mark; as they were a while ago, if they are many."""
        return self._flows if time.monotonic() < self._count_next else self._counted_flows()

    def _counted_flows(self) -> Mapping[int, int]:
        begun = time.monotonic()
        self._flows = conntrack.count(0xFFFFFFFF)
        self._count_next = (ended := time.monotonic()) + SHARE * (ended - begun)
        return self._flows

    def release(self) -> None:
        """See `Engine.release`: the flows end with the rules.

        Raises:
            VirtualServersError: nftables refused.
        """
        listed = self._list()
        if listed:
            self._run(ruleset.without())
        for one in (_given(listed), self._marks):
            # Both: should it fail, a number may have another owner when it is tried again.
            self._ending |= {*one.servers.values(), *one.members.values()}
        self._table, self._marks, self._listed, self._generation = None, conntrack_marks.NONE, "", None
        self._loads = UNKNOWN
        self._unled.clear()
        self._end()

    def _run(self, commands: str, flags: int = 0) -> str:
        try:
            return libnftables.run_commands(commands, flags)
        except NftError as error:
            raise VirtualServersError("forward UDP and SCTP", str(error), _REMEDY) from error


def _given(listed: str) -> Marks:
    """What a listed table has given to whom."""
    owners = {int(base, 16): name for base, name in _BASE.findall(listed)}
    members = {}
    for text, address, port in _TARGET.findall(listed):
        mark = int(text, 16)
        if owner := owners.get(mark & SERVER_MASK):
            members[owner, (ipaddress.ip_address(address), int(port))] = mark
    return Marks({name: base for base, name in owners.items()}, members)
