# SPDX-License-Identifier: Apache-2.0
"""The folders of a directory of amphorae: one for each, with all that a backend of this machine knows of it.

Invariant: the folder is the first thing made and the last removed. A mark in it says which deployment booted the
amphora: another one with the same directory leaves it alone. One process at a time works on an amphora (a lock on its
folder), many amphorae are worked on at once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from amphora_driver.compute.interface import BootRequest
from amphora_driver.deadline import least
from amphora_driver.errors import ComputeError

_ID = re.compile(r"[0-9a-f][0-9a-f-]{7,35}")
# Longest time for somebody else to be done with an amphora's folder, and pause between two looks, in seconds.
_LOCK_SECONDS, _LOCK_PAUSE = 60.0, 0.02
# Characters of a log that are shown, and the most bytes of its end that are read: blanks may follow the last word.
_LOG_TAIL, _MOST_READ = 400, 64 * 1024
# The file in an amphora's folder that holds the prefix of the deployment that booted it.
_OWNER_FILE = "deployment"
# The file in it that says what it was booted from.
_IMAGE_FILE = "image"


class StateDirs:
    """One directory of amphorae.

    Args:
        directory: where it is.
        prefix: whose amphorae are ours.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory
        self._prefix = prefix

    def path(self, amphora_id: str) -> Path:
        """Where the amphora's folder is, or would be.

        Raises:
            ComputeError: this is not the id of an amphora.
        """
        if not _ID.fullmatch(amphora_id):
            raise ComputeError(f"find the folder of amphora {amphora_id!r}", "this is not the id of an amphora")
        return self._directory / amphora_id

    def all_amphorae(self) -> list[str]:
        """The ids of all amphorae that have a folder, whoever's they are."""
        if not self._directory.is_dir():
            return []
        return sorted(entry.name for entry in self._directory.iterdir() if _ID.fullmatch(entry.name))

    def own_amphorae(self) -> frozenset[str]:
        """The ids of all amphorae of this deployment of which something is left."""
        return frozenset(one for one in self.all_amphorae() if self._is_own(self.path(one)))

    def mark_owner(self, folder: Path) -> None:
        """Write down whose it is: before anything else is made, because what an interrupted boot leaves is ours."""
        write_private(folder / _OWNER_FILE, self._prefix.encode())

    def _is_own(self, folder: Path) -> bool:
        with suppress(FileNotFoundError):
            return (folder / _OWNER_FILE).read_bytes() == self._prefix.encode()
        return False

    @contextmanager
    def locked(self, amphora_id: str, *, make: bool = False) -> Iterator[Path]:
        """The amphora's folder, locked for this thread alone; where there is none, there is no lock."""
        folder = self.path(amphora_id)
        descriptor = _lock(folder, make=make)
        try:
            yield folder
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _lock(folder: Path, *, make: bool) -> int | None:
    while True:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if make:
                continue
            return None
        try:
            _wait_for_lock(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        # Whoever had the lock before may have removed the folder: then this is the lock of nothing.
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
        os.close(descriptor)


def _wait_for_lock(descriptor: int, folder: Path) -> None:
    """Lock it for this thread, as soon as nobody else has it and in the time this operation has."""
    end_at = time.monotonic() + _LOCK_SECONDS
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > end_at:
            raise ComputeError(f"work on {folder}", f"somebody else has been at it for {_LOCK_SECONDS:g} s")
        time.sleep(least(_LOCK_PAUSE))


def agent_files(request: BootRequest, address: str) -> dict[str, bytes]:
    """What lies in ``/etc/amphora-agent`` of the amphora, by file name, with its management address filled in.

    Raises:
        ComputeError: a name would lead out of that folder.
    """
    found = {}
    for name, content in request.files.items():
        if Path(name).name != name:
            raise ComputeError(f"boot amphora {request.amphora_id}", f"{name} is not the name of a file", final=True)
        text = content.reveal()
        found[name] = text.replace(b"{management_address}", address.encode()) if name == "agent.conf" else text
    return found


def write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and readable by root only: there are keys among these files."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)


def remove_directory(folder: Path) -> None:
    """Remove it, and its mark last: what is left of it when this is interrupted is still ours."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _OWNER_FILE:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder)


def write_image_name(folder: Path, image: str | None) -> None:
    """Write down what it is booted from."""
    write_private(folder / _IMAGE_FILE, (image or "").encode())


def read_image_name(folder: Path) -> str | None:
    """What it was booted from, if that was written down."""
    with suppress(FileNotFoundError):
        return (folder / _IMAGE_FILE).read_text(encoding="ascii") or None
    return None


def console_tail(log: Path) -> str:
    """The end of what it said. No more of it is read: how long it is, is up to whoever said it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_READ))
            text = file.read(_MOST_READ).decode(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    return text[-_LOG_TAIL:] or "it said nothing"


@contextmanager
def compute_errors(wanted: str) -> Iterator[None]:
    """Say of an error of the operating system what it kept from happening."""
    try:
        yield
    except OSError as error:
        raise ComputeError(wanted, str(error)) from error
