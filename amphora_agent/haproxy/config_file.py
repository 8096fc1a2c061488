# SPDX-License-Identifier: Apache-2.0
"""HAProxy's configuration file: a head from the agent, then the load balancer's text.

Invariant: pure, except for the limit on open files. The head names the directory of the TLS files and the limits of the
process. HAProxy checks head and text together, and one rename changes both.
"""

from __future__ import annotations

import ipaddress
import re
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from amphora_agent.bundle import Host, Vrrp
from amphora_agent.config import Target
from amphora_agent.haproxy.config_parser import AGENT_PREFIX, Configuration

_METRICS = """\
# What a Prometheus listener serves: the agent's responder.
backend {prefix}metrics
    mode http
    timeout connect 1s
    timeout queue 10s
    timeout server 10s
    # The responder's other paths are for HAProxy alone.
    http-request deny deny_status 404 unless {{ path / /metrics }}
    server responder 127.0.0.1:{port} maxconn 4
"""
PEERS = "amphora"
"""The name of the section with the peers of the stick tables."""
RESPONDER_PORT = 9101
"""The port of the responder on the loopback of the inner namespace."""
MAX_CONNECTIONS = 50_000
_END_OF_HEAD = "# From here on: the load balancer's part.\n"
_NEVER_BOUND = 9103
DRAIN_SECONDS = 1800
_DRAIN = re.compile(r"^    hard-stop-after (\d+)s$", re.MULTILINE)
_ORIGIN = re.compile(r"^    default-path origin (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Peer:
    """A HAProxy that shares the stick tables (manual, "peers")."""

    name: str
    address: Host
    port: int


# Without a partner, HAProxy's old worker passes its stick tables to the new worker over the loopback address.
SINGLE = (Peer("local", ipaddress.IPv4Address("127.0.0.1"), 9102),)
PAIR_PORT = 1025


def peers(vrrp: Vrrp | None) -> tuple[Peer, ...]:
    """Return the peers that share stick tables, this amphora first."""
    if vrrp is None:
        return SINGLE
    return tuple(Peer(each.name, each.address, PAIR_PORT) for each in (vrrp.local, *vrrp.peers))


def max_connections(configuration: Configuration) -> int:
    """Return the number of connections for which the process may open enough files.

    A connection needs two files, and half a file for the pipes of spliced connections. HAProxy reserves a pipe for each
    fourth connection (manual 3.2, "maxpipes").
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    binds = sum(line.words[0] == "bind" for section in configuration.sections for line in section.lines)
    other = 500 + 2 * (configuration.size + binds)
    return max(100, min(MAX_CONNECTIONS, (hard - other) // 250 * 100))


@dataclass(frozen=True)
class Document:
    """The content of the file: a head and a text."""

    head: str
    text: str

    @property
    def content(self) -> str:
        return self.head + self.text

    @property
    def files(self) -> Path | None:
        found = _ORIGIN.search(self.head)
        return Path(found.group(1)) if found else None

    @property
    def drain(self) -> int:
        """The limit in seconds for the time of a worker after its replacement."""
        found = _DRAIN.search(self.head)
        return int(found.group(1)) if found else DRAIN_SECONDS

    def line(self, number: int) -> int:
        """Return the line of the text for a line of the file; a line of the head is below 1."""
        return number - self.head.count("\n")


def compose(
    text: str,
    *,
    files: Path,
    maxconn: int,
    threads: int,
    drain: int = DRAIN_SECONDS,
    certificates: Iterable[str],
    sharing: Sequence[Peer] = SINGLE,
) -> Document:
    """Return the document for a text with TLS files in a directory.

    Args:
        drain: the limit in seconds for the time of a worker after its replacement (manual, "hard-stop-after").
        sharing: the peers of the stick tables, this HAProxy first (manual, "peers").
        certificates: the files that servers present as client certificates. HAProxy 2.6 opens these files only after it
            has read the configuration and left the directory. A frontend that is never bound makes HAProxy load the
            files earlier.
    """
    head = (
        "# What the load balancer's part needs of this machine. Written by the agent.\n"
        "global\n"
        f"    default-path origin {files}\n"
        f"    maxconn {maxconn}\n"
        f"    nbthread {threads}\n"
        f"    hard-stop-after {drain}s\n"
        f"    localpeer {sharing[0].name}\n"
        "# A new worker learns the stick tables from the old one, and from the other amphora of a pair.\n"
        f"peers {PEERS}\n"
    )
    head += "".join(f"    peer {peer.name} {Target(str(peer.address), peer.port)}\n" for peer in sharing)
    head += _METRICS.format(prefix=AGENT_PREFIX, port=RESPONDER_PORT)
    binds = "".join(f"    bind 127.0.0.1:{_NEVER_BOUND} ssl crt {name}\n" for name in certificates)
    if binds:
        head += f"frontend {AGENT_PREFIX}certificates\n    disabled\n{binds}"
    return Document(head + _END_OF_HEAD, text)


def read(content: str) -> Document:
    """Split the content of a file into its head and its text."""
    head, end, text = content.partition(_END_OF_HEAD)
    return Document(head + end, text) if end else Document("", content)
