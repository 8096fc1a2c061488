# SPDX-License-Identifier: Apache-2.0
"""The network of the pair tests with the VIPs' network on OVN: two amphorae on two chassis.

Invariant: the northbound database has the rows that Neutron's ML2/OVN driver writes. Port security of an amphora's port
lists its addresses and the VIPs (allowed address pairs). Each VIP has a virtual port with both amphorae as parents. The
security groups are port groups with ACLs of priority 1002, above the ACLs of priority 1001 that drop all else.

    chassis 1: cl (a client), far (a client behind the router), amp          chassis 2: bmp, mem (members)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ovn_lab import MTU, Ovn

# ovn_lab has made the modules of the data plane's tests importable.
from amphora_lab import MEMBERS, ip  # isort: skip
from pair_lab import PLACES, PairNetwork, NodeAddresses  # isort: skip
from served import CLIENT_ADDRESSES, MEMBER_ADDRESSES  # isort: skip
from wanted import VIP, VIP6  # isort: skip

NEAR, BEHIND = "net", "ext"
AMPHORAE = tuple(replace(place, mtu=MTU) for place in PLACES[:2])
VIRTUAL = {VIP: "vip4", VIP6: "vip6"}
"""The virtual ports by VIP."""
_CHASSIS = {"amp": 1, "bmp": 2, "cl": 1, "far": 1, "mem": 2}
_ROUTER, _ROUTER_FAR = ("198.51.100.1/24", "2001:db8:1::1/64"), ("192.0.2.1/24", "2001:db8:2::1/64")
_FAR = ("192.0.2.20/24", "2001:db8:2::20/64")
_GROUP, _CLIENTS, _MEMBERS, _DROP = "pg_amphorae", "pg_clients", "pg_members", "neutron_pg_drop"
_PRIORITY_ALLOW, _PRIORITY_DROP = "1002", "1001"


@dataclass(frozen=True)
class _LogicalPort:
    """A port of a machine.

    Attributes:
        pairs: the VIPs, for an amphora.
        groups: the security groups.
    """

    name: str
    switch: str
    mac: str
    addresses: tuple[str, ...]
    groups: tuple[str, ...]
    pairs: tuple[str, ...] = ()

    def words(self) -> Iterator[str]:
        known = " ".join((self.mac, *self.addresses))
        yield from ("--", "lsp-add", self.switch, self.name)
        yield from ("--", "lsp-set-addresses", self.name, known)
        yield from ("--", "lsp-set-port-security", self.name, " ".join((known, *self.pairs)))


def _mac(name: str) -> str:
    """Return a locally administered MAC address."""
    return "0a:00:00:" + zlib.crc32(name.encode()).to_bytes(4, "big").hex(":", 1)[:8]


def _hosts(*addresses: str) -> tuple[str, ...]:
    return tuple(each.partition("/")[0] for each in addresses)


def _ports() -> list[_LogicalPort]:
    clients = _hosts("198.51.100.20", "2001:db8:1::20", *CLIENT_ADDRESSES)
    return [
        *(_LogicalPort(p.cable, NEAR, p.mac, (p.fixed, p.fixed6), (_GROUP,), tuple(VIRTUAL)) for p in AMPHORAE),
        _LogicalPort("cl", NEAR, _mac("cl"), clients, (_CLIENTS,)),
        _LogicalPort("mem", NEAR, _mac("mem"), _hosts(*MEMBERS.values(), *MEMBER_ADDRESSES), (_MEMBERS,)),
        _LogicalPort("far", BEHIND, _mac("far"), _hosts(*_FAR), (_CLIENTS,)),
    ]


class OvnNetwork(PairNetwork):
    """The management network is a bridge as in `PairNetwork`; all other cables end on OVN."""

    def __init__(self, prefix: str, directory: Path) -> None:
        self._directory = directory
        self.ovn: Ovn | None = None
        self._action = ""
        super().__init__(prefix)

    def _build(self) -> None:
        self.ovn = Ovn(self.prefix, self._directory)
        self._write_topology()
        super()._build()
        for short, routers in (("far", _ROUTER_FAR), ("cl", _ROUTER), ("mem", _ROUTER)):
            for router in _hosts(*routers):
                ip(f"-n {self.name(short)} route add default via {router}")

    def _write_topology(self) -> None:
        words = ["ls-add", NEAR, "--", "ls-add", BEHIND, "--", "lr-add", "router"]
        # Neutron sets these options.
        words += ["--", "set", "logical_router", "router", "options:always_learn_from_arp_request=false"]
        words += ["options:dynamic_neigh_routers=true"]
        for switch, addresses in ((NEAR, _ROUTER), (BEHIND, _ROUTER_FAR)):
            port, peer = f"router-{switch}", f"{switch}-router"
            words += ["--", "lrp-add", "router", port, _mac(port), *addresses]
            words += ["--", "lsp-add", switch, peer, "--", "lsp-set-type", peer, "router"]
            words += ["--", "lsp-set-addresses", peer, "router", "--", "lsp-set-options", peer, f"router-port={port}"]
        for port in _ports():
            words += port.words()
        parents = ",".join(place.cable for place in AMPHORAE)
        for vip, name in VIRTUAL.items():
            words += ["--", "lsp-add", NEAR, name, "--", "lsp-set-addresses", name, f"{_mac(name)} {vip}"]
            words += ["--", "lsp-set-type", name, "virtual"]
            words += ["--", "lsp-set-options", name, f"virtual-ip={vip}", f"virtual-parents={parents}"]
        groups = {
            name: [each.name for each in _ports() if name in each.groups] for name in (_CLIENTS, _MEMBERS, _GROUP)
        }
        groups[_DROP] = [each.name for each in _ports()]
        for name, members in groups.items():
            words += ["--", "pg-add", name, *members]
        self.ovn.nb(*words)
        for direction, end in (("from-lport", "inport"), ("to-lport", "outport")):
            self._add_rule(_DROP, direction, _PRIORITY_DROP, f"{end} == @{_DROP} && ip", "drop")
        for group in (_CLIENTS, _MEMBERS):
            self._allow(group, "allow-related", incoming=group == _MEMBERS)
        self.set_group(stateful=False)

    def _add_rule(self, group: str, direction: str, priority: str, match: str, action: str) -> None:
        self.ovn.nb("--type=port-group", "acl-add", group, direction, priority, match, action)

    def _allow(self, group: str, action: str, *, incoming: bool) -> None:
        for direction, end in (("from-lport", "inport"), ("to-lport", "outport"))[: 1 + incoming]:
            for family in ("ip4", "ip6"):
                self._add_rule(group, direction, _PRIORITY_ALLOW, f"{end} == @{group} && {family}", action)

    def set_group(self, *, stateful: bool) -> None:
        """Make the amphorae's security group stateful or stateless; it allows all packets."""
        action = "allow-related" if stateful else "allow-stateless"
        if action == self._action:
            return
        self.ovn.nb("--type=port-group", "acl-del", _GROUP)
        self._allow(_GROUP, action, incoming=True)
        self.ovn.nb("--wait=hv", "sync")
        self._action = action

    # -- cables ----------------------------------------------------------------------------------------------------

    def connect(self, short: str, bridge: str, addresses) -> None:
        if bridge != "vip":
            super().connect(short, bridge, addresses)
            return
        self._plug_machine(short, addresses)

    def _plug_machine(self, short: str, addresses) -> None:
        namespace = self.name(short)
        self.ovn.plug(_CHASSIS[short], namespace, "eth0", short, _mac(short))
        ip(f"-n {namespace} link set eth0 up")
        for address in addresses:
            ip(f"-n {namespace} addr add {address} dev eth0" + (" nodad" if ":" in address else ""))

    def _route(self) -> None:
        """Create a client behind OVN's router."""
        ip(f"netns add {self.name('far')}")
        self._made.append("far")
        ip(f"-n {self.name('far')} link set lo up")
        self._plug_machine("far", _FAR)

    def plug_in(self, place: NodeAddresses) -> None:
        self.ovn.plug(chassis_of(place), self.name(place.namespace), "new0", place.cable, place.mac)

    def pull_out(self, place: NodeAddresses) -> None:
        self.ovn.unplug(chassis_of(place), place.cable)

    def cut(self, place: NodeAddresses) -> None:
        ip(f"-n {self.ovn.namespace(chassis_of(place))} link set {place.cable} down")

    def mend(self, place: NodeAddresses) -> None:
        ip(f"-n {self.ovn.namespace(chassis_of(place))} link set {place.cable} up")

    def part(self, *places: NodeAddresses, apart: bool = True) -> None:
        assert not apart, "a port of OVN cannot be isolated from one other port"

    def close(self) -> None:
        super().close()
        if self.ovn is not None:
            self.ovn.close()


def chassis_of(place: NodeAddresses) -> int:
    """Return the chassis of an amphora."""
    return _CHASSIS[place.namespace]
