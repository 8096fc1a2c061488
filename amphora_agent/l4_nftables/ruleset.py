# SPDX-License-Identifier: Apache-2.0
"""The nftables table that forwards the packets of virtual servers.

Invariant: pure. One transaction changes one table into another. It touches only the differences, and deletes only the
counters of removed virtual servers.

    arriving     matches the first packet of a flow by VIP, protocol and port. A hash of the source, or the next turn,
                 selects a slot; the slot has the mark of a member; the mark selects its address and port. The kernel
                 keeps all of it with the flow, so later packets are not matched here
    limited-ID   refuses the flow if the virtual server has too many
    leaving      replaces the client's address by the amphora's, where it is to be hidden
    forward      counts packets and marks them; only marked packets may pass (`network.firewall`). Named counters of
                 virtual servers outlive changes of the table; members are counted by the elements of sets
    returning    marks replies, so that they leave by the VIP's network like HAProxy's (`network.policy_routing`)

`network.firewall` decides before which clients may send, and leaves TCP untracked. Weights are numbers of slots
(`maglev`), so a change of one member changes some slots. With LEAST_CONNECTIONS the slots are turns
(`least_connections`), which are replaced every second.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from amphora_agent.l4 import eligible_members
from amphora_agent.l4.eligible_members import MemberHealth
from amphora_agent.l4.model import Host, Member, VirtualServer
from amphora_agent.l4_nftables import least_connections, maglev, turns
from amphora_agent.l4_nftables.conntrack_marks import SERVER_MASK, Marks, MemberMarks, notation
from amphora_agent.l4_nftables.least_connections import NO_LOADS, Loads

FAMILY, TABLE = "inet", "amphora_virtual"
RETURNING = 0x616D
"""Mark of packets from members to clients, for the routing rule; and of all packets that may be forwarded."""
_NUMBERS = {"UDP": 17, "SCTP": 132}
_NFPROTO = {4: 2, 6: 10}
_WORDS = {4: "ip", 6: "ip6"}
_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_REFUSE = "reject with icmpx port-unreachable"
_SLOT = "typeof numgen inc mod 2 : ct mark;"
_COUNTERS = ("flows", "refused", "in", "out")
MEMBER_COUNTERS = ("member-flows", "member-in", "member-out")
"""Sets of marks of members; each element has a counter."""


SlotSource = tuple[tuple[Member, ...], MemberMarks, int | None, bool]
"""What decides the slots of a map: members that get new flows, their marks, the number of the list of turns
(`least_connections`), and whether a hash selects the slot."""


@dataclass(frozen=True)
class Chain:
    """A chain. ``head`` binds it to a hook; it is empty for a chain that other chains jump to."""

    head: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Map:
    """A map or a set. Elements of a set have no value."""

    kind: str
    elements: Mapping[str, str]
    word: str = "map"


@dataclass(frozen=True)
class Table:
    """The contents of a table, by name."""

    counters: frozenset[str] = frozenset()
    maps: Mapping[str, Map] = field(default_factory=dict)
    chains: Mapping[str, Chain] = field(default_factory=dict)
    sources: Mapping[str, SlotSource] = field(default_factory=dict)
    """The members from which the slots were planned, by the name of the map."""


EMPTY = Table()
_NUMBER_TEXTS: list[str] = []
"""Keys of slots, which all maps share."""
DELETE_COMMANDS = f"add table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n"
ServicePlace = tuple[Host, int, int]
"""The destination of clients: address, protocol number, port."""


def build_table(
    servers: Sequence[VirtualServer],
    up: MemberHealth,
    marks: Marks,
    *,
    paired: bool,
    loads: Loads = NO_LOADS,
    former: Table = EMPTY,
) -> Table:
    """Return the table for virtual servers, which differs little from the ``former`` table.

    ``marks`` are the result of `conntrack_marks.assign_marks`, ``loads`` flow counts for LEAST_CONNECTIONS. With
    ``paired``, another amphora has to select the same member for a flow that it has not seen.
    """
    counters = frozenset(f"{word}-{server.id}" for server in servers for word in _COUNTERS)
    sources: dict[str, SlotSource] = {}
    maps = dict(_maps(servers, up, marks, loads, former, sources, paired=paired))
    chains = dict(_CHAINS)
    for server in servers:
        limit = [f"ct count over {server.connection_limit} goto refused-{server.id}"] if server.connection_limit else []
        chains[f"limited-{server.id}"] = Chain("", tuple(limit))
        chains[f"refused-{server.id}"] = Chain("", (f'counter name "refused-{server.id}" {_REFUSE}',))
        chains[f"serve-{server.id}"] = Chain("", tuple(_serve_rules(server, maps, loads, paired=paired)))
    return Table(counters, maps, chains, sources)


def service_places(table: Table) -> set[ServicePlace]:
    """Return the destinations for which a table has a virtual server."""
    keys = [key.split(" . ") for version in (4, 6) for key in _elements_of(table, f"servers-{version}")]
    return {(ipaddress.ip_address(address), int(number), int(port)) for address, number, port in keys}


def target_marks(table: Table) -> AbstractSet[str]:
    """Return the marks of all members that may have flows, in the notation of nft."""
    return _elements_of(table, MEMBER_COUNTERS[0]).keys()


_NO_ELEMENTS: Mapping[str, str] = {}


def _elements_of(table: Table, name: str) -> Mapping[str, str]:
    return table.maps[name].elements if name in table.maps else _NO_ELEMENTS


_CHAINS = {
    "returning": Chain(
        "type filter hook prerouting priority -150; policy accept;",
        (f"ct direction 1 ct status dnat meta mark set {RETURNING:#x}",),
    ),
    "arriving": Chain(
        "type nat hook prerouting priority -100; policy accept;",
        ("ip daddr . meta l4proto . th dport vmap @servers-4", "ip6 daddr . meta l4proto . th dport vmap @servers-6"),
    ),
    "leaving": Chain(
        "type nat hook postrouting priority 100; policy accept;", (f"ct mark & {SERVER_MASK:#x} @hidden masquerade",)
    ),
    "forward": Chain(
        "type filter hook forward priority 0; policy accept;",
        (
            f"ct status dnat ct direction 0 counter name ct mark & {SERVER_MASK:#x} map @in",
            f"ct status dnat ct direction 1 counter name ct mark & {SERVER_MASK:#x} map @out",
            "ct status dnat ct direction 0 ct mark @member-in",
            "ct status dnat ct direction 1 ct mark @member-out",
            f"ct status dnat meta mark set {RETURNING:#x}",
        ),
    ),
}


def _maps(
    servers: Sequence[VirtualServer],
    up: MemberHealth,
    marks: Marks,
    loads: Loads,
    former: Table,
    sources: dict[str, SlotSource],
    *,
    paired: bool,
) -> Iterator[tuple[str, Map]]:
    bases = {server.id: notation(marks.servers[server.id]) for server in servers}
    retained = {server.id: eligible_members.retained_members(server, up) for server in servers}
    for word in ("in", "out"):
        yield word, Map("type mark : counter;", {base: f'"{word}-{name}"' for name, base in bases.items()})
    hidden = {bases[server.id]: "" for server in servers if server.client_address == "hidden"}
    yield "hidden", Map("type mark;", hidden, "set")
    all_marks: dict[str, str] = {}
    for version in (4, 6):
        services, targets = {}, {}
        for server in servers:
            number = _NUMBERS[server.protocol]
            for address in server.addresses:
                if address.version == version:
                    services[f"{address} . {number} . {server.port}"] = f"goto serve-{server.id}"
            own = marks.members[server.id]
            targets.update({own[one.place]: one.place for one in retained[server.id] if one.address.version == version})
            if version in eligible_members.vip_families(server):
                name = f"slots-{server.id}-{version}"
                turns_number = loads.number if uses_least_connections(server) else None
                serving = eligible_members.serving_of(retained[server.id], version)
                sources[name] = serving, own, turns_number, _is_hashed(server, paired=paired)
                yield name, Map(_SLOT, _slots(sources[name], loads, loads.expected.get(server.id, 0), name, former))
        yield f"servers-{version}", Map(f"type {_TYPES[version]} . inet_proto . inet_service : verdict;", services)
        yield f"targets-{version}", Map(f"type mark : {_TYPES[version]} . inet_service;", targets)
        all_marks |= dict.fromkeys(targets, "")
    for word in MEMBER_COUNTERS:
        yield word, Map("type mark; counter;", all_marks, "set")


def _slots(source: SlotSource, loads: Loads, expected: int, name: str, former: Table) -> Mapping[str, str]:
    """Return the mark of each slot. ``former`` has the present slots of the map with this name."""
    before = _elements_of(former, name)
    if former.sources.get(name) == source:
        return before
    members, marks, number, hashed = source
    found: Sequence[str]
    if number is not None:
        known = [(mark := int(marks[one.place], 16), one.weight, loads.flows.get(mark, 0)) for one in members]
        found = [notation(mark) for mark in least_connections.plan_turns(known, expected)]
    elif hashed:
        keys = {(int(one.address) << 16) | one.port: one for one in members}
        table = maglev.hash_table([(key, one.weight) for key, one in keys.items()])
        texts = {key: marks[one.place] for key, one in keys.items()}
        found = [texts[key] for key in table]
    else:
        present = list(before.values()) if name in former.sources and _is_list_of_turns(former.sources[name]) else []
        weights: dict[str, int] = {}
        for one in members:
            weights[marks[one.place]] = weights.get(marks[one.place], 0) + one.weight
        found = turns.plan_turns(present, weights)
    _NUMBER_TEXTS.extend(map(str, range(len(_NUMBER_TEXTS), len(found))))
    return dict(zip(_NUMBER_TEXTS, found, strict=False))


def _is_list_of_turns(source: SlotSource) -> bool:
    return source[2] is None and not source[3]


def _is_hashed(server: VirtualServer, *, paired: bool) -> bool:
    if uses_least_connections(server):
        return False
    return paired or server.persistence is not None or server.algorithm != "ROUND_ROBIN"


def uses_least_connections(server: VirtualServer) -> bool:
    """Return whether the member with the fewest flows gets the next one."""
    return server.algorithm == "LEAST_CONNECTIONS" and server.persistence is None


def _serve_rules(server: VirtualServer, maps: Mapping[str, Map], loads: Loads, *, paired: bool) -> Iterator[str]:
    yield f"jump limited-{server.id}"
    versions = eligible_members.vip_families(server)
    for version in versions:
        name = f"slots-{server.id}-{version}"
        # nftables refuses a hash over zero slots, so a virtual server without slots gets no rule.
        if maps[name].elements:
            by = _slot_expression(server, version, len(maps[name].elements), paired=paired)
            # Each new list of turns (least_connections.py) has another number. The number in the comment makes the
            # kernel replace the rule, so that the rule begins at the first turn.
            comment = f' comment "{loads.number}"' if uses_least_connections(server) else ""
            yield f"meta nfproto {_NFPROTO[version]} ct mark set {by} map @{name}{comment}"
    yield f'ct mark != 0 counter name "flows-{server.id}"'
    yield "ct mark @member-flows"
    for version in versions:
        yield (
            f"meta nfproto {_NFPROTO[version]} meta l4proto {_NUMBERS[server.protocol]} "
            f"dnat {_WORDS[version]} to ct mark map @targets-{version}"
        )
    yield f"goto refused-{server.id}"


def _slot_expression(server: VirtualServer, version: int, slots: int, *, paired: bool) -> str:
    if not _is_hashed(server, paired=paired):
        return f"numgen inc mod {slots}"
    source = f"{_WORDS[version]} saddr"
    # All amphorae use the same seed for a virtual server, so that a client gets the same member from each amphora.
    end = f"mod {slots} seed {int(server.id[:8], 16) or 1:#x}"
    if server.persistence is not None:
        prefix = server.persistence.prefix_v4 if version == 4 else server.persistence.prefix_v6
        if prefix == 0:
            # A prefix of 0 bits treats all clients as one client. A hash modulo 1 is 0 for each client, so all clients
            # get the same member.
            return f"jhash {source} mod 1 seed 0x1"
        mask = ipaddress.ip_network(f"{'0.0.0.0' if version == 4 else '::'}/{prefix}").netmask
        return f"jhash {source} & {mask} {end}"
    return f"jhash {source} {end}" if server.algorithm == "SOURCE_IP" else f"jhash {source} . th sport {end}"


def diff_commands(before: Table, after: Table) -> str:
    """Return the commands of the transaction from one table to another; empty without a difference."""
    commands = [*_additions(before, after), *_content_changes(before, after), *_removals(before, after)]
    return "".join(f"{one}\n" for one in (f"add table {FAMILY} {TABLE}", *commands)) if commands else ""


def rebuild_commands(present: Mapping[str, str], after: Table) -> str:
    """Return the commands that rebuild a table of objects with unknown contents, but keep its counters."""
    if not present:
        return diff_commands(EMPTY, after)
    maps = {name: word for name, word in present.items() if word in ("map", "set")}
    flushes = [f"flush table {FAMILY} {TABLE}", *(_command("flush", word, name) for name, word in maps.items())]
    unknown = Table(
        frozenset(name for name, word in present.items() if word == "counter"),
        {name: Map("", {}, word) for name, word in maps.items()},
        {name: Chain("", ("?",)) for name, word in present.items() if word == "chain"},
    )
    return "".join(f"{one}\n" for one in flushes) + diff_commands(unknown, after)


def _command(verb: str, word: str, name: str, more: str = "") -> str:
    return f"{verb} {word} {FAMILY} {TABLE} {name}{more and ' '}{more}"


def _additions(before: Table, after: Table) -> Iterator[str]:
    for name in sorted(after.counters - before.counters):
        yield _command("add", "counter", name)
    for name, one in after.maps.items():
        if name not in before.maps:
            yield _command("add", one.word, name, f"{{ {one.kind} }}")
    for name, chain in after.chains.items():
        if name not in before.chains:
            yield _command("add", "chain", name, f"{{ {chain.head} }}" if chain.head else "")


def _content_changes(before: Table, after: Table) -> Iterator[str]:
    changed = [name for name, chain in after.chains.items() if _rules(before, name) != chain.rules]
    yield from (_command("flush", "chain", name) for name in changed if _rules(before, name))
    # The sets of counters share their elements, so their differences are searched once.
    known: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for name, one in after.maps.items():
        former = _elements_of(before, name)
        pair = id(former), id(one.elements)
        if pair not in known:
            known[pair] = _element_changes(former, one.elements)
        gone, new = known[pair]
        yield from _element_commands("delete", name, gone)
        yield from _element_commands("add", name, new)
    for name in changed:
        yield from (_command("add", "rule", name, rule) for rule in after.chains[name].rules)


def _element_changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the keys of removed elements, and the texts of added elements."""
    if before == after:
        return [], []
    gone = [key for key, value in before.items() if after.get(key) != value]
    added = [(key, value) for key, value in after.items() if before.get(key) != value]
    return gone, [f"{key} : {value}" if value else key for key, value in added]


def _rules(table: Table, name: str) -> tuple[str, ...]:
    return table.chains[name].rules if name in table.chains else ()


def _element_commands(verb: str, name: str, elements: Sequence[str]) -> Iterator[str]:
    if elements:
        yield _command(verb, "element", name, f"{{ {', '.join(elements)} }}")


def _removals(before: Table, after: Table) -> Iterator[str]:
    """Yield deletions; an object is deleted after the objects that refer to it."""
    for name, one in before.maps.items():
        if name not in after.maps and one.elements:
            yield _command("flush", one.word, name)
    chains = [name for name in before.chains if name not in after.chains]
    yield from (_command("flush", "chain", name) for name in chains)
    yield from (_command("delete", "chain", name) for name in chains)
    for name, one in before.maps.items():
        if name not in after.maps:
            yield _command("delete", one.word, name)
    for name in sorted(before.counters - after.counters):
        yield _command("delete", "counter", name)
