# SPDX-License-Identifier: Apache-2.0
"""The TLS files of HAProxy: certificates with their keys, CA certificates, CRLs.

Invariant: the files are in memory (tmpfs) only, and only root can read them. Each set has a directory, whose name is a
digest of the set; the directory is complete and never changes. HAProxy's configuration names the directory, so that
text and files change together with one rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from amphora_agent.bundle import File
from amphora_agent.errors import MachineError
from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.tls_diff import TlsState
from amphora_agent.paths import Paths, file_identity

_DIGITS = 32


class FileSets:
    """The TLS files of this amphora, in sets."""

    def __init__(self, paths: Paths) -> None:
        self._root = paths.files
        self._empty = paths.empty
        self._known: set[Path] = set()
        # Inode number, size and times of each TLS file at the last check that found the correct content.
        self._intact: dict[Path, tuple[int, ...]] = {}

    def directory(self, files: Sequence[File]) -> Path:
        """Return the directory of a set, which may not exist."""
        if not files:
            return self._empty
        names = "\n".join(f"{file.sha256} {file.name}" for file in files)
        return self._root / hashlib.sha256(names.encode()).hexdigest()[:_DIGITS]

    def holds(self, files: Sequence[File]) -> bool:
        """Whether a set exists with the correct content of each file."""
        directory = self.directory(files)
        complete = not files or (
            directory.is_dir() and all(_digest(directory / file.name) == file.sha256 for file in files)
        )
        (self._known.add if complete else self._known.discard)(directory)
        return complete

    def damaged(self, files: Sequence[File]) -> list[str]:
        """Return the names of missing or modified files of a set; read only files whose inode changed."""
        directory, wrong = self.directory(files), []
        before, self._intact = self._intact, {}
        for file in files:
            path = directory / file.name
            identity = file_identity(path)
            if identity is not None and (before.get(path) == identity or _digest(path) == file.sha256):
                self._intact[path] = identity
            else:
                wrong.append(file.name)
        return wrong

    def invalidate(self) -> None:
        """Read each file again before its next use, because another program may have changed the file."""
        self._known.clear()
        self._intact.clear()

    def create(self, files: Sequence[File], served: Sequence[File] = ()) -> Path:
        """Create the directory of a set, if necessary, and return its path.

        Identical files of the `served` set are linked, which needs no memory. Raises MachineError if the bundle does
        not have the contents, and OSError.
        """
        directory = self.directory(files)
        if directory in self._known and directory.is_dir():
            return directory
        if not self.holds(files):
            self._write_set(directory, files, served)
            self._known.add(directory)
        return directory

    def _write_set(self, directory: Path, files: Sequence[File], served: Sequence[File]) -> None:
        incomplete = directory.with_name(f".{directory.name}")
        _remove(incomplete)
        same = {file.name: file.sha256 for file in served}
        try:
            for file in files:
                target = incomplete / file.name
                _make_directories(target.parent)
                source = self.directory(served) / file.name
                if same.get(file.name) == file.sha256 and _digest(source) == file.sha256:
                    os.link(source, target)
                else:
                    _write(target, file)
            # The directory may exist with missing or modified files, so the agent replaces the directory.
            _remove(directory)
            incomplete.rename(directory)
        except BaseException:
            _remove(incomplete)
            raise

    def tls_state(
        self, configuration: Configuration, files: Sequence[File], directory: Path, names: Iterable[str]
    ) -> TlsState:
        """Return a configuration with its files in a directory, and the contents for a comparison.

        A comparison needs the contents of crt-lists, ticket keys, and the files with the given `names`.
        """
        listed = (tls_diff.files_of_binds(configuration, keyword) for keyword in ("crt-list", "tls-ticket-keys"))
        needed = set(names).union(*listed)
        existing = {file.name for file in files}
        texts = {name: (directory / name).read_text(encoding="utf-8") for name in needed & existing}
        return TlsState(configuration, tuple(files), texts)

    def keep_only(self, directories: Collection[Path]) -> None:
        """Remove all other sets, and incomplete ones after a crash of the agent."""
        for found in list(self._root.iterdir()) if self._root.is_dir() else ():
            if found not in directories:
                self._known.discard(found)
                _remove(found)


def _make_directories(directory: Path) -> None:
    """Create missing directories with mode 0700; `Path.mkdir` does not apply the mode to parents."""
    if not directory.is_dir():
        _make_directories(directory.parent)
        directory.mkdir(mode=0o700)


def _write(target: Path, file: File) -> None:
    if file.content is None:
        raise MachineError(f"write {file.name}", "its content is lost: it was in memory only", "Push the bundle again.")
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(file.content.encode())


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _remove(directory: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
