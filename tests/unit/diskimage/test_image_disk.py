# SPDX-License-Identifier: Apache-2.0
"""The disk image builder: positions of partitions and of the boot loader."""

import json
import shutil
import struct
import subprocess

import pytest

from diskimage import disk


def test_partitions_follow_each_other():
    bios, uefi, root = disk.partition_layout(2048)
    assert (bios.first, uefi.first, root.first) == (1, 2, 10)
    assert bios.first + bios.length <= uefi.first
    assert uefi.first + uefi.length <= root.first
    assert root.first + root.length == 2047


def test_the_first_sector_keeps_the_partition_table():
    boot, present = bytes(range(256)) * 2, b"\xee" * 512
    found = disk.boot_sector(present, boot, 2048)
    assert struct.unpack_from("<Q", found, 0x5C) == (2048,)
    assert found[440:] == present[440:]
    assert found[:0x5C] == boot[:0x5C]
    assert len(found) == 512


def test_the_boot_loader_core_has_the_position_of_its_blocks():
    found = disk.core_with_block_list(b"\x01" * 1300, 2048)
    assert len(found) == 3 * 512
    assert struct.unpack_from("<QH", found, 500) == (2049, 2)


@pytest.mark.parametrize("length", [0, 512, 2**20 + 1])
def test_a_boot_loader_core_that_is_too_large_is_refused(length):
    with pytest.raises(ValueError, match="core"):
        disk.core_with_block_list(bytes(length), 2048)


@pytest.mark.skipif(
    not all(map(shutil.which, ("sfdisk", "mke2fs", "mkfs.vfat", "mcopy", "debugfs"))),
    reason="the tools that make disks are missing",
)
def test_a_small_disk_is_built(tmp_path):
    tree, file = tmp_path / "tree", tmp_path / "disk.raw"
    (tree / "boot/amphora").mkdir(parents=True)
    (tree / "etc").mkdir()
    (tree / "etc/os-release").write_text("ID=debian\n")
    for name, content in (("boot.img", b"B" * 512), ("core.img", b"C" * 1300), ("bootx64.efi", b"MZ")):
        (tree / "boot/amphora" / name).write_bytes(content)
    disk.make_disk(tree, file, 64)
    table = json.loads(subprocess.run(["sfdisk", "--json", file], check=True, capture_output=True).stdout)[
        "partitiontable"
    ]
    assert table["label"] == "gpt"
    assert [(part["start"], part["name"]) for part in table["partitions"]] == [
        (2048, "bios"),
        (4096, "uefi"),
        (20480, "root"),
    ]
    data = file.read_bytes()
    assert data[2048 * 512 : 2048 * 512 + 500] == b"C" * 500
    assert data[0:8] == b"B" * 8
    listed = subprocess.run(
        ["mdir", "-b", "-i", f"{file}@@2M", "::/EFI/BOOT"], check=True, capture_output=True, text=True
    ).stdout
    assert "BOOTX64.EFI" in listed
    shown = subprocess.run(
        ["debugfs", "-R", "cat /etc/os-release", f"{file}?offset={10 * 2**20}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "ID=debian\n"
