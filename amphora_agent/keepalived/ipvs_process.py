# SPDX-License-Identifier: Apache-2.0
"""The keepalived that has IPVS forward UDP and SCTP: a parent that the service manager runs, and its child.

Invariant: apart from the keepalived that speaks VRRP; neither notices the other. The file it would read now is one that
keepalived has checked. It is told to read it again only when it has changed, and is never restarted for a change. When
it dies IPVS goes on, and whoever starts it again has it say everything anew.

The checker has written its files (`virtual_servers/lvs_engine`) before `bring_about` is called.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from amphora_agent.bundle import Bundle
from amphora_agent.errors import KeepalivedError
from amphora_agent.keepalived import ipvs_config
from amphora_agent.keepalived.ipvs_config import Sync
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_ipvs import netlink
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services.control import Care, Services

SERVICE = "keepalived-lvs"
CHECK_SECONDS = 20.0


class LvsKeepalived:
    """The one of this amphora."""

    def __init__(self, paths: Paths, services: Services, inner: Namespace) -> None:
        self._paths = paths
        self._services = services
        self._inner = inner
        self._accepted: str | None = None
        # Whether it has just begun, and so has said everything anyway.
        self._has_begun = False

    def check(self, bundle: Bundle) -> None:
        """Have keepalived read what it would be given; changes nothing.

        Raises:
            KeepalivedError: it refuses; in its own words.
        """
        if ipvs_config.has_any(bundle.virtual_servers):
            self._check(self._render(bundle.virtual_servers, ipvs_config.sync_of(bundle)))

    def bring_about(self, bundle: Bundle) -> None:
        """Have IPVS forward for a bundle's virtual servers, or for nobody.

        Raises:
            KeepalivedError: it refuses its file; it goes on as it was.
            ServiceError: it could not be started or stopped.
            NoIpvsError: the kernel refuses to forget.
        """
        if not ipvs_config.has_any(bundle.virtual_servers):
            self.stop()
            return
        text = self._render(bundle.virtual_servers, ipvs_config.sync_of(bundle))
        self._check(text)
        changed = text != self._present()
        if changed:
            write_atomically(self._paths.lvs_configuration, text, durable=False)
        before = self._services.status(SERVICE)
        runs = before is not None and before.pid is not None
        self._has_begun = not runs
        self._start()
        if changed and runs:
            self._services.signal(SERVICE, signal.SIGHUP)

    def difference(self, bundle: Bundle) -> str:
        """What is not as `bring_about` would make it, in words; empty if everything is.

        Raises:
            ServiceError: who runs it does not say.
        """
        if not ipvs_config.has_any(bundle.virtual_servers):
            return "keepalived has IPVS forward, and nobody wants it" if self._is_running() else ""
        if not self._is_running():
            return "the keepalived that has IPVS forward does not run"
        wanted = self._render(bundle.virtual_servers, ipvs_config.sync_of(bundle))
        return "" if self._present() == wanted else "its file is not as it was written"

    def renew(self) -> None:
        """Have it say everything to the kernel anew, after somebody else's hand has been in IPVS. Flows go on.

        Raises:
            ServiceError: it could not be started or stopped.
        """
        if self._is_running() and not self._has_begun:
            self._services.stop(SERVICE)
            self._start()
        self._has_begun = False

    def stop(self) -> None:
        """End it, and what it had IPVS do.

        Raises:
            ServiceError: it could not be stopped.
            NoIpvsError: the kernel refuses to forget.
        """
        if self._is_running():
            self._services.stop(SERVICE)
            # It leaves everything as it is (-I): who only restarts it interrupts nobody.
            self._inner.run(netlink.flush)
        self._paths.lvs_configuration.unlink(missing_ok=True)

    def _is_running(self) -> bool:
        status = self._services.status(SERVICE)
        return status is not None and (status.pid is not None or status.wanted)

    def _start(self) -> None:
        files = self._paths.lvs_pid_files
        # -C: no VRRP. -I: IPVS keeps what it has when this ends. -R: the child is started again by the service manager.
        argv = ["keepalived", "-n", "-l", "-C", "-I", "-R", "-f", str(self._paths.lvs_configuration)]
        argv += ["-p", str(files[0]), "-c", str(files[1])]
        self._services.start(SERVICE, argv, inner=True, care=Care(leftovers=files))

    def _render(self, servers: Sequence[VirtualServer], sync: Sync | None) -> str:
        return ipvs_config.render(servers, self._paths.lvs_tracks, sync)

    def _present(self) -> str | None:
        try:
            return self._paths.lvs_configuration.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _check(self, text: str) -> None:
        if text in (self._accepted, self._present()):
            return
        # keepalived 2.3 refuses files in a directory that is not there; the checker fills it later.
        tracks = self._paths.lvs_tracks
        tracks.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = tracks.parent.stat()
        os.chown(tracks, owner.st_uid, owner.st_gid)  # the checker may be a user of its own
        candidate = self._paths.lvs_candidate
        write_atomically(candidate, text, durable=False)
        try:
            self._inner.run(verify, ["keepalived", "-t", "-C", "-f", str(candidate)])
        finally:
            candidate.unlink(missing_ok=True)
        self._accepted = text


def verify(argv: Sequence[str]) -> None:
    """Have keepalived read a file.

    Raises:
        KeepalivedError: it refuses; in its own words.
    """
    wanted = "check keepalived's configuration"
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KeepalivedError(wanted, f"no answer in {CHECK_SECONDS:.0f} s") from error
    except OSError as error:
        raise KeepalivedError(wanted, str(error)) from error
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).splitlines()
        said = next((line.strip() for line in lines if line.strip()), "it did not say why")
        raise KeepalivedError(wanted, said)
