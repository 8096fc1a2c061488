# SPDX-License-Identifier: Apache-2.0
"""Searches files, tables, command lines and environments for secrets.

Invariant: a whole or partial secret is found in each of these encodings: bytes, hexadecimal, Python's notation of
bytes, and base64 at every alignment (so also inside DER inside PEM), with or without line breaks.
"""

import base64
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_private_key

# Shortest part of a secret that is looked for: long enough not to be there by chance, short enough to be in one line.
_RAW, _HEX, _BASE64, _TEXT = 10, 20, 12, 16


@dataclass(frozen=True)
class Canary:
    """One secret. `home` are the files where it belongs, as patterns below the state directory."""

    name: str
    secret: bytes
    home: tuple[str, ...] = ()
    # A word that people chose is looked for as it is, too short to be cut.
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
    """What makes an elliptic-curve key secret: its number, which every way of writing the key contains."""
    number = load_pem_private_key(pem if isinstance(pem, bytes) else pem.encode(), None).private_numbers()
    return number.private_value.to_bytes((number.public_numbers.curve.key_size + 7) // 8, "big")


def _parts(content, size, step):
    return {content[at : at + size] for at in range(0, max(1, len(content) - size + 1), step)}


def _base64(content, encode):
    """Parts that are the same whatever stands before; the six bits at either end belong to neighbours."""
    found = set()
    for before in range(3):
        text = encode(bytes(before) + content)
        inner = text[4 if before else 0 :].rstrip(b"=")[:-1]
        found |= _parts(inner, _BASE64, 6)
    return found


class Search:
    """All canaries at once."""

    def __init__(self, canaries):
        self._needles = [(one, sorted(one.needles())) for one in canaries]

    def within(self, content, exempt=lambda _canary: False):
        """The names of canaries that are in there."""
        return [
            one.name
            for one, needles in self._needles
            if not exempt(one) and any(needle in content for needle in needles)
        ]

    def files(self, folder):
        """Pairs of file and canary, for every file below a folder in which one does not belong; and how many files."""
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
        """Pairs of process and canary, for every command line and environment that can be read."""
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
        """Pairs of table and canary, for every value of every row; and how many rows there are."""
        found, looked = [], 0
        for table in tables:
            for row in connection.execute(table.select()):
                looked += 1
                for value in row:
                    content = value if isinstance(value, bytes) else str(value).encode()
                    found += [(table.name, name) for name in self.within(content)]
        return found, looked
