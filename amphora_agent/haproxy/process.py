# SPDX-License-Identifier: Apache-2.0
"""HAProxy's processes: a master that the service manager runs, and the workers it makes.

Invariant: the file that HAProxy would read if it started now is one that HAProxy has checked; a start or
reload is over only when the new worker itself answers, or when it is known why none does.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from amphora_agent.bundle import File, Limits
from amphora_agent.errors import AgentError, HaproxyError, MachineError
from amphora_agent.haproxy import document, server_state, tables
from amphora_agent.haproxy.configuration import OWN, Configuration
from amphora_agent.haproxy.document import Document
from amphora_agent.haproxy.refusal import ALERT, refusal
from amphora_agent.haproxy.runtime import Socket
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, write, write_atomically
from amphora_agent.services import Services

SERVICE = "haproxy"
START_SECONDS = 20.0
RELOAD_SECONDS = 30.0
CHECK_SECONDS = 60.0
LARGEST_MAXCONN = 50_000
MOST_THREADS = 64
HARD_STOP_AFTER = "30m"
# In the inner namespace, on its loopback.
RESPONDER_PORT, PEERS_PORT = 9101, 9102
TABLES_SECONDS = 6.0
_POLL_SECONDS = 0.002
_TABLES_POLL_SECONDS = 0.05
_MASTER = re.compile(r"^(?P<pid>\d+)\s+master\s+(?P<reloads>\d+)", re.MULTILINE)
_WORKER = re.compile(r"^(?P<pid>\d+)\s+worker\s+(?P<reloads>\d+)", re.MULTILINE)
# Alerts that say only that an alert before them was fatal.
_EMPTY_PHRASES = ("Fatal errors", "Error(s) found", "exited with code", "failed to start their listeners")
# Set while a server is disabled. Another bit, 0x04, remembers that the file said so, even after it was enabled.
_FORCED_MAINTENANCE = 0x01


@dataclass(frozen=True)
class Loaded:
    """What HAProxy says it runs. Servers: their weight and whether they are in maintenance."""

    frontends: frozenset[str]
    servers: dict[tuple[str, str], tuple[int, bool]]

    def document(self) -> dict[str, object]:
        return {"listeners": sorted(self.frontends), "members": len(self.servers)}


NOTHING = Loaded(frozenset(), {})


def largest_maxconn(configuration: Configuration) -> int:
    """The connections that the limit on files leaves room for.

    Two files each, half a file for the pipes of spliced connections (HAProxy sets aside a pipe for every fourth
    connection, manual 3.2 "maxpipes"), and some for the rest.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return LARGEST_MAXCONN
    binds = sum(line.words[0] == "bind" for section in configuration.sections for line in section.lines)
    spare = 500 + 2 * (len(configuration.servers) + binds)
    return max(100, min(LARGEST_MAXCONN, (hard - spare) // 250 * 100))


class Check:
    """A HAProxy that reads a file."""

    def __init__(self, process: subprocess.Popen[str], refusal: Callable[[str], AgentError]) -> None:
        self._process = process
        self._refusal = refusal

    def end(self) -> None:
        """Wait for its judgement.

        Raises:
            ConfigurationRefused: it says no; with its own first line and the object it is about.
        """
        try:
            output, _ = self._process.communicate(timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise MachineError("check the configuration", f"no answer within {CHECK_SECONDS:.0f} s") from error
        if self._process.returncode != 0:
            raise self._refusal(output)


class Haproxy:
    """The one HAProxy of this amphora.

    Args:
        before_leaving: called when the present worker is about to be replaced; reads its counters.
    """

    def __init__(self, paths: Paths, services: Services, inner: Namespace, before_leaving: Callable[[], None]) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._before_leaving = before_leaving
        self.worker = Socket(paths.stats_socket)
        self.master = Socket(paths.master_socket, half_close=True)
        self._templates = Environment(  # noqa: S701 (HAProxy's language, not HTML)
            loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
        )

    # -- the files ------------------------------------------------------------------------------------------

    def document(
        self, text: str, configuration: Configuration, files: Sequence[File], directory: Path, limits: Limits
    ) -> Document:
        """What HAProxy is to read for a load balancer's text.

        Args:
            directory: of the files that the text names.
        """
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        return document.compose(
            text,
            files=directory,
            maxconn=min(limits.connections or LARGEST_MAXCONN, largest_maxconn(configuration)),
            threads=min(limits.threads or threads, threads),
            certificates=[file.name for file in files if ("crt", file.name) in configuration.server_files],
        )

    def write_machine_configuration(self) -> None:
        """Write the part of HAProxy's configuration that is this machine's."""
        text = self._templates.get_template("machine.cfg.j2").render(
            stats_socket=self._paths.stats_socket,
            server_state=self._paths.server_state,
            own=OWN,
            peers=tables.PEERS,
            peers_port=PEERS_PORT,
            responder_port=RESPONDER_PORT,
            hard_stop_after=HARD_STOP_AFTER,
            empty=self._paths.empty,
        )
        if _content(self._paths.machine_configuration) != text:
            write_atomically(self._paths.machine_configuration, text)
        if not self._paths.server_state.exists():
            self._write_server_state(server_state.EMPTY)

    def _write_server_state(self, text: str) -> None:
        """It speaks of a worker that lives; after a power cut there is none."""
        write_atomically(self._paths.server_state, text, durable=False)

    @contextmanager
    def checking(self, wanted: Document, configuration: Configuration, files: Sequence[File]) -> Iterator[Check]:
        """Have HAProxy read a document, beside what it runs now, and leave it in the candidate file, durably.

        Within the block HAProxy reads; how it ends is what `Check.end` is for.
        """
        self.write_machine_configuration()
        write(self._paths.candidate, wanted.content, durable=True)
        arguments = ["-f", str(self._paths.machine_configuration), "-f", str(self._paths.candidate)]
        process = self._inner.run(_start, ["haproxy", "-c", *arguments])
        try:
            yield Check(process, lambda output: refusal(output, wanted, configuration, files, self._paths.candidate))
        finally:
            process.kill()
            process.communicate()

    # -- the processes --------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        status = self._services.status(SERVICE)
        return status is not None and status.pid is not None

    def start(self) -> None:
        """Run HAProxy with the files as they are, until it answers."""
        self.write_machine_configuration()
        self._write_server_state(server_state.EMPTY)
        master = f"{self._paths.master_socket},mode,600"
        files = ["-f", str(self._paths.machine_configuration), "-f", str(self._paths.configuration)]
        before = self._services.status(SERVICE)
        starts = before.starts if before is not None else 0
        self._services.start(SERVICE, ["haproxy", "-W", "-S", master, *files], inner=True)
        deadline = time.monotonic() + START_SECONDS
        while self._worker_pid() is None:
            status = self._services.status(SERVICE)
            failed = status is None or status.pid is None or status.starts > starts + 1
            if failed or time.monotonic() > deadline:
                why = self._last_alert() or f"no answer within {START_SECONDS:.0f} s"
                self._services.stop(SERVICE)
                raise HaproxyError("start HAProxy", why)
            time.sleep(_POLL_SECONDS)  # HAProxy 2.6 announces its readiness to systemd only

    def stop(self) -> None:
        """End HAProxy."""
        if self.is_running():
            self._before_leaving()
        self._services.stop(SERVICE)

    def reload(self, configuration: Configuration) -> None:
        """Replace the worker by one that has read the file; the old one ends with its last connection.

        Raises:
            HaproxyError: the new worker did not come up; the old one serves on.
        """
        self.write_machine_configuration()
        self._await_tables()
        state = server_state.rewrite(self.worker.ask("show servers state"), configuration)
        self._write_server_state(state)
        self._before_leaving()
        old, reloads = self._worker_pid(), self._generation()[0]
        self.master.ask("reload")
        try:
            self._await_reload(old, reloads)
        finally:
            # A start after a crash must not take these states, by then old, for those of the members.
            self._write_server_state(server_state.EMPTY)

    def _await_tables(self) -> None:
        """Wait until the worker would hand over its stick tables, if there is anything in them."""
        deadline = time.monotonic() + TABLES_SECONDS
        while tables.would_be_lost(self.worker.ask(tables.QUESTION)) and time.monotonic() < deadline:
            time.sleep(_TABLES_POLL_SECONDS)  # HAProxy announces it to nobody

    def _await_reload(self, old: int | None, reloads: int) -> None:
        deadline = time.monotonic() + RELOAD_SECONDS
        while time.monotonic() < deadline:
            try:
                count, worker = self._generation()
            except HaproxyError:
                count, worker = reloads, None  # the master is executing itself anew
            if count != reloads and worker is None:
                why = self._last_alert() or "the new worker did not start"
                raise HaproxyError("reload HAProxy", why, "The old worker serves on.")
            if worker is not None and worker not in (None, old) and self._worker_pid() == worker:
                return
            time.sleep(_POLL_SECONDS)  # HAProxy 2.6 answers 'reload' before it is done; 2.8 after
        raise HaproxyError("reload HAProxy", f"no new worker within {RELOAD_SECONDS:.0f} s")

    def _generation(self) -> tuple[int, int | None]:
        """How often the master has reloaded, and the worker of the last time if there is one."""
        answer = self.master.ask("show proc")
        master = _MASTER.search(answer)
        if master is None:
            raise HaproxyError("ask HAProxy's master for its workers", answer.strip() or "it said nothing")
        workers = [int(m.group("pid")) for m in _WORKER.finditer(answer) if m.group("reloads") == "0"]
        return int(master.group("reloads")), workers[0] if workers else None

    def _worker_pid(self) -> int | None:
        try:
            found = re.search(r"^Pid: (\d+)$", self.worker.ask("show info"), re.MULTILINE)
        except HaproxyError:
            return None
        return int(found.group(1)) if found else None

    def _last_alert(self) -> str:
        alerts = [match.group("text") for line in self._services.log(SERVICE) if (match := ALERT.match(line))]
        specific = [text for text in alerts if not any(phrase in text for phrase in _EMPTY_PHRASES)]
        return (specific or alerts or [""])[-1]

    # -- what it runs ---------------------------------------------------------------------------------------

    def loaded(self) -> Loaded:
        """What HAProxy itself says it runs."""
        rows = [line.split(",", 2) for line in self.worker.ask("show stat -1 1 -1").splitlines()]
        frontends = frozenset(row[0] for row in rows if len(row) > 2 and row[1] == "FRONTEND")
        servers = {}
        for line in self.worker.ask("show servers state").splitlines():
            fields = line.split(" ")
            if len(fields) > 8 and not line.startswith("#") and not fields[1].startswith(OWN):
                servers[fields[1], fields[3]] = (int(fields[7]), bool(int(fields[6]) & _FORCED_MAINTENANCE))
        return Loaded(frontends, servers)

    def verify(self, wanted: Configuration) -> Loaded:
        """Compare what HAProxy runs with what it should.

        Raises:
            HaproxyError: naming the first difference.
        """
        loaded = self.loaded()
        frontends = {name for name, section in wanted.frontends.items() if section.setting("disabled") is None}
        if loaded.frontends != frontends:
            different = min(loaded.frontends ^ frontends)
            raise HaproxyError("confirm the configuration", f"listener {different} is not as wanted")
        live = {name for name, section in wanted.backends.items() if section.setting("disabled") is None}
        servers = {key: (server.weight, server.disabled) for key, server in wanted.servers.items() if key[0] in live}
        for key in servers.keys() | loaded.servers.keys():
            if key not in servers or key not in loaded.servers:
                raise HaproxyError("confirm the configuration", f"member {key[1]} of {key[0]} is not as wanted")
            agent = "agent-check" in wanted.servers[key].keywords
            if loaded.servers[key] != servers[key] and not agent:
                raise HaproxyError(
                    "confirm the configuration",
                    f"member {key[1]} of {key[0]} has (weight, maintenance) {loaded.servers[key]}, not {servers[key]}",
                )
        return loaded


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _start(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
