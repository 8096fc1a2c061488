# SPDX-License-Identifier: Apache-2.0
"""Resumes guests from a saved one, so that a run needs only one cold boot.

Invariant: a guest is saved before it has an identity. It waits for its config drive, has no interface, and its agent
has not started. A resumed copy gets its identity from a drive and an interface that are plugged in, like a guest that
boots cold. The saved state names its qemu, hardware and image; a guest with different ones does not use it.

STATE contains the memory of the waiting guest; the image TAG contains its disk. Each guest gets a new generation id
(device vmgenid), from which its kernel seeds its random numbers, and takes its clock from the machine.
"""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import disk
from msgspec.structs import replace

from amphora_driver import config
from amphora_driver.compute.images import Images, link_image_files
from amphora_driver.compute.qemu import QemuCompute, _add_interface, _make_overlay
from amphora_driver.compute.qemu_command import CONSOLE, DISK, DRIVE, INITRD, KERNEL, Hardware, build_command
from amphora_driver.compute.qmp import Monitor, open_monitor
from amphora_driver.compute.state_dirs import console_tail, read_image_name
from amphora_driver.errors import ComputeError

TAG, STATE = "frozen", "frozen.state"
_MADE_BY, _THAWED = "frozen.made-by", "thawed"
_WAITS = "waiting for the config drive"
_NODE = "config-drive"
# For emulation beside other tests; 30 s on an idle machine.
_BOOT_SECONDS, _SAVE_SECONDS = 900.0, 120.0
# Seconds between two measurements of processor use: a guest that waits uses almost none.
_IDLE_SHARE, _IDLE_SECONDS = 0.15, 1.0


class ResumedGuests(QemuCompute):
    """The product's backend, which resumes guests of the image TAG from the saved guest."""

    def __init__(self, conf, network) -> None:
        super().__init__(conf, network)
        self._state = Path(conf.amp_compute_qemu.image_directory) / STATE

    def _start(self, amphora_id, folder, hardware, ports) -> None:
        mark = folder / _THAWED
        if mark.exists() or not (read_image_name(folder) or "").startswith(f"{TAG}-"):
            # Later starts boot cold from the guest's own disk.
            super()._start(amphora_id, folder, hardware, ports)
            return
        for port in ports:
            self._connect(amphora_id, port)
        # qemu opens the config drive after its start, and only root can read it.
        self._spawn(folder, _waiting(replace(hardware, user=None), folder, "-incoming", "defer"))
        with open_monitor(folder, f"thaw amphora {amphora_id}") as monitor, self._state.open("rb") as state:
            _pass_file(monitor, state)
            monitor.execute("migrate-incoming", uri=f"fd:{STATE}")
            _await_migration(monitor)
            for port in ports:
                _add_interface(monitor, port, self._switch_name)
            drive = {"driver": "file", "filename": DRIVE}
            monitor.execute("blockdev-add", **{"node-name": _NODE, "driver": "raw", "read-only": True, "file": drive})
            monitor.execute("device_add", driver="virtio-blk-pci", drive=_NODE, id=_NODE)
            monitor.execute("cont")
        mark.touch()


def ensure(images: Path) -> str:
    """Ensure a saved guest of the image; return an empty text, or the reason for its absence."""
    with (images / "frozen.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(prefix="freezing-", dir=images) as name:
            folder = Path(name)
            hardware = _hardware(images, folder)
            if hardware.accelerated:
                return "KVM boots a guest as fast as it resumes a saved one"
            made_by = _made_by(images, hardware)
            with suppress(FileNotFoundError):
                if (images / _MADE_BY).read_text() == made_by:
                    return ""
            (images / _MADE_BY).unlink(missing_ok=True)
            try:
                _freeze(images, folder, hardware)
            except (ComputeError, OSError, subprocess.SubprocessError) as error:
                return f"no guest is saved: {error}"
            (images / _MADE_BY).write_text(made_by)
            return ""


# --- the identity of the saved state -----------------------------------------------------------------------


def _hardware(images: Path, folder: Path) -> Hardware:
    file = folder / "freezing.conf"
    file.write_text(f"[amp_compute_qemu]\ndirectory = {folder}\nimage_directory = {images}\n")
    image = Images(images).find(disk.TAG)
    compute = QemuCompute(config.load([str(file)]), None)
    return replace(compute._hardware(TAG, image.arguments, initrd=image.initrd is not None), user=None)


def _made_by(images: Path, hardware: Hardware) -> str:
    version = subprocess.run([hardware.program, "--version"], capture_output=True, text=True, check=True).stdout
    found = (images / f"{disk.TAG}.qcow2").stat()
    return json.dumps([version, _waiting(hardware, Path()), found.st_mtime_ns, found.st_size], indent=1)


def _waiting(hardware: Hardware, folder: Path, *more: str) -> list[str]:
    """Return the command line of the same machine without interface and config drive."""
    *argv, option, pid = build_command(hardware, folder, ())
    drive = argv.index(f"file={DRIVE},format=raw,if=none,id=drive,readonly=on")
    device = argv.index("virtio-blk-pci,drive=drive")
    left = [word for at, word in enumerate(argv) if at not in {drive - 1, drive, device - 1, device}]
    return [*left, *more, option, pid]


# --- freezing ----------------------------------------------------------------------------------------------


def _freeze(images: Path, folder: Path, hardware: Hardware) -> None:
    """Boot a guest until it waits for its drive; save its memory and its disk.

    Raises:
        ComputeError: the guest does not reach that state, or qemu refuses.
    """
    image = Images(images).find(disk.TAG)
    link_image_files(image, folder)
    _make_overlay(folder, "freeze a guest")
    with (folder / CONSOLE).open("wb") as console:
        argv = _waiting(hardware, folder)
        qemu = subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
    try:
        _await_waiting(qemu, folder / CONSOLE)
        with open_monitor(folder, "freeze a guest") as monitor, (folder / STATE).open("wb") as state:
            monitor.execute("stop")
            _pass_file(monitor, state)
            # A guest's memory is half a gigabyte, which takes four seconds with qemu's default limit.
            monitor.execute("migrate-set-parameters", **{"max-bandwidth": 2**32})
            monitor.execute("migrate", uri=f"fd:{STATE}")
            _await_migration(monitor)
            monitor.execute("quit")
        qemu.wait(_SAVE_SECONDS)
    finally:
        qemu.kill()
        qemu.wait()
    whole = folder / f"{TAG}.qcow2"
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", folder / DISK, whole], check=True)
    for name, kind in ((KERNEL, "kernel"), (INITRD, "initrd")):
        (folder / name).replace(images / f"{TAG}.{kind}")
    (images / f"{TAG}.arguments").write_text(image.arguments or "")
    whole.replace(images / whole.name)
    (folder / STATE).replace(images / STATE)


def _await_waiting(qemu: subprocess.Popen, console: Path) -> None:
    """Wait until the guest waits for its drive and all other services have started."""
    deadline = time.monotonic() + _BOOT_SECONDS
    idle = said = False
    while not (said and idle):
        before, began = _wanted(qemu.pid), time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            raise ComputeError("freeze a guest", f"qemu ended ({qemu.wait(_IDLE_SECONDS)}): {console_tail(console)}")
        if time.monotonic() > deadline:
            raise ComputeError("freeze a guest", f"the guest does not wait for a drive: {console_tail(console)}")
        idle = _wanted(qemu.pid) - before < _IDLE_SHARE * (time.monotonic() - began)
        said = _WAITS in console.read_text(errors="replace")


def _wanted(pid: int) -> float:
    """Return the seconds that a process has run or waited for a processor (scheduler/sched-stats.rst)."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            run, waited, _ = (thread / "schedstat").read_text().split()
            total += int(run) + int(waited)
    return total / 1e9


# --- qemu's monitor ----------------------------------------------------------------------------------------


def _pass_file(monitor: Monitor, file) -> None:
    """Pass an open file to qemu as STATE, because the confined qemu cannot start a helper program."""
    line = json.dumps({"execute": "getfd", "arguments": {"fdname": STATE}}).encode() + b"\n"
    socket.send_fds(monitor._connection, [line], [file.fileno()])
    while "return" not in (answer := monitor._read_message()):
        if "error" in answer:
            raise ComputeError(monitor._wanted, f"qemu refuses the file: {answer['error']}")


def _await_migration(monitor: Monitor) -> None:
    deadline = time.monotonic() + _SAVE_SECONDS
    while (found := monitor.execute("query-migrate")).get("status") != "completed":
        if found.get("status") in {"failed", "cancelled"} or time.monotonic() > deadline:
            raise ComputeError(monitor._wanted, f"the memory is not transferred: {found}")
        time.sleep(0.05)
