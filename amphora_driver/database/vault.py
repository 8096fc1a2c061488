# SPDX-License-Identifier: Apache-2.0
"""Secrets at rest.

Invariant: a secret reaches a table only as what `Vault.seal` made of it, and opens only in the place it was sealed for:
the place is part of what is encrypted and signed. A value without a place, as older versions sealed it, is opened by
`reseal` only. The first key seals, all keys open, so that keys are rotated by putting a new one on top
(docs/secrets.md). A key file that was changed is taken up by running processes; one that cannot be used any more leaves
them with the keys they have. A key that is not in it any more opens for a minute longer: a file that is being written
in place may look like a shorter one. A file that other users can read is refused. Keys are named by their line and a
fingerprint, and never shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import stat
import threading
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.secret import Secret

if TYPE_CHECKING:
    from collections.abc import Sequence

LOG = logging.getLogger(__name__)

_READ_KEYS = "read the encryption keys"
_OPEN = "open a secret"
_REMEDY = "Set [store] encryption_key_file to a file with one Fernet key a line."
# What a fingerprint is made from besides the key: it is the hash of nothing else that anybody may have.
_FINGERPRINT_PREFIX = b"amphora-driver encryption key "
_FINGERPRINT_DIGITS = 12
# Seconds for which a key still opens after it was taken out of the file: writing one takes less.
_REMOVED_KEY_SECONDS = 60.0
# File, time of change in nanoseconds, length: what tells one version of a key file from the next.
_FileVersion = tuple[int, int, int, int]
# What is encrypted is this, a digest of the place, and the secret. Neither PEM texts nor random keys begin so.
_BOUND_PREFIX = b"amphora-sealed-1"
_DIGEST_LENGTH = 32


class SecretLocation(msgspec.Struct, frozen=True):
    """Where a sealed secret belongs.

    Attributes:
        table: its table.
        row: what identifies the row and the purpose; the same parts in the same order for all rows of a table.
    """

    table: str
    row: tuple[str, ...]

    def digest(self) -> bytes:
        """What is sealed of it; no two places have the same."""
        return hashlib.sha256(msgspec.json.encode((self.table, *self.row))).digest()


class Binding(Enum):
    """What a sealed value is bound to: the place it is in, another one, or none."""

    THIS_ROW = "this row"
    OTHER_ROW = "other row"
    UNBOUND = "unbound"


class Vault:
    """Seals and opens secrets with the keys of one file (one Fernet key a line), from any thread.

    Args:
        keys: Fernet keys, the one that seals first.

    Raises:
        ValueError: one of them is none.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._path: Path | None = None
        self._version: _FileVersion | None = None
        self._loading = threading.Lock()
        self._ring = _KeyRing(keys)

    @classmethod
    def load(cls, path: str) -> Vault:
        """The vault whose keys are in this file, now and after each change of it.

        Raises:
            ConfigurationError: the file is missing, empty, readable by everybody, or holds something else.
        """
        # Looked at first: a change between looking and reading is then noticed the next time.
        version = _file_version(Path(path))
        vault = cls(_read_keys(Path(path)))
        vault._path, vault._version = Path(path), version
        return vault

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """What the keys are called, the one that seals first. Nothing about a key follows from it."""
        return self._current().fingerprints

    def seal(self, secret: Secret, place: SecretLocation) -> bytes:
        """What may be written to this place, and to no other."""
        return self._current().cipher.encrypt(_BOUND_PREFIX + place.digest() + secret.reveal())

    def open(self, sealed: bytes, place: SecretLocation) -> Secret:
        """What was sealed.

        Args:
            sealed: what `seal` returned.
            place: where it was found.

        Raises:
            StoreError: no key of ours opens it, or it was sealed for another place.
        """
        return _require_bound_to(place, self._decrypted(sealed))

    def binding(self, sealed: bytes, place: SecretLocation) -> Binding | None:
        """What a value found in this place is bound to; None if no key of ours opens it."""
        try:
            return _binding(place, self._decrypted(sealed))
        except StoreError:
            return None

    def key_index(self, sealed: bytes) -> int | None:
        """The place of the key this was sealed with, counted from 0; None if it is none of ours. Opens nothing."""
        for place, one in enumerate(self._current().ciphers):
            with contextlib.suppress(InvalidToken):
                # Checks the signature, which another key does not make, and decrypts nothing.
                one.extract_timestamp(sealed)
                return place
        return None

    def reseal(self, sealed: bytes, place: SecretLocation, *, bind: bool = False) -> bytes:
        """The same secret sealed with the first key; the same bytes where it is already.

        Args:
            sealed: what is in the place.
            place: where it was found.
            bind: what is bound to no place belongs here.

        Raises:
            StoreError: no key of ours opens it, or it was sealed for another place, or for none.
        """
        content = self._decrypted(sealed)
        if bind and _binding(place, content) is Binding.UNBOUND:
            return self.seal(Secret(content), place)
        secret = _require_bound_to(place, content)
        return sealed if self.key_index(sealed) == 0 else self.seal(secret, place)

    def _decrypted(self, sealed: bytes) -> bytes:
        with contextlib.suppress(InvalidToken):
            return self._current().opening.decrypt(sealed)
        raise StoreError(
            _OPEN,
            "none of the encryption keys fits",
            "Put the key it was sealed with back into the file.",
        )

    def _current(self) -> _KeyRing:
        """The keys, read again if their file is another one: a look at it costs microseconds."""
        if self._path is not None and _file_version(self._path) != self._version:
            with self._loading:
                self._load_again(self._path)
        ring = self._ring
        if ring.dropped and time.monotonic() > ring.until:
            with self._loading:
                # Another thread may have put a newer one there meanwhile.
                if self._ring is ring:
                    self._ring = _KeyRing(ring.keys)
        return self._ring

    def _load_again(self, path: Path) -> None:
        version = _file_version(path)
        if version == self._version:
            return
        # Whatever comes of it, this version is not tried again: one warning is enough.
        self._version = version
        try:
            keys = _read_keys(path)
        except ConfigurationError as error:
            LOG.warning("the encryption keys in use are kept: %s", error)
            return
        before = self._ring
        dropped = [key for key in (*before.keys, *before.dropped) if key not in keys]
        self._ring = _KeyRing(keys, dropped)
        LOG.info("encryption keys were read again; %s seals", self._ring.fingerprints[0])
        if dropped:
            LOG.info("%d that are not there any more open for another %.0f s", len(dropped), _REMOVED_KEY_SECONDS)


def _binding(place: SecretLocation, content: bytes) -> Binding:
    if not content.startswith(_BOUND_PREFIX):
        return Binding.UNBOUND
    found = content[len(_BOUND_PREFIX) :][:_DIGEST_LENGTH]
    return Binding.THIS_ROW if hmac.compare_digest(found, place.digest()) else Binding.OTHER_ROW


def _require_bound_to(place: SecretLocation, content: bytes) -> Secret:
    binding = _binding(place, content)
    if binding is Binding.THIS_ROW:
        return Secret(content[len(_BOUND_PREFIX) + _DIGEST_LENGTH :])
    if binding is Binding.UNBOUND:
        happened = f"a value in table {place.table} is not bound to its row"
        raise StoreError(_OPEN, happened, "Run: amphoractl secrets reseal --bind (docs/secrets.md).")
    raise StoreError(
        _OPEN,
        f"a value in table {place.table} was sealed for another row or purpose",
        "It was copied inside the database. Restrict write access to it, and replace the value (docs/secrets.md).",
    )


class _KeyRing:
    """Keys that belong together; never changed, so that a thread sees the old ones or the new ones.

    Args:
        keys: of the file.
        dropped: keys that were in it until now. They open for some time yet, and do nothing else.
    """

    def __init__(self, keys: list[bytes], dropped: Sequence[bytes] = ()) -> None:
        self.keys, self.dropped = keys, dropped
        self.until = time.monotonic() + _REMOVED_KEY_SECONDS
        self.ciphers = [Fernet(key) for key in keys]
        self.cipher = MultiFernet(self.ciphers)
        self.opening = MultiFernet([*self.ciphers, *map(Fernet, dropped)])
        self.fingerprints = tuple(
            hashlib.sha256(_FINGERPRINT_PREFIX + key).hexdigest()[:_FINGERPRINT_DIGITS] for key in keys
        )


def _file_version(path: Path) -> _FileVersion | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def _read_keys(path: Path) -> list[bytes]:
    try:
        mode = path.stat().st_mode
        if mode & stat.S_IRWXO:
            raise ConfigurationError(
                _READ_KEYS,
                f"everybody on this machine has access to {path} (mode {stat.S_IMODE(mode):04o})",
                f"Run chmod o-rwx {path}; if others could read it, replace the keys (docs/secrets.md).",
            )
        keys = path.read_bytes().split()
    except OSError as error:
        raise ConfigurationError(_READ_KEYS, str(error), _REMEDY) from error
    if not keys:
        raise ConfigurationError(_READ_KEYS, f"{path} is empty", _REMEDY)
    for line, key in enumerate(keys, start=1):
        try:
            Fernet(key)
        except ValueError:
            # Not what was raised: a traceback would lead through a frame with the key.
            raise ConfigurationError(_READ_KEYS, f"line {line} of {path} is no Fernet key", _REMEDY) from None
    return keys
