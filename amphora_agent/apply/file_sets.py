# SPDX-License-Identifier: Apache-2.0
"""The files that HAProxy reads besides its configuration: certificates with their keys, authorities, revocation lists.

Invariant: they are in memory only, readable by root only, and lost with it. Each set of files has a directory of its
own, named after what it holds, complete and unchanging as soon as it has that name. HAProxy's configuration names the
directory: so text and files change together, in one step, and what was served before is whole until it is not needed
any more.
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
from amphora_agent.haproxy.tls_diff import Side
from amphora_agent.paths import Paths

_DIGITS = 32


class FileSets:
    """All sets of files of this amphora."""

    def __init__(self, paths: Paths) -> None:
        self._root = paths.files
        self._empty = paths.empty
        self._known: set[Path] = set()
        # Of each file of the set that was looked at last, how it looked when its content was right.
        self._right: dict[Path, tuple[int, ...]] = {}

    def place(self, files: Sequence[File]) -> Path:
        """The directory in which a set is, or would be."""
        if not files:
            return self._empty
        names = "\n".join(f"{file.sha256} {file.name}" for file in files)
        return self._root / hashlib.sha256(names.encode()).hexdigest()[:_DIGITS]

    def holds(self, files: Sequence[File]) -> bool:
        """Whether a set is here, every file of it with the right content."""
        place = self.place(files)
        here = not files or (place.is_dir() and all(_digest(place / file.name) == file.sha256 for file in files))
        (self._known.add if here else self._known.discard)(place)
        return here

    def damaged(self, files: Sequence[File]) -> list[str]:
        """Names of those of a set that are gone or hold something else; only what was touched is read again."""
        place, wrong = self.place(files), []
        before, self._right = self._right, {}
        for file in files:
            path = place / file.name
            looks = looks_of(path)
            if looks is not None and (before.get(path) == looks or _digest(path) == file.sha256):
                self._right[path] = looks
            else:
                wrong.append(file.name)
        return wrong

    def doubt(self) -> None:
        """Read every file before it is taken for what it was: somebody says the same once more, or was here."""
        self._known.clear()
        self._right.clear()

    def lay_out(self, files: Sequence[File], served: Sequence[File] = ()) -> Path:
        """Have a set in its directory.

        Args:
            served: the files that are served now; what is the same is not written again.

        Raises:
            MachineError: the set is not here, and neither are the contents to make it from.
            OSError: there is no memory left, for example.
        """
        place = self.place(files)
        if place in self._known and place.is_dir():
            return place
        if not self.holds(files):
            self._make(place, files, served)
            self._known.add(place)
        return place

    def _make(self, place: Path, files: Sequence[File], served: Sequence[File]) -> None:
        unready = place.with_name(f".{place.name}")
        _remove(unready)
        same = {file.name: file.sha256 for file in served}
        try:
            for file in files:
                target = unready / file.name
                _make_directories(target.parent)
                source = self.place(served) / file.name
                if same.get(file.name) == file.sha256 and _digest(source) == file.sha256:
                    os.link(source, target)
                else:
                    _write(target, file)
            _remove(place)  # it was damaged
            unready.rename(place)
        except BaseException:
            _remove(unready)
            raise

    def side(self, configuration: Configuration, files: Sequence[File], place: Path, names: Iterable[str]) -> Side:
        """A configuration with its files, and the contents of those of them that say what else there is.

        Args:
            place: where they are.
            names: further files whose contents have to be known.
        """
        told = {*tls_diff.lists(configuration), *tls_diff.ticket_keys(configuration), *names}
        here = {file.name for file in files}
        texts = {name: (place / name).read_text(encoding="utf-8") for name in told & here}
        return Side(configuration, tuple(files), texts)

    def keep_only(self, places: Collection[Path]) -> None:
        """Remove every other set, and what a death of the agent left half made."""
        for found in _entries(self._root):
            if found not in places:
                self._known.discard(found)
                _remove(found)


def looks_of(path: Path) -> tuple[int, ...] | None:
    """What changes with a file's content, and cannot be put back (inode(7)); None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _make_directories(directory: Path) -> None:
    """Each for its owner alone, which `Path.mkdir` does not do for those on the way."""
    if not directory.is_dir():
        _make_directories(directory.parent)
        directory.mkdir(mode=0o700)


def _write(target: Path, file: File) -> None:
    if file.content is None:
        raise MachineError(f"write {file.name}", "its content is gone: it was in memory only", "Push the bundle again.")
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(file.content.encode())


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _entries(directory: Path) -> Iterable[Path]:
    with suppress(FileNotFoundError):
        return list(directory.iterdir())
    return []


def _remove(directory: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
