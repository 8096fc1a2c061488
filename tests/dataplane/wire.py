# SPDX-License-Identifier: Apache-2.0
"""The network configuration of a load balancer in real namespaces, without an agent and HAProxy.

Invariant: the root namespace does not change. There are three namespaces: of the management (`outer`, where interfaces
arrive), of the load balancer (`inner`), and of the other end of each cable (`peer`).
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import socket
import subprocess
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

from amphora_lab import ip

from amphora_agent.bundle import AllowedSources, Bundle, Interface, Limits, Partner, Route, Vrrp
from amphora_agent.network import sysctls
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.plumbing import Plumbing

FIXED, FIXED6 = "198.51.100.11/24", "2001:db8:1::11/64"
VIP, VIP6 = "198.51.100.5/32", "2001:db8:1::5/128"
SECOND, SECOND6 = "198.51.100.6/32", "2001:db8:1::6/128"
NUMBERS = itertools.count()


def mac(number: int) -> str:
    return f"02:00:00:00:60:{number:02x}"


def interface(number, name, *addresses, vips=(), routes=(), mtu=1500):
    return Interface(
        mac=mac(number),
        name=name,
        mtu=mtu,
        addresses=tuple(map(ipaddress.ip_interface, addresses)),
        vips=tuple(map(ipaddress.ip_interface, vips)),
        routes=tuple(Route(ipaddress.ip_network(to), via and ipaddress.ip_address(via)) for to, via in routes),
    )


def eth1(*vips, **more):
    more.setdefault("routes", (("0.0.0.0/0", "198.51.100.1"), ("::/0", "2001:db8:1::1")))
    return interface(1, "eth1", FIXED, FIXED6, vips=vips or (VIP, VIP6), **more)


def eth2(**more):
    return interface(2, "eth2", "192.0.2.11/24", "2001:db8:2::11/64", **more)


def bundle(*wanted, allowed=(), vrrp=None):
    return Bundle(
        amphora_id=uuid.UUID(int=1),
        load_balancer_id=uuid.UUID(int=2),
        generation=1,
        haproxy=None,
        files=(),
        pings={},
        limits=Limits(None, None),
        interfaces=wanted,
        allowed=tuple(AllowedSources(port, tuple(map(ipaddress.ip_network, networks))) for port, networks in allowed),
        vrrp=vrrp,
    )


PAIR = Vrrp(
    "eth1",
    1,
    254,
    1.0,
    Partner("a", ipaddress.ip_address("198.51.100.11")),
    (Partner("b", ipaddress.ip_address("198.51.100.12")),),
)


class Wire:
    """The namespaces, and the agent's plumbing in them."""

    def __init__(self) -> None:
        self.prefix = f"pl{os.getpid()}-{next(NUMBERS)}"
        self._closing = ExitStack()
        self.spaces: dict[str, Namespace] = {}
        try:
            for short in ("outer", "inner", "peer"):
                name = f"{self.prefix}-{short}"
                ip(f"netns add {name}", f"-n {name} link set lo up")
                self._closing.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)
                self.spaces[short] = Namespace(Path("/run/netns") / name)
                self._closing.callback(self.spaces[short].close)
            for number in (1, 2):
                self.cable(number)
            sysctls.apply_settings(self.inner)
            self.plumbing = Plumbing(self.inner)
            self._closing.callback(self.plumbing.close)
        except BaseException:
            self.close()
            raise

    @property
    def inner(self) -> Namespace:
        return self.spaces["inner"]

    def cable(self, number: int) -> None:
        ip(
            f"-n {self.prefix}-peer link add far{number} type veth peer name new{number} address {mac(number)} "
            f"netns {self.prefix}-outer",
            f"-n {self.prefix}-peer link set far{number} up",
        )

    def ip(self, *commands: str) -> None:
        """Run ip(8) in the load balancer's namespace, without the plumbing."""
        ip(*(f"-n {self.prefix}-inner {command}" for command in commands))

    def change(self, wanted: Bundle, served: Bundle | None = None) -> None:
        """Replace a bundle by another one, as the agent does, in the management namespace."""

        def all_of_it() -> None:
            if not self.plumbing.matches(wanted):
                self.plumbing.prepare(wanted, served)
                self.plumbing.commit(wanted)

        self.outside(all_of_it)

    def outside(self, function, *args, **kwargs):
        return self.spaces["outer"].run(function, *args, **kwargs)

    def everything(self) -> dict[str, object]:
        """Return the content of the namespace, as ip(8) and nft(8) report it."""
        found: dict[str, object] = {}
        for words in ("link", "addr", "-4 route show table all", "-6 route show table all", "-4 rule", "-6 rule"):
            command = ["ip", "-n", f"{self.prefix}-inner", "-j", *words.split()]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[words] = json.loads(said or "[]")
        command = ["ip", "netns", "exec", f"{self.prefix}-inner", "nft", "list", "ruleset"]
        found["nft"] = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return found

    def close(self) -> None:
        self._closing.close()


class Tap:
    """Receives gratuitous ARP (operation, address) and unsolicited neighbour advertisements of a cable."""

    def __init__(self, wire: Wire, number: int = 1) -> None:
        self._opened = wire.spaces["peer"].run(self._open, f"far{number}")

    @staticmethod
    def _open(name: str) -> socket.socket:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        opened.bind((name, 3))
        opened.settimeout(0.2)
        return opened

    def heard(self) -> list[tuple[str, str]]:
        """Return the announcements since the last call, after 0.2 s without a frame."""
        found = []
        with suppress(TimeoutError):
            while frame := self._opened.recv(2048):
                if frame[12:14] == b"\x08\x06" and frame[28:32] == frame[38:42]:
                    kind = {1: "request", 2: "reply"}[frame[21]]
                    found.append((kind, socket.inet_ntoa(frame[28:32])))
                elif frame[12:14] == b"\x86\xdd" and frame[20] == 58 and frame[54] == 136:
                    found.append(("advertisement", socket.inet_ntop(socket.AF_INET6, frame[62:78])))
        return sorted(found)

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_) -> None:
        self._opened.close()


def announced(*vips: str) -> list[tuple[str, str]]:
    """Return one announcement of each VIP: ARP in both forms, or an advertisement."""
    found = []
    for vip in vips:
        address = vip.partition("/")[0]
        found += [("advertisement", address)] if ":" in address else [("request", address), ("reply", address)]
    return sorted(found)


def rules(wire) -> list[tuple[str, str]]:
    found = wire.everything()
    return sorted(
        (rule["src"], rule["table"]) for f in ("-4 rule", "-6 rule") for rule in found[f] if rule["src"] != "all"
    )


def table(wire, number: int) -> list[str]:
    found = wire.everything()
    routes = [
        each for f in ("-4", "-6") for each in found[f"{f} route show table all"] if each.get("table") == str(number)
    ]
    return sorted(f"{each['dst']} via {each.get('gateway')} dev {each['dev']}" for each in routes)


def hears_changes():
    """Return netlink sockets for changes of interfaces, addresses, routes, rules and nftables."""
    found = []
    for kind, groups in ((0, 0x1 | 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 0x40000), (12, 0x40)):
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, kind)
        opened.bind((0, groups))
        found.append(opened)
    return found


def comparable(wire) -> dict[str, object]:
    """Return the configured objects in a stable order, without link-local addresses."""
    found = wire.everything()
    del found["link"]
    found["addr"] = {
        link["ifname"]: (
            link["mtu"],
            "UP" in link["flags"],
            sorted(f"{each['local']}/{each['prefixlen']}" for each in link["addr_info"] if each["scope"] == "global"),
        )
        for link in found["addr"]
    }
    for key in ("-4 route show table all", "-6 route show table all"):
        found[key] = sorted(
            f"{each.get('table')} {each['dst']} {each.get('gateway')} {each['dev']} {each.get('metric')}"
            for each in found[key]
            if not each["dst"].startswith(("fe80", "ff00"))
        )
    return found


def settled(wire, wanted) -> bool:
    """Return whether the namespace is as wanted; if not, apply again, because links come up later."""
    if wire.outside(wire.plumbing.matches, wanted):
        return True
    wire.change(wanted, wanted)
    return False


def came_up(wire) -> bool:
    """Return whether all links are up: the kernel adds the link-local IPv6 address last."""
    links = [link for link in wire.everything()["addr"] if link["ifname"] != "lo"]
    return all(any(each["local"].startswith("fe80") for each in link["addr_info"]) for link in links)


def addresses(wire) -> set[str]:
    link = next(link for link in wire.everything()["addr"] if link["ifname"] == "eth1")
    return {f"{a['local']}/{a['prefixlen']}" for a in link["addr_info"] if a["scope"] == "global"}
