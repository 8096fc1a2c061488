# SPDX-License-Identifier: Apache-2.0
"""The paths of the agent's files.

Invariant: all paths are below one root, so that a test can move them together.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INNER_NAMESPACE = "amphora-haproxy"


@dataclass(frozen=True)
class Paths:
    """All of them. ``etc`` is written by the compute backend, ``var`` survives a boot, ``run`` does not."""

    root: Path = Path("/")

    @property
    def etc(self) -> Path:
        return self.root / "etc/amphora-agent"

    @property
    def var(self) -> Path:
        return self.root / "var/lib/amphora-agent"

    @property
    def run(self) -> Path:
        return self.root / "run/amphora-agent"

    @property
    def inner_namespace(self) -> Path:
        return self.root / "run/netns" / INNER_NAMESPACE

    @property
    def private(self) -> Path:
        """What an amphora made of namespaces writes in directories that it shares with its host."""
        return self.root / "run/private"

    @property
    def supervisor_socket(self) -> Path:
        return self.run / "supervisor.sock"

    @property
    def services(self) -> Path:
        """What is known of the daemons that systemd runs: a directory for each."""
        return self.run / "services"

    @property
    def units(self) -> Path:
        """The units of those daemons; gone after a boot."""
        return self.root / "run/systemd/system"

    @property
    def confirmed(self) -> Path:
        """The last confirmed bundle."""
        return self.var / "confirmed.json"

    @property
    def callers(self) -> Path:
        """The CA of the controllers and the digests of its predecessors; the config drive has the first one."""
        return self.var / "callers.json"

    @property
    def unfinished(self) -> Path:
        """Exists while HAProxy's file and what HAProxy runs may differ."""
        return self.var / "unfinished"

    @property
    def machine_configuration(self) -> Path:
        return self.var / "machine.cfg"

    @property
    def configuration(self) -> Path:
        """The load balancer's part of HAProxy's configuration."""
        return self.var / "haproxy.cfg"

    @property
    def candidate(self) -> Path:
        return self.var / "haproxy.cfg.new"

    @property
    def abridged(self) -> Path:
        """What HAProxy reads of a candidate whose other servers it has read before."""
        return self.run / "haproxy.cfg.abridged"

    @property
    def previous(self) -> Path:
        """The configuration before the one that is being switched to."""
        return self.var / "haproxy.cfg.old"

    @property
    def server_state(self) -> Path:
        """What the checks found out, from one worker to the next: of no use after a boot."""
        return self.run / "server-state"

    @property
    def earlier(self) -> Path:
        """What has to be added to the counters of the present worker, for the responder."""
        return self.run / "earlier"

    @property
    def totals(self) -> Path:
        return self.var / "totals.json"

    @property
    def epoch(self) -> Path:
        return self.var / "epoch"

    @property
    def stats_socket(self) -> Path:
        return self.run / "haproxy.sock"

    @property
    def master_socket(self) -> Path:
        return self.run / "haproxy-master.sock"

    @property
    def haproxy_health(self) -> Path:
        """HAProxy's health file for keepalived: 0 while it serves or is not wanted, otherwise 1."""
        return self.run / "haproxy.health"

    @property
    def released(self) -> Path:
        """1 in the moment in which the VIPs are given to the partner, otherwise 0; keepalived watches it."""
        return self.run / "vrrp.released"

    @property
    def handover(self) -> Path:
        """Until when connections go on after the VIPs have moved; its times mean nothing after a boot."""
        return self.run / "handover.json"

    @property
    def keepalived_configuration(self) -> Path:
        return self.run / "keepalived.conf"

    @property
    def keepalived_candidate(self) -> Path:
        return self.run / "keepalived.conf.new"

    @property
    def keepalived_pid_files(self) -> tuple[Path, Path]:
        """Of the parent and of the child that speaks VRRP."""
        return self.run / "keepalived.pid", self.run / "keepalived-vrrp.pid"

    @property
    def metrics_socket(self) -> Path:
        """HAProxy's other socket: for the responder, and for questions only."""
        return self.run / "metrics.sock"

    @property
    def checker(self) -> Path:
        """The directory of the checker, which in a virtual machine writes nowhere else."""
        return self.run / "checker"

    @property
    def pings(self) -> Path:
        """The addresses to ping, for the responder."""
        return self.run / "pings"

    @property
    def virtual_servers(self) -> Path:
        """What the checker serves; it writes this itself, after it has brought it about."""
        return self.checker / "virtual-servers.json"

    @property
    def virtual_states(self) -> Path:
        """What the checker has found out, from one process to the next: of no use after a boot."""
        return self.checker / "virtual-states.json"

    @property
    def checker_socket(self) -> Path:
        return self.checker / "checker.sock"

    @property
    def virtual_totals(self) -> Path:
        """The sums over what kernels have counted of virtual servers."""
        return self.var / "virtual-totals.json"

    @property
    def files(self) -> Path:
        """Certificates with their keys, and what else HAProxy reads: a directory for each set, in memory."""
        return self.run / "files"

    @property
    def empty(self) -> Path:
        """HAProxy's root directory: there is nothing to be found in it."""
        return self.run / "empty"


def write_atomically(path: Path, content: str, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replace a file so that a reader, or a power cut, meets the old or the new content, nothing between.

    Args:
        durable: False for a file that is not read after a power cut, which may then leave any content.
        mode: its permissions, whatever the process's mask is.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary, content, durable=durable, mode=mode)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def write(path: Path, content: str, *, durable: bool, mode: int = 0o600) -> None:
    """Write a file that only its owner may read, unless a mode says otherwise.

    If durable, its content is on disk when this returns. Otherwise it has its room there, so that `sync` need not find
    any.
    """
    data = content.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        if data:
            os.posix_fallocate(file.fileno(), 0, len(data))
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have a file's content on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory survive a power cut."""
    sync(path)
