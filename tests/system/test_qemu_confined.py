# SPDX-License-Identifier: Apache-2.0
"""The qemu compute backend confines a hostile guest: the user of qemu, and the console log's size."""

import os
import pwd
import shutil
import subprocess
import time

import pytest

from amphora_driver.compute import console, kvm_probe, qemu
from amphora_driver.compute.qemu_command import (
    CONSOLE,
    DISK,
    DRIVE,
    PID,
    Hardware,
    bounded_console_command,
    build_command,
    device_id,
    tap_options,
)
from amphora_driver.compute.qmp import open_monitor
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import find_by_last_argument
from amphora_driver.model.network import Port
from amphora_driver.network import taps

PROGRAM = "qemu-system-x86_64"
pytestmark = [pytest.mark.root, pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")]
# A boot sector: mov dx, 0x3f8; mov al, 'A'; again: out dx, al; jmp again.
NOISE = (bytes.fromhex("baf803b041eeebfd").ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0")
PORT = Port(
    id="4a5b6c7d-0000-4000-8000-000000000001", network_id="net", mac="fa:16:3e:00:00:01", mtu=1500, addresses=()
)
USER = pwd.getpwnam("nobody")


def until(condition, what, seconds=60.0):
    begin = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - begin < seconds, what
        time.sleep(0.02)
    return found


@pytest.fixture
def switch():
    name = f"qc{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def guest(switch, tmp_path):
    """A guest that prints one letter endlessly."""
    (tmp_path / "noise").write_bytes(NOISE)
    make = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", tmp_path / "noise", tmp_path / DISK]
    subprocess.run(make, check=True)
    (tmp_path / DRIVE).write_bytes(bytes(1 << 16))
    tmp_path.chmod(0o700)
    hardware = Hardware(
        program=PROGRAM, name="noise", machine="pc", accelerated=False, processors=1, memory=64, user=USER.pw_name,
        runs_with=kvm_probe.supports_run_with_user(PROGRAM),
    )  # fmt: skip
    enter = ["nsenter", f"--net={namespaces.path(switch)}", f"--wd={tmp_path}", "--"]
    with (tmp_path / CONSOLE).open("ab") as log:
        process = subprocess.Popen(
            [*enter, *bounded_console_command(build_command(hardware, tmp_path, ()))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process, tmp_path
    finally:
        process.kill()
        process.wait()


def status(pid):
    with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        return {name: said.strip() for name, _, said in (line.partition(":") for line in file)}


def test_a_guest_has_neither_root_nor_the_disk(guest, switch):
    process, folder = guest
    file = folder / CONSOLE
    until(lambda: file.stat().st_size > 1000, "the guest prints")
    found = status(process.pid)
    assert set(found["Uid"].split()) == {str(USER.pw_uid)}
    assert found["Groups"] in ("", str(USER.pw_gid))
    assert int(found["CapEff"], 16) == int(found["CapPrm"], 16) == 0
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert [one.pid for one in find_by_last_argument(str(folder / PID))] == [process.pid]
    # qemu cannot open /dev/net/tun as this user, so it gets the tap's descriptor.
    namespaces.run_inside(namespaces.path(switch), lambda: taps._create_persistent(tap_options(PORT)["ifname"]))
    with open_monitor(folder, "plug") as monitor:
        qemu._add_interface(monitor, PORT, switch)
        qemu._add_interface(monitor, PORT, switch)
        assert device_id(PORT) in monitor.device_ids()
    sizes = [file.stat().st_size]
    until(lambda: sizes.append(file.stat().st_size) or sizes[-1] < sizes[-2], "the console log is truncated")
    assert max(sizes) <= console.MOST
