# SPDX-License-Identifier: Apache-2.0
"""The QEMU command line of a machine, and images by tag."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from amphora_driver import config
from amphora_driver.compute import console, qemu
from amphora_driver.compute.images import BASE, DEFAULT_ARGUMENTS, Images, link_image_files
from amphora_driver.compute.qemu_command import (
    PID,
    Hardware,
    bounded_console_command,
    build_command,
    device_id,
    interface_options,
    manual_boot_command,
    tap_options,
)
from amphora_driver.compute.state_dirs import console_tail
from amphora_driver.errors import ComputeError
from amphora_driver.host.detached_process import identify
from amphora_driver.model.network import FixedAddress, Port

FOLDER = Path("/state/0b9d")
PORT = Port(
    id="4a5b6c7d-0000-4000-8000-000000000001", network_id="net", mac="fa:16:3e:00:00:01", mtu=1450,
    addresses=(FixedAddress(subnet_id="four", address="203.0.113.9"),),
)  # fmt: skip
OTHER = Port(
    id="99998888-0000-4000-8000-000000000002", network_id="vip", mac="fa:16:3e:00:00:02", mtu=1500, addresses=()
)


def hardware(**changes):
    usual = {
        "program": "qemu",
        "name": "amphora-0b9d",
        "machine": "pc",
        "accelerated": False,
        "processors": 1,
        "memory": 512,
    }
    return Hardware(**{**usual, **changes})


def values(argv, option):
    return [argv[at + 1] for at, word in enumerate(argv) if word == option]


def test_a_machine_has_one_interface_for_each_port_in_order():
    argv = build_command(hardware(), FOLDER, (PORT, OTHER))
    nets = [one for one in values(argv, "-device") if one.startswith("virtio-net")]
    assert [one.split("mac=")[1].split(",")[0] for one in nets] == [PORT.mac, OTHER.mac]
    assert "host_mtu=1450" in nets[0]
    assert [one.split("ifname=")[1].split(",")[0] for one in values(argv, "-netdev")] == [
        tap_options(PORT)["ifname"],
        tap_options(OTHER)["ifname"],
    ]


def test_a_hot_plugged_nic_equals_a_nic_at_boot():
    (there,) = [
        one for one in values(build_command(hardware(), FOLDER, (PORT,)), "-device") if one.startswith("virtio-net")
    ]
    later = interface_options(PORT)
    assert there == ",".join(
        ["virtio-net-pci", *(f"{name}={value}" for name, value in later.items() if name != "driver")]
    )
    assert device_id(PORT) == later["id"] != tap_options(PORT)["id"]


def test_an_external_kernel_is_used_only_for_images_without_a_kernel():
    assert "-kernel" not in build_command(hardware(), FOLDER, ())
    argv = build_command(hardware(kernel_arguments="root=/dev/vda quiet"), FOLDER, ())
    assert values(argv, "-append") == ["root=/dev/vda quiet"]
    assert "-initrd" not in argv
    assert "-initrd" in build_command(hardware(kernel_arguments="", initrd=True), FOLDER, ())


@pytest.mark.parametrize(
    ("accelerated", "beginning", "model"), [(True, "kvm", "host"), (False, "tcg,", "Opteron_G3-v1")]
)
def test_processes_of_the_provider_agent(accelerated, beginning, model):
    argv = build_command(hardware(accelerated=accelerated), FOLDER, ())
    assert values(argv, "-accel")[0].startswith(beginning)
    assert values(argv, "-cpu") == [model]


def test_the_process_of_a_machine_is_found_by_its_last_argument():
    assert build_command(hardware(), FOLDER, (PORT,))[-1] == str(FOLDER / PID)


def test_qemu_reads_no_configuration_of_the_host():
    argv = build_command(hardware(), FOLDER, ())
    assert {"-nodefaults", "-no-user-config"} <= set(argv)
    assert values(argv, "-sandbox")[0].startswith("on,")


@pytest.mark.parametrize(
    ("changes", "option", "value"),
    [({}, "-runas", "qemu"), ({"runs_with": True}, "-run-with", "user=qemu")],
)
def test_qemu_runs_as_an_unprivileged_user(changes, option, value):
    argv = build_command(hardware(user="qemu", **changes), FOLDER, ())
    assert values(argv, option) == [value]
    assert len({"-runas", "-run-with"} & set(argv)) == 1
    # QEMU changes to that user itself. Without a change the filter forbids it.
    assert "elevateprivileges=allow,spawn=deny" in values(argv, "-sandbox")[0]
    assert "elevateprivileges=deny,spawn=deny" in values(build_command(hardware(), FOLDER, ()), "-sandbox")[0]
    assert argv[argv.index("setpriv") + 1] == "--no-new-privs"


def test_a_missing_user_is_not_retried():
    with pytest.raises(ComputeError, match="no user nonsense") as raised:
        qemu._uid_of("nonsense", "boot")
    assert raised.value.final


def test_the_console_log_is_limited(tmp_path):
    """The end of the log matters after a crash. A writer that stopped reading would block the guest."""
    file = tmp_path / "console.log"
    script = 'for word in early later; do head -c 3000000 /dev/zero | tr "\\0" x; echo $word; done'
    with file.open("ab") as log:
        subprocess.run(bounded_console_command(["sh", "-c", script]), stdout=log, stderr=log, check=True, timeout=60)
        eventually_ends(file, b"later\n")
    assert console.MOST // 2 <= file.stat().st_size <= console.MOST
    assert b"early" not in file.read_bytes()


def eventually_ends(file, word):
    """The log writer ends a moment after QEMU."""
    until = time.monotonic() + 30
    while not file.read_bytes().endswith(word):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_machine_booted_by_hand_differs_in_its_paths_only():
    by_hand = manual_boot_command(
        hardware(),
        "/a,b.qcow2",
        disk_format="qcow2",
        forward="tcp:127.0.0.1:9443-:9443",
        mac="52:54:00:12:34:56",
        firmware="/ovmf.fd",
    )
    ours = build_command(hardware(), FOLDER, ())
    for option in ("-machine", "-accel", "-cpu", "-smp", "-m"):
        assert values(by_hand, option) == values(ours, option)
    assert "file=/a,,b.qcow2,format=qcow2,if=none,id=disk,snapshot=on" in values(by_hand, "-drive")
    assert values(by_hand, "-bios") == ["/ovmf.fd"]


def test_a_boot_truncates_the_console_log(tmp_path, monkeypatch):
    console = tmp_path / "console.log"
    console.write_text("of the boot before")
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_compute_qemu]\ndirectory = {tmp_path}\n")
    compute = qemu.QemuCompute(config.load([str(path)]), None)
    seen = []

    def spawn(_argv, _environment, log):
        seen.append((log, log.read_bytes(), log.stat().st_mode & 0o777))
        return identify(os.getpid())

    monkeypatch.setattr(qemu, "spawn", spawn)
    compute._start("0b9d", tmp_path, hardware(), ())
    assert seen == [(console, b"", 0o600)]


def test_only_the_end_of_a_large_console_log_is_read(tmp_path):
    console = tmp_path / "console.log"
    assert console_tail(console) == "no console output"
    console.write_bytes(b"\xff the one word ")
    assert console_tail(console) == "\N{REPLACEMENT CHARACTER} the one word"
    with console.open("wb") as file:
        file.seek(1 << 42)  # a sparse file
        file.write(b"the last word\n" + b" " * 1000)
    assert console_tail(console).lstrip("\0") == "the last word"


# --- images ------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "amphora.qcow2").write_bytes(b"one")
    return folder


def test_the_tag_of_an_image_depends_on_its_contents(images):
    known = Images(images)
    first = known.digest(known.find("amphora"))
    assert first.startswith("amphora-")
    new = images / ".new"
    new.write_bytes(b"two")
    new.replace(images / "amphora.qcow2")
    second = known.digest(known.find("amphora"))
    assert second != first
    assert second == Images(images).digest(known.find("amphora"))
    (images / "amphora.kernel").write_bytes(b"kernel")
    assert known.digest(known.find("amphora")) not in {first, second}


def test_the_name_of_an_image_contains_its_build_day(images):
    known = Images(images)
    undated = known.digest(known.find("amphora"))
    for built, day in (("2026-08-09T23:59:59Z", "-2026-08-09-"), ("2026-08-10T00:00:00Z", "-2026-08-10-")):
        (images / "amphora.manifest").write_text(f'{{"architecture": "amd64", "built": "{built}"}}')
        assert known.digest(known.find("amphora")) == undated.replace("-", day)
    (images / "amphora.manifest").write_text('{"built": "yesterday"}')
    assert known.digest(known.find("amphora")) == undated


def test_a_kernel_beside_an_image_is_booted_with_its_arguments(images):
    assert Images(images).find("amphora").arguments is None
    (images / "amphora.kernel").write_bytes(b"kernel")
    assert Images(images).find("amphora").arguments == DEFAULT_ARGUMENTS
    (images / "amphora.arguments").write_text("root=/dev/vda1\n quiet\n")
    assert Images(images).find("amphora").arguments == "root=/dev/vda1 quiet"


@pytest.mark.parametrize("tag", ["missing", "../amphora", "", ".hidden", "a b"])
def test_a_tag_without_an_image_is_not_retried(images, tag):
    with pytest.raises(ComputeError) as raised:
        Images(images).find(tag)
    assert raised.value.final


def test_a_machine_keeps_the_image_of_its_boot(images, tmp_path):
    folder = tmp_path / "machine"
    folder.mkdir()
    link_image_files(Images(images).find("amphora"), folder)
    new = images / ".new"
    new.write_bytes(b"two")
    new.replace(images / "amphora.qcow2")
    assert (folder / BASE).read_bytes() == b"one"
    link_image_files(Images(images).find("amphora"), folder)
    assert (folder / BASE).read_bytes() == b"two"


def test_an_image_on_another_file_system_is_copied(images, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    link_image_files(Images(images).find("amphora"), tmp_path)
    assert (tmp_path / BASE).read_bytes() == b"one"
    assert (tmp_path / BASE).stat().st_ino != (images / "amphora.qcow2").stat().st_ino
