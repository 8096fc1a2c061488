# SPDX-License-Identifier: Apache-2.0
"""HAProxy's processes: a master that the service manager runs, and the workers it makes.

Invariant: the file that HAProxy would read if it started now is one that HAProxy has checked; a start or
reload is over only when the new worker itself answers, or when it is known why none does.
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
    features,
    runtime_state,
    server_state,
    stick_table_sync,
    workers,
)
from amphora_agent.haproxy.check_errors import ALERT, refusal
from amphora_agent.haproxy.config_check import Check, read
from amphora_agent.haproxy.config_file import DRAIN_SECONDS, Document
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.features import Abilities
from amphora_agent.haproxy.limits import LARGEST_MAXCONN, LEAST_PATIENCE, largest_maxconn, patience
from amphora_agent.haproxy.partial_check import abridge
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.runtime_state import Loaded
from amphora_agent.haproxy.verify import Inspection
from amphora_agent.haproxy.worker_accounting import Accounts
from amphora_agent.haproxy.workers import Workers
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, write, write_atomically
from amphora_agent.services.control import ServiceManager, ServicePolicy
from amphora_agent.services.health_file import Probe

_log = logging.getLogger(__name__)
SERVICE = "haproxy"
MOST_THREADS = 64
TABLES_SECONDS = 11.0
STOP_SECONDS, LEAVING_SECONDS = 1.0, 2.0
# A HAProxy that freezes is known to be frozen 0.6 to 0.75 s later.
PROBE_SECONDS, FROZEN_SECONDS = 0.15, 0.6
_POLL_SECONDS = 0.002
_TABLES_POLL_SECONDS = 0.05
# A master that was told to reload is busy at once, and answers again when it is done. One that answers after this time
# as if nothing had been said was executing itself anew (2.6: when its worker has come up), and did not hear it.
_UNHEARD_SECONDS = 2.0
# Alerts that say only that an alert before them was fatal.
_EMPTY_PHRASES = ("Fatal errors", "Error(s) found", "exited with code", "failed to start their listeners")


class Haproxy:
    """The one HAProxy of this amphora.

    Args:
        accounts: who reads its counters.

    Attributes:
        ended: for each replaced worker that was ended to make room, how many connections it had. Whoever counts
            them removes them.
    """

    def __init__(self, paths: Paths, services: ServiceManager, inner: Namespace, accounts: Accounts) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._accounts = accounts
        self.ended: list[int] = []
        self._bequeathed = True  # nobody knows what an agent before this one has seen
        self._abilities: Abilities | None = None
        self._patience = LEAST_PATIENCE
        self.worker = Socket(paths.stats_socket)
        self._inspection = Inspection(self.worker)
        self.master = Socket(paths.master_socket, half_close=True)
        self._templates = Environment(  # noqa: S701 (HAProxy's language, not HTML)
            loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
        )

    # -- the files ------------------------------------------------------------------------------------------

    def document(
        self,
        text: str,
        configuration: Configuration,
        files: Sequence[File],
        directory: Path,
        limits: Limits,
        vrrp: Vrrp | None,
    ) -> Document:
        """What HAProxy is to read for a load balancer's text.

        Args:
            directory: of the files that the text names.
        """
        self._patience = patience(configuration)
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        return config_file.compose(
            text,
            files=directory,
            maxconn=min(limits.connections or LARGEST_MAXCONN, largest_maxconn(configuration)),
            threads=min(limits.threads or threads, threads),
            drain=limits.drain or DRAIN_SECONDS,
            certificates=[file.name for file in files if ("crt", file.name) in configuration.server_files],
            sharing=config_file.peers(vrrp),
        )

    def write_machine_configuration(self) -> None:
        """Write the part of HAProxy's configuration that is this machine's."""
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

    def is_machine_configuration_ours(self) -> bool:
        """Whether that part is as it was written; one that is not there yet is."""
        return _content(self._paths.machine_configuration) in (None, self._machine_text())

    def _write_server_state(self, text: str) -> None:
        """It speaks of a worker that lives; after a power cut there is none."""
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
        """Have HAProxy read a document, beside what it runs now.

        Within the block HAProxy reads; how it ends is what `Check.end` is for.

        Args:
            place: where it is (`lay_down`).
            accepted: what HAProxy runs, if that differs in nothing that takes a new worker: servers that both have it
                has read, and does not read again (`abridged`).
        """
        self.write_machine_configuration()
        short = wanted.text if accepted is None else abridge(wanted.text, configuration, accepted)
        if short != wanted.text:
            place = self._paths.abridged
            write(place, wanted.head + short, durable=False)
        arguments = ["-f", str(self._paths.machine_configuration), "-f", str(place)]
        process = self._inner.run(read, ["haproxy", "-c", *arguments])
        try:
            yield Check(process, lambda output: refusal(output, wanted, configuration, files, place), self._patience)
        finally:
            process.kill()
            process.communicate()

    def lay_down(self, wanted: Document, serving: Document | None) -> Path:
        """Have a document's file, with room on the disk; `sync` is left to do.

        One that is there already takes no room: on a full disk this matters.

        Args:
            serving: what is in HAProxy's file.
        """
        if serving == wanted:
            return self._paths.configuration
        if _content(self._paths.previous) == wanted.content:  # a change was interrupted, and this one came before it
            self._paths.previous.replace(self._paths.candidate)
        else:
            # It may have another name: `amphora_agent.apply.confirmed_bundle`.
            self._paths.candidate.unlink(missing_ok=True)
            write(self._paths.candidate, wanted.content, durable=False)
        return self._paths.candidate

    # -- the processes --------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        status = self._services.status(SERVICE)
        return status is not None and status.pid is not None

    def start(self) -> None:
        """Run HAProxy with the files as they are, until it answers."""
        self._bequeathed = False
        self._inspection.forget()
        self.write_machine_configuration()
        self._write_server_state(server_state.EMPTY)
        starts = self._starts()
        self._services.start(SERVICE, self._arguments(), inner=True, policy=self._policy())
        deadline = time.monotonic() + self._patience
        while self._worker_pid() is None:
            status = self._services.status(SERVICE)
            failed = status is None or status.pid is None or status.starts > starts + 1
            if failed or time.monotonic() > deadline:
                why = self._last_alert() or f"no answer within {self._patience:.0f} s"
                self._services.stop(SERVICE, missed=True)
                raise HaproxyError("start HAProxy", why)
            time.sleep(_POLL_SECONDS)  # HAProxy 2.6 announces its readiness to systemd only
        # Whoever asks for metrics is answered at once, and even if this agent dies now.
        self._accounts.sample()

    def claim(self) -> None:
        """Have a HAProxy that runs wanted: an agent that died while it ended it has left that half done."""
        status = self._services.status(SERVICE)
        if status is not None and status.pid is not None and not status.wanted:
            self._services.start(SERVICE, self._arguments(), inner=True, policy=self._policy())

    def _arguments(self) -> list[str]:
        files = ["-f", str(self._paths.machine_configuration), "-f", str(self._paths.configuration)]
        return ["haproxy", "-W", "-S", f"{self._paths.master_socket},mode,600", *files]

    def _policy(self) -> ServicePolicy:
        """How its parent notices that it is dead or frozen, for whoever decides which node serves."""
        probe = Probe(str(self._paths.stats_socket), "show version\n", PROBE_SECONDS, FROZEN_SECONDS)
        return ServicePolicy(health=self._paths.haproxy_health, probe=probe)

    def stop(self, drain: float = DRAIN_SECONDS) -> None:
        """End HAProxy. What it is doing it may finish, within a second; what goes on then is closed, and counted.

        Args:
            drain: for how long its workers might have gone on otherwise.
        """
        if self.is_running():
            self._services.dismiss(SERVICE)
            with suppress(AgentError, ProcessLookupError):
                self._leave(drain)
        self._services.stop(SERVICE)

    def _leave(self, drain: float) -> None:
        worker = self._worker_pid()
        if worker is not None:
            self._accounts.hold(drain)
            # To the worker alone: it closes its listeners and stays, as we hold it. The master would be started again.
            os.kill(worker, signal.SIGUSR1)
        self._accounts.finish_all(STOP_SECONDS)

    def reload(self, configuration: Configuration, *, drain: float, most: int | None) -> None:
        """Replace the worker by one that has read the file; the old one ends with its last connection.

        Args:
            drain: for how many seconds the old one may go on.
            most: how many replaced workers there may be then; None is the default.

        Raises:
            HaproxyError: the new worker did not come up; the old one serves on.
        """
        self.write_machine_configuration()
        self._await_worker()
        self._make_room(most)
        self._await_tables()
        states = self.worker.ask(runtime_state.SERVERS)
        self._write_server_state(server_state.rewrite(states, configuration))
        self._accounts.hold(drain)
        reach(Point.HANDED_OVER)
        old, reloads, starts = self._worker_pid(), self._workers().reloads, self._starts()
        self._inspection.forget()
        told = self._forsake(states, configuration)
        try:
            # HAProxy 2.8 answers when it is done.
            self.master.ask("reload", seconds=self._patience)
            reach(Point.RELOADING)
            self._await_reload(old, reloads, starts)
        except HaproxyError:
            self._take_back(told)
            raise
        finally:
            # A start after a crash must not take these states, by then old, for those of the members.
            self._write_server_state(server_state.EMPTY)
            self._accounts.sample()

    def _forsake(self, states: str, wanted: Configuration) -> list[str]:
        """Have the worker that is about to be replaced send nothing new to members that its successor has no more."""
        told: list[str] = []
        # At the worst a client is sent there once more. An order that is refused stops no other; one that nobody
        # answers does: the next would wait as long.
        with suppress(HaproxyError):
            for order in drain_removed_servers.orders(wanted, runtime_state.states(states)):
                told.append(order)  # also without an answer it may have been carried out
                self.worker.ask(order)
        return told

    def _take_back(self, told: Sequence[str]) -> None:
        with suppress(HaproxyError):  # it has died, and the next one knows nothing of it
            for order in told:
                self.worker.ask(drain_removed_servers.taken_back(order))

    def _await_worker(self) -> None:
        """Wait for a HAProxy that was started a moment ago: by us, or, after it had died, by who runs it."""
        deadline = time.monotonic() + self._patience
        while not self._is_up():
            if not self.is_running() or time.monotonic() > deadline:
                raise HaproxyError("reload HAProxy", self._last_alert() or "it does not run")
            time.sleep(_POLL_SECONDS)

    def _make_room(self, most: int | None) -> None:
        """End the oldest of the replaced workers, if there would be too many of them.

        Those that have nobody any more go by themselves once they are counted, and are waited for a moment: reloads
        that come quickly would otherwise cost an older one its connections.
        """
        waited = time.monotonic() + LEAVING_SECONDS
        while workers.too_many(self._workers(), most) and time.monotonic() < waited:
            self._accounts.sample()
            time.sleep(_TABLES_POLL_SECONDS)
        for pid in workers.too_many(self._workers(), most):
            closed = self._accounts.finish(pid, 0.0)
            if closed:
                _log.warning("Worker %d was ended with %d connections: too many replaced ones", pid, closed)
                self.ended.append(closed)
            deadline = time.monotonic() + LEAVING_SECONDS
            while pid in self._workers().replaced:
                if time.monotonic() > deadline:  # it was not held, or a connection resists
                    _log.warning("Worker %d was killed: too many replaced ones", pid)
                    self.ended.append(closed)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                    break
                time.sleep(_POLL_SECONDS)

    def count(self, servers: Sequence[tuple[str, str]] | None) -> None:
        """Have counters read.

        Args:
            servers: of these alone, by HAProxy's numbers of backend and server; None for all.
        """
        if servers is None:
            self._accounts.sample()
        else:
            self._accounts.sample_servers(servers)

    def _await_tables(self) -> None:
        """Wait until the worker would hand over its stick tables, if there is anything in them."""
        deadline = time.monotonic() + TABLES_SECONDS
        answer = self.worker.ask(stick_table_sync.QUESTION)
        while stick_table_sync.would_be_lost(answer, heir=self._bequeathed) and time.monotonic() < deadline:
            time.sleep(_TABLES_POLL_SECONDS)  # HAProxy announces it to nobody
            answer = self.worker.ask(stick_table_sync.QUESTION)
        self._bequeathed = stick_table_sync.has_entries(answer)

    def _starts(self) -> int:
        status = self._services.status(SERVICE)
        return status.starts if status is not None else 0

    def _await_reload(self, old: int | None, reloads: int, starts: int) -> None:
        deadline = time.monotonic() + self._patience
        again = time.monotonic() + _UNHEARD_SECONDS
        while time.monotonic() < deadline:
            try:
                found = self._workers()
                count, worker = found.reloads, found.present
                if count == reloads and time.monotonic() > again:
                    self.master.ask("reload", seconds=self._patience)
                    again = time.monotonic() + _UNHEARD_SECONDS
            except HaproxyError:
                count, worker = reloads, None  # the master is executing itself anew, or has died
                if self._starts() > starts + 1:
                    raise HaproxyError("reload HAProxy", self._last_alert() or "it died, and again") from None
            if count != reloads and worker is None:
                why = self._last_alert() or "the new worker did not start"
                raise HaproxyError("reload HAProxy", why, "The old worker serves on.")
            if worker is not None and worker not in (None, old) and self._worker_pid() == worker:
                return
            time.sleep(_POLL_SECONDS)  # HAProxy 2.6 answers 'reload' before it is done; 2.8 after
        raise HaproxyError("reload HAProxy", f"no new worker within {self._patience:.0f} s")

    def _workers(self) -> Workers:
        # The master says nothing while it reads a configuration itself.
        answer = self.master.ask("show proc", seconds=self._patience)
        found = workers.parse(answer)
        if found is None:
            raise HaproxyError("ask HAProxy's master for its workers", answer.strip() or "it said nothing")
        return found

    def _is_up(self) -> bool:
        """Whether both answer. The master executes itself anew when its worker is there, and refuses us meanwhile.

        For some 50 ms after a start (2.6, 2.8 and 3.0).
        """
        with suppress(HaproxyError):
            self._workers()  # after a reload that failed none of them is the present one
            return self._worker_pid() is not None
        return False

    def worker_pid(self) -> int | None:
        """The process that serves; None if none answers."""
        return self._worker_pid()

    def is_wanted(self) -> bool:
        """Whether it runs, or who runs it will start it again in a moment."""
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

    # -- what it runs ---------------------------------------------------------------------------------------

    def verify(
        self, wanted: Configuration, files: Path | None = None, touched: Collection[tuple[str, str]] | None = None
    ) -> Loaded:
        """Compare what HAProxy runs with what it should: `amphora_agent.haproxy.verify`."""
        return self._inspection.verify(wanted, files, touched)

    def abilities(self) -> Abilities:
        """What this HAProxy can do; asked once in the agent's life."""
        if self._abilities is None:
            self._abilities = features.ask(self.worker)
        return self._abilities


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
