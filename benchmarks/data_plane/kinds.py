# SPDX-License-Identifier: Apache-2.0
"""The kinds of listeners that are compared, as a load balancer of the product and as a plain configuration."""

from __future__ import annotations

from dataclasses import dataclass

from wanted import listener, load_balancer, member, pool

from amphora_driver.model.loadbalancer import LoadBalancer
from data_plane.place import MEMBER_PORT, UDP_MEMBER_PORT, member_address

CERTIFICATE = "cert"
"""The reference of the certificate."""


@dataclass(frozen=True)
class Kind:
    """A kind of listener: its name, the protocols of listener and pool, and its port."""

    name: str
    listener: str
    pool: str
    port: int

    @property
    def http(self) -> bool:
        return self.pool == "HTTP"

    @property
    def tls(self) -> bool:
        return self.listener == "TERMINATED_HTTPS"

    @property
    def udp(self) -> bool:
        return self.pool == "UDP"


HTTP = Kind("http", "HTTP", "HTTP", 80)
TLS = Kind("tls", "TERMINATED_HTTPS", "HTTP", 443)
TCP = Kind("tcp", "TCP", "TCP", 8080)
UDP = Kind("udp", "UDP", "UDP", 5300)
KINDS = {one.name: one for one in (HTTP, TLS, TCP, UDP)}


@dataclass(frozen=True)
class _Peer:
    name: str
    address: str
    port: int


def tree(kind: Kind, members: int) -> LoadBalancer:
    """Return the load balancer with this many members, and one more that the changes use."""
    port = UDP_MEMBER_PORT if kind.udp else MEMBER_PORT
    peers = [_Peer(f"member {number}", member_address(number), port) for number in range(members + 1)]
    more = {"default_tls_container_ref": CERTIFICATE} if kind.tls else {}
    front = listener(kind.port, protocol=kind.listener, **more)
    return load_balancer(front, pool("pool", *map(member, peers), protocol=kind.pool), additional_vips=())


def plain(kind: Kind, members: int, *, address: str, folder: str, name: str, changes: Changes | None = None) -> str:
    """Return the minimal configuration of HAProxy with the same bind and the same members.

    Only what HAProxy needs is set: the mode, the three time-outs without which it warns, and a limit of connections as
    in an amphora. The socket is the one that the benchmark reads.
    """
    changed = changes or Changes()
    servers = "".join(f"    server s{number} {member_address(number)}:{MEMBER_PORT}\n" for number in range(members))
    certificate = f" ssl crt {folder}/listener.pem" if kind.tls else ""
    return (
        f"global\n    stats socket {folder}/{name}.sock mode 600 level admin\n"
        f"    maxconn {changed.maxconn}\n{_lines(changed.process)}"
        f"defaults\n    mode {'http' if kind.http else 'tcp'}\n"
        f"    timeout connect 5s\n    timeout client 50s\n    timeout server 50s\n{_lines(changed.defaults)}"
        f"frontend front\n    bind {address}:{kind.port}{certificate}{changed.bind}\n{_lines(changed.frontend)}"
        f"    default_backend back\nbackend back\n    balance roundrobin\n{servers}"
    )


@dataclass(frozen=True)
class Changes:
    """Lines that a plain configuration has in addition, by section, and words of its bind line.

    `offloads` are words of `ethtool -K`.
    """

    process: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    frontend: tuple[str, ...] = ()
    bind: str = ""
    offloads: tuple[str, ...] = ()
    maxconn: int = 5000


def _lines(lines: tuple[str, ...]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def plain_datagrams(kind: Kind, members: int, address: str, table: str) -> str:
    """Return a minimal table of nftables: one rule selects the member, and one hides the client."""
    targets = ", ".join(f"{n} : {member_address(n)} . {UDP_MEMBER_PORT}" for n in range(members))
    return (
        f"table ip {table} {{\n"
        "  chain arriving {\n    type nat hook prerouting priority -100;\n"
        f"    ip daddr {address} udp dport {kind.port} dnat ip to numgen inc mod {members} map {{ {targets} }}\n  }}\n"
        "  chain leaving {\n    type nat hook postrouting priority 100;\n"
        f"    ct status dnat masquerade\n  }}\n}}\n"
    )
