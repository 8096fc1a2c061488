# SPDX-License-Identifier: Apache-2.0
"""The QMP monitor of a stopped guest: interfaces are added and removed without the guest."""

import shutil
import socket
import subprocess

import pytest

from amphora_driver import deadline
from amphora_driver.compute import kvm_probe, qmp
from amphora_driver.errors import AmphoraDriverError, ComputeError

PROGRAM = shutil.which("qemu-system-x86_64")
needs_qemu = pytest.mark.skipif(PROGRAM is None, reason="there is no qemu here")


@pytest.fixture
def paused(tmp_path):
    """The folder of a machine that has not begun."""
    argv = [
        PROGRAM,
        "-S",
        "-machine",
        "pc",
        "-accel",
        "tcg",
        "-m",
        "32",
        "-display",
        "none",
        "-nodefaults",
        "-no-user-config",
    ]
    process = subprocess.Popen([*argv, "-qmp", f"unix:{qmp.SOCKET},server=on,wait=off"], cwd=tmp_path)
    yield tmp_path
    process.kill()
    process.wait()


@needs_qemu
def test_a_conversation(paused):
    with qmp.open_monitor(paused, "try") as monitor:
        assert monitor.execute("query-status")["status"] == "prelaunch"
        assert monitor.device_ids() == frozenset()
        monitor.execute("netdev_add", type="user", id="back")
        monitor.execute("device_add", driver="virtio-net-pci", id="front", netdev="back", romfile="")
        assert monitor.device_ids() == {"front"}
    # The next one is heard too, and a refusal says why.
    with qmp.open_monitor(paused, "add it twice") as monitor, pytest.raises(ComputeError, match=r"add it twice.*front"):
        monitor.execute("device_add", driver="virtio-net-pci", id="front", netdev="back", romfile="")
    with qmp.open_monitor(paused, "try") as monitor:
        assert not monitor.try_execute("netdev_del", id="nobody")
        assert monitor.try_execute("query-status")


@needs_qemu
def test_a_device_that_its_guest_keeps_is_not_waited_for(paused):
    with qmp.open_monitor(paused, "try") as monitor:
        monitor.execute("netdev_add", type="user", id="back")
        monitor.execute("device_add", driver="virtio-net-pci", id="front", netdev="back", romfile="")
        assert not monitor.wait_until_removed("front", 0.2)
        assert monitor.wait_until_removed("another", 0.2)


def test_missing_server_is_an_error_in_time(tmp_path):
    with (
        deadline.apply_deadline(deadline.Deadline(0.3, "try")),
        pytest.raises(AmphoraDriverError),
        qmp.open_monitor(tmp_path, "talk without a socket"),
    ):
        pass


def test_silent_server_is_an_error_in_time(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / qmp.SOCKET))
        silent.listen()
        with (
            deadline.apply_deadline(deadline.Deadline(0.5, "try")),
            pytest.raises(AmphoraDriverError),
            qmp.open_monitor(tmp_path, "talk to the monitor"),
        ):
            pass


@needs_qemu
def test_a_guest_is_run_to_know_whether_guests_run():
    assert kvm_probe.guest_finishes(PROGRAM, "tcg", 120)
    assert not kvm_probe.guest_finishes(PROGRAM, "tcg", 0.01)
    assert kvm_probe.usable(PROGRAM) == kvm_probe.usable(PROGRAM)
