# SPDX-License-Identifier: Apache-2.0
"""The paths of the agent's files below one root, and functions that write files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Paths:
    """The compute backend writes ``etc``. The directory ``run`` is empty after a boot."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.etc = root / "etc/amphora-agent"
        self.var = var = root / "var/lib/amphora-agent"
        self.run = run = root / "run/amphora-agent"
        self.inner_namespace = root / "run/netns/amphora-haproxy"
        # The supervisor of an amphora in a network namespace keeps the amphora's own files below this directory.
        self.private = root / "run/private"
        self.supervisor_socket = run / "supervisor.sock"
        # Each daemon that systemd runs has a directory with state files in `services`, and a unit file in `units`.
        self.services = run / "services"
        self.units = root / "run/systemd/system"

        self.confirmed = var / "confirmed.json"
        # While this file exists, HAProxy may run another configuration than `haproxy.cfg`. The next change then reloads
        # HAProxy.
        self.unfinished = var / "unfinished"
        # The CA of the controllers, and the digests of replaced CAs.
        self.callers = var / "callers.json"
        # This directory is in memory and has a subdirectory for each set of TLS files.
        self.files = run / "files"

        # HAProxy reads `machine.cfg` for the amphora itself and `haproxy.cfg` for the load balancer.
        self.machine_configuration = var / "machine.cfg"
        self.configuration = var / "haproxy.cfg"
        self.candidate = var / "haproxy.cfg.new"
        self.previous = var / "haproxy.cfg.old"
        # HAProxy checks this shorter file in place of a long configuration. The file omits servers that HAProxy has
        # accepted before.
        self.abridged = run / "haproxy.cfg.abridged"
        # HAProxy's new worker reads the results of the old worker's health checks from this file.
        self.server_state = run / "server-state"
        self.stats_socket = run / "haproxy.sock"
        self.master_socket = run / "haproxy-master.sock"
        # The responder reads statistics from this socket, on which HAProxy accepts no changes.
        self.metrics_socket = run / "metrics.sock"
        # keepalived reads this file: 0 if HAProxy serves or is not needed, otherwise 1.
        self.haproxy_health = run / "haproxy.health"
        # HAProxy's root directory (chroot), which always stays empty.
        self.empty = run / "empty"

        # Counters of ended HAProxy workers, which the responder adds to those of the present worker.
        self.earlier = run / "earlier"
        self.totals = var / "totals.json"
        self.epoch = var / "epoch"
        # The settings that a controller sent last, which replace values of agent.conf.
        self.settings = var / "settings.json"
        # This file is in memory, because the authorization for a log target is a secret.
        self.log_settings = run / "log-settings.json"
        # The log forwarder has its sockets in this directory.
        self.log_forwarder = run / "log-forwarder"
        self.admin_log_socket = self.log_forwarder / "admin.sock"
        self.pings = run / "pings"

        # keepalived reads this file: 1 while the VIPs move to the partner, otherwise 0.
        self.released = run / "vrrp.released"
        # Deadlines until which this amphora continues existing connections after a move of the VIPs. A reboot deletes
        # the file.
        self.handover = run / "handover.json"
        self.keepalived_configuration = run / "keepalived.conf"
        self.keepalived_candidate = run / "keepalived.conf.new"
        # The process ids of keepalived's parent process and of its child process for VRRP.
        self.keepalived_pid_files = run / "keepalived.pid", run / "keepalived-vrrp.pid"

        # In a virtual machine, the L4 daemon (for UDP and SCTP) can write into this directory only.
        self.checker = run / "checker"
        self.checker_socket = self.checker / "checker.sock"
        # The L4 daemon reads the virtual servers and the states of their members from these files after a restart.
        self.virtual_servers = self.checker / "virtual-servers.json"
        self.virtual_states = self.checker / "virtual-states.json"
        # Counters of virtual servers since their creation. A reboot does not reset the counters.
        self.virtual_totals = var / "virtual-totals.json"


def file_identity(path: Path) -> tuple[int, ...] | None:
    """Return the inode fields that change with the content (inode(7)); None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_if_exists(path: Path, errors: str = "strict") -> str | None:
    """Return the text of a file; None if it does not exist."""
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors=errors)
    return None


def write_atomically(path: Path, content: str, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replace a file completely. The `mode` does not depend on the umask.

    After a power cut, a durable file has the old or the new content, and another file may have any content.
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
        sync(path.parent)


def write(path: Path, content: str, *, durable: bool, mode: int = 0o600) -> None:
    """Write a file of mode 0600 or another mode, and sync a durable file to disk.

    The disk space of another file is reserved, so that a later `sync` cannot fail on a full disk.
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
    """Sync the content of a file to disk, or the renames and removals in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
