# SPDX-License-Identifier: Apache-2.0
"""The engine that works on every kernel with nf_tables: `ruleset` says what, this brings it into the kernel.

Invariant: one transaction for each change. A flow whose member stays is not touched, also by a process that begins
anew: what was given to whom is read back from the kernel.

Counting flows means to go through all of them. That takes no more than one part in `SHARE` of the time.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Mapping, Sequence

from amphora_agent.errors import ConfigurationRefused, VirtualServersError
from amphora_agent.network import libnftables
from amphora_agent.network.libnftables import STATELESS, NftError
from amphora_agent.virtual_servers import flows, marks, ruleset
from amphora_agent.virtual_servers.engine import Counters
from amphora_agent.virtual_servers.marks import MOST_MEMBERS, MOST_SERVERS, SERVER_MASK, Marks
from amphora_agent.virtual_servers.ruleset import FAMILY, TABLE, Table
from amphora_agent.virtual_servers.wanted import VirtualServer

SHARE = 100
_LIST = f"list table {FAMILY} {TABLE}\n"
_COUNT = f"list counters table {FAMILY} {TABLE}\n"
_REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_DECLARED = re.compile(r"^\t(chain|map|set|counter) (\S+) \{", re.MULTILINE)
_COUNTED = re.compile(r"counter (\w+)-(\S+) \{\s+packets (\d+) bytes (\d+)")
_BASE = re.compile(r'(0x[0-9a-f]{8}) : "in-([0-9a-f-]{36})"')
_TARGET = re.compile(r"(0x[0-9a-f]{8}) : ([0-9a-f.:]+) \. (\d+)")


class NftablesEngine:
    """Forwards by nftables. Used by one thread, in the namespace that has the VIPs."""

    name = "nftables"

    def __init__(self) -> None:
        self._table: Table | None = None
        self._marks = marks.NONE
        # How the kernel lists the table since we changed it, and its number for what there was then.
        self._listed = ""
        self._generation: int | None = None
        self._flows: dict[int, int] = {}
        self._count_next = 0.0

    def check(self, servers: Sequence[VirtualServer]) -> None:
        """Refuse what these rules cannot do.

        Raises:
            ConfigurationRefused: naming the listener.
        """
        if len(servers) > MOST_SERVERS:
            raise ConfigurationRefused("forward by nftables", f"{len(servers)} listeners are more than {MOST_SERVERS}")
        for server in servers:
            if server.algorithm == "LEAST_CONNECTIONS":
                raise ConfigurationRefused(
                    f"serve listener {server.id}",
                    "LEAST_CONNECTIONS needs IPVS, which this amphora's kernel does not have",
                    "Choose ROUND_ROBIN, SOURCE_IP or SOURCE_IP_PORT.",
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
        present = self._look() if self._table is None else None
        given = marks.allot(self._marks, servers)
        table = ruleset.table_of(servers, up, given, paired=paired)
        if self._table is None:
            self._renew(present or "", table)
        elif commands := ruleset.exchange(self._table, table):
            self._run(commands)
        before = {*self._marks.members.values()} if present is not None else _keys(self._table)
        self._table, self._marks = table, given
        self._remember()
        # Last: by now a packet that had found its member by the former rules is a flow, and is seen here.
        self._end(before - _keys(table), {*given.servers.values()})

    def _look(self) -> str:
        """What there is of a process before this one."""
        listed = self._run(_LIST, STATELESS) if libnftables.exists(FAMILY, TABLE) else ""
        self._marks = _given(listed)
        return listed

    def _renew(self, listed: str, table: Table) -> None:
        present = {name: word for word, name in _DECLARED.findall(listed)}
        try:
            libnftables.run(ruleset.anew(present, table))
        except NftError:
            # Somebody's hand has been in it: then without what was counted.
            self._run(ruleset.without() + ruleset.exchange(ruleset.EMPTY, table))

    def _end(self, gone: set[int], servers: set[int]) -> None:
        """End the flows of members that are gone; those of a whole virtual server by the part that is its own."""
        whole = {mark & SERVER_MASK for mark in gone} - servers
        flows.end(
            {mark for mark in gone if mark & SERVER_MASK not in whole}, [(base, SERVER_MASK) for base in sorted(whole)]
        )

    def _remember(self) -> None:
        self._listed = ""
        self._generation = libnftables.generation()
        self._listed = self._run(_LIST, STATELESS)

    def differs(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> list[str]:
        """See `Engine.differs`. Asks for the rules only if somebody has changed any of this namespace.

        Raises:
            VirtualServersError: the kernel does not tell.
        """
        if self._table is None:
            return ["the rules are not known to be as wanted"]
        wanted = ruleset.table_of(servers, up, marks.allot(self._marks, servers), paired=paired)
        if ruleset.exchange(self._table, wanted):
            return ["the rules are those of another configuration"]
        generation = libnftables.generation()
        if generation is not None and generation == self._generation:
            return []
        listed = self._run(_LIST, STATELESS) if libnftables.exists(FAMILY, TABLE) else ""
        if listed != self._listed:
            self._table = None  # the next change writes all of it anew
            return ["the rules that forward are not as they were written"]
        self._generation = generation
        return []

    def counters(self) -> Mapping[str, Counters]:
        """See `Engine.counters`: bytes are those of IP packets, with their headers.

        Raises:
            VirtualServersError: the kernel does not tell.
        """
        if not libnftables.exists(FAMILY, TABLE):
            return {}
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for word, name, packets, size in _COUNTED.findall(self._run(_COUNT)):
            found.setdefault(name, {})[word] = int(packets), int(size)
        open_ = self._open()
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

    def _open(self) -> Mapping[int, int]:
        begun = time.monotonic()
        if begun >= self._count_next:
            self._flows = flows.count(SERVER_MASK)
            self._count_next = (ended := time.monotonic()) + SHARE * (ended - begun)
        return self._flows

    def release(self) -> None:
        """See `Engine.release`: the flows end with the rules.

        Raises:
            VirtualServersError: nftables refused.
        """
        bases: set[int] = set()
        if libnftables.exists(FAMILY, TABLE):
            bases = {int(base, 16) for base, _ in _BASE.findall(self._run(_LIST, STATELESS))}
            self._run(ruleset.without())
        bases |= {*self._marks.servers.values()}
        self._table, self._marks, self._listed, self._generation = None, marks.NONE, "", None
        flows.end((), [(base, SERVER_MASK) for base in sorted(bases)])

    def _run(self, commands: str, flags: int = 0) -> str:
        try:
            return libnftables.run(commands, flags)
        except NftError as error:
            raise VirtualServersError("forward UDP and SCTP", str(error), _REMEDY) from error


def _keys(table: Table | None) -> set[int]:
    """The marks of members that have flows."""
    if table is None:
        return set()
    return {int(mark, 16) for version in (4, 6) for mark in table.maps[f"targets-{version}"].elements}


def _given(listed: str) -> Marks:
    """What a listed table has given to whom."""
    owners = {int(base, 16): name for base, name in _BASE.findall(listed)}
    members = {}
    for text, address, port in _TARGET.findall(listed):
        mark = int(text, 16)
        if owner := owners.get(mark & SERVER_MASK):
            members[owner, (ipaddress.ip_address(address), int(port))] = mark
    return Marks({name: base for base, name in owners.items()}, members)
