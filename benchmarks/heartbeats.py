# SPDX-License-Identifier: Apache-2.0
"""Measures a health manager in steady state: a real process, socket and database, and signed heartbeats of a fleet.

    .sandbox/test-venv/bin/python benchmarks/heartbeats.py [--size S|M] [--amphorae N] [--interval S] [--seconds S]
        [--database sqlite|mariadb] [--option NAME=VALUE]

Size S is one listener with two members, size M ten listeners with 100 members, 50 L7 policies and 150 rules. Each
amphora sends a heartbeat in each interval, with new counters and unchanged statuses. The program prints the processor
time of health manager and database server for one heartbeat, and what one core of each can receive. Afterwards it
compares all totals in the database with the last counters that the amphorae sent.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import mariadb  # noqa: E402
import sqlalchemy as sa  # noqa: E402
from cryptography.fernet import Fernet  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from simulated_fleet import shape  # noqa: E402

from amphora_agent.stats import heartbeat_codec  # noqa: E402
from amphora_agent.stats.report_differences import ReportDifferences  # noqa: E402
from amphora_driver.database import migrate, tables  # noqa: E402
from amphora_driver.database.engine import Database  # noqa: E402
from amphora_driver.database.vault import Vault  # noqa: E402
from amphora_driver.model.amphora import AmphoraState  # noqa: E402
from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType  # noqa: E402
from amphora_driver.model.loadbalancer import L7Policy, L7Rule, LoadBalancer  # noqa: E402
from amphora_driver.secret import Secret  # noqa: E402
from amphora_driver.store import amphorae, desired_objects, status_outbox  # noqa: E402

# Listeners, members of each pool, policies of each listener, and rules of each policy.
SIZES = {"S": (1, 2, 0, 0), "M": (10, 10, 5, 3)}
_WARM_SECONDS = 120.0


class Amphora:
    """An amphora with a load balancer of its own."""

    def __init__(self, number: int, size: str) -> None:
        self.id, self.key, self.sequence, self.count = uuid.UUID(int=number << 64 | 0x4000 << 48), os.urandom(32), 0, 0
        self._differences = ReportDifferences()
        self.tree = _tree(number, *SIZES[size])
        self._pools = {
            f"{pool.id}:{listener.id}": {"status": "UP", "members": {one.id: "UP" for one in pool.members}}
            for listener, pool in zip(self.tree.listeners, self.tree.pools, strict=True)
        }

    def record(self, connection: sa.Connection, vault: Vault) -> None:
        """Insert the rows of a confirmed load balancer."""
        identity = self.tree.id
        amphora_id = str(self.id)
        work = {"load_balancer_id": identity, "project_id": "demo", "op": "apply", "generation": 1, "committed": 1}
        connection.execute(tables.job.insert().values(**work, applied=1, read_back=False, dirty=False))
        nodes = list(desired_objects.iter_subtree(self.tree))
        desired_objects.insert_objects(connection, identity, 1, nodes)
        kinds = [(desired_objects.kind_of(one), one.id) for one in nodes]
        status_outbox.expect_confirmation(connection, identity, 1, (), kinds)
        status_outbox.confirm_generation(connection, identity, 1, {})
        sealed = vault.seal(Secret(self.key), amphorae.key_location(amphora_id))
        amphorae.insert_amphora(connection, amphora_id, identity, "standalone", sealed)
        amphorae.update_amphora(connection, amphora_id, state=AmphoraState.READY, confirmed=1, plugged=())

    def datagrams(self, epoch: int) -> list[bytes]:
        """Return the next heartbeat."""
        self.count += 7
        counted = dict.fromkeys(("bytes_in", "bytes_out", "total_connections"), self.count)
        listeners = {one.id: {"status": "OPEN", "active_connections": 3, **counted} for one in self.tree.listeners}
        usage = {"connections": 41, "cpu": 12, "memory": 35, "file_descriptors": 7, "conntrack": 3}
        facts = {"generation": 1, "holds_vip": None, "agent_version": "0.1.0", "usage": usage}
        document = {**facts, "listeners": listeners, "pools": self._pools}
        difference, first = self._differences.find(document), self.sequence + 1
        made = list(heartbeat_codec.datagrams(self.id, self.key, epoch, first, difference or document))
        if difference is None:
            self._differences.record(document, first, [len(one) for one in made])
        self.sequence += len(made)
        return made


def _tree(number: int, listeners: int, members: int, policies: int, rules: int) -> LoadBalancer:
    """Return a load balancer of the simulated fleet, with L7 policies that reject requests by their path."""
    tree = shape.load_balancer(number, size=shape.Size("", listeners, members))
    fronts = tuple(
        replace(listener, l7policies=tuple(_policy(listener.id, place, rules) for place in range(policies)))
        for listener in tree.listeners
    )
    return replace(tree, listeners=fronts)


def _policy(listener_id: str, place: int, rules: int) -> L7Policy:
    own = str(uuid.uuid5(uuid.UUID(listener_id), str(place)))
    return L7Policy(
        id=own,
        listener_id=listener_id,
        action=L7Action.REJECT,
        position=place + 1,
        rules=tuple(
            L7Rule(
                id=str(uuid.uuid5(uuid.UUID(own), str(one))),
                l7policy_id=own,
                type=L7RuleType.PATH,
                compare_type=L7Compare.EQUAL_TO,
                value=f"/{one}",
            )
            for one in range(rules)
        ),
    )


@contextmanager
def _manager(folder: Path, url: str, options: list[str]):
    """Run a health manager; yield its processes and its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = [
        *("[amp_database]", f"connection = {url}", f"encryption_key_file = {folder}/key"),
        *("[amp_queue]", f"socket_dir = {folder}/bells", "[amp_status_page]", "health_bind_port = 0"),
        *("[amp_health]", "bind_address = 127.0.0.1", f"bind_port = {port}"),
        *(" = ".join(one.split("=", 1)) for one in options),
    ]
    (folder / "driver.conf").write_text("\n".join([*lines, ""]))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "amphora_driver.health.service"],
            env={**os.environ, "AMPHORA_DRIVER_CONFIG": str(folder / "driver.conf"), "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        )
        try:
            yield process, port
        finally:
            process.terminate()
            process.wait(60)


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and its descendants."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def create_fleet(folder: Path, url: str, number: int, size: str) -> list[Amphora]:
    """Return amphorae with rows of confirmed load balancers; the folder has the file of the encryption key."""
    database, vault = Database(url), Vault.load(str(folder / "key"))
    fleet = [Amphora(place + 1, size) for place in range(number)]
    for begin in range(0, len(fleet), 50):
        database.write(lambda c, some=fleet[begin : begin + 50]: [one.record(c, vault) for one in some])
    return fleet


@contextmanager
def prepared_database(kind: str) -> Iterator[tuple[Path, str, psutil.Process | None]]:
    """Create a database with the tables and a key; yield their folder, the URL, and the process of the server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hb-")))
        (folder / "key").write_bytes(Fernet.generate_key())
        (folder / "key").chmod(0o600)
        url, server = f"sqlite:///{folder}/driver.sqlite", None
        if kind == "mariadb":
            running = stack.enter_context(mariadb.killable("bench"))
            (url,) = running.urls
            server = psutil.Process(running._process.pid)  # noqa: SLF001 - the processor time of the server
        migrate.upgrade(url)
        yield folder, url, server


def measure(chosen: argparse.Namespace) -> dict[str, float | str]:
    """Return the figures of one run."""
    rounds = max(2, round(chosen.seconds / chosen.interval))
    with ExitStack() as stack:
        folder, url, server = stack.enter_context(prepared_database(chosen.database))
        database, fleet = Database(url), create_fleet(folder, url, chosen.amphorae, chosen.size)
        # The first round is heard before the measurement: it causes statuses and new rows.
        epoch = time.time_ns()
        prepared = [[one.datagrams(epoch) for one in fleet] for _ in range(rounds + 2)]
        process, port = stack.enter_context(_manager(folder, url, [f"interval={chosen.interval}", *chosen.option]))
        manager = psutil.Process(process.pid)
        sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        first = prepared.pop(0)
        _wait_for_rows(database, tables.amphora_heartbeat, 1, lambda: _send(sender, port, first[:1], 0.0))
        _send(sender, port, first[1:], chosen.interval)
        listeners = len(fleet) * len(fleet[0].tree.listeners)
        _wait_for_rows(database, tables.listener_statistics, listeners, lambda: None)
        _send(sender, port, prepared.pop(0), chosen.interval)
        begun, before = time.monotonic(), (processor_seconds(manager), processor_seconds(server) if server else 0.0)
        for one in prepared:
            _send(sender, port, one, chosen.interval)
        passed = time.monotonic() - begun
        after = (processor_seconds(manager), processor_seconds(server) if server else 0.0)
        memory = max(one.memory_info().rss for one in (manager, *manager.children(recursive=True)))
        _wait_for_rows(database, tables.amphora_heartbeat, len(fleet), lambda: None, fleet[0].sequence)
        process.terminate()
        process.wait(60)
        sent = rounds * chosen.amphorae
        used = [(late - early) / sent * 1000 for early, late in zip(before, after, strict=True)]
        return {
            "size": chosen.size,
            "database": chosen.database,
            "amphorae": chosen.amphorae,
            "heartbeats_per_second": round(sent / passed),
            "manager_ms": round(used[0], 4),
            "database_ms": round(used[1], 4),
            "heartbeats_per_core_of_manager": round(1000 / used[0]),
            "heartbeats_per_core_of_database": round(1000 / used[1]) if used[1] else "-",
            "memory_mib": round(memory / 2**20),
            "wrong_totals": _wrong_totals(database, fleet),
            "bytes": round(sum(len(each) for one in prepared for many in one for each in many) / sent),
        }


def _send(sender: socket.socket, port: int, heartbeats: list[list[bytes]], seconds: float) -> None:
    """Send the heartbeats at a constant rate."""
    begun = time.monotonic()
    for number, datagrams in enumerate(heartbeats):
        for one in datagrams:
            sender.sendto(one, ("127.0.0.1", port))
        ahead = begun + (number + 1) / len(heartbeats) * seconds - time.monotonic()
        if ahead > 0.002:
            time.sleep(ahead)


def _wait_for_rows(
    database: Database, table: sa.Table, number: int, repeat: Callable[[], None], sequence: int | None = None
) -> None:
    """Wait until a table has this number of rows; with `sequence`, of rows with this one."""
    count = sa.select(sa.func.count()).select_from(table)
    if sequence is not None:
        count = count.where(table.c.sequence == sequence)
    deadline = time.monotonic() + _WARM_SECONDS
    while database.read(lambda c: c.scalar(count)) < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"The health manager does not write {number} rows of {table.name}.")
        repeat()
        time.sleep(0.2)


def _wrong_totals(database: Database, fleet: list[Amphora]) -> int:
    table = tables.listener_statistics.c
    found = dict(map(tuple, database.read(lambda c: c.execute(sa.select(table.listener_id, table.bytes_in)).all())))
    return sum(found.get(listener.id) != one.count for one in fleet for listener in one.tree.listeners)


def main() -> int:
    """Measure once, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--amphorae", type=int, default=3000)
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between two heartbeats of an amphora")
    parser.add_argument("--seconds", type=float, default=15.0, help="time of the measurement")
    parser.add_argument("--database", choices=("sqlite", "mariadb"), default="sqlite")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, an option of [amp_health]")
    print(json.dumps(measure(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
