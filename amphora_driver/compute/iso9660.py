# SPDX-License-Identifier: Apache-2.0
"""An ISO 9660 file system in memory, for config drives.

Invariant: pure and deterministic: the same files give the same bytes. The Joliet tree has the file names (specification
of 1995: UCS-2, up to 64 characters). The mandatory ISO 9660 tree (ECMA-119) has numbers as names. The image has no
times and no owners: the guest sets them when it writes the files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SECTOR = 2048
# ECMA-119 8.1.1: the descriptors follow the system area.
_SYSTEM_SECTORS = 16
# Descriptors: primary, Joliet, terminator. Four path tables follow.
_FIRST_TABLE = _SYSTEM_SECTORS + 3
_LONGEST_NAME = 64
# Level 3 of UCS-2 (Joliet, section "SVD Escape Sequences Field").
_JOLIET = b"%/E"
# 1 January 1970 in the two formats of ECMA-119 (9.1.5 and 8.4.26.1).
_SHORT_TIME = bytes((70, 1, 1, 0, 0, 0, 0))
_LONG_TIME, _NO_TIME = b"1970010100000000\0", b"0000000000000000\0"
_DIRECTORY_FLAG = 2


@dataclass
class _Folder:
    """A directory: its name, its parent and its content."""

    name: str
    parent: _Folder | None = None
    folders: dict[str, _Folder] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def build_image(label: str, files: Mapping[str, bytes]) -> bytes:
    """The image of a file system with these files.

    Args:
        label: the volume label that blkid(8) prints; at most 16 ASCII characters.
        files: contents by path; slashes separate directories.

    Raises:
        ValueError: a path or the label is not allowed.
    """
    if not label.isascii() or not 0 < len(label) <= 16:
        raise ValueError(f"label {label!r}: 1 to 16 ASCII characters are needed")
    root = _tree(files)
    folders = list(_breadth_first(root))
    trees = (_Tree(folders, joliet=False), _Tree(folders, joliet=True))
    at = _FIRST_TABLE
    for tree in trees:
        at = tree.place_tables(at)
    for tree in trees:
        at = tree.place_folders(at)
    places: dict[tuple[int, str], int] = {}
    contents = []
    for folder in folders:
        for name, content in folder.files.items():
            places[id(folder), name] = at
            contents.append(_padded(content))
            at += len(contents[-1]) // SECTOR
    descriptors = [tree.descriptor(label, at) for tree in trees]
    descriptors.append(_padded(b"\xffCD001\x01"))
    tables = [table for tree in trees for table in tree.tables()]
    directories = [written for tree in trees for written in tree.directories(places)]
    return b"".join((bytes(_SYSTEM_SECTORS * SECTOR), *descriptors, *tables, *directories, *contents))


def _tree(files: Mapping[str, bytes]) -> _Folder:
    root = _Folder("")
    for path in sorted(files):
        *above, name = path.split("/")
        folder = root
        for part in above:
            _check(part, path)
            if part in folder.files:
                raise ValueError(f"{path!r}: {part} is a file")
            folder = folder.folders.setdefault(part, _Folder(part, folder))
        _check(name, path)
        if name in folder.folders:
            raise ValueError(f"{path!r}: a directory has this name")
        folder.files[name] = bytes(files[path])
    return root


def _check(name: str, path: str) -> None:
    if name in {"", ".", ".."} or len(name) > _LONGEST_NAME or set(name) & set("*/:;?\\") or not name.isprintable():
        raise ValueError(f"{path!r}: {name!r} cannot be the name of a file")


def _breadth_first(root: _Folder) -> Iterator[_Folder]:
    """The directories in the order of a path table (ECMA-119 6.9.1): by level, parent and name."""
    level = [root]
    while level:
        yield from level
        level = [folder.folders[name] for folder in level for name in sorted(folder.folders)]


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % SECTOR)


def _both(number: int, size: str = "I") -> bytes:
    """A number in both byte orders (ECMA-119 7.2.3, 7.3.3)."""
    return struct.pack(f"<{size}", number) + struct.pack(f">{size}", number)


class _Tree:
    """One of the two directory trees (ISO 9660 or Joliet). Both refer to the same file contents."""

    def __init__(self, folders: list[_Folder], *, joliet: bool) -> None:
        self._folders = folders
        self._joliet = joliet
        self._numbers = {id(folder): number for number, folder in enumerate(folders, 1)}
        self._at: dict[int, int] = {}
        self._table_at = 0

    def place_tables(self, at: int) -> int:
        """Reserve sectors for the path tables of both byte orders; returns the next free sector."""
        self._table_at = at
        return at + 2 * self._table_sectors

    def place_folders(self, at: int) -> int:
        for folder in self._folders:
            self._at[id(folder)] = at
            at += len(self._entries(folder, {})) // SECTOR
        return at

    @property
    def _table_sectors(self) -> int:
        return len(_padded(self._table("<"))) // SECTOR

    def tables(self) -> list[bytes]:
        return [_padded(self._table("<")), _padded(self._table(">"))]

    def directories(self, places: Mapping[tuple[int, str], int]) -> list[bytes]:
        return [self._entries(folder, places) for folder in self._folders]

    def descriptor(self, label: str, sectors: int) -> bytes:
        """The volume descriptor (ECMA-119 8.4, 8.5)."""
        root = self._folders[0]
        size = len(self._table("<"))
        blank = self._text("", 128)
        made = b"".join((
            bytes((2 if self._joliet else 1,)), b"CD001\x01\0",
            self._text("", 32), self._text(label, 32), bytes(8), _both(sectors),
            (_JOLIET if self._joliet else b"").ljust(32, b"\0"),
            _both(1, "H"), _both(1, "H"), _both(SECTOR, "H"), _both(size),
            struct.pack("<II", self._table_at, 0), struct.pack(">II", self._table_at + self._table_sectors, 0),
            self._record(b"\0", self._at[id(root)], len(self._entries(root, {})), _DIRECTORY_FLAG),
            blank * 4, self._text("", 37) * 3, _LONG_TIME, _LONG_TIME, _NO_TIME, _NO_TIME, b"\x01\0",
        ))  # fmt: skip
        return _padded(made)

    def _text(self, text: str, length: int) -> bytes:
        if not self._joliet:
            return text.encode().ljust(length, b" ")
        return (text.encode("utf-16-be") + b"\0 " * length)[: length - length % 2].ljust(length, b"\0")

    def _table(self, order: str) -> bytes:
        """The path table (ECMA-119 9.4)."""
        found = []
        for folder in self._folders:
            name = self._folder_name(folder)
            parent = self._numbers[id(folder.parent or folder)]
            head = struct.pack(f"{order}BBIH", len(name), 0, self._at.get(id(folder), 0), parent)
            found.append(head + name + bytes(len(name) % 2))
        return b"".join(found)

    def _entries(self, folder: _Folder, places: Mapping[tuple[int, str], int]) -> bytes:
        """The records of a directory (ECMA-119 9.1): none crosses the end of a sector."""
        above = folder.parent or folder
        records = [
            self._record(name, self._at.get(id(one), 0), self._size(one), _DIRECTORY_FLAG)
            for name, one in ((b"\0", folder), (b"\1", above))
        ]
        named = [(self._folder_name(one), one) for one in folder.folders.values()]
        rows = [(name, self._at.get(id(one), 0), self._size(one), _DIRECTORY_FLAG) for name, one in named]
        rows += [
            (self._file_name(number, name), places.get((id(folder), name), 0), len(content), 0)
            for number, (name, content) in enumerate(folder.files.items())
        ]
        records += [self._record(*row) for row in sorted(rows)]
        made = b""
        for record in records:
            if len(made) // SECTOR != (len(made) + len(record) - 1) // SECTOR:
                made = _padded(made)
            made += record
        return _padded(made)

    def _size(self, folder: _Folder) -> int:
        """The size of a directory. It follows from the names alone, so that no recursion is necessary."""
        lengths = [34, 34]
        lengths += _sorted_lengths(
            [self._folder_name(one) for one in folder.folders.values()]
            + [self._file_name(number, name) for number, name in enumerate(folder.files)]
        )
        at = 0
        for length in lengths:
            if at // SECTOR != (at + length - 1) // SECTOR:
                at += -at % SECTOR
            at += length
        return at + -at % SECTOR

    @staticmethod
    def _record(name: bytes, at: int, size: int, flags: int) -> bytes:
        tail = name + bytes(1 - len(name) % 2)
        head = _both(at) + _both(size) + _SHORT_TIME + bytes((flags, 0, 0)) + _both(1, "H") + bytes((len(name),))
        return bytes((2 + len(head) + len(tail), 0)) + head + tail

    def _folder_name(self, folder: _Folder) -> bytes:
        if folder.parent is None:
            return b"\0"
        return folder.name.encode("utf-16-be") if self._joliet else f"D{self._numbers[id(folder)]:07}".encode()

    def _file_name(self, number: int, name: str) -> bytes:
        return name.encode("utf-16-be") if self._joliet else f"F{number:07}.;1".encode()


def _sorted_lengths(names: list[bytes]) -> list[int]:
    """The lengths of the directory records of these names, in the order on disk."""
    return [33 + len(name) + 1 - len(name) % 2 for name in sorted(names)]
