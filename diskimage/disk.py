# SPDX-License-Identifier: Apache-2.0
"""Creates a bootable disk image from a file system tree.

Invariant: the build needs no loop device, no mount and no partition support of the kernel, so that it also works in a
container. The disk boots with BIOS (GRUB's core image in its own partition) and with UEFI (removable media path). The
boot images in the tree (element amphora-boot) determine which; nothing else depends on the architecture.

    python3 -m diskimage.disk TREE DISK MEBIBYTES

Sources: UEFI specification 2.10 section 5 (GPT) and 3.5.1.1 (removable media); GRUB's `boot.S` and `diskboot.S` for the
block lists in the first sectors.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512
MEBIBYTE = 2**20
ROOT_LABEL = "amphora-root"
BOOT_IMAGES = Path("boot/amphora")
_UEFI_NAMES = ("bootx64.efi", "bootaa64.efi")
# GPT partition types: BIOS boot, EFI system, Linux file system.
_BIOS, _UEFI, _LINUX = (
    "21686148-6449-6E6F-744E-656564454649",
    "C12A7328-F81F-11D2-BA4B-00A0C93EC93B",
    "0FC63DAF-8483-4772-8E79-3D69D8477DE4",
)
_UEFI_MEBIBYTES = 8
# boot.S: the offset of the first sector to read, and the number of code bytes in the sector.
_NEXT_SECTOR, _CODE_BYTES = 0x5C, 440
# diskboot.S: the block list is at the end of the first sector; an entry has sector, count and segment.
_LIST_ENTRY = 500


@dataclass(frozen=True)
class Partition:
    """A partition; start and length in mebibytes."""

    kind: str
    name: str
    first: int
    length: int


def partition_layout(mebibytes: int) -> tuple[Partition, Partition, Partition]:
    """The partitions of a disk: BIOS boot, UEFI, root. The table takes one mebibyte at each end."""
    root = 2 + _UEFI_MEBIBYTES
    return (
        Partition(_BIOS, "bios", 1, 1),
        Partition(_UEFI, "uefi", 2, _UEFI_MEBIBYTES),
        Partition(_LINUX, "root", root, mebibytes - root - 1),
    )


def sfdisk_script(partitions: tuple[Partition, ...]) -> str:
    """The input of sfdisk(8) for these partitions."""
    lines = [f"start={part.first}MiB, size={part.length}MiB, type={part.kind}, name={part.name}" for part in partitions]
    return "\n".join(["label: gpt", *lines, ""])


def boot_sector(present: bytes, boot: bytes, core_sector: int) -> bytes:
    """The first sector of the disk: GRUB's code, then the existing partition table.

    Args:
        present: the present content of the sector.
        boot: GRUB's boot.img.
        core_sector: the first sector of the core image.
    """
    code = bytearray(boot[:_CODE_BYTES])
    struct.pack_into("<Q", code, _NEXT_SECTOR, core_sector)
    return bytes(code) + present[_CODE_BYTES:]


def core_with_block_list(core: bytes, core_sector: int) -> bytes:
    """GRUB's core image with a block list for a contiguous location.

    Raises:
        ValueError: the image is larger than its partition.
    """
    if not SECTOR < len(core) <= MEBIBYTE:
        raise ValueError(f"GRUB's core image has {len(core)} bytes, its partition {MEBIBYTE}")
    sectors = -(-len(core) // SECTOR)
    data = bytearray(core.ljust(sectors * SECTOR, b"\0"))
    struct.pack_into("<QH", data, _LIST_ENTRY, core_sector + 1, sectors - 1)
    return bytes(data)


def make_disk(tree: Path, disk: Path, mebibytes: int) -> None:
    """Create the disk image.

    Args:
        tree: the content of the root file system, unpacked with its owners.
        disk: the file to create.
        mebibytes: the size of the disk.
    """
    bios, uefi, root = partition_layout(mebibytes)
    with disk.open("wb") as file:
        file.truncate(mebibytes * MEBIBYTE)
    _run("sfdisk", "--quiet", "--no-reread", "--no-tell-kernel", str(disk), given=sfdisk_script((bios, uefi, root)))
    images = tree / BOOT_IMAGES
    if (images / "core.img").exists():
        _write_bios(disk, images, bios.first * MEBIBYTE // SECTOR)
    _write_uefi(disk, images, uefi)
    # Few reserved blocks and a small journal: an amphora rarely writes, and only some kilobytes.
    _run(
        *("mke2fs", "-q", "-F", "-t", "ext4", "-L", ROOT_LABEL, "-m", "1", "-J", "size=16", "-d", str(tree)),
        *("-E", f"offset={root.first * MEBIBYTE},root_owner=0:0", str(disk), f"{root.length * 1024}k"),
    )


def _write_bios(disk: Path, images: Path, core_sector: int) -> None:
    with disk.open("r+b") as file:
        sector = boot_sector(file.read(SECTOR), (images / "boot.img").read_bytes(), core_sector)
        file.seek(0)
        file.write(sector)
        file.seek(core_sector * SECTOR)
        file.write(core_with_block_list((images / "core.img").read_bytes(), core_sector))


def _write_uefi(disk: Path, images: Path, partition: Partition) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "uefi"
        _run("mkfs.vfat", "-n", "UEFI", "-C", str(file), str(partition.length * 1024))
        _run("mmd", "-i", str(file), "::/EFI", "::/EFI/BOOT")
        for name in _UEFI_NAMES:
            if (images / name).exists():
                _run("mcopy", "-i", str(file), str(images / name), f"::/EFI/BOOT/{name.upper()}")
        with file.open("rb") as source, disk.open("r+b") as target:
            target.seek(partition.first * MEBIBYTE)
            shutil.copyfileobj(source, target)


def _run(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"Could not create the disk: {command[0]} failed: {(done.stderr or done.stdout).strip()[-800:]}")


if __name__ == "__main__":
    make_disk(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
