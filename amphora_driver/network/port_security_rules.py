# SPDX-License-Identifier: Apache-2.0
"""Security groups and QoS policies of the embedded network backend, as nftables rules of its switch.

Invariant: pure functions; the same policies make the same text. A port with security groups is closed but for what one
of them lets in, as far as somebody speaks to a VIP: what an amphora says, and what is sent to its own address (members'
answers, its partner) is nobody's business here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

import msgspec

from amphora_driver.errors import NetworkError

FAMILY, TABLE = "bridge", "amphora_vips"
PROTOCOLS = ("tcp", "udp", "sctp", "icmp", "icmpv6")
_WITH_PORTS = ("tcp", "udp", "sctp")
# Kilobits to bytes.
_BYTES = 125
# A second's share that may be sent at once, as networks usually grant TCP; and a kernel's largest frame, some times.
_BURST = 0.8
_LEAST_BURST = 256 * 1024
# Without neighbour discovery nobody finds the VIP; without the others TCP never learns the path's MTU (RFC 1191, 8201).
_ALWAYS = {
    4: ("icmp type destination-unreachable accept",),
    6: ("icmpv6 type { destination-unreachable, packet-too-big, nd-neighbor-solicit, nd-neighbor-advert } accept",),
}


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something a security group lets in; None is "any".

    Attributes:
        protocol: one of `PROTOCOLS`.
        first_port: the lowest port.
        last_port: the highest one.
        remote: a network in CIDR notation.
    """

    protocol: str | None = None
    first_port: int | None = None
    last_port: int | None = None
    remote: str | None = None


class SecurityGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of rules; one without rules lets nobody in."""

    id: str
    name: str
    rules: tuple[Rule, ...] = ()


class QosPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How much a port may carry, in kilobits (1000 bits) per second: sent by the amphora, and sent to it."""

    id: str
    name: str
    egress_kbps: int | None = None
    ingress_kbps: int | None = None


class ProtectedVips(msgspec.Struct, frozen=True, kw_only=True):
    """The VIPs of one load balancer and what they obey.

    Attributes:
        addresses: the VIPs.
        interfaces: the switch's ends of the cables to its amphorae.
        groups: None where nothing is shut out.
        policy: None where nothing is limited.
    """

    load_balancer_id: str
    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]
    groups: tuple[SecurityGroup, ...] | None = None
    policy: QosPolicy | None = None


def validate_group(group: SecurityGroup) -> None:
    """Refuse rules that say nothing or two things at once.

    Raises:
        NetworkError: naming the rule.
    """
    for rule in group.rules:
        wanted = f"define security group {group.name}"
        ports = (rule.first_port, rule.last_port)
        if rule.protocol not in (None, *PROTOCOLS):
            raise NetworkError(wanted, f"{rule.protocol} is not one of {', '.join(PROTOCOLS)}")
        if ports != (None, None) and (
            rule.protocol not in _WITH_PORTS or not 1 <= (ports[0] or 0) <= (ports[1] or 0) <= 65535
        ):
            raise NetworkError(wanted, f"{ports[0]} to {ports[1]} are no ports of {rule.protocol}")
        try:
            ipaddress.ip_network(rule.remote or "::/0")
        except ValueError:
            raise NetworkError(wanted, f"{rule.remote} is not a network") from None


def render_ruleset(protected: Sequence[ProtectedVips]) -> str:
    """The commands that make the switch's table exactly this; it is gone where nothing is protected."""
    lines = [f"table {FAMILY} {TABLE}", f"delete table {FAMILY} {TABLE}"]
    if not protected:
        return "\n".join([*lines, ""])
    lines += [f"table {FAMILY} {TABLE} {{"]
    for number, one in enumerate(protected):
        if one.groups is not None:
            lines += [f"  chain vip{number} {{", *(f"    {line}" for line in _admission_rules(one, one.groups)), "  }"]
    # Frames between two ports pass the first hook, what the switch routes from other networks the second.
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
        # One rule for each: a limit is shared by all that it matches.
        yield f'{direction} "{interface}" limit rate over {rate * _BYTES} bytes/second burst {burst} bytes drop'


def _set(names: Sequence[str]) -> str:
    return "{ " + ", ".join(f'"{name}"' for name in names) + " }"
