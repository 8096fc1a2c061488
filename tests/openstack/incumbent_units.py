# SPDX-License-Identifier: Apache-2.0
"""The part of systemd that the amphora agent of Octavia's provider uses: it reads the units that the agent writes.

Supported are the types oneshot, notify and forking, commands before the start and for a reload, required units, and
variables. A unit that ends by itself does not start again. Only the standard library: this runs as a guest.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

UNITS = Path("/usr/lib/systemd/system")
_START_SECONDS, _STOP_SECONDS = 60.0, 10.0
# The exit statuses of systemctl (systemctl(1)).
_INACTIVE = 3


class UnitError(Exception):
    """A command of a unit has failed. The text is the output of systemctl."""


class Unit:
    """One unit file, and its main process."""

    def __init__(self, name, lines):
        self.name = name
        self.options = {}
        for line in lines:
            key, separator, value = line.strip().partition("=")
            if separator and not key.startswith("#"):
                self.options.setdefault(key, []).append(value)
        self.pid = None
        self.done = False
        self._child = None

    @property
    def is_active(self):
        if self._child is not None and self._child.poll() is not None:
            return False
        return self.done or (self.pid is not None and _is_running(self.pid))

    def start(self):
        kind = self.options.get("Type", ["simple"])[0]
        for command in self.options.get("ExecStartPre", ()):
            self._execute(command)
        commands = self.options["ExecStart"]
        if kind == "oneshot":
            for command in commands:
                self._execute(command)
            self.done = True
        elif kind == "notify":
            self._start_notifying(commands[0])
        else:
            self._execute(commands[0])
            self._await_pid(Path(self.options["PIDFile"][0]))

    def reload(self):
        if not self.is_active:
            raise UnitError(f"{self.name} is not active, cannot reload.")
        for command in self.options["ExecReload"]:
            self._execute(command)

    def stop(self):
        self.done = False
        if self.pid is None:
            return
        deadline = time.monotonic() + _STOP_SECONDS
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
            while _is_running(self.pid) and (number == signal.SIGKILL or time.monotonic() < deadline):
                if self._child is not None:
                    self._child.poll()
                time.sleep(0.02)
        self.pid = self._child = None

    def _environment(self):
        found = dict(os.environ)
        for line in self.options.get("Environment", ()):
            found.update(word.split("=", 1) for word in words(line))
        if self.pid is not None:
            found["MAINPID"] = str(self.pid)
        return found

    def _execute(self, command):
        environment = self._environment()
        # systemd ignores the failure of a command with this prefix.
        optional, command = command.startswith("-"), command.removeprefix("-")
        argv = expanded(words(command), environment)
        try:
            done = subprocess.run(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", timeout=_START_SECONDS, check=False,
            )  # fmt: skip
            failed, said = done.returncode != 0, done.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            failed, said = True, str(error)
        if said.strip() or failed:
            print(f"unit {self.name}: {argv}: {said.strip()}", flush=True)  # noqa: T201 - the console of the guest
        if failed and not optional:
            raise UnitError(f"{self.name}: {argv} failed: {said}")

    def _start_notifying(self, command):
        """Start a program that reports its readiness (sd_notify(3))."""
        place = f"/run/notify-{self.name}"
        Path(place).unlink(missing_ok=True)
        ready = threading.Event()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind(place)
        threading.Thread(target=_receive, args=(listener, ready), daemon=True).start()
        environment = {**self._environment(), "NOTIFY_SOCKET": place}
        self._child = subprocess.Popen(expanded(words(command), environment), env=environment, stdin=subprocess.DEVNULL)
        self.pid = self._child.pid
        deadline = time.monotonic() + _START_SECONDS
        while not ready.wait(0.1):
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise UnitError(f"{self.name} has not become ready")

    def _await_pid(self, path):
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                self.pid = int(path.read_text().split()[0])
                if _is_running(self.pid):
                    return
            time.sleep(0.05)
        raise UnitError(f"{self.name} has written no {path}")


class Units:
    """Handles the commands of systemctl, one after the other."""

    def __init__(self):
        self._units = {}
        self._lock = threading.Lock()

    def handle(self, argv):
        """Perform `systemctl ACTION UNIT`; return exit status and output."""
        action, name = argv[0], argv[1] if "." in argv[1] else f"{argv[1]}.service"
        with self._lock:
            try:
                return getattr(self, f"_{action}")(name)
            except (UnitError, OSError, LookupError) as error:
                return 1, str(error)

    def _enable(self, _name):
        return 0, ""

    _disable = _enable

    def _status(self, name):
        return (0, "active") if name in self._units and self._units[name].is_active else (_INACTIVE, "inactive")

    def _start(self, name):
        unit = self._units.setdefault(name, Unit(name, ()))
        if not unit.is_active:
            unit = self._units[name] = Unit(name, (UNITS / name).read_text().splitlines())
            for required in " ".join(unit.options.get("Requires", ())).split():
                self._start(required)
            unit.start()
        return 0, ""

    def _stop(self, name):
        if name in self._units:
            self._units[name].stop()
        return 0, ""

    def _restart(self, name):
        self._stop(name)
        return self._start(name)

    def _reload(self, name):
        self._units.setdefault(name, Unit(name, ())).reload()
        return 0, ""


def words(line):
    """Split a command line into words, as systemd does (systemd.service(5), command lines)."""
    found, word, quote, escaped = [], None, "", False
    for char in line:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            word, escaped = word or "", True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "'\"":
            word, quote = word or "", char
        elif not char.isspace():
            word = (word or "") + char
        elif word is not None:
            found, word = [*found, word], None
    return found if word is None else [*found, word]


def expanded(argv, environment):
    """Replace the words that are variables."""
    return [environment.get(word[1:], word) if word.startswith("$") else word for word in argv]


def _receive(listener, ready):
    while True:
        if b"READY=1" in listener.recv(4096).split(b"\n"):
            ready.set()


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
