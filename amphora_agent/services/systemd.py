# SPDX-License-Identifier: Apache-2.0
"""systemd as the one who runs the daemons, in a virtual machine.

Invariant: what a daemon is to be is written down before systemd is told of it, in files that are read when it dies; so
that its end is judged rightly whoever lives then. Everything that has to go on without the agent is done by systemd, by
the script around a daemon (`templates/daemon.sh`) and by the vigil (`vigil.py`).

Whether a daemon runs is read from files that the script writes, which costs no process; systemctl is asked only where
it does not run, and to change something. systemd's own socket is not spoken to: it is nobody else's (systemd(1)).
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
from amphora_agent.services.control import NO_CARE, Care, ServiceStatus
from amphora_agent.services.sd_notify import Inheritance
from amphora_agent.services.systemd_units import Change, Unit, change_of, render, unit_name

VIGIL = "amphora-vigil"
WANTED, DISMISSED, STOPPED, MISSED = "wanted", "dismissed", "stopped", "missed"
ANSWER_SECONDS = 90.0
LOG_LINES = 200
MOST_KEPT = 64
_ON_ITS_WAY = ("activating", "deactivating", "reloading", "active")
_SCRIPT = Path(__file__).parents[1] / "templates/daemon.sh"


class Systemd:
    """Daemons as units of systemd.

    Args:
        inheritance: what systemd gave the agent.
    """

    def __init__(self, paths: Paths, inheritance: Inheritance) -> None:
        self._paths = paths
        self._address = inheritance.address
        self._kept = inheritance.unpack()
        # One at a time: two threads that change one unit would each find the other's half.
        self._lock = threading.Lock()

    # -- what runs ------------------------------------------------------------------------------------------

    def start(self, name: str, argv: Sequence[str], *, inner: bool, care: Care = NO_CARE) -> ServiceStatus:
        unit = self._unit(name, argv, inner=inner, care=care)
        with self._lock:
            if care.health is not None:
                self._watch(name, care)
            change, present = self._write(unit), self._status(name)
            if present is not None and present.pid is not None:
                self._want(name, WANTED)
                return present if present.wanted else self._expect(name)
            waits = self._state(name) in _ON_ITS_WAY
            if waits and care.restart_delay and change is not Change.COMMAND and self._wanted(name) == WANTED:
                return self._expect(name)  # it died, and there is a reason not to start it again at once
            self._begin(name, again=waits)
            return self._expect(name)

    def _begin(self, name: str, *, again: bool) -> None:
        place = self._place(name)
        self._want(name, WANTED)
        for file in ("deaths", "exit"):
            (place / file).unlink(missing_ok=True)
        before = health_watcher.word(place / "starts")
        try:
            self._systemctl(f"start {name}", "restart" if again else "start", unit_name(name))
        except ServiceError:
            # One that could be started and died at once is whoever's concern who waits for its answer.
            if health_watcher.word(place / "starts") == before:
                raise

    def stop(self, name: str, *, missed: bool = False) -> None:
        with self._lock:
            if self._status(name) is None:
                return
            self._want(name, MISSED if missed else STOPPED)
            self._systemctl(f"stop {name}", "stop", unit_name(name))
            # One that has failed would be remembered for ever.
            self._systemctl(f"stop {name}", "reset-failed", unit_name(name), may_fail=True)

    def dismiss(self, name: str) -> None:
        with self._lock:
            status = self._expect(name)
            self._want(name, DISMISSED)
            if status.pid is None and status.wanted:
                self._systemctl(f"dismiss {name}", "stop", unit_name(name))

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self._expect(name).pid
        if pid is None:
            raise ServiceError(f"send {number.name} to {name}", "it does not run")
        try:
            descriptor = os.pidfd_open(pid)
            try:
                if not health_watcher.belongs(pid, unit_name(name)):  # it has ended, and its number is another's
                    raise ProcessLookupError
                signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
        except (ProcessLookupError, FileNotFoundError):  # either says that it has ended (Linux 6.16)
            raise ServiceError(f"send {number.name} to {name}", "it does not run") from None

    def status(self, name: str) -> ServiceStatus | None:
        return self._status(name)

    def log(self, name: str) -> list[str]:
        if self._status(name) is None:
            return []
        # What it said just before it died has to be there.
        self._run("read the log", ["journalctl", "--sync"], may_fail=True)
        match = [f"_SYSTEMD_UNIT={unit_name(name)}", "--boot", f"--lines={LOG_LINES}"]
        said = self._run(f"read {name}'s log", ["journalctl", "--quiet", "--no-pager", "--output=cat", *match])
        return said.splitlines()

    # -- connections that outlive the agent -------------------------------------------------------------------

    def keep(self, name: str, descriptor: int) -> None:
        with self._lock:
            if self._address is None:
                raise ServiceError(f"have {name} kept", "systemd did not start this agent")
            if name in self._kept or len(self._kept) >= MOST_KEPT:
                raise ServiceError(f"have {name} kept", f"it cannot be kept, {len(self._kept)} are")
            sd_notify.store(self._address, name, descriptor)
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
                    sd_notify.remove(self._address, name)

    # -- files ------------------------------------------------------------------------------------------------

    def _unit(self, name: str, argv: Sequence[str], *, inner: bool, care: Care) -> Unit:
        program = shutil.which(argv[0])
        if program is None:
            raise ServiceError(f"start {name}", f"there is no program {argv[0]}")
        return Unit(
            name,
            (program, *argv[1:]),
            self._paths.inner_namespace if inner else None,
            _SCRIPT,
            self._place(name),
            self._paths.run,
            care.health,
            care.restart_delay,
            care.leftovers,
        )

    def _write(self, unit: Unit) -> Change:
        """Write a unit's file, and have systemd read it.

        Raises:
            ServiceError: it runs, and with another command.
        """
        file, text = self._paths.units / unit_name(unit.name), render(unit)
        change = change_of(_content(file), text)
        if change is Change.NONE:
            return change
        status = self._status(unit.name)
        if change is Change.COMMAND and status is not None and status.pid is not None:
            raise ServiceError(f"start {unit.name}", "it runs with other arguments; stop it first")
        unit.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text, durable=False)
        file.chmod(0o644)  # it has no secrets, and systemd says for each that it thinks so
        if change is not Change.NEW:
            self._systemctl(f"start {unit.name}", "daemon-reload")
        return change

    def _watch(self, name: str, care: Care) -> None:
        """Have the vigil keep a daemon's health file."""
        place = self._place(name)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = json.dumps({key: care.document()[key] for key in ("health", "probe")})
        if _content(place / health_watcher.CARE) != wanted:
            write_atomically(place / health_watcher.CARE, wanted, durable=False)
        present = self._status(VIGIL)
        if present is None or present.pid is None:
            argv = [sys.executable, "-I", "-S", str(Path(health_watcher.__file__)), str(self._paths.services)]
            self._write(self._unit(VIGIL, argv, inner=False, care=NO_CARE))
            self._begin(VIGIL, again=False)

    def _place(self, name: str) -> Path:
        return self._paths.services / unit_name(name)

    def _want(self, name: str, word: str) -> None:
        if self._wanted(name) != word:
            write_atomically(self._place(name) / health_watcher.WANTED_FILE, word + "\n", durable=False)

    def _wanted(self, name: str) -> str | None:
        return health_watcher.word(self._place(name) / health_watcher.WANTED_FILE)

    # -- systemd ----------------------------------------------------------------------------------------------

    def _expect(self, name: str) -> ServiceStatus:
        status = self._status(name)
        if status is None:
            raise ServiceError(f"ask for {name}", "it was never started")
        return status

    def _status(self, name: str) -> ServiceStatus | None:
        place = self._place(name)
        wanted = self._wanted(name)
        if wanted is None:
            return None
        pid = health_watcher.running(place, unit_name(name))
        starts = int(health_watcher.word(place / "starts") or 0)
        # One that an operator has stopped is not started again, whatever we want.
        comes = wanted == WANTED and (pid is not None or self._state(name) in _ON_ITS_WAY)
        if comes and pid is None:
            pid = health_watcher.running(place, unit_name(name))  # it may have come up while systemd was asked
        return ServiceStatus(pid, starts, exit_code(health_watcher.word(place / "exit")), comes)

    def _state(self, name: str) -> str:
        return self._systemctl(f"ask for {name}", "show", "--property=ActiveState", "--value", unit_name(name)).strip()

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
    """How a daemon ended, as `subprocess` says it: a status, or the negative number of the signal.

    Args:
        said: EXIT_CODE and EXIT_STATUS of systemd.exec(5); None or empty ones while it has not ended.
    """
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
