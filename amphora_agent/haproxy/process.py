# SPDX-License-Identifier: Apache-2.0
"""HAProxy's processes: a master that the service manager runs, and its workers.

Invariant: HAProxy has checked the file that it would read at a start. A start or a reload ends only when the new worker
answers, or when the reason of the failure is known.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from amphora_agent.bundle import File, Limits, Vrrp
from amphora_agent.errors import AgentError, HaproxyError
from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy import (
    config_file,
    drain_removed_servers,
    runtime_state,
    server_state,
    stick_table_sync,
    workers,
)
from amphora_agent.haproxy.config_check import (
    ALERT,
    MIN_READ_SECONDS,
    Check,
    read_timeout,
    start_check,
    translate_error,
)
from amphora_agent.haproxy.config_file import DRAIN_SECONDS, MAX_CONNECTIONS, Document
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.features import Features, probe_features
from amphora_agent.haproxy.partial_check import omit_checked_servers
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import Loaded
from amphora_agent.haproxy.verify import Verifier
from amphora_agent.haproxy.workers import WorkerCounters, Workers
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, write, write_atomically
from amphora_agent.services.control import ServiceManager, ServicePolicy
from amphora_agent.services.health_file import Probe

_log = logging.getLogger(__name__)
SERVICE = "haproxy"
MAX_THREADS = 64
STICK_TABLES_SECONDS = 11.0
STOP_SECONDS, OLD_WORKER_END_SECONDS = 1.0, 2.0
# A frozen HAProxy is detected after 0.6 to 0.75 s.
PROBE_SECONDS, FROZEN_SECONDS = 0.15, 0.6
_POLL_SECONDS = 0.002
_SLOW_POLL_SECONDS = 0.05
# A master is busy during a reload and answers again after it. A master that still reports the old state after this time
# has lost the command: it was just executing itself again (2.6: after the start of its worker).
_LOST_COMMAND_SECONDS = 2.0
# The first thread of the old worker handles the signal of the master in milliseconds, on a busy machine later.
_STOPPING_SECONDS = 2.0
# Alerts without a reason: they refer to an earlier alert.
_EMPTY_PHRASES = ("Fatal errors", "Error(s) found", "exited with code", "failed to start their listeners")


class Haproxy:
    """The one HAProxy of this amphora.

    Args:
        counters: reads the counters of the workers.

    Attributes:
        ended_workers: the number of connections of each old worker that was ended at the limit of old workers. The
            caller removes the entries.
    """

    def __init__(self, paths: Paths, services: ServiceManager, inner: Namespace, counters: WorkerCounters) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._counters = counters
        self.ended_workers: list[int] = []
        self._had_table_entries = True  # a started agent does not know it
        self._features: Features | None = None
        self._read_seconds = MIN_READ_SECONDS
        self.worker = Socket(paths.stats_socket)
        self._verifier = Verifier(self.worker)
        self.master = Socket(paths.master_socket, half_close=True)
        self._templates = Environment(  # noqa: S701 (HAProxy's language, not HTML)
            loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
        )

    # -- files ----------------------------------------------------------------------------------------------

    def compose_document(
        self,
        text: str,
        configuration: Configuration,
        files: Sequence[File],
        directory: Path,
        limits: Limits,
        vrrp: Vrrp | None,
    ) -> Document:
        """Return the content of HAProxy's file for a load balancer's text.

        Args:
            directory: of the TLS files.
        """
        self._read_seconds = read_timeout(configuration)
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        return config_file.compose(
            text,
            files=directory,
            maxconn=min(limits.connections or MAX_CONNECTIONS, config_file.max_connections(configuration)),
            threads=min(limits.threads or threads, threads),
            drain=limits.drain or DRAIN_SECONDS,
            certificates=[file.name for file in files if ("crt", file.name) in configuration.server_files],
            sharing=config_file.peers(vrrp),
        )

    def write_machine_configuration(self) -> None:
        """Write the part of HAProxy's configuration that depends on this machine."""
        text = self._machine_text()
        if _content(self._paths.machine_configuration) != text:
            write_atomically(self._paths.machine_configuration, text)
        if not self._paths.server_state.exists():
            self._write_server_state(server_state.EMPTY)

    def _machine_text(self) -> str:
        return self._templates.get_template("machine.cfg.j2").render(
            stats_socket=self._paths.stats_socket,
            metrics_socket=self._paths.metrics_socket,
            server_state=self._paths.server_state,
            empty=self._paths.empty,
        )

    def is_machine_configuration_intact(self) -> bool:
        """Whether that part is unmodified or missing."""
        return _content(self._paths.machine_configuration) in (None, self._machine_text())

    def _write_server_state(self, text: str) -> None:
        """Write the file without a sync: after a power cut no worker lives that it describes."""
        write_atomically(self._paths.server_state, text, durable=False)

    @contextmanager
    def checking(
        self,
        wanted: Document,
        place: Path,
        configuration: Configuration,
        files: Sequence[File],
        accepted: Configuration | None = None,
    ) -> Iterator[Check]:
        """Start a second HAProxy that checks a document within the block; `Check.wait` returns its result.

        Args:
            place: the file with the document (`write_candidate`).
            accepted: the running configuration, if no reload is needed. The check then omits the servers that both
                configurations have.
        """
        self.write_machine_configuration()
        short = wanted.text if accepted is None else omit_checked_servers(wanted.text, configuration, accepted)
        if short != wanted.text:
            place = self._paths.abridged
            write(place, wanted.head + short, durable=False)
        arguments = ["-f", str(self._paths.machine_configuration), "-f", str(place)]
        process = self._inner.run(start_check, ["haproxy", "-c", *arguments])
        try:
            yield Check(
                process,
                lambda output: translate_error(output, wanted, configuration, files, place),
                self._read_seconds,
            )
        finally:
            process.kill()
            process.communicate()

    def write_candidate(self, wanted: Document, serving: Document | None) -> Path:
        """Write a document to the candidate file and return its path; the caller syncs it.

        An existing file with this document is used again, because the disk may be full.

        Args:
            serving: the content of HAProxy's file.
        """
        if serving == wanted:
            return self._paths.configuration
        if _content(self._paths.previous) == wanted.content:  # the change after this document was interrupted
            self._paths.previous.replace(self._paths.candidate)
        else:
            # Never overwrite it: it may have a second name (`amphora_agent.apply.confirmed_bundle`).
            self._paths.candidate.unlink(missing_ok=True)
            write(self._paths.candidate, wanted.content, durable=False)
        return self._paths.candidate

    # -- processes ------------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        status = self._services.status(SERVICE)
        return status is not None and status.pid is not None

    def start(self) -> None:
        """Start HAProxy with the present files, and wait until it answers."""
        self._had_table_entries = False
        self._verifier.invalidate()
        self.write_machine_configuration()
        self._write_server_state(server_state.EMPTY)
        starts = self._starts()
        self._services.start(SERVICE, self._arguments(), inner=True, policy=self._policy())
        deadline = time.monotonic() + self._read_seconds
        while self._worker_pid() is None:
            status = self._services.status(SERVICE)
            failed = status is None or status.pid is None or status.starts > starts + 1
            if failed or time.monotonic() > deadline:
                why = self._last_alert() or f"no answer within {self._read_seconds:.0f} s"
                self._services.stop(SERVICE, missed=True)
                raise HaproxyError("start HAProxy", why)
            time.sleep(_POLL_SECONDS)  # HAProxy 2.6 notifies systemd only
        # The responder can answer requests for metrics at once, even if this agent crashes now.
        self._counters.sample()

    def ensure_wanted(self) -> None:
        """Keep a running HAProxy running, even if the previous agent crashed while it stopped HAProxy."""
        status = self._services.status(SERVICE)
        if status is not None and status.pid is not None and not status.wanted:
            self._services.start(SERVICE, self._arguments(), inner=True, policy=self._policy())

    def _arguments(self) -> list[str]:
        files = ["-f", str(self._paths.machine_configuration), "-f", str(self._paths.configuration)]
        return ["haproxy", "-W", "-S", f"{self._paths.master_socket},mode,600", *files]

    def _policy(self) -> ServicePolicy:
        """Return how the service manager detects a dead or frozen HAProxy, so that the other node takes over."""
        probe = Probe(str(self._paths.stats_socket), "show version\n", PROBE_SECONDS, FROZEN_SECONDS)
        return ServicePolicy(health=self._paths.haproxy_health, probe=probe)

    def stop(self, drain: float = DRAIN_SECONDS) -> None:
        """Stop HAProxy. Requests may finish within a second; then their connections are closed and counted.

        Args:
            drain: the deadline in seconds of its workers if this agent crashes meanwhile.
        """
        if self.is_running():
            self._services.dismiss(SERVICE)
            with suppress(AgentError, ProcessLookupError):
                self._drain_worker(drain)
        self._services.stop(SERVICE)

    def _drain_worker(self, drain: float) -> None:
        worker = self._worker_pid()
        if worker is not None:
            self._counters.hold(drain)
            # The worker closes its listeners, and our connection keeps it alive. A signal to the master would end the
            # master, and the service manager would restart it.
            os.kill(worker, signal.SIGUSR1)
        self._counters.finish_all(STOP_SECONDS)

    def reload(self, configuration: Configuration, *, drain: float, max_old_workers: int | None) -> None:
        """Replace the worker by one with the present file; the old one ends with its last connection.

        Args:
            drain: seconds that the old worker may go on.
            max_old_workers: the limit after the reload; None for the default.

        Raises:
            HaproxyError: the new worker did not start; the old one still serves.
        """
        self.write_machine_configuration()
        self._await_worker()
        self._end_excess_workers(max_old_workers)
        self._await_stick_tables()
        states = self.worker.ask(runtime_state.SERVERS)
        self._write_server_state(server_state.compose_state(states, configuration))
        self._counters.hold(drain)
        reach(Point.HANDED_OVER)
        old, reloads, starts = self._worker_pid(), self._workers().reloads, self._starts()
        self._verifier.invalidate()
        drained = self._drain_removed_servers(states, configuration)
        try:
            # HAProxy 2.8 answers after the reload.
            self.master.ask("reload", seconds=self._read_seconds)
            reach(Point.RELOADING)
            self._await_reload(old, reloads, starts)
        except HaproxyError:
            self._undo_drain(drained)
            raise
        finally:
            # A start after a crash must not read these states: they are outdated then.
            self._write_server_state(server_state.EMPTY)
            self._counters.sample()

    def _drain_removed_servers(self, states: str, wanted: Configuration) -> list[str]:
        """Stop requests of the present worker to members that the next one does not have; return the commands."""
        sent: list[str] = []
        # A failure costs at most one more request to a removed member. A refused command does not stop the others; a
        # missing answer does, because each further command would wait as long.
        with suppress(HaproxyError):
            for command in drain_removed_servers.drain_commands(wanted, runtime_state.parse_servers(states)):
                sent.append(command)  # HAProxy may carry it out without an answer
                self.worker.ask(command)
        return sent

    def _undo_drain(self, sent: Sequence[str]) -> None:
        with suppress(HaproxyError):  # the worker has crashed, and the next one was not drained
            for command in sent:
                self.worker.ask(drain_removed_servers.ready_command(command))

    def _await_worker(self) -> None:
        """Wait for a HAProxy that was just started by this agent, or after a crash by the service manager."""
        deadline = time.monotonic() + self._read_seconds
        while not self._is_up():
            if not self.is_running() or time.monotonic() > deadline:
                raise HaproxyError("reload HAProxy", self._last_alert() or "it does not run")
            time.sleep(_POLL_SECONDS)

    def _end_excess_workers(self, limit: int | None) -> None:
        """End the oldest workers if the reload would exceed the limit of old workers.

        Workers without a connection end as soon as their counters are read. A short wait for them avoids that quick
        reloads close the connections of another worker.
        """
        deadline = time.monotonic() + OLD_WORKER_END_SECONDS
        while workers.excess_workers(self._workers(), limit) and time.monotonic() < deadline:
            self._counters.sample()
            time.sleep(_SLOW_POLL_SECONDS)
        for pid in workers.excess_workers(self._workers(), limit):
            closed = self._counters.finish(pid, 0.0)
            if closed:
                _log.warning("Worker %d was ended with %d connections: too many old workers", pid, closed)
                self.ended_workers.append(closed)
            deadline = time.monotonic() + OLD_WORKER_END_SECONDS
            while pid in self._workers().replaced:
                if time.monotonic() > deadline:  # the worker is not held, or a connection does not close
                    _log.warning("Worker %d was killed: too many old workers", pid)
                    self.ended_workers.append(closed)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                    break
                time.sleep(_POLL_SECONDS)

    def read_counters(self, servers: Sequence[tuple[str, str]] | None) -> None:
        """Read the counters of the worker.

        Args:
            servers: of these only, by HAProxy's numbers of backend and server; None for all.
        """
        if servers is None:
            self._counters.sample()
        else:
            self._counters.sample_servers(servers)

    def _await_stick_tables(self) -> None:
        """Wait until the worker would pass its stick tables to the next one, if they have entries."""
        deadline = time.monotonic() + STICK_TABLES_SECONDS
        answer = self.worker.ask(stick_table_sync.QUESTION)
        while (
            stick_table_sync.would_lose_entries(answer, has_predecessor=self._had_table_entries)
            and time.monotonic() < deadline
        ):
            time.sleep(_SLOW_POLL_SECONDS)  # HAProxy sends no notification
            answer = self.worker.ask(stick_table_sync.QUESTION)
        self._had_table_entries = stick_table_sync.has_entries(answer)

    def _starts(self) -> int:
        status = self._services.status(SERVICE)
        return status.starts if status is not None else 0

    def _await_reload(self, old: int | None, reloads: int, starts: int) -> None:
        deadline = time.monotonic() + self._read_seconds
        again = time.monotonic() + _LOST_COMMAND_SECONDS
        while time.monotonic() < deadline:
            try:
                found = self._workers()
                count, worker = found.reloads, found.present
                if count == reloads and time.monotonic() > again:
                    self.master.ask("reload", seconds=self._read_seconds)
                    again = time.monotonic() + _LOST_COMMAND_SECONDS
            except HaproxyError:
                count, worker = reloads, None  # the master is executing itself again, or has crashed
                if self._starts() > starts + 1:
                    raise HaproxyError("reload HAProxy", self._last_alert() or "it crashed twice") from None
            if count != reloads and worker is None:
                why = self._last_alert() or "the new worker did not start"
                raise HaproxyError("reload HAProxy", why, "The old worker still serves.")
            if worker not in (None, old) and self._worker_pid() == worker:
                self._await_stopping(old)
                return
            time.sleep(_POLL_SECONDS)  # HAProxy 2.6 answers 'reload' before the reload ends, 2.8 after it
        raise HaproxyError("reload HAProxy", f"no new worker within {self._read_seconds:.0f} s")

    def _await_stopping(self, old: int | None) -> None:
        """Wait until the old worker accepts no connections.

        Until then, both workers accept on the same sockets. The old worker would answer questions and run commands
        that are meant for the new one.
        """
        deadline = time.monotonic() + _STOPPING_SECONDS
        with suppress(HaproxyError):  # a frozen worker accepts no connections
            while old is not None and time.monotonic() < deadline:
                if "\nStopping: 0\n" not in self.master.ask(f"@!{old} show info", seconds=_STOPPING_SECONDS):
                    return
                time.sleep(_POLL_SECONDS)

    def _workers(self) -> Workers:
        # The master does not answer while it reads a configuration.
        answer = self.master.ask("show proc", seconds=self._read_seconds)
        found = workers.parse(answer)
        if found is None:
            raise HaproxyError("ask HAProxy's master for its workers", answer.strip() or "the answer is empty")
        return found

    def _is_up(self) -> bool:
        """Whether the master and the worker answer.

        For about 50 ms after a start (2.6, 2.8 and 3.0) the master executes itself again and refuses connections.
        """
        with suppress(HaproxyError):
            self._workers()  # after a failed reload the master reports no present worker
            return self._worker_pid() is not None
        return False

    def worker_pid(self) -> int | None:
        """Return the pid of the serving worker; None if it does not answer."""
        return self._worker_pid()

    def is_wanted(self) -> bool:
        """Whether HAProxy runs, or the service manager is about to restart it."""
        status = self._services.status(SERVICE)
        return status is not None and (status.pid is not None or status.wanted)

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

    # -- the running configuration --------------------------------------------------------------------------

    def verify(
        self, wanted: Configuration, files: Path | None = None, touched: Collection[tuple[str, str]] | None = None
    ) -> Loaded:
        """Compare the running configuration with the wanted one: `amphora_agent.haproxy.verify`."""
        return self._verifier.verify(wanted, files, touched)

    def features(self) -> Features:
        """Return the features of this HAProxy, which are probed once."""
        if self._features is None:
            self._features = probe_features(self.worker)
        return self._features


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
