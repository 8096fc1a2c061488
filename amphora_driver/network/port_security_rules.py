# SPDX-License-Identifier: Apache-2.0
"""Security groups and QoS policies of the local network backend as nftables rules of its switch.

Invariant: pure functions; the same policies give the same text. Traffic to a VIP with security groups is dropped unless
a rule of one group accepts it. The rules do not affect traffic from an amphora, or traffic to its own address
(responses of members, VRRP).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

import msgspec

from amphora_driver.errors import NetworkError

FAMILY, TABLE = "bridge", "amphora_vips"
PROTOCOLS = ("tcp", "udp", "sctp", "icmp", "icmpv6")
_WITH_PORTS = ("tcp", "udp", "sctp")
# Bytes in a kilobit, the unit of rates in a QoS policy.
_BYTES = 125
# Duration in seconds of a burst at the full rate, as Neutron's documentation recommends for TCP.
_BURST = 0.8
# Minimum burst in bytes: four of the kernel's largest frames (64 KiB).
_LEAST_BURST = 256 * 1024
# ICMP messages that always pass, for neighbour discovery and path MTU discovery (RFC 1191, RFC 8201).
_ALWAYS = {
    4: ("icmp type destination-unreachable accept",),
    6: ("icmpv6 type { destination-unreachable, packet-too-big, nd-neighbor-solicit, nd-neighbor-advert } accept",),
}


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule of a group that accepts traffic; None means "any". `remote` is a network (CIDR notation)."""

    protocol: str | None = None
    first_port: int | None = None
    last_port: int | None = None
    remote: str | None = None


class SecurityGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of rules; a group without rules admits no traffic."""

    id: str
    name: str
    rules: tuple[Rule, ...] = ()


class QosPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a port in kilobits (1000 bits) per second: egress from the amphora, ingress to it."""

    id: str
    name: str
    egress_kbps: int | None = None
    ingress_kbps: int | None = None


class ProtectedVips(msgspec.Struct, frozen=True, kw_only=True):
    """The VIPs of one load balancer with their security groups and QoS policy.

    Attributes:
        addresses: the VIPs.
        interfaces: the switch interfaces of its amphorae.
        groups: the security groups; None to accept all traffic.
        policy: the QoS policy; None for no limit.
    """

    load_balancer_id: str
    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]
    groups: tuple[SecurityGroup, ...] | None = None
    policy: QosPolicy | None = None


def validate_group(group: SecurityGroup) -> None:
    """Refuse a group with a rule that is not valid.

    Raises:
        NetworkError: a protocol, port range or network is not valid.
    """
    for rule in group.rules:
        wanted = f"define security group {group.name}"
        ports = (rule.first_port, rule.last_port)
        if rule.protocol not in (None, *PROTOCOLS):
            raise NetworkError(wanted, f"{rule.protocol} is not one of {', '.join(PROTOCOLS)}")
        if ports != (None, None) and (
            rule.protocol not in _WITH_PORTS or not 1 <= (ports[0] or 0) <= (ports[1] or 0) <= 65535
        ):
            raise NetworkError(wanted, f"{ports[0]} to {ports[1]} is not a port range of {rule.protocol}")
        try:
            ipaddress.ip_network(rule.remote or "::/0")
        except ValueError:
            raise NetworkError(wanted, f"{rule.remote} is not a network") from None


def render_ruleset(protected: Sequence[ProtectedVips]) -> str:
    """The nft commands that replace the table of the switch, or remove it if no VIP is protected."""
    lines = [f"table {FAMILY} {TABLE}", f"delete table {FAMILY} {TABLE}"]
    if not protected:
        return "\n".join([*lines, ""])
    lines += [f"table {FAMILY} {TABLE} {{"]
    for number, one in enumerate(protected):
        if one.groups is not None:
            lines += [f"  chain vip{number} {{", *(f"    {line}" for line in _admission_rules(one, one.groups)), "  }"]
    # The rules need both hooks: `forward` sees frames between ports of a bridge, and `output` sees packets that the
    # kernel routes to a bridge.
    for hook in ("forward", "output"):
        lines += [f"  chain {hook} {{", f"    type filter hook {hook} priority 0; policy accept;"]
        for number, one in enumerate(protected):
            if one.groups is not None and one.interfaces:
                lines += [f"    oifname {_set(one.interfaces)} jump vip{number}"]
        lines += ["  }"]
    lines += ["  chain sent {", "    type filter hook prerouting priority 0; policy accept;"]
    lines += [f"    {line}" for one in protected for line in _rate_limits(one, "iifname", "egress_kbps")]
    lines += ["  }", "  chain received {", "    type filter hook postrouting priority 0; policy accept;"]
    lines += [f"    {line}" for one in protected for line in _rate_limits(one, "oifname", "ingress_kbps")]
    return "\n".join([*lines, "  }", "}", ""])


def _admission_rules(one: ProtectedVips, groups: Sequence[SecurityGroup]) -> Iterator[str]:
    for address in one.addresses:
        version = ipaddress.ip_address(address).version
        family = "ip" if version == 4 else "ip6"
        to = f"{family} daddr {address}"
        yield from (f"{to} {line}" for line in _ALWAYS[version])
        for rule in dict.fromkeys(rule for group in groups for rule in group.rules):
            if rule.remote is not None and ipaddress.ip_network(rule.remote).version != version:
                continue
            come = "" if rule.remote is None else f" {family} saddr {ipaddress.ip_network(rule.remote)}"
            yield f"{to}{come}{_protocol_match(rule)} accept"
        yield f"{to} drop"


def _protocol_match(rule: Rule) -> str:
    if rule.protocol is None:
        return ""
    if rule.first_port is None:
        return f" meta l4proto {rule.protocol if rule.protocol != 'icmpv6' else 'ipv6-icmp'}"
    return f" {rule.protocol} dport {rule.first_port}-{rule.last_port}"


def _rate_limits(one: ProtectedVips, direction: str, attribute: str) -> Iterator[str]:
    rate = getattr(one.policy, attribute, None)
    if rate is None:
        return
    burst = max(int(rate * _BYTES * _BURST), _LEAST_BURST)
    for interface in one.interfaces:
        # All packets that match a rule share its rate limit, so each interface needs its own rule.
        yield f'{direction} "{interface}" limit rate over {rate * _BYTES} bytes/second burst {burst} bytes drop'


def _set(names: Sequence[str]) -> str:
    return "{ " + ", ".join(f'"{name}"' for name in names) + " }"
