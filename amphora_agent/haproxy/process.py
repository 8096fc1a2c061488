# SPDX-License-Identifier: Apache-2.0
"""HAProxy's processes: a master that the service manager runs, and its workers.

Invariant: HAProxy has accepted each line of the file that it would read at a start. A start or a reload ends when the
new worker answers, or when the reason of the failure is known.
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
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from amphora_agent.bundle import Bundle, File
from amphora_agent.errors import AgentError, HaproxyError
from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy import config_check, config_file, runtime_state, worker_replacement, workers
from amphora_agent.haproxy.config_check import ALERT, Check
from amphora_agent.haproxy.config_file import DRAIN_SECONDS, MAX_CONNECTIONS, Document
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.features import Features, probe_features
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import Loaded
from amphora_agent.haproxy.server_numbers import Usage
from amphora_agent.haproxy.verify import Verifier
from amphora_agent.haproxy.workers import Workers
from amphora_agent.log_settings import LOG_ADDRESS, LOG_PORT
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, read_if_exists, write, write_atomically
from amphora_agent.services.control import ServiceManager, ServicePolicy
from amphora_agent.services.health_file import Probe

if TYPE_CHECKING:
    from amphora_agent.stats.collector import Collector

_log = logging.getLogger(__name__)
SERVICE = "haproxy"
MAX_THREADS = 64
STICK_TABLES_SECONDS = 11.0
STOP_SECONDS, OLD_WORKER_END_SECONDS = 1.0, 2.0
# HAProxy is probed every PROBE_SECONDS. Without an answer for FROZEN_SECONDS, HAProxy counts as frozen.
PROBE_SECONDS, FROZEN_SECONDS = 0.15, 0.6
_POLL_SECONDS = 0.002
_SLOW_POLL_SECONDS = 0.05
# The agent repeats a reload command if HAProxy's count of reloads stays unchanged for this number of seconds. HAProxy
# 2.6 may lose a command while its master executes itself again.
_LOST_COMMAND_SECONDS = 2.0
# Seconds after a reload within which HAProxy's old worker must stop accepting connections.
_STOPPING_SECONDS = 2.0
# Seconds after a failed reload within which HAProxy's old worker must accept connections again.
_OPENING_SECONDS = 10.0
# HAProxy's alerts without a reason. If an earlier alert contains a reason, the error message quotes the earlier alert
# instead.
_EMPTY_PHRASES = ("Fatal errors", "Error(s) found", "exited with code", "failed to start their listeners")


class Haproxy:
    """The one HAProxy of this amphora.

    ``ended_workers`` has the number of connections of each old worker that exceeded the limit of old workers. The
    caller removes the entries.
    """

    def __init__(self, paths: Paths, services: ServiceManager, inner: Namespace, counters: Collector) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self.counters = counters
        self.ended_workers: list[int] = []
        # The state of HAProxy's stick tables is unknown after a restart of the agent, so entries are assumed.
        self._had_table_entries = True
        self._features: Features | None = None
        self._read_seconds = config_check.MIN_READ_SECONDS
        self.worker = Socket(paths.stats_socket)
        self._verifier = Verifier(self.worker)
        self.master = Socket(paths.master_socket, half_close=True)
        self._templates = Environment(  # noqa: S701 (HAProxy's language, not HTML)
            loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
        )

    def compose_document(self, text: str, configuration: Configuration, bundle: Bundle, directory: Path) -> Document:
        """Return the content of HAProxy's file for the text of a bundle with TLS files in a directory."""
        self._read_seconds = config_check.read_timeout(configuration)
        limits = bundle.limits
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        return config_file.compose(
            text,
            files=directory,
            maxconn=min(limits.connections or MAX_CONNECTIONS, config_file.max_connections(configuration)),
            threads=min(limits.threads or threads, threads),
            drain=limits.drain or DRAIN_SECONDS,
            certificates=[file.name for file in bundle.files if ("crt", file.name) in configuration.server_files],
            sharing=config_file.peers(bundle.vrrp),
        )

    def write_machine_configuration(self) -> None:
        """Write the part of HAProxy's configuration that depends on this machine."""
        text = self._machine_text()
        if read_if_exists(self._paths.machine_configuration) != text:
            write_atomically(self._paths.machine_configuration, text)
        if not self._paths.server_state.exists():
            self._write_server_state(worker_replacement.NO_STATES)

    def _machine_text(self) -> str:
        return self._templates.get_template("machine.cfg.j2").render(
            stats_socket=self._paths.stats_socket,
            metrics_socket=self._paths.metrics_socket,
            server_state=self._paths.server_state,
            empty=self._paths.empty,
            log_target=f"{LOG_ADDRESS}:{LOG_PORT}",
        )

    def is_machine_configuration_intact(self) -> bool:
        """Whether the machine's part of the configuration is unmodified or missing."""
        return read_if_exists(self._paths.machine_configuration) in (None, self._machine_text())

    def _write_server_state(self, text: str) -> None:
        """Write the file without a sync, because a power cut ends all workers."""
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
        """Start a second HAProxy that checks a document in the file `place` within the block.

        `Check.wait` returns the result. `accepted` is the running configuration, if no reload is needed; the check
        omits the servers of both.
        """
        self.write_machine_configuration()
        short = wanted.text
        if accepted is not None:
            short = config_check.omit_checked_servers(short, configuration, accepted)
        if short != wanted.text:
            place = self._paths.abridged
            write(place, wanted.head + short, durable=False)
        arguments = ["-f", str(self._paths.machine_configuration), "-f", str(place)]
        process = self._inner.run(config_check.start_check, ["haproxy", "-c", *arguments])

        def error(output: str) -> AgentError:
            return config_check.translate_error(output, wanted, configuration, files, place)

        try:
            yield Check(process, error, self._read_seconds)
        finally:
            process.kill()
            process.communicate()

    def write_candidate(self, wanted: Document, serving: Document | None) -> Path:
        """Write a document to the candidate file without a sync, and return the path.

        If a file with this document exists, such as HAProxy's own file (`serving`), the disk may be full.
        """
        if serving == wanted:
            return self._paths.configuration
        if read_if_exists(self._paths.previous) == wanted.content:
            # An interrupted change left a file with the wanted content. The agent renames this file, because a full
            # disk may prevent a new file.
            self._paths.previous.replace(self._paths.candidate)
        else:
            # The old candidate file may be a hard link to the stored text of the confirmed bundle. A write into the
            # candidate file would change this text, so the agent creates a new file.
            self._paths.candidate.unlink(missing_ok=True)
            write(self._paths.candidate, wanted.content, durable=False)
        return self._paths.candidate

    def is_running(self) -> bool:
        status = self._services.status(SERVICE)
        return status is not None and status.pid is not None

    def start(self) -> None:
        """Start HAProxy with the present files, and wait until HAProxy answers."""
        self._had_table_entries = False
        self._verifier.invalidate()
        self.write_machine_configuration()
        self._write_server_state(worker_replacement.NO_STATES)
        starts = self._starts()
        self._services.start(SERVICE, self._arguments(), inner=True, policy=self._policy())
        deadline = time.monotonic() + self._read_seconds
        while self.worker_pid() is None:
            status = self._services.status(SERVICE)
            failed = status is None or status.pid is None or status.starts > starts + 1
            if failed or time.monotonic() > deadline:
                why = self._last_alert() or f"no answer within {self._read_seconds:.0f} s"
                self._services.stop(SERVICE, missed=True)
                raise HaproxyError("start HAProxy", why)
            # HAProxy 2.6 reports a completed start to systemd only, so the agent polls HAProxy.
            time.sleep(_POLL_SECONDS)
        # The agent reads the counters immediately, because the responder serves no metrics before the first reading.
        self.counters.sample()

    def ensure_wanted(self) -> None:
        """Make the service manager keep HAProxy running after an interrupted stop."""
        status = self._services.status(SERVICE)
        if status is not None and status.pid is not None and not status.wanted:
            self._services.start(SERVICE, self._arguments(), inner=True, policy=self._policy())

    def _arguments(self) -> list[str]:
        files = ["-f", str(self._paths.machine_configuration), "-f", str(self._paths.configuration)]
        return ["haproxy", "-W", "-S", f"{self._paths.master_socket},mode,600", *files]

    def _policy(self) -> ServicePolicy:
        probe = Probe(str(self._paths.stats_socket), "show version\n", PROBE_SECONDS, FROZEN_SECONDS)
        return ServicePolicy(health=self._paths.haproxy_health, probe=probe)

    def stop(self, drain: float = DRAIN_SECONDS) -> None:
        """Stop HAProxy. After a second, HAProxy closes and counts the connections of running requests.

        `drain` limits the time of the workers, in seconds, if this agent crashes meanwhile.
        """
        if self.is_running():
            self._services.dismiss(SERVICE)
            with suppress(AgentError, ProcessLookupError):
                worker = self.worker_pid()
                if worker is not None:
                    self.counters.hold(drain)
                    # SIGUSR1 makes a worker close its listeners. HAProxy's master must not get the signal, because the
                    # master would end, and the service manager would restart HAProxy.
                    os.kill(worker, signal.SIGUSR1)
                self.counters.finish_all(STOP_SECONDS)
        self._services.stop(SERVICE)

    def reload(self, configuration: Configuration, *, drain: float, max_old_workers: int | None) -> None:
        """Replace the worker; the old worker ends with its last connection.

        `drain` limits the time of the old worker in seconds. `max_old_workers` None is the default limit after the
        reload. Raises HaproxyError if the new worker did not start; the old worker then still serves.
        """
        self.write_machine_configuration()
        self._await_worker()
        self._end_excess_workers(max_old_workers)
        self._await_stick_tables()
        states = self.worker.ask(runtime_state.SERVERS)
        self._write_server_state(worker_replacement.compose_states(states, configuration))
        self.counters.hold(drain)
        reach(Point.HANDED_OVER)
        old, reloads, starts = self.worker_pid(), self._workers().reloads, self._starts()
        self._verifier.invalidate()
        drained = self._drain_removed_servers(states, configuration)
        try:
            self.master.ask("reload", seconds=self._read_seconds)
            reach(Point.RELOADING)
            self._await_reload(old, reloads, starts)
        except HaproxyError:
            self._await_open_listeners()
            with suppress(HaproxyError):
                # The reload has failed, so the drained servers must get requests again. If the worker has crashed, the
                # commands fail, but the new worker has no drained servers.
                for command in drained:
                    self.worker.ask(worker_replacement.ready_command(command))
            raise
        finally:
            # The agent empties the file of server states, because the states are soon outdated, and HAProxy would read
            # the file after a crash.
            self._write_server_state(worker_replacement.NO_STATES)
            self.counters.sample()

    def _drain_removed_servers(self, states: str, wanted: Configuration) -> list[str]:
        """Stop requests of the old worker to removed members; return the commands."""
        sent: list[str] = []
        # The first error ends the loop, because each unanswered command takes a full time-out. As a result, the old
        # worker may still send requests to a removed server.
        with suppress(HaproxyError):
            for command in worker_replacement.drain_commands(wanted, runtime_state.parse_servers(states)):
                # HAProxy may carry out a command without answering, so each command is recorded before it is sent.
                sent.append(command)
                self.worker.ask(command)
        return sent

    def _await_worker(self) -> None:
        """Wait for a HAProxy that the agent or the service manager has just started."""
        deadline = time.monotonic() + self._read_seconds
        while not self._is_up():
            if not self.is_running() or time.monotonic() > deadline:
                raise HaproxyError("reload HAProxy", self._last_alert() or "it does not run")
            time.sleep(_POLL_SECONDS)

    def _end_excess_workers(self, limit: int | None) -> None:
        """End the oldest workers if the reload would exceed the limit of old workers.

        Workers without a connection end as soon as the agent has read their counters. A short wait for them keeps
        connections of other workers open.
        """
        deadline = time.monotonic() + OLD_WORKER_END_SECONDS
        while workers.excess_workers(self._workers(), limit) and time.monotonic() < deadline:
            self.counters.sample()
            time.sleep(_SLOW_POLL_SECONDS)
        for pid in workers.excess_workers(self._workers(), limit):
            closed = self.counters.finish(pid, 0.0)
            if closed:
                _log.warning(
                    "The agent ended HAProxy's old worker with process id %d and closed its %d connections, because "
                    "HAProxy has too many old workers",
                    pid,
                    closed,
                )
                self.ended_workers.append(closed)
            deadline = time.monotonic() + OLD_WORKER_END_SECONDS
            while pid in self._workers().replaced:
                if time.monotonic() > deadline:
                    # The old worker waits until all clients and other processes have disconnected, so the agent kills
                    # the worker.
                    _log.warning(
                        "The agent kills HAProxy's old worker with process id %d, because HAProxy has too many old "
                        "workers and this worker does not end",
                        pid,
                    )
                    self.ended_workers.append(closed)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                    break
                time.sleep(_POLL_SECONDS)

    def _await_stick_tables(self) -> None:
        """Wait until the worker can pass the entries of its stick tables to the next one."""
        deadline = time.monotonic() + STICK_TABLES_SECONDS
        had = self._had_table_entries
        answer = self.worker.ask(worker_replacement.TABLES)
        while worker_replacement.would_lose_entries(answer, has_predecessor=had) and time.monotonic() < deadline:
            # HAProxy sends no notification when a stick table changes, so its worker is polled.
            time.sleep(_SLOW_POLL_SECONDS)
            answer = self.worker.ask(worker_replacement.TABLES)
        self._had_table_entries = worker_replacement.has_entries(answer)

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
                # During a reload, HAProxy's master executes itself again and does not answer. So a missing answer does
                # not mean a failed reload.
                count, worker = reloads, None
                if self._starts() > starts + 1:
                    raise HaproxyError("reload HAProxy", self._last_alert() or "it crashed twice") from None
            if count != reloads and worker is None:
                why = self._last_alert() or "the new worker did not start"
                raise HaproxyError("reload HAProxy", why, "The old worker still serves.")
            if worker not in (None, old) and self.worker_pid() == worker:
                self._await_stopping(old)
                return
            # HAProxy 2.6 answers the command `reload` before the new worker serves, so the agent polls HAProxy.
            time.sleep(_POLL_SECONDS)
        raise HaproxyError("reload HAProxy", f"no new worker within {self._read_seconds:.0f} s")

    def _await_open_listeners(self) -> None:
        """Wait until the old worker accepts connections again after a failed reload.

        A new worker that cannot bind an address asks the old worker to pause its listeners, and tries for two seconds.
        A verification during the pause would find a difference and cause a needless reload.
        """
        deadline = time.monotonic() + _OPENING_SECONDS
        while time.monotonic() < deadline:
            # A paused worker also pauses its statistics socket, and may refuse the agent's connection. So the loop
            # ignores the error and asks again.
            with suppress(HaproxyError):
                if not runtime_state.closed_listeners(self.worker.ask(runtime_state.PROXIES)):
                    return
            if not self.is_running():
                return
            time.sleep(_POLL_SECONDS)

    def _await_stopping(self, old: int | None) -> None:
        """Wait until the old worker accepts no connections.

        Until then both workers accept on the same sockets, and the old one may receive commands for the new one.
        """
        deadline = time.monotonic() + _STOPPING_SECONDS
        with suppress(HaproxyError):
            # The wait ends without an error if an old worker does not answer, because a frozen worker accepts no
            # connections.
            while old is not None and time.monotonic() < deadline:
                if "\nStopping: 0\n" not in self.master.ask(f"@!{old} show info", seconds=_STOPPING_SECONDS):
                    return
                time.sleep(_POLL_SECONDS)

    def _workers(self) -> Workers:
        # HAProxy's master does not answer while HAProxy reads its configuration, so the time-out is as long as such a
        # read.
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
            # The call shows that HAProxy's master answers. Its list of workers is not used, because the list contains
            # no worker after a failed reload. So the agent asks the worker itself.
            self._workers()
            return self.worker_pid() is not None
        return False

    def is_wanted(self) -> bool:
        """Whether HAProxy runs, or the service manager is about to restart HAProxy."""
        status = self._services.status(SERVICE)
        return status is not None and (status.pid is not None or status.wanted)

    def worker_pid(self) -> int | None:
        """Return the pid of the serving worker; None without an answer."""
        try:
            found = re.search(r"^Pid: (\d+)$", self.worker.ask("show info"), re.MULTILINE)
        except HaproxyError:
            return None
        return int(found.group(1)) if found else None

    def _last_alert(self) -> str:
        alerts = [match.group("text") for line in self._services.log(SERVICE) if (match := ALERT.match(line))]
        specific = [text for text in alerts if not any(phrase in text for phrase in _EMPTY_PHRASES)]
        return (specific or alerts or [""])[-1]

    def verify(
        self, wanted: Configuration, files: Path | None = None, touched: Collection[tuple[str, str]] | None = None
    ) -> Loaded:
        return self._verifier.verify(wanted, files, touched)

    def usage(self, backend: str, names: Collection[str]) -> dict[str, Usage] | None:
        return self._verifier.usage(backend, names)

    def features(self) -> Features:
        if self._features is None:
            self._features = probe_features(self.worker)
        return self._features
