# SPDX-License-Identifier: Apache-2.0
"""An amphora under systemd, as in a virtual machine, but in namespaces.

Invariant: systemd is process 1 of its own namespaces (processes, mounts, network, cgroups), sees no unit of the
host, and ends with this process; its cgroup is removed. The unit files of agent and namespace are those of the image;
the test replaces only the paths of Python and the sources.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from amphora_lab import ROOT, Amphora, alive, descendants, eventually

from amphora_agent.failpoints import VARIABLE

SYSTEMD = Path("/lib/systemd/systemd")
IMAGE_UNITS = ROOT / "diskimage/elements/amphora/static/usr/lib/systemd/system"
AGENT = "amphora-agent.service"
# The implicit dependencies of every unit.
_TARGETS = ("basic", "sysinit", "shutdown", "umount", "final", "multi-user", "poweroff")
_POWER_OFF = "systemd-poweroff.service"
_JOURNAL = """[Unit]
DefaultDependencies=no
Before=sysinit.target
Requires=systemd-journald.socket
After=systemd-journald.socket
[Service]
Type=notify
ExecStart=/lib/systemd/systemd-journald
FileDescriptorStoreMax=4224
Restart=always
Sockets=systemd-journald.socket
"""
_BUILD = """set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
for place in etc var/lib; do
    own=/run/private/$place
    mkdir -p $own/upper $own/work
    mount -t overlay overlay -o lowerdir=/$place,upperdir=$own/upper,workdir=$own/work /$place
    mkdir -p /$place/amphora-agent
done
mount --bind "$1/etc" /etc/amphora-agent
mount --bind "$1/var" /var/lib/amphora-agent
while umount /sys/fs/cgroup 2>/dev/null || umount -R /sys/fs/cgroup 2>/dev/null; do :; done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# The users of the image (diskimage/).
number=64001
for user in amphora-responder amphora-checker amphora-logs; do
    getent passwd $user >/dev/null || {
        echo "$user:x:$number:$number::/nonexistent:/usr/sbin/nologin" >> /etc/passwd
        echo "$user:x:$number:" >> /etc/group
    }
    number=$((number + 1))
done
mkdir -p /run/systemd/journald.conf.d
# The image's tmpfiles.d/amphora.conf creates this link.
mkdir -p /run/systemd/journal
ln -s /run/amphora-agent/log-forwarder/admin.sock /run/systemd/journal/syslog
printf '[Journal]\\nStorage=volatile\\nForwardToSyslog=yes\\nReadKMsg=no\\nAudit=no\\n' \\
    > /run/systemd/journald.conf.d/test.conf
exec env -i container=amphora-test SYSTEMD_UNIT_PATH="$1/units:/run/systemd/system" PATH="$PATH" \
    /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal --show-status=no
"""


def cgroups() -> Path | None:
    """Return the mount point of the host's version 2 cgroups, or None."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


def missing() -> str | None:
    """Return why this machine cannot run such an amphora, or None."""
    if not SYSTEMD.exists():
        return "systemd is not installed"
    if cgroups() is None:
        return "no cgroup2 is mounted"
    if not os.access(cgroups(), os.W_OK):
        return "cgroup2 is mounted read-only"
    return None if (IMAGE_UNITS / AGENT).exists() else "the image's units are not in this tree"


class SystemdAmphora(Amphora):
    """systemd, the agent and HAProxy, in namespaces."""

    def __init__(self, network, directory: Path, authority, **changes) -> None:
        super().__init__(network, directory, authority, **changes)
        file = directory / "etc/agent.conf"
        file.write_text(file.read_text().replace("services = supervisor\n", "services = systemd\n"))
        self._cgroup = cgroups() / f"{network.prefix}-{self.id[:8]}"
        units = directory / "units"
        (units / f"{AGENT}.d").mkdir(parents=True)
        (units / "multi-user.target.wants").mkdir()
        for target in _TARGETS:
            shutil.copy(SYSTEMD.parent / f"system/{target}.target", units)
        for name in ("systemd-journald.socket", _POWER_OFF):
            shutil.copy(SYSTEMD.parent / "system" / name, units)
        (units / "systemd-journald.service").write_text(_JOURNAL)
        for name in (AGENT, "amphora-netns.service"):
            shutil.copy(IMAGE_UNITS / name, units)
        # The test has written the files of the configuration drive. As in the image, the unit starts once: systemd
        # would refuse a sixth start within ten seconds, and with it the start of the agent.
        drive = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
        (units / "amphora-config-drive.service").write_text(drive)
        (units / f"{AGENT}.d/test.conf").write_text(
            f"[Service]\nExecStart=\nExecStart={sys.executable} -m amphora_agent.server\n"
            f"Environment=PYTHONPATH={ROOT} {VARIABLE}={self.points}\n"
        )
        sources = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
        if any(place.is_relative_to(home) for place in sources for home in ("/home", "/root")):
            # The image hides home directories from daemons. The daemons of this test need Python and the sources there.
            (units / "amphora-.service.d").mkdir()
            shown = " ".join(map(str, sorted(sources)))
            (units / "amphora-.service.d/test.conf").write_text(
                f"[Service]\nProtectHome=tmpfs\nBindReadOnlyPaths={shown}\n"
            )
            # A file of the same name replaces that drop-in, because this unit shares the machine's mounts.
            (units / "amphora-netns.service.d").mkdir()
            (units / "amphora-netns.service.d/test.conf").write_text("[Service]\n")
        for name in ("systemd-journald.service", AGENT):
            (units / "multi-user.target.wants" / name).symlink_to(units / name)

    def start(self) -> None:
        self._cgroup.mkdir()
        script = f'echo $$ > {self._cgroup}/cgroup.procs && exec "$@"'
        command = [
            *("setpriv", "--pdeathsig", "KILL", "--", "sh", "-c", script, "sh"),
            *("nsenter", f"--net=/run/netns/{self.network.name(self.place)}", "--"),
            *(
                "unshare",
                "--cgroup",
                "--pid",
                "--mount",
                "--uts",
                "--ipc",
                "--mount-proc",
                "--fork",
                "--kill-child=KILL",
            ),
            *("--", "sh", "-c", _BUILD, "sh", str(self._directory)),
        ]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def power_off(self) -> None:
        if self._process is None:
            return
        super().power_off()
        for place, _, _ in os.walk(self._cgroup, topdown=False):
            eventually(lambda place=place: _removed(Path(place)), "the cgroup is empty")

    def shut_down(self) -> None:
        """Shut the amphora down as an operator does."""
        self.disconnect()
        left = descendants(self._process.pid)
        os.kill(self.init(), signal.SIGRTMIN + 4)
        eventually(lambda: not any(alive(pid) for pid in left), "the machine has ended", 90.0)
        self.power_off()

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs a command inside the amphora."""
        return ["nsenter", f"--target={self.init()}", "--all", "--", *command]

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command inside; return its output."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False, timeout=60)
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def pid(self, service: str) -> int | None:
        """Return the host PID of a service's first process."""
        inside = self.run("systemctl", "show", "--property=MainPID", "--value", f"amphora-{service}.service").strip()
        with suppress(AssertionError):
            return None if inside in ("", "0") else self.outside_pid(int(inside))
        return None

    def file(self, path: str) -> Path:
        """Return the host's path of a file inside the amphora."""
        return Path(f"/proc/{self.init()}/root{path}")

    def log(self) -> str:
        said = self.run("journalctl", "--no-pager", "--output=short-monotonic", check=False) if self._process else ""
        return super().log() + said


def _removed(place: Path) -> bool:
    try:
        place.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
