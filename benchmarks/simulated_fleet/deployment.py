# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the processes of a simulated fleet on loopback: database, control plane, agents.

The control plane is real: `amphora-controller`, `amphora-health-manager`, and octavia-driver-agent with the provider
agent. Each has a database user of its own, so that the server counts its statements.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from amphora_driver import config
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from sandbox import config_files
from sandbox.settings import Settings
from simulated_fleet import backends, galera_cluster, processes
from simulated_fleet.rows import FleetRows

ROOT = Path(__file__).parents[2]
USERS = ("controller", "health", "reporter", "operator")
_READY = 120.0
_STOP = 30.0


@dataclass
class Program:
    """A started process. `ready_cpu` and `ready_wall` are the seconds until it worked."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    port: int = 0
    ready_cpu: float = 0.0
    ready_wall: float = 0.0

    def pids(self) -> list[int]:
        return processes.family(self.popen.pid)


@dataclass
class Options:
    """The options of a deployment: database, heartbeat interval, largest number of controllers, and others."""

    database: str = "mariadb"
    interval: float = 10.0
    controllers: int = 1
    # Hints to other processes over RabbitMQ, beside the local sockets.
    broker: bool = False
    further: dict[str, dict[str, str]] = field(default_factory=dict)
    # octavia-driver-agent as it is installed, without the provider agent: for measurements of its calls.
    plain_agent: bool = False
    # Only the rows of the provider, without digests of bundles: for measurements without agents and Octavia.
    rows_only: bool = False


class Deployment:
    """One deployment in a folder; `run` starts it with a fleet inside the block."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.options = folder, options
        self.programs: dict[str, Program] = {}
        self.server: Any = None
        self.cluster: galera_cluster.GaleraCluster | None = None
        # The URL of each database user.
        self.urls: dict[str, str] = {}
        self.octavia_url = self.broker_url = ""
        # The URLs of the servers themselves: several nodes, or one server.
        self.counters_urls: tuple[str, ...] = ()
        self._database_pid = 0
        self._ports = _free_ports(5 + options.controllers)
        self.agent_port, self.health_port = self._ports[:2]

    @contextmanager
    def run(self, number: int, members: dict[int, int] | None = None) -> Iterator[Deployment]:
        with ExitStack() as stack:
            stack.enter_context(self._database_server())
            if self.options.broker:
                import rabbitmq  # noqa: PLC0415 - only with a broker

                self.broker_url = stack.enter_context(rabbitmq.server()).url
            stack.callback(self.stop)
            self.amphorae = self._prepare(number, members)
            yield self

    def start_all(self, controllers: int | None = None) -> None:
        """Start agents, health manager, controllers and octavia-driver-agent, one after the other."""
        self.start_agents()
        self.start_health_manager()
        for number in range(self.options.controllers if controllers is None else controllers):
            self.start_controller(number)
        self.start_driver_agent()

    def start_other_controllers(self) -> None:
        """Start the controllers that do not run yet."""
        for number in range(self.options.controllers):
            if f"controller{number}" not in self.programs:
                self.start_controller(number)

    def restart_database(self) -> None:
        """Start MariaDB after `server.kill()`."""
        self.server.start()
        self._set_server_options()

    def start_agents(self) -> None:
        program = self._start("agents", "simulated_fleet.agents", str(self.folder))
        self._await(program, lambda: (self.folder / "control").exists() and self.command(do="counts") is not None)

    def start_controller(self, number: int = 0) -> Program:
        port = self._ports[5 + number]
        conf = self._configure(f"controller{number}", "controller", {"amp_status_page": {"bind_port": str(port)}})
        return self._start_service(f"controller{number}", "amphora_driver.controller.service", conf, port)

    def start_health_manager(self) -> Program:
        conf = self._configure("health", "health", {})
        return self._start_service("health", "amphora_driver.health.service", conf, self._ports[2])

    def start_driver_agent(self, *, prepared: bool = False) -> Program:
        """Start octavia-driver-agent. `prepared`: with the sandbox's preparation before the first fork."""
        conf = self._configure("reporter", "reporter", {})
        if not self.options.plain_agent:
            return self._start_service("reporter", "sandbox.octavia_start", conf, self._ports[3])
        arguments = ("--config-file", str(self.settings.octavia_configuration))
        module = "sandbox.octavia_start" if prepared else "simulated_fleet.plain_driver_agent"
        program = self._start("reporter", module, *(() if prepared else arguments), conf=conf)
        names = ("status", "stats", "get")
        self._await(program, lambda: all((self.folder / f"run/{name}.sock").exists() for name in names))
        return program

    def server_pids(self) -> dict[str, list[int]]:
        """Return the processes of the database servers, and of the balancer in front of them if there is one."""
        if self.cluster is not None:
            return self.cluster.pids()
        return {"database": processes.family(self._database_pid)} if self._database_pid else {}

    def command(self, **request: Any) -> Any:
        """Let the process of the agents execute a command."""
        with suppress(ConnectionRefusedError, FileNotFoundError):
            return backends.command(str(self.folder / "control"), **request)
        return None

    def open_database(self, user: str = "operator") -> Database:
        return Database(self.urls[user])

    def stop(self) -> None:
        """Stop all programs, in the reverse order of their start."""
        for name in reversed(list(self.programs)):
            self.stop_program(name)

    def stop_program(self, name: str) -> None:
        program = self.programs.pop(name)
        everyone = program.pids()
        program.popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            program.popen.wait(_STOP)
        for pid in everyone:
            if _belongs_to(pid, self.folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        program.popen.wait(_STOP)

    def environment(self, conf: Path) -> dict[str, str]:
        paths = [str(ROOT), str(ROOT / "sandbox"), str(ROOT / "benchmarks"), str(self.folder / "plugins")]
        return {
            **os.environ,
            "PYTHONPATH": ":".join(paths),
            config.opts.FILE_VARIABLE: str(conf),
            "OCTAVIA_CONF": str(self.settings.octavia_configuration),
            "OS_CLIENT_CONFIG_FILE": str(self.settings.clouds),
            backends.VARIABLE: str(self.folder / "control"),
        }

    # --- preparation --------------------------------------------------------------------------------------------------

    @contextmanager
    def _database_server(self) -> Iterator[None]:
        sys.path.append(str(ROOT / "tests"))
        kind = self.options.database
        if kind == "sqlite":
            self.urls = dict.fromkeys(USERS, f"sqlite:///{self.folder}/fleet.sqlite")
            self.octavia_url = f"sqlite:///{self.folder}/octavia.sqlite"
            self.counters_urls = (self.urls["operator"],)
            yield
        elif kind == "mariadb":
            import mariadb  # noqa: PLC0415 - only for this kind

            with mariadb.killable("fleet", "octavia") as self.server:
                fleet, self.octavia_url = self.server.urls
                self.counters_urls = (fleet,)
                self._set_server_options()
                for user in USERS:
                    _execute(
                        fleet,
                        f"CREATE USER '{user}'@'localhost' IDENTIFIED BY ''",
                        f"GRANT ALL ON fleet.* TO '{user}'@'localhost'",
                    )
                    self.urls[user] = fleet.replace("//root@", f"//{user}@")
                yield
        elif kind == "galera":
            with galera_cluster.cluster(USERS, "fleet", "octavia") as self.cluster:
                self.urls = {user: self.cluster.url(0, user, "fleet") for user in USERS}
                self.octavia_url = self.cluster.url(galera_cluster.OCTAVIA, "root", "octavia")
                self.counters_urls = self.cluster.node_urls("fleet")
                yield
        else:
            import postgresql  # noqa: PLC0415 - only for this kind

            with postgresql.server("fleet", "octavia") as (fleet, self.octavia_url):
                for user in USERS:
                    _execute(fleet, f"CREATE ROLE {user} LOGIN SUPERUSER")
                    self.urls[user] = fleet.replace("//root@", f"//{user}@")
                self.counters_urls = (fleet,)
                folder = Path(fleet.partition("host=")[2])
                self._database_pid = int((folder / "data/postmaster.pid").read_text().split()[0])
                yield

    def _set_server_options(self) -> None:
        """Set the options that the server forgets at its end, and note its process."""
        _execute(self.counters_urls[0], "SET GLOBAL userstat = 1", "SET GLOBAL innodb_buffer_pool_size = 536870912")
        self._database_pid = int((self.server.data.parent / "pid").read_text())

    def _prepare(self, number: int, members: dict[int, int] | None) -> int:
        """Write configuration, certificates and rows; return the number of amphorae."""
        self.settings = Settings(
            state=str(self.folder),
            prefix="fleet",
            octavia_port=self._ports[4],
            network_port=self._ports[4],
            status_port=0,
            agent_python=sys.executable,
            store_url=self.urls["operator"],
            octavia_url=self.octavia_url,
            broker_url=self.broker_url or None,
            octavia_options={"driver_agent": {"enabled_provider_agents": ""}} if self.options.plain_agent else {},
        )
        config_files.write(self.settings)
        (self.folder / "run/sockets").mkdir(parents=True, exist_ok=True)
        self._write_entry_points()
        self.configuration = self._configure("operator", "operator", {})
        agents = {"port": self.agent_port, "interval": self.options.interval}
        etc = self.folder / "etc"
        agents |= {"targets": [f"127.0.0.1:{self.health_port}"], "client_ca": str(etc / "controller_ca.pem")}
        agents |= {"ca_certificate": str(etc / "amphora_ca.pem"), "ca_private_key": str(etc / "amphora_ca.key")}
        (self.folder / "agents.json").write_text(json.dumps(agents))
        octavia = None if self.options.rows_only else self._write_octavia_rows(number, members)
        migrate.upgrade(self.urls["operator"])
        sys.path.append(str(self.folder / "plugins"))
        database = self.open_database()
        os.environ[backends.VARIABLE] = str(self.folder / "control")
        try:
            rows = FleetRows(config.load([str(self.configuration)]), database, self.folder)
            count = rows.insert(number, members, bundles=not self.options.rows_only)
        finally:
            database.dispose()
        if octavia is None:
            return count
        _, errors = octavia.communicate()
        assert octavia.returncode == 0, errors[-3000:]
        self._update_table_statistics()
        return count

    def _update_table_statistics(self) -> None:
        """Let the servers analyze the tables, whose rows were inserted at once. Rows of a real fleet grow slowly.

        PostgreSQL itself analyzes a changed table within a minute (autovacuum), so commands before that would use other
        plans than commands after it.
        """
        if self.options.database in {"mariadb", "galera"}:
            url = self.counters_urls[0]
            for database_name in ("fleet", "octavia"):
                _execute(url, f"ANALYZE TABLE {', '.join(_tables(url, database_name))}")
        elif self.options.database == "postgresql":
            for url in (self.counters_urls[0], self.octavia_url):
                _execute(url, "ANALYZE")

    def _write_octavia_rows(self, number: int, members: dict[int, int] | None) -> subprocess.Popen[str]:
        """Start the process that writes Octavia's rows, beside those of the provider."""
        words = ["-m", "simulated_fleet.octavia_rows", str(number), json.dumps(members or {})]
        environment = self.environment(self.configuration)
        return subprocess.Popen([sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True)

    def _write_entry_points(self) -> None:
        folder = self.folder / "plugins/simulated_fleet-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-fleet\nVersion: 0\n")
        (folder / "entry_points.txt").write_text(
            "[amphora_driver.compute]\nfleet = simulated_fleet.backends:FleetCompute\n"
            "[amphora_driver.network]\nfleet = simulated_fleet.backends:FleetNetwork\n"
        )

    def _configure(self, name: str, user: str, own: dict[str, dict[str, str]]) -> Path:
        """Write the configuration of a process: the sandbox's, with the differences of a fleet."""
        parser = ConfigParser(interpolation=None, default_section="no default section")
        parser.read(self.settings.driver_configuration)
        for group in ("amp_controller", "amp_failover", "amp_status_page"):
            parser.remove_section(group)
        interval = self.options.interval
        options: dict[str, dict[str, str]] = {
            "amp_database": {"connection": self.urls[user]},
            "amp_compute": {"driver": "fleet"},
            "amp_network": {"driver": "fleet"},
            "amp_agent": {"port": str(self.agent_port)},
            "amp_health": {
                "bind_address": "127.0.0.1",
                "bind_port": str(self.health_port),
                "interval": str(interval),
                "targets": f"127.0.0.1:{self.health_port}",
            },
            "amp_failover": {"silent_after": str(max(7.0, 2.4 * interval))},
            "amp_status_page": {"health_bind_port": str(self._ports[2]), "provider_agent_port": str(self._ports[3])},
        }
        hosted = self.cluster.options(name, user, "fleet", self.folder / "run/sockets") if self.cluster else {}
        for group, values in [*options.items(), *hosted.items(), *self.options.further.items(), *own.items()]:
            if not parser.has_section(group):
                parser.add_section(group)
            for key, value in values.items():
                parser.set(group, key, value)
        path = self.folder / f"etc/{name}.conf"
        with path.open("w", encoding="utf-8") as file:
            parser.write(file)
        return path

    # --- programs -----------------------------------------------------------------------------------------------------

    def _start_service(self, name: str, module: str, conf: Path, port: int, *arguments: str) -> Program:
        program = self._start(name, module, *arguments, conf=conf, port=port)
        self._await(program, lambda: is_healthy(port))
        return program

    def _start(self, name: str, module: str, *arguments: str, conf: Path | None = None, port: int = 0) -> Program:
        log = self.folder / f"log/{name}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=self.environment(conf or self.configuration), stdout=output, stderr=output, cwd=self.folder,
            )  # fmt: skip
        self.programs[name] = Program(name, popen, log, port)
        return self.programs[name]

    def _await(self, program: Program, is_ready: Any) -> None:
        begun = time.monotonic()
        while not is_ready():
            ended = program.popen.poll() is not None
            assert not ended, f"{program.name} ended: {program.log.read_text()[-3000:]}"
            late = time.monotonic() > begun + _READY
            assert not late, f"{program.name} is not ready: {program.log.read_text()[-3000:]}"
            time.sleep(0.05)
        program.ready_wall = time.monotonic() - begun
        program.ready_cpu = processes.cpu_seconds(program.pids())


def is_healthy(port: int) -> bool:
    """Whether the process with this status page works."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _belongs_to(pid: int, folder: Path) -> bool:
    """Whether a process is one of this deployment, and not a later one with the same id."""
    with suppress(OSError):
        return str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in made]


def _execute(url: str, *statements: str) -> None:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for one in statements:
            connection.exec_driver_sql(one)
    engine.dispose()


def _tables(url: str, name: str) -> list[str]:
    engine = sa.create_engine(url)
    query = f"SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = '{name}'"
    with engine.connect() as connection:
        found = [f"{name}.{row[0]}" for row in connection.exec_driver_sql(query)]
    engine.dispose()
    return found
