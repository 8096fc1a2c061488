# SPDX-License-Identifier: Apache-2.0
"""HAProxy's file as it is on disk: a head of ours, then the load balancer's text.

Invariant: pure. The head names the directory of the files that the text needs and the limits of the process, so that
all of them are checked together and change together, by the renaming of one file.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from amphora_agent.bundle import Host, Vrrp
from amphora_agent.haproxy.config_parser import OWN
from amphora_agent.haproxy.stick_table_sync import PEERS

_METRICS = """\
# What a Prometheus listener serves: the agent's responder.
backend {own}metrics
    mode http
    timeout connect 1s
    timeout queue 10s
    timeout server 10s
    # What else the responder answers is for HAProxy alone.
    http-request deny deny_status 404 unless {{ path / /metrics }}
    server responder 127.0.0.1:{port} maxconn 4
"""
RESPONDER_PORT = 9101
"""On the inner namespace's loopback."""
_END_OF_HEAD = "# From here on: the load balancer's part.\n"
_NEVER_BOUND = 9103
DRAIN_SECONDS = 1800
_DRAIN = re.compile(r"^    hard-stop-after (\d+)s$", re.MULTILINE)
_ORIGIN = re.compile(r"^    default-path origin (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Peer:
    """Somebody who knows the entries of stick tables, and where to tell or ask."""

    name: str
    address: Host
    port: int


# On its own a HAProxy talks to nobody but the worker that comes after it.
ALONE = (Peer("local", ipaddress.IPv4Address("127.0.0.1"), 9102),)
PAIR_PORT = 1025


def peers(vrrp: Vrrp | None) -> tuple[Peer, ...]:
    """Who shares stick tables: this amphora itself, first, and its partners."""
    if vrrp is None:
        return ALONE
    return tuple(Peer(each.name, each.address, PAIR_PORT) for each in (vrrp.local, *vrrp.peers))


@dataclass(frozen=True)
class Document:
    """A head and a text."""

    head: str
    text: str

    @property
    def content(self) -> str:
        return self.head + self.text

    @property
    def files(self) -> Path | None:
        """The directory it takes its files from."""
        found = _ORIGIN.search(self.head)
        return Path(found.group(1)) if found else None

    @property
    def drain(self) -> int:
        """For how many seconds a worker that has read it may go on after it was replaced."""
        found = _DRAIN.search(self.head)
        return int(found.group(1)) if found else DRAIN_SECONDS

    def line(self, number: int) -> int:
        """A line of the whole as a line of the text; below 1 in the head."""
        return number - self.head.count("\n")


def compose(
    text: str,
    *,
    files: Path,
    maxconn: int,
    threads: int,
    drain: int = DRAIN_SECONDS,
    certificates: Iterable[str],
    sharing: Sequence[Peer] = ALONE,
) -> Document:
    """The document for a text.

    Args:
        drain: for how many seconds its worker may go on after it was replaced (manual, "hard-stop-after").
        sharing: who shares the stick tables, this HAProxy first (manual, "peers").
        files: the directory of the files that the text names.
        certificates: those of them that servers show. HAProxy (2.6) opens a server's certificate only after it has read
            the configuration and left this directory; so a frontend that is never bound has it opened before, and
            the server finds it in memory, under the same name.
    """
    head = (
        "# What the load balancer's part needs of this machine. Written by the agent.\n"
        "global\n"
        f"    default-path origin {files}\n"
        f"    maxconn {maxconn}\n"
        f"    nbthread {threads}\n"
        f"    hard-stop-after {drain}s\n"
        f"    localpeer {sharing[0].name}\n"
        "# The new worker learns the stick tables from the old one, and from who serves when this one does not.\n"
        f"peers {PEERS}\n"
    )
    head += "".join(f"    peer {peer.name} {_endpoint(peer)}\n" for peer in sharing)
    head += _METRICS.format(own=OWN, port=RESPONDER_PORT)
    binds = "".join(f"    bind 127.0.0.1:{_NEVER_BOUND} ssl crt {name}\n" for name in certificates)
    if binds:
        head += f"frontend {OWN}certificates\n    disabled\n{binds}"
    return Document(head + _END_OF_HEAD, text)


def _endpoint(peer: Peer) -> str:
    return f"[{peer.address}]:{peer.port}" if peer.address.version == 6 else f"{peer.address}:{peer.port}"


def read(content: str) -> Document:
    """Take a file apart again."""
    head, end, text = content.partition(_END_OF_HEAD)
    return Document(head + end, text) if end else Document("", content)
