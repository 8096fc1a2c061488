# SPDX-License-Identifier: Apache-2.0
"""What kinds of machines there are images for, and what each of them is under qemu.

Invariant: values only. An image says itself which it is, and when it was built, in the manifest beside it.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import msgspec

_MANIFEST = ".manifest"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One of them.

    Attributes:
        name: as Debian calls it.
        program: the qemu that has it.
        package: Debian's, with that program.
        machine: the board.
        emulated: the processor where it is emulated.
        firmware: what boots a disk where qemu has nothing by itself, with Debian's package for it.
        generation: whether a guest can be told that it is not what it was (vmgenid).
    """

    name: str
    program: str
    package: str
    machine: str
    emulated: str
    firmware: tuple[str, str] | None = None
    generation: bool = True


# The processor was measured. What is emulated costs less, the less of it there is (a kernel's start takes two thirds of
# the time that it takes with `max`), and the fewer faults a kernel believes it has to guard against: from power-on to
# the agent it is 33 s of processor time with this one and 42 s with Nehalem-v1 (Debian 13), 27 and 30 s (Debian 12).
AMD64 = Architecture(
    name="amd64", program="qemu-system-x86_64", package="qemu-system-x86", machine="pc", emulated="Opteron_G3-v1"
)
ARM64 = Architecture(
    name="arm64",
    program="qemu-system-aarch64",
    package="qemu-system-arm",
    machine="virt",
    emulated="cortex-a72",
    firmware=("/usr/share/qemu-efi-aarch64/QEMU_EFI.fd", "qemu-efi-aarch64"),
    generation=False,
)
ARCHITECTURES = {one.name: one for one in (AMD64, ARM64)}


class _Manifest(msgspec.Struct):
    architecture: str = ""
    built: dt.datetime | None = None


def _beside(image: Path) -> _Manifest:
    try:
        return msgspec.json.decode(image.with_suffix(_MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError):
        return _Manifest()


def image_architecture(image: Path) -> Architecture:
    """What the manifest beside an image says; amd64 where there is none that can be read."""
    return ARCHITECTURES.get(_beside(image).architecture, AMD64)


def build_date(image: Path) -> dt.date | None:
    """The day on which an image was built, by the manifest beside it; None where there is none that can be read."""
    time = _beside(image).built
    return None if time is None else time.date()
