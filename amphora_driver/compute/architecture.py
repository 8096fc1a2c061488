# SPDX-License-Identifier: Apache-2.0
"""The processor architectures of images, and the QEMU options for each.

Invariant: this module has constants only. The manifest beside an image states its architecture and its build date.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import msgspec

_MANIFEST = ".manifest"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One processor architecture; `name` is the name in Debian, `package` the Debian package of `program`.

    Attributes:
        machine: the machine type (`-machine`).
        emulated: the processor model without KVM (`-cpu`).
        firmware: the firmware file and its Debian package, where QEMU has no built-in firmware.
        generation: whether the machine type supports vmgenid, which shows a guest that it was restored.
    """

    name: str
    program: str
    package: str
    machine: str
    emulated: str
    firmware: tuple[str, str] | None = None
    generation: bool = True


# QEMU emulates Opteron_G3-v1 faster than other processor models. An amphora on Debian 13 needs 33 s of processor time
# until its agent starts, and 42 s with Nehalem-v1.
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


def _read_manifest(image: Path) -> _Manifest:
    try:
        return msgspec.json.decode(image.with_suffix(_MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError):
        return _Manifest()


def image_architecture(image: Path) -> Architecture:
    """Return the architecture in the manifest beside an image; amd64 without a readable manifest."""
    return ARCHITECTURES.get(_read_manifest(image).architecture, AMD64)


def build_date(image: Path) -> dt.date | None:
    """Return the build date in the manifest beside an image; None without a readable manifest."""
    time = _read_manifest(image).built
    return None if time is None else time.date()
