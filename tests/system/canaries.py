# SPDX-License-Identifier: Apache-2.0
"""Searches files, tables, command lines and environments for secrets.

Invariant: a search finds whole and partial secrets in these encodings: bytes, hexadecimal, Python's notation of bytes,
and base64. It finds base64 at every alignment (so also inside DER inside PEM), with or without line breaks.
"""

import base64
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_private_key

# Shortest searched part of a secret: long enough to exclude chance, short enough to fit in one line.
_RAW, _HEX, _BASE64, _TEXT = 10, 20, 12, 16


@dataclass(frozen=True)
class Canary:
    """One secret. `home` has patterns of the files that may contain it, below the state directory."""

    name: str
    secret: bytes
    home: tuple[str, ...] = ()
    # A chosen password is too short for partial matches.
    whole: bool = False

    def needles(self):
        if self.whole:
            return {self.secret, self.secret.hex().encode(), base64.b64encode(self.secret).rstrip(b"=")[:-1]}
        return {
            *_parts(self.secret, _RAW, 8),
            *_parts(self.secret.hex().encode(), _HEX, 20),
            *_parts(self.secret.hex().upper().encode(), _HEX, 20),
            *_parts(repr(self.secret)[2:-1].encode(), _TEXT, 30),
            *_base64(self.secret, base64.b64encode),
            *_base64(self.secret, base64.urlsafe_b64encode),
        }


def key_in(pem):
    """Return the private number of an elliptic-curve key, which every encoding of the key contains."""
    number = load_pem_private_key(pem if isinstance(pem, bytes) else pem.encode(), None).private_numbers()
    return number.private_value.to_bytes((number.public_numbers.curve.key_size + 7) // 8, "big")


def _parts(content, size, step):
    return {content[at : at + size] for at in range(0, max(1, len(content) - size + 1), step)}


def _base64(content, encode):
    """Return the parts of base64 that do not depend on neighbouring bytes."""
    found = set()
    for before in range(3):
        text = encode(bytes(before) + content)
        inner = text[4 if before else 0 :].rstrip(b"=")[:-1]
        found |= _parts(inner, _BASE64, 6)
    return found


class Search:
    """Searches for all canaries at once."""

    def __init__(self, canaries):
        self._needles = [(one, sorted(one.needles())) for one in canaries]

    def within(self, content, exempt=lambda _canary: False):
        """Return the names of canaries in this data."""
        return [
            one.name
            for one, needles in self._needles
            if not exempt(one) and any(needle in content for needle in needles)
        ]

    def files(self, folder):
        """Return pairs of file and misplaced canary below a folder, and the number of files."""
        found, looked = [], 0
        for path in sorted(Path(folder).rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            looked += 1
            place = path.relative_to(folder)
            names = self.within(path.read_bytes(), lambda one, place=place: any(map(place.match, one.home)))
            found += [(str(place), name) for name in names]
        return found, looked

    def processes(self):
        """Return pairs of process and canary, for every readable command line and environment."""
        found, looked = [], 0
        for folder in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                try:
                    content = (folder / name).read_bytes()
                except OSError:
                    continue
                looked += 1
                found += [(f"{name} of process {folder.name}", one) for one in self.within(content)]
        return found, looked

    def tables(self, connection, tables):
        """Return pairs of table and canary over all values, and the number of rows."""
        found, looked = [], 0
        for table in tables:
            for row in connection.execute(table.select()):
                looked += 1
                for value in row:
                    content = value if isinstance(value, bytes) else str(value).encode()
                    found += [(table.name, name) for name in self.within(content)]
        return found, looked
