# SPDX-License-Identifier: Apache-2.0
"""The configuration of the keepalived that has IPVS forward UDP and SCTP (manual: keepalived.conf(5)).

Invariant: pure. Only ids, addresses and numbers get into it. It says who is there; who of them is up, and with what
weight, is in files that keepalived watches (`lvs_tracks`), so that it changes with the user's wishes only.

Each VIP has a virtual server of its own. A group of them would be shorter, but keepalived 2.2.7, when a VIP joins a
group, puts members that are down back into IPVS and leaves them there.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from amphora_agent.bundle import Bundle, Host
from amphora_agent.l4.model import Persistence, VirtualServer
from amphora_agent.l4_ipvs import track_files

# As connection tracking, which keeps the same flows (nf_conntrack_udp_timeout_stream): IPVS's own five minutes would
# only count clients that are gone.
UDP_SECONDS = 120
SYNC_PORT = 8848
# What makes a scheduler look at the client's port too.
_FLAGS = {"SOURCE_IP_PORT": "mh-port"}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,15}")


@dataclass(frozen=True)
class Sync:
    """How two amphorae tell each other of their flows: both ways at once, since either may have the VIPs.

    ``group`` is the multicast address, one of each load balancer's own: what is said there is not signed, and nobody
    else's flows are of use. ``number`` is between 0 and 255.
    """

    interface: str
    number: int
    group: Host


def sync_of(bundle: Bundle) -> Sync | None:
    """How the amphora of a bundle does so; None where it is on its own, or has no flows to tell of."""
    if bundle.vrrp is None or not bundle.virtual_servers:
        return None
    seed = hashlib.sha256(bundle.load_balancer_id.bytes).digest()
    group: Host
    if bundle.vrrp.local.address.version == 4:
        # 239.192.0.0/14 is for organisations to use as they like (RFC 2365, section 6.2).
        group = ipaddress.IPv4Address(int(ipaddress.IPv4Address("239.192.0.0")) | int.from_bytes(seed[:4], "big") >> 14)
    else:
        # Transient and link-local (RFC 4291, section 2.7), with a number of 32 bits (RFC 3307, section 4.3).
        number = int.from_bytes(seed[:4], "big") | 1 << 31
        group = ipaddress.IPv6Address(int(ipaddress.IPv6Address("ff12::")) | number)
    return Sync(bundle.vrrp.interface, bundle.vrrp.router_id, group)


def render(servers: Sequence[VirtualServer], tracks: Path, sync: Sync | None = None) -> str:
    """The file.

    Args:
        servers: those without members are left to the kernel, which refuses at once who knocks at a port of nobody.
        tracks: the directory of the files that say who is up.
        sync: how flows are made known to the partner.

    Raises:
        ValueError: an interface's name is none.
    """
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Written by the agent from ids, addresses and numbers; nothing in it is a user's text.",
        "global_defs {",
        "    # What one that died left behind: members may have gone meanwhile.",
        "    lvs_flush",
        f"    lvs_timeouts udp {UDP_SECONDS}",
        *([] if sync is None else [_sync(sync)]),
        "}",
    ]
    for server in sorted(servers, key=lambda one: one.id):
        versions = sorted({address.version for address in server.addresses})
        if any(track_files.members(server, version) for version in versions):
            lines += _tracks(server, versions, tracks)
            lines += [line for version in versions for line in _servers(server, version)]
    return "\n".join(lines) + "\n"


def has_any(servers: Sequence[VirtualServer]) -> bool:
    """Whether there is anything for IPVS to do."""
    return any(track_files.members(server, address.version) for server in servers for address in server.addresses)


def _sync(sync: Sync) -> str:
    if not _NAME.fullmatch(sync.interface):
        raise ValueError(f"{sync.interface!r} is no interface")
    return f"    lvs_sync_daemon {sync.interface} id {sync.number} port {SYNC_PORT} group {sync.group}"


def _tracks(server: VirtualServer, versions: Sequence[int], tracks: Path) -> Iterator[str]:
    for version in versions:
        for member in track_files.members(server, version):
            for what, weight in ((track_files.DOWN, 0), (track_files.WEIGHT, 1)):
                name = track_files.name(server.id, member.id, what)
                yield f"track_file {name} {{"
                yield f'    file "{tracks / name}"'
                yield f"    weight {weight}"
                yield "}"


def _servers(server: VirtualServer, version: int) -> Iterator[str]:
    members = track_files.members(server, version)
    for address in sorted(each for each in server.addresses if each.version == version) if members else ():
        yield f"virtual_server {address} {server.port} {{"
        yield f"    lvs_sched {track_files.SCHEDULERS[server.algorithm]}"
        if flag := _FLAGS.get(server.algorithm):
            yield f"    {flag}"
        yield "    lvs_method NAT"
        yield f"    protocol {server.protocol}"
        if server.persistence is not None:
            yield f"    persistence_timeout {server.persistence.timeout}"
            yield f"    persistence_granularity {_granularity(server.persistence, version)}"
        for member in members:
            yield f"    real_server {member.address} {member.port} {{"
            yield f"        weight {track_files.BASE}"
            for what, weight in ((track_files.DOWN, 0), (track_files.WEIGHT, 1)):
                yield "        FILE_CHECK {"
                yield f"            track_file {track_files.name(server.id, member.id, what)}"
                yield f"            weight {weight}"
                yield "        }"
            yield "    }"
        yield "}"


def _granularity(persistence: Persistence, version: int) -> str:
    if version == 6:
        return str(persistence.prefix_v6)
    return str(ipaddress.ip_network(f"0.0.0.0/{persistence.prefix_v4}").netmask)
