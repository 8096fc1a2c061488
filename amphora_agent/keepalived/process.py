# SPDX-License-Identifier: Apache-2.0
"""keepalived's processes: a parent that the service manager runs, and its child.

Invariant: the file that keepalived would read if it started or reloaded now is one that keepalived has checked. It is
told to reload only when its file has changed, and it is never restarted for a change: a keepalived that starts takes
the VIPs away first.
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress

from amphora_agent.errors import InterfaceError, KeepalivedError
from amphora_agent.keepalived import stale_vips
from amphora_agent.keepalived.configuration import Pair, render
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import NetlinkError
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services.control import Care, Services
from amphora_agent.services.health_file import ALIVE

SERVICE = "keepalived"
CHECK_SECONDS = 20.0
# A partner that hears nothing takes over after three advertisements and a fraction of one (RFC 9568, 6.1), and a busy
# machine is later. It announces the VIPs at once and again after a second (garp_master_delay); not before that are they
# taken away here, for whoever missed the first announcement.
_ADVERTS_TO_WAIT = 4
_SPARE_SECONDS = 1.5


class Keepalived:
    """The one keepalived of this amphora."""

    def __init__(self, paths: Paths, services: Services, inner: Namespace) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._accepted: str | None = None

    def is_running(self) -> bool:
        """Whether it runs, or will be started again in a moment."""
        status = self._services.status(SERVICE)
        return status is not None and (status.pid is not None or status.wanted)

    def difference(self, wanted: Pair | None) -> str:
        """What is not as `bring_about` would make it, in words; empty if everything is.

        Raises:
            ServiceError: who runs it does not say.
        """
        running = self.is_running()
        if wanted is None:
            return "it runs, and this amphora is on its own" if running else ""
        if not running:
            return "it does not run"
        return "" if self._present() == self._render(wanted) else "its file is not as it was written"

    def check(self, wanted: Pair | None) -> None:
        """Have keepalived read what it would be given. The interface has to be there.

        Raises:
            KeepalivedError: it refuses; in its own words.
        """
        if wanted is not None:
            self._check(self._render(wanted))

    def _check(self, text: str) -> None:
        if text in (self._accepted, self._present()):
            return
        candidate = self._paths.keepalived_candidate
        write_atomically(candidate, text, durable=False)
        try:
            self._verify(["keepalived", "-t", "-P", "-f", str(candidate)])
        finally:
            candidate.unlink(missing_ok=True)
        self._accepted = text

    def bring_about(self, wanted: Pair | None) -> None:
        """Have keepalived take part in this way, or not run at all.

        Raises:
            KeepalivedError: it refuses its file; it goes on as it was.
            ServiceError: it could not be started or stopped.
            InterfaceError: it does not run, and what it left could not be taken away.
        """
        if wanted is None:
            self.stop()
            return
        text = self._render(wanted)
        self._check(text)
        changed = text != self._present()
        if changed:
            write_atomically(self._paths.keepalived_configuration, text, durable=False)
        # Where no HAProxy has been wanted yet there is nothing amiss: the VIP is up before the first listener.
        for watched in (self._paths.haproxy_health, self._paths.released):
            with suppress(FileExistsError), watched.open("x", encoding="ascii") as file:
                file.write(ALIVE)
        before = self._services.status(SERVICE)
        if before is None or before.pid is None:
            self._tidy(wanted)
        self._start(wanted)
        if changed and before is not None and before.pid is not None:
            self._services.signal(SERVICE, signal.SIGHUP)

    def stop(self) -> None:
        """End keepalived; it takes the VIPs off the interface and tells the partners."""
        if self.is_running():
            self._services.stop(SERVICE)
        self._paths.keepalived_configuration.unlink(missing_ok=True)

    def _tidy(self, wanted: Pair) -> None:
        try:
            self._inner.run(stale_vips.take_away, wanted)
        except NetlinkError as error:
            raise InterfaceError("take former VIPs away", f"the kernel refused: {error}") from error

    def _start(self, wanted: Pair) -> None:
        files = self._paths.keepalived_pid_files
        # -P: no health checks of its own. -R: the child is not started again by its parent, at once, but by the service
        # manager, after the partner has taken over; until then the VIPs stay where they are, and HAProxy serves on.
        argv = ["keepalived", "-n", "-l", "-P", "-R", "-f", str(self._paths.keepalived_configuration)]
        argv += ["-p", str(files[0]), "-r", str(files[1])]
        delay = wanted.vrrp.advert_interval * _ADVERTS_TO_WAIT + _SPARE_SECONDS
        self._services.start(SERVICE, argv, inner=True, care=Care(restart_delay=delay, leftovers=files))

    def _render(self, wanted: Pair) -> str:
        return render(wanted, self._paths.haproxy_health, self._paths.released)

    def _present(self) -> str | None:
        try:
            return self._paths.keepalived_configuration.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _verify(self, argv: list[str]) -> None:
        process = self._inner.run(_start, argv)
        try:
            output, _ = process.communicate(timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise KeepalivedError("check keepalived's configuration", f"no answer in {CHECK_SECONDS:.0f} s") from error
        finally:
            process.kill()
            process.communicate()
        if process.returncode != 0:
            said = next((line.strip() for line in output.splitlines() if line.strip()), "it did not say why")
            raise KeepalivedError("check keepalived's configuration", said)


def _start(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
