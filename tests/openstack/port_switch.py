# SPDX-License-Identifier: Apache-2.0
"""A switch in a network namespace that enforces Neutron's ports, as the agent of a compute node does.

A port passes packets only if it is enabled, bound and attached. Its packets need its MAC address, and one of its
addresses or allowed address pairs as source (port security).
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec

_NUMBERS = count()


class Link(msgspec.Struct, frozen=True):
    """The ends of a port's cable: a namespace with the interface `eth0`, and the switch's side."""

    namespace: str
    name: str


def ruleset(live):
    """Commands of nft that let only these ports pass packets.

    Args:
        live: for each port its interface on the bridge, its MAC address and its permitted source addresses, None for
            all.
    """
    lines = [
        "table bridge ports {}",
        "delete table bridge ports",
        "table bridge ports {",
        "chain live { type filter hook forward priority 0; policy drop;",
    ]
    outputs = ", ".join(name for name, _, _ in live)
    for name, mac, sources in live:
        start = f"iifname {name} oifname {{ {outputs} }} ether saddr {mac}"
        if sources is None:
            lines.append(f"{start} accept")
            continue
        v4, v6 = (", ".join(one for one in sources if (":" in one) is six) for six in (False, True))
        if v4:
            lines += [f"{start} ip saddr {{ {v4} }} accept", f"{start} arp saddr ip {{ {v4} }} accept"]
        if v6:
            lines.append(f"{start} ip6 saddr {{ {v6} }} accept")
    return "\n".join([*lines, "}", "}"])


class PortSwitch:
    """One layer-2 network. Use it as a context manager."""

    def __init__(self):
        self._name = f"ads-{os.getpid()}-{next(_NUMBERS)}"
        self._links = {}

    def __enter__(self):
        _run("ip", "netns", "add", self._name)
        self._inside("ip", "link", "add", "br0", "type", "bridge", "stp_state", "0")
        self._inside("ip", "link", "set", "br0", "up")
        return self

    def __exit__(self, *_):
        for namespace in (self._name, *(link.namespace for link in self._links.values())):
            _run("ip", "netns", "del", namespace)

    def attach(self, port, *addresses):
        """Connect a new namespace with the MAC address of the port and these addresses; return its name."""
        link = Link(f"{self._name}-{len(self._links)}", f"p{len(self._links)}")
        self._links[port.id] = link
        _run("ip", "netns", "add", link.namespace)
        far = ("peer", "name", "eth0", "netns", link.namespace, "address", port.mac_address)
        self._inside("ip", "link", "add", link.name, "type", "veth", *far)
        self._inside("ip", "link", "set", link.name, "master", "br0", "up")
        for address in addresses:
            # Without duplicate address detection, nodes answer at once.
            _run("ip", "-n", link.namespace, "addr", "add", address, "dev", "eth0", *(("nodad",) * (":" in address)))
        _run("ip", "-n", link.namespace, "link", "set", "eth0", "up")
        return link.namespace

    def apply(self, ports):
        """Enforce the present state of these ports."""
        live = [
            (
                self._links[port.id].name,
                port.mac_address,
                [one["ip_address"] for one in (*port.fixed_ips, *(port.allowed_address_pairs or ()))],
            )
            for port in ports
            if port.is_admin_state_up and port.status == "ACTIVE" and port.device_id
        ]
        self._inside("nft", "-f", "-", text=ruleset(live))

    def _inside(self, *words, text=None):
        _run("ip", "netns", "exec", self._name, *words, text=text)


_SERVER = """
import socket
with socket.create_server(("", 8080)) as server:
    print(flush=True)
    while True:
        server.accept()[0].close()
"""
_CLIENT = "import socket, sys; socket.create_connection((sys.argv[1], 8080), timeout=2).close()"


@contextmanager
def serving(namespace):
    """Accept TCP connections on port 8080 of a namespace while the block runs."""
    words = ["ip", "netns", "exec", namespace, sys.executable, "-c", _SERVER]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


def answers(namespace, address):
    """Return whether an address accepts a connection from a namespace with empty neighbour caches."""
    _run("ip", "-n", namespace, "neigh", "flush", "all")
    words = ["ip", "netns", "exec", namespace, sys.executable, "-c", _CLIENT, address]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _run(*words, text=None):
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{Path(words[0]).name} {' '.join(words[1:])}: {done.stderr}"
