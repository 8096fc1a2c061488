# SPDX-License-Identifier: Apache-2.0
"""The state directories of amphorae on this machine, one for each amphora.

Invariant: the directory is created first and removed last. Its owner file names the deployment that booted the amphora;
other deployments that share the parent directory do not touch it. A lock on the directory serializes the work on one
amphora; work on different amphorae is concurrent.
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
from amphora_driver.deadline import limit_wait
from amphora_driver.errors import ComputeError

_ID = re.compile(r"[0-9a-f][0-9a-f-]{7,35}")
# Seconds to wait for the lock of an amphora's directory.
_LOCK_SECONDS = 60.0
# Seconds between two attempts to lock the directory.
_LOCK_PAUSE = 0.02
# Maximum number of characters of a console log in an error message.
_LOG_TAIL = 400
# Number of bytes to read from the end of a console log. The number exceeds _LOG_TAIL, because white space at the end is
# removed.
_MOST_READ = 64 * 1024
# The file with the id of the deployment that booted the amphora. No other deployment changes this amphora.
_OWNER_FILE = "deployment"
_IMAGE_FILE = "image"


class StateDirs:
    """The state directories below one parent directory; `prefix` identifies this deployment."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory
        self._prefix = prefix

    def path(self, amphora_id: str) -> Path:
        """Return the path of the amphora's directory, which need not exist.

        Raises:
            ComputeError: the argument is not an amphora id.
        """
        if not _ID.fullmatch(amphora_id):
            raise ComputeError(f"find the directory of amphora {amphora_id!r}", "this is not the id of an amphora")
        return self._directory / amphora_id

    def all_amphorae(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        return sorted(entry.name for entry in self._directory.iterdir() if _ID.fullmatch(entry.name))

    def own_amphorae(self) -> frozenset[str]:
        return frozenset(one for one in self.all_amphorae() if self._is_own(self.path(one)))

    def mark_owner(self, folder: Path) -> None:
        """Write the owner file before all others: the rest of an interrupted boot then has an owner."""
        write_private(folder / _OWNER_FILE, self._prefix.encode())

    def _is_own(self, folder: Path) -> bool:
        with suppress(FileNotFoundError):
            return (folder / _OWNER_FILE).read_bytes() == self._prefix.encode()
        return False

    @contextmanager
    def locked(self, amphora_id: str, *, make: bool = False) -> Iterator[Path]:
        """Lock the amphora's directory for this thread; a missing directory is not locked."""
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
        # While this process waited for the lock, another process may have replaced the directory. Only a lock of the
        # present directory is valid.
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
        os.close(descriptor)


def _wait_for_lock(descriptor: int, folder: Path) -> None:
    """Lock the directory; wait at most `_LOCK_SECONDS` or until the deadline of the operation."""
    end_at = time.monotonic() + _LOCK_SECONDS
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > end_at:
            happened = f"another thread or process has held its lock for {_LOCK_SECONDS:g} s"
            raise ComputeError(f"work on {folder}", happened)
        time.sleep(limit_wait(_LOCK_PAUSE))


def agent_files(request: BootRequest, address: str) -> dict[str, bytes]:
    """Return the files for ``/etc/amphora-agent`` by name, with the management address filled in.

    Raises:
        ComputeError: a name has a directory part.
    """
    found = {}
    for name, content in request.files.items():
        if Path(name).name != name:
            raise ComputeError(f"boot amphora {request.amphora_id}", f"{name} is not the name of a file", final=True)
        text = content.reveal()
        found[name] = text.replace(b"{management_address}", address.encode()) if name == "agent.conf" else text
    return found


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner only, because some files contain keys."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)


def remove_directory(folder: Path) -> None:
    """Remove a directory; the owner file is last: the rest of an interrupted removal has an owner."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _OWNER_FILE:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder)


def write_image_name(folder: Path, image: str | None) -> None:
    """Record the image of the machine."""
    write_private(folder / _IMAGE_FILE, (image or "").encode())


def read_image_name(folder: Path) -> str | None:
    """Return the recorded image of the machine; None without a record."""
    with suppress(FileNotFoundError):
        return (folder / _IMAGE_FILE).read_text(encoding="ascii") or None
    return None


def console_tail(log: Path) -> str:
    """Return the end of a console log; the guest controls the size of the log, so only the end is read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_READ))
            text = file.read(_MOST_READ).decode(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    return text[-_LOG_TAIL:] or "no console output"


@contextmanager
def compute_errors(wanted: str) -> Iterator[None]:
    """Convert an OSError to a ComputeError that names the failed operation."""
    try:
        yield
    except OSError as error:
        raise ComputeError(wanted, str(error)) from error
