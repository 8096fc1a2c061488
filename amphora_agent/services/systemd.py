# SPDX-License-Identifier: Apache-2.0
"""systemd as service manager of an amphora in a virtual machine.

Invariant: the wanted state of a daemon is in files before systemd starts or stops the daemon. These files decide
whether an exit is a failure, also while no agent runs. systemd, the script around a daemon (`templates/daemon.sh`) and
the health watcher (`health_watcher`) do all work that must continue without the agent.

The script writes whether a daemon runs, so that a status needs no process. The agent calls systemctl only for changes
and for daemons that do not run. The agent does not use systemd's private socket, which is for systemctl only
(systemd(1)).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from amphora_agent.errors import ServiceError
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services import health_watcher, sd_notify
from amphora_agent.services.control import DEFAULT_POLICY, ServicePolicy, ServiceStatus
from amphora_agent.services.sd_notify import Inherited
from amphora_agent.services.systemd_units import Unit, UnitChange, compare_units, render_unit, unit_name

WATCHER = "amphora-health-watcher"
WANTED, DISMISSED, STOPPED, MISSED = "wanted", "dismissed", "stopped", "missed"
ANSWER_SECONDS = 90.0
LOG_LINES = 200
MOST_KEPT = 64
_ACTIVE_STATES = ("activating", "deactivating", "reloading", "active")
_SCRIPT = Path(__file__).parents[1] / "templates/daemon.sh"


class Systemd:
    """Daemons as units of systemd."""

    def __init__(self, paths: Paths, inherited: Inherited) -> None:
        self._paths = paths
        self._address = inherited.address
        self._kept = dict(inherited.descriptors)
        # A change of a unit has several steps, between which no other thread may change the unit.
        self._lock = threading.Lock()

    def start(
        self, name: str, argv: Sequence[str], *, inner: bool, policy: ServicePolicy = DEFAULT_POLICY
    ) -> ServiceStatus:
        unit = self._unit(name, argv, inner=inner, policy=policy)
        with self._lock:
            if policy.health is not None:
                self._watch(name, policy)
            change, present = self._write_unit(unit), self.status(name)
            if present is not None and present.pid is not None:
                self._set_wanted(name, WANTED)
                return present if present.wanted else self._started_status(name)
            pending = self._state(name) in _ACTIVE_STATES
            if pending and policy.restart_delay and change is not UnitChange.COMMAND and self._wanted(name) == WANTED:
                # The daemon has exited, and systemd is about to restart it after a delay. So the agent does not start
                # it now.
                return self._started_status(name)
            self._start_unit(name, restart=pending)
            return self._started_status(name)

    def _start_unit(self, name: str, *, restart: bool) -> None:
        directory = self._directory(name)
        self._set_wanted(name, WANTED)
        for file in ("deaths", "exit"):
            (directory / file).unlink(missing_ok=True)
        before = health_watcher.read_line(directory / "starts")
        try:
            self._systemctl(f"start {name}", "restart" if restart else "start", unit_name(name))
        except ServiceError:
            # systemctl also fails if the daemon starts and exits at once. The agent ignores an error after a start,
            # because the caller notices that the daemon does not answer.
            if health_watcher.read_line(directory / "starts") == before:
                raise

    def stop(self, name: str, *, missed: bool = False) -> None:
        with self._lock:
            if self.status(name) is None:
                return
            self._set_wanted(name, MISSED if missed else STOPPED)
            self._systemctl(f"stop {name}", "stop", unit_name(name))
            # systemd would keep the failed unit in memory until the command `reset-failed`.
            self._systemctl(f"stop {name}", "reset-failed", unit_name(name), may_fail=True)

    def dismiss(self, name: str) -> None:
        with self._lock:
            status = self._started_status(name)
            self._set_wanted(name, DISMISSED)
            if status.pid is None and status.wanted:
                self._systemctl(f"dismiss {name}", "stop", unit_name(name))

    def signal(self, name: str, number: signal.Signals) -> None:
        missing = ServiceError(f"send {number.name} to {name}", "it does not run")
        pid = self._started_status(name).pid
        if pid is None:
            raise missing
        try:
            descriptor = os.pidfd_open(pid)
            try:
                if not health_watcher.is_in_unit(pid, unit_name(name)):
                    # The daemon has exited, and another process has its process id, which must not get the signal.
                    raise missing
                signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
        except (ProcessLookupError, FileNotFoundError):
            # The pidfd functions fail with ESRCH after the end of the process. If the process ends during pidfd_open,
            # some versions of Linux return ENOENT.
            raise missing from None

    def log(self, name: str) -> list[str]:
        if self.status(name) is None:
            return []
        # `journalctl --sync` writes pending lines to the journal, such as the last lines of a daemon that has exited.
        self._run("read the log", ["journalctl", "--sync"], may_fail=True)
        match = [f"_SYSTEMD_UNIT={unit_name(name)}", "--boot", f"--lines={LOG_LINES}"]
        said = self._run(f"read the log of {name}", ["journalctl", "--quiet", "--no-pager", "--output=cat", *match])
        return said.splitlines()

    def keep(self, name: str, descriptor: int) -> None:
        with self._lock:
            if self._address is None:
                raise ServiceError(f"store descriptor {name}", "systemd did not start this agent")
            if name in self._kept or len(self._kept) >= MOST_KEPT:
                raise ServiceError(
                    f"store descriptor {name}", f"its name is in use, or {MOST_KEPT} descriptors are stored already"
                )
            sd_notify.store_descriptor(self._address, name, descriptor)
            self._kept[name] = os.dup(descriptor)

    def kept(self) -> dict[str, int]:
        with self._lock:
            return {name: os.dup(descriptor) for name, descriptor in self._kept.items()}

    def drop(self, name: str) -> None:
        with self._lock:
            descriptor = self._kept.pop(name, None)
            if descriptor is not None:
                os.close(descriptor)
                if self._address is not None:
                    sd_notify.remove_descriptor(self._address, name)

    def _unit(self, name: str, argv: Sequence[str], *, inner: bool, policy: ServicePolicy) -> Unit:
        program = shutil.which(argv[0])
        if program is None:
            raise ServiceError(f"start {name}", f"there is no program {argv[0]}")
        namespace, command = self._paths.inner_namespace if inner else None, (program, *argv[1:])
        supervision = (policy.health, policy.restart_delay, policy.leftovers)
        return Unit(name, command, namespace, _SCRIPT, self._directory(name), self._paths.run, *supervision)

    def _write_unit(self, unit: Unit) -> UnitChange:
        """Write the file of a unit and make systemd read it; raises ServiceError."""
        file, text = self._paths.units / unit_name(unit.name), render_unit(unit)
        change = compare_units(_content(file), text)
        if change is UnitChange.NONE:
            return change
        status = self.status(unit.name)
        if change is UnitChange.COMMAND and status is not None and status.pid is not None:
            raise ServiceError(f"start {unit.name}", "it runs with other arguments; stop it first")
        unit.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text, durable=False)
        # systemd warns about unit files that other users cannot read. So this file, which has no secrets, becomes
        # readable.
        file.chmod(0o644)
        if change is not UnitChange.NEW:
            self._systemctl(f"start {unit.name}", "daemon-reload")
        return change

    def _watch(self, name: str, policy: ServicePolicy) -> None:
        """Make the health watcher keep the health file of a daemon."""
        directory = self._directory(name)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = json.dumps({key: policy.document()[key] for key in ("health", "probe")})
        if _content(directory / health_watcher.POLICY_FILE) != wanted:
            write_atomically(directory / health_watcher.POLICY_FILE, wanted, durable=False)
        present = self.status(WATCHER)
        if present is None or present.pid is None:
            argv = [sys.executable, "-I", "-S", str(Path(health_watcher.__file__)), str(self._paths.services)]
            self._write_unit(self._unit(WATCHER, argv, inner=False, policy=DEFAULT_POLICY))
            self._start_unit(WATCHER, restart=False)

    def _directory(self, name: str) -> Path:
        return self._paths.services / unit_name(name)

    def _set_wanted(self, name: str, word: str) -> None:
        if self._wanted(name) != word:
            write_atomically(self._directory(name) / health_watcher.WANTED_FILE, word + "\n", durable=False)

    def _wanted(self, name: str) -> str | None:
        return health_watcher.read_line(self._directory(name) / health_watcher.WANTED_FILE)

    def _started_status(self, name: str) -> ServiceStatus:
        status = self.status(name)
        if status is None:
            raise ServiceError(f"read the status of {name}", "it was never started")
        return status

    def status(self, name: str) -> ServiceStatus | None:
        directory = self._directory(name)
        wanted = self._wanted(name)
        if wanted is None:
            return None
        pid = health_watcher.running_pid(directory, unit_name(name))
        starts = int(health_watcher.read_line(directory / "starts") or 0)
        # A daemon that an operator has stopped does not count as restarting, because systemd does not restart this
        # daemon.
        restarts = wanted == WANTED and (pid is not None or self._state(name) in _ACTIVE_STATES)
        if restarts and pid is None:
            # The daemon may have started while systemctl ran, so its process id is read again.
            pid = health_watcher.running_pid(directory, unit_name(name))
        return ServiceStatus(pid, starts, exit_code(health_watcher.read_line(directory / "exit")), restarts)

    def _state(self, name: str) -> str:
        words = ("show", "--property=ActiveState", "--value", unit_name(name))
        return self._systemctl(f"read the state of {name}", *words).strip()

    def _systemctl(self, wanted: str, *words: str, may_fail: bool = False) -> str:
        return self._run(wanted, ["systemctl", "--no-ask-password", "--quiet", *words], may_fail=may_fail)

    @staticmethod
    def _run(wanted: str, command: list[str], *, may_fail: bool = False) -> str:
        try:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServiceError(wanted, f"{command[0]} does not answer: {error}") from error
        if done.returncode != 0 and not may_fail:
            said = done.stderr.strip().splitlines()
            raise ServiceError(wanted, said[0] if said else f"{command[0]} ended with {done.returncode}")
        return done.stdout


def exit_code(said: str | None) -> int | None:
    """Return the code for EXIT_CODE and EXIT_STATUS (systemd.exec(5)), negative for a signal."""
    how, _, what = (said or "").partition(" ")
    if how == "exited" and what.isdecimal():
        return int(what)
    if how in ("killed", "dumped"):
        with suppress(KeyError):
            return -int(signal.Signals[f"SIG{what}"])
    return None


def _content(file: Path) -> str | None:
    with suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8")
    return None
