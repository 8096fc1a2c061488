# SPDX-License-Identifier: Apache-2.0
"""A Galera cluster of three nodes with an HAProxy in front of it, as docs/how-to/several-hosts.md describes it.

Each host of the documents has one node and one HAProxy. Here one HAProxy has an address for each host. It prefers the
node of the host; the other nodes are backups. A further address is for Octavia: all its processes use the same node.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

NODES = 3
OCTAVIA = "octavia"
# The buffer pool is that of the single MariaDB server.
_OPTIONS = {
    "innodb-buffer-pool-size": "512M",
    "innodb-flush-log-at-trx-commit": "2",
    "max-connections": "500",
    "userstat": "ON",
}
# The host of each process. `operator` is Octavia's API with the driver, and amphoractl.
_HOSTS = {"health": 1, "reporter": 2, "operator": 0}
_READY = 30.0
# A node that returns after ten minutes receives only the missing write sets.
_CACHED = "512M"
_COUNTERS = {
    "wsrep_local_cert_failures": "refused",
    "wsrep_local_bf_aborts": "aborted",
    "wsrep_replicated": "write_sets",
    "wsrep_flow_control_paused_ns": "paused_ns",
}


class GaleraCluster:
    """The nodes and the balancer."""

    def __init__(self, nodes: Sequence[Any], folder: Path, balancer: subprocess.Popen[bytes]) -> None:
        self.nodes, self._folder, self._balancer = list(nodes), folder, balancer

    def url(self, host: int | str, user: str, database: str) -> str:
        """Return the URL of an address of the balancer: `OCTAVIA`, or the number of a host."""
        return f"mysql+pymysql://{user}@localhost/{database}?unix_socket={self._folder / f'host-{host}'}"

    def options(self, process: str, user: str, database: str, sockets: Path) -> dict[str, dict[str, str]]:
        """Return the options of a process on its host: the balancer's address, and the folder of local hints."""
        host = host_of(process)
        folder = sockets / str(host)
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "amp_database": {"connection": self.url(host, user, database)},
            "amp_queue": {"socket_dir": str(folder)},
        }

    def node_urls(self, database: str) -> tuple[str, ...]:
        """Return the URLs of the nodes themselves, for counters of each node."""
        return tuple(one.url(database) for one in self.nodes)

    def pids(self) -> dict[str, list[int]]:
        """Return the processes of the running nodes, and of the balancer."""
        return {"database": [one.pid for one in self.nodes if one.is_running()], "balancer": [self._balancer.pid]}

    def restart(self, number: int) -> float:
        """Start a killed node again; return the seconds until it has joined the others."""
        begun = time.monotonic()
        self.nodes[number].start([one for one in self.nodes if one.is_running()])
        return time.monotonic() - begun


@contextmanager
def cluster(users: Sequence[str], *databases: str) -> Iterator[GaleraCluster]:
    """Run the cluster with these users and databases inside the block."""
    import galera  # noqa: PLC0415 - in `tests`, which the deployment adds to the path

    with galera.killable(*databases, nodes=NODES, options=_OPTIONS, cached=_CACHED) as nodes:
        _create_users(nodes[0].url(databases[0]), users, databases[0])
        folder = nodes[0].folder / "balancer"
        folder.mkdir()
        check = folder / "is-synced"
        check.write_text(check_program(nodes[0].folder))
        check.chmod(0o755)
        configuration = folder / "haproxy.cfg"
        configuration.write_text(balancer_configuration(folder, [one.socket for one in nodes]))
        with (folder / "log").open("wb") as log:
            balancer = subprocess.Popen(["haproxy", "-db", "-f", str(configuration)], stdout=log, stderr=log)
        try:
            made = GaleraCluster(nodes, folder, balancer)
            _await(made, databases[0])
            yield made
        finally:
            balancer.terminate()
            balancer.wait(_READY)


def host_of(process: str) -> int:
    """Return the host of a process. Controllers are spread over all hosts."""
    return _HOSTS[process] if process in _HOSTS else int(process.removeprefix("controller")) % NODES


def check_program(folder: Path) -> str:
    """Return the health check of a node, which asks for its Galera state."""
    return (
        f"#!/bin/sh\nmariadb --no-defaults --user=root --socket={folder}/socket${{HAPROXY_SERVER_NAME#node}} "
        "--batch --execute \"SHOW STATUS LIKE 'wsrep_local_state_comment'\" | grep -q Synced\n"
    )


def balancer_configuration(folder: Path, sockets: Sequence[Path]) -> str:
    """Return the configuration of HAProxy: an address for each host, and one for Octavia."""
    lines = ["global", "    maxconn 4000", "    external-check", "    insecure-fork-wanted"]
    # Idle connections of the driver's pool live up to 60 s.
    lines += ["defaults", "    mode tcp", "    timeout connect 3s", "    timeout client 10m", "    timeout server 10m"]
    lines += ["    timeout check 3s", "    option redispatch", "    retries 2"]
    lines += ["backend nodes", "    option external-check", "    external-check path /usr/bin:/bin"]
    lines += [f"    external-check command {folder}/is-synced"]
    numbers = list(range(len(sockets)))
    lines += [f"    server node{one} unix@{sockets[one]} check inter 1s fall 2 rise 2" for one in numbers]
    for host in (*numbers, OCTAVIA):
        first = 0 if host == OCTAVIA else int(host)
        lines += [f"listen host-{host}", f"    bind unix@{folder}/host-{host}"]
        # If the preferred node returns, Octavia leaves the backup, so that two nodes never serve its processes.
        returns = " on-marked-up shutdown-backup-sessions" if host == OCTAVIA else ""
        for one in [first, *(other for other in numbers if other != first)]:
            line = f"    server node{one} unix@{sockets[one]} track nodes/node{one} on-marked-down shutdown-sessions"
            lines.append(line + (returns if one == first else " backup"))
    return "\n".join(lines) + "\n"


class WriteSetCounters:
    """Counts conflicts and write sets of the nodes (Galera): refused at the commit, aborted by another node's."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._engines = [sa.create_engine(url, poolclass=sa.NullPool) for url in urls]

    def read(self) -> dict[str, float]:
        """Return the sums over the nodes that answer, and the seconds in which flow control paused them."""
        found: dict[str, float] = dict.fromkeys(_COUNTERS.values(), 0.0)
        for engine in self._engines:
            for name, value in _read_status(engine):
                if name in _COUNTERS:
                    found[_COUNTERS[name]] += float(value)
        paused = found.pop("paused_ns") / 1e9
        return {**found, "paused": paused}


def _read_status(engine: sa.Engine) -> list[tuple[str, str]]:
    try:
        with engine.connect() as connection:
            rows = connection.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'wsrep_%%'").fetchall()
            return [(str(name), str(value)) for name, value in rows]
    except sa.exc.DBAPIError:
        return []


def _create_users(url: str, users: Sequence[str], database: str) -> None:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        for user in users:
            connection.exec_driver_sql(f"CREATE USER '{user}'@'localhost' IDENTIFIED BY ''")
            connection.exec_driver_sql(f"GRANT ALL ON {database}.* TO '{user}'@'localhost'")


def _await(made: GaleraCluster, database: str) -> None:
    """Wait until every address of the balancer serves."""
    deadline = time.monotonic() + _READY
    for host in (*range(NODES), OCTAVIA):
        engine = sa.create_engine(made.url(host, "root", database), poolclass=sa.NullPool)
        while True:
            try:
                engine.connect().close()
                break
            except sa.exc.DBAPIError:
                assert time.monotonic() < deadline, "HAProxy does not serve the nodes"
                time.sleep(0.1)
