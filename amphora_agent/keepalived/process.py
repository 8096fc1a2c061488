# SPDX-License-Identifier: Apache-2.0
"""The keepalived processes: a parent that the service manager runs, and its child.

Invariant: keepalived has checked the file that it would read at its next start or reload. keepalived reloads only when
its file has changed. The agent never restarts keepalived for a change, because a keepalived that starts removes the
VIPs first.
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from functools import partial

from amphora_agent.bundle import VrrpInstance
from amphora_agent.errors import InterfaceError, KeepalivedError
from amphora_agent.keepalived.configuration import render
from amphora_agent.keepalived.vrrp_state import remove_stale_vips
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import NetlinkError
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services.control import ServiceManager, ServicePolicy
from amphora_agent.services.health_file import ALIVE

SERVICE = "keepalived"
CHECK_SECONDS = 20.0
# The service manager restarts a failed keepalived after _ADVERTS_TO_WAIT advertisement intervals and _SPARE_SECONDS. In
# this time, the partner takes over (RFC 9568, section 6.1) and announces the VIPs twice.
_ADVERTS_TO_WAIT = 4
_SPARE_SECONDS = 1.5


class Keepalived:
    """Controls the one keepalived of this amphora."""

    def __init__(self, paths: Paths, services: ServiceManager, inner: Namespace) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._accepted: str | None = None

    def is_running(self) -> bool:
        """Return whether keepalived runs, or the service manager will start it again."""
        status = self._services.status(SERVICE)
        return status is not None and (status.pid is not None or status.wanted)

    def describe_drift(self, wanted: VrrpInstance | None) -> str:
        """Return the difference from the state that `apply` would leave, as words; empty without a difference."""
        running = self.is_running()
        if wanted is None:
            return "it runs, although this amphora has no VRRP" if running else ""
        if not running:
            return "it does not run"
        return "" if self._current_text() == self._render(wanted) else "its file has changed"

    def check_configuration(self, wanted: VrrpInstance | None) -> None:
        """Let keepalived check the file that `apply` would write; raises KeepalivedError with its message."""
        if wanted is not None:
            self._check(self._render(wanted))

    def _check(self, text: str) -> None:
        if text in (self._accepted, self._current_text()):
            return
        candidate = self._paths.keepalived_candidate
        write_atomically(candidate, text, durable=False)
        try:
            self._run_check(["keepalived", "-t", "-P", "-f", str(candidate)])
        finally:
            candidate.unlink(missing_ok=True)
        self._accepted = text

    def apply(self, wanted: VrrpInstance | None) -> None:
        """Run keepalived with this VRRP instance; stop it for None.

        Raises KeepalivedError if keepalived refuses the file and continues with the previous one. Raises ServiceError
        if keepalived cannot be started or stopped, and InterfaceError if VIPs of a former keepalived cannot be removed.
        """
        if wanted is None:
            self.stop()
            return
        text = self._render(wanted)
        self._check(text)
        changed = text != self._current_text()
        if changed:
            write_atomically(self._paths.keepalived_configuration, text, durable=False)
        # The agent creates missing health files with the content ALIVE, so that keepalived can add the VIPs before
        # HAProxy listens for the first time.
        for watched in (self._paths.haproxy_health, self._paths.released):
            with suppress(FileExistsError), watched.open("x", encoding="ascii") as file:
                file.write(ALIVE)
        before = self._services.status(SERVICE)
        if before is None or before.pid is None:
            self._remove_stale_vips(wanted)
        self._start(wanted)
        if changed and before is not None and before.pid is not None:
            self._services.signal(SERVICE, signal.SIGHUP)

    def stop(self) -> None:
        """Stop keepalived, which removes the VIPs from the interface and tells the partners."""
        if self.is_running():
            self._services.stop(SERVICE)
        self._paths.keepalived_configuration.unlink(missing_ok=True)

    def _remove_stale_vips(self, wanted: VrrpInstance) -> None:
        try:
            self._inner.run(remove_stale_vips, wanted)
        except NetlinkError as error:
            raise InterfaceError("remove stale VIPs", f"the kernel refused: {error}") from error

    def _start(self, wanted: VrrpInstance) -> None:
        files = self._paths.keepalived_pid_files
        # -P disables keepalived's own health checks, and -R disables keepalived's restart of its failed processes. The
        # service manager restarts keepalived after the partner has taken over.
        argv = ["keepalived", "-n", "-l", "-P", "-R", "-f", str(self._paths.keepalived_configuration)]
        argv += ["-p", str(files[0]), "-r", str(files[1])]
        delay = wanted.vrrp.advert_interval * _ADVERTS_TO_WAIT + _SPARE_SECONDS
        self._services.start(SERVICE, argv, inner=True, policy=ServicePolicy(restart_delay=delay, leftovers=files))

    def _render(self, wanted: VrrpInstance) -> str:
        return render(wanted, self._paths.haproxy_health, self._paths.released)

    def _current_text(self) -> str | None:
        with suppress(FileNotFoundError):
            return self._paths.keepalived_configuration.read_text(encoding="utf-8")
        return None

    def _run_check(self, argv: list[str]) -> None:
        start = partial(
            subprocess.Popen[str], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        process = self._inner.run(start, argv, text=True, errors="replace")
        try:
            output, _ = process.communicate(timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise KeepalivedError("check keepalived's configuration", f"no answer in {CHECK_SECONDS:.0f} s") from error
        finally:
            process.kill()
            process.communicate()
        if process.returncode != 0:
            reason = next((line.strip() for line in output.splitlines() if line.strip()), "it gave no reason")
            raise KeepalivedError("check keepalived's configuration", reason)
