# SPDX-License-Identifier: Apache-2.0
"""Puts the connection tracking of the Linux kernel between an amphora and its chassis.

A stateful security group has the same tracking. Invariant: the port has its usual connection again after the with
block. Each chassis has its own table of connections, because it is a network namespace.

    amphora ── veth ── bridge (br_netfilter, nftables: invalid packets are dropped) ── veth ── br-int

The tracking of Open vSwitch in user space accepts about one window of packets that the kernel takes as invalid. The
kernel has its default settings: it accepts connections in mid-stream, and is not liberal about TCP windows.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from ovn_lab import MTU, Ovn, disable_offloads

from amphora_lab import ip  # isort: skip

_BRIDGE, _INNER, _OUTER = "sg", "sg-in", "sg-out"
_RULES = """table inet sg {
 chain through {
  type filter hook forward priority 0; policy accept;
  ct state invalid counter drop
  ct state established,related,new accept
 }
}
"""
_SETTINGS = (
    "net.bridge.bridge-nf-call-iptables=1",
    "net.bridge.bridge-nf-call-ip6tables=1",
    "net.netfilter.nf_conntrack_tcp_be_liberal=0",
    "net.netfilter.nf_conntrack_tcp_loose=1",
)


def _run(namespace: str, *command: str, given: str = "") -> str:
    words = ["ip", "netns", "exec", namespace, *command]
    return subprocess.run(words, input=given, check=True, capture_output=True, text=True).stdout


@contextmanager
def tracked_by_kernel(ovn: Ovn, chassis: int, port: str) -> Iterator[None]:
    """Let the packets of a port pass the connection tracking of the kernel."""
    namespace = ovn.namespace(chassis)
    _run(namespace, "nft", "-f", "-", given=_RULES)
    _run(namespace, "sysctl", "-qw", *_SETTINGS)
    ip(
        f"-n {namespace} link add {_BRIDGE} mtu {MTU} type bridge forward_delay 0 stp_state 0 mcast_snooping 0",
        f"-n {namespace} link add {_INNER} mtu {MTU} type veth peer name {_OUTER} mtu {MTU}",
        *(f"-n {namespace} link set {name} up" for name in (_BRIDGE, _INNER, _OUTER)),
    )
    for name in (_INNER, _OUTER, port):
        disable_offloads(namespace, name)
    try:
        ovn.vs(chassis, "del-port", "br-int", port)
        ip(*(f"-n {namespace} link set {name} master {_BRIDGE}" for name in (port, _INNER)))
        ovn.bind(chassis, _OUTER, port)
        yield
    finally:
        ovn.vs(chassis, "--if-exists", "del-port", "br-int", _OUTER)
        ip(f"-n {namespace} link del {_INNER}", f"-n {namespace} link del {_BRIDGE}")
        ovn.bind(chassis, port, port)
        _run(namespace, "nft", "delete", "table", "inet", "sg")


def invalid_in_kernel(ovn: Ovn, chassis: int) -> int:
    """Return the number of packets that the kernel took as invalid."""
    return int(re.search(r"invalid counter packets (\d+)", _run(ovn.namespace(chassis), "nft", "list", "ruleset"))[1])
