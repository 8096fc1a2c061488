# SPDX-License-Identifier: Apache-2.0
"""The QMP client: commands, events and hot-plugged interfaces without a guest."""

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
    """The directory of a machine that has not started."""
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
def test_commands_and_events_are_exchanged(paused):
    with qmp.open_monitor(paused, "try") as monitor:
        assert monitor.execute("query-status")["status"] == "prelaunch"
        assert monitor.device_ids() == frozenset()
        monitor.execute("netdev_add", type="user", id="back")
        monitor.execute("device_add", driver="virtio-net-pci", id="front", netdev="back", romfile="")
        assert monitor.device_ids() == {"front"}
    # A second client is served as well, and a refusal contains the reason.
    with qmp.open_monitor(paused, "add it twice") as monitor, pytest.raises(ComputeError, match=r"add it twice.*front"):
        monitor.execute("device_add", driver="virtio-net-pci", id="front", netdev="back", romfile="")
    with qmp.open_monitor(paused, "try") as monitor:
        assert not monitor.try_execute("netdev_del", id="nobody")
        assert monitor.try_execute("query-status")


@needs_qemu
def test_a_device_that_the_guest_keeps_times_out(paused):
    with qmp.open_monitor(paused, "try") as monitor:
        monitor.execute("netdev_add", type="user", id="back")
        monitor.execute("device_add", driver="virtio-net-pci", id="front", netdev="back", romfile="")
        assert not monitor.wait_until_removed("front", 0.2)
        assert monitor.wait_until_removed("another", 0.2)


def test_a_missing_server_is_an_error_in_time(tmp_path):
    with (
        deadline.apply_deadline(deadline.Deadline(0.3, "try")),
        pytest.raises(AmphoraDriverError),
        qmp.open_monitor(tmp_path, "talk without a socket"),
    ):
        pass


def test_a_silent_server_is_an_error_in_time(tmp_path):
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
def test_the_check_for_kvm_starts_a_guest():
    assert kvm_probe.guest_finishes(PROGRAM, "tcg", 120)
    assert not kvm_probe.guest_finishes(PROGRAM, "tcg", 0.01)
    assert kvm_probe.usable(PROGRAM) == kvm_probe.usable(PROGRAM)
