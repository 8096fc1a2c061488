# SPDX-License-Identifier: Apache-2.0
"""The images of a directory, by tag.

Invariant: the image files of a machine do not change while the machine exists, even if the directory changes. The
machine has a hard link to each file, or a copy where a link is impossible. The digest depends on the contents and is
computed again only after a file has changed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
from pathlib import Path

import msgspec

from amphora_driver.compute.architecture import build_date
from amphora_driver.compute.qemu_command import INITRD, KERNEL
from amphora_driver.errors import ComputeError

BASE = "base.qcow2"
# Kernel arguments for an image without a file of kernel arguments. The root file system is a disk without partitions.
DEFAULT_ARGUMENTS = "root=/dev/vda ro console=ttyS0 quiet panic=10"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGITS = 16


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """One image: its files and kernel arguments. Kernel fields are None for an image with a boot loader."""

    tag: str
    disk: Path
    kernel: Path | None = None
    initrd: Path | None = None
    arguments: str | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.disk, self.kernel, self.initrd) if path is not None)


class Images:
    """One directory of images."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, str]] = {}

    def find(self, tag: str) -> Image:
        wanted = f"find the image {tag!r}"
        if not _TAG.fullmatch(tag):
            raise ComputeError(wanted, "the tag has characters that are not allowed", final=True)
        disk, kernel, initrd, arguments = (self._path(tag, kind) for kind in ("qcow2", "kernel", "initrd", "arguments"))
        if disk is None:
            place = self._directory / f"{tag}.qcow2"
            raise ComputeError(wanted, f"{place} does not exist", "See docs/how-to/build-an-image.md.", final=True)
        if kernel is None:
            return Image(tag=tag, disk=disk)
        words = DEFAULT_ARGUMENTS if arguments is None else " ".join(arguments.read_text(encoding="ascii").split())
        return Image(tag=tag, disk=disk, kernel=kernel, initrd=initrd, arguments=words)

    def digest(self, image: Image) -> str:
        """Return the name of the contents of an image: the tag, the build date if known, and a digest.

        Raises:
            OSError: a file cannot be read.
        """
        day = build_date(image.disk)
        seen = (day, image.arguments, *((at.st_ino, at.st_mtime_ns, at.st_size) for at in map(Path.stat, image.files)))
        with self._lock:
            known = self._known.get(image.tag)
            if known is None or known[0] != seen:
                made = hashlib.sha256((image.arguments or "").encode())
                for path in image.files:
                    with path.open("rb") as file:
                        while block := file.read(2**20):
                            made.update(block)
                known = (seen, "-".join(map(str, filter(None, (image.tag, day, made.hexdigest()[:_DIGITS])))))
                self._known[image.tag] = known
            return known[1]

    def _path(self, tag: str, kind: str) -> Path | None:
        path = self._directory / f"{tag}.{kind}"
        return path if path.is_file() else None


def link_image_files(image: Image, folder: Path) -> None:
    """Link the files of an image into the directory of a machine."""
    for name, path in ((BASE, image.disk), (KERNEL, image.kernel), (INITRD, image.initrd)):
        place = folder / name
        place.unlink(missing_ok=True)
        if path is not None:
            _link(path, place)


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EPERM, errno.EMLINK}:
            raise
        # If a hard link is impossible, for example across file systems, the file is copied.
        temporary = place.with_name(f".{place.name}.new")
        shutil.copyfile(source, temporary)
        temporary.replace(place)
