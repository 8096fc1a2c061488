# SPDX-License-Identifier: Apache-2.0
"""Secrets at rest.

Invariant: a secret reaches a table only as what `Vault.seal` made of it. The first key seals, all keys open, so that
keys are rotated by putting a new one on top (docs/secrets.md). A key file that was changed is taken up by running
processes; one that cannot be used any more leaves them with the keys they have. A key that is not in it any more opens
for a minute longer: a file that is being written in place may look like a shorter one. A file that strangers could
read is refused: keys are called by their place and a fingerprint, and shown to nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.secret import Secret

if TYPE_CHECKING:
    from collections.abc import Sequence

LOG = logging.getLogger(__name__)

_WANTED = "read the encryption keys"
_REMEDY = "Set [store] encryption_key_file to a file with one Fernet key a line."
# What a fingerprint is made from besides the key: it is the hash of nothing else that anybody may have.
_FINGERPRINT_OF = b"amphora-driver encryption key "
_FINGERPRINT_DIGITS = 12
# Seconds for which a key still opens after it was taken out of the file: writing one takes less.
_DROPPED_SECONDS = 60.0
# File, time of change in nanoseconds, length: what tells one version of a key file from the next.
_Version = tuple[int, int, int, int]


class Vault:
    """Seals and opens secrets with the keys of one file (one Fernet key a line), from any thread.

    Args:
        keys: Fernet keys, the one that seals first.

    Raises:
        ValueError: one of them is none.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._path: Path | None = None
        self._version: _Version | None = None
        self._loading = threading.Lock()
        self._ring = _Ring(keys)

    @classmethod
    def load(cls, path: str) -> Vault:
        """The vault whose keys are in this file, now and after each change of it.

        Raises:
            ConfigurationError: the file is missing, empty, readable by everybody, or holds something else.
        """
        # Looked at first: a change between looking and reading is then noticed the next time.
        version = _version(Path(path))
        vault = cls(_keys(Path(path)))
        vault._path, vault._version = Path(path), version
        return vault

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """What the keys are called, the one that seals first. Nothing about a key follows from it."""
        return self._current().fingerprints

    def seal(self, secret: Secret) -> bytes:
        """What may be written to a table."""
        return self._current().cipher.encrypt(secret.reveal())

    def open(self, sealed: bytes) -> Secret:
        """What was sealed.

        Raises:
            StoreError: no key of ours opens it.
        """
        with contextlib.suppress(InvalidToken):
            return Secret(self._current().opening.decrypt(sealed))
        raise StoreError(
            "open a secret",
            "none of the encryption keys fits",
            "Put the key it was sealed with back into the file.",
        )

    def sealed_with(self, sealed: bytes) -> int | None:
        """The place of the key this was sealed with, counted from 0; None if it is none of ours. Opens nothing."""
        for place, one in enumerate(self._current().ciphers):
            with contextlib.suppress(InvalidToken):
                # Checks the signature, which another key does not make, and decrypts nothing.
                one.extract_timestamp(sealed)
                return place
        return None

    def reseal(self, sealed: bytes) -> bytes:
        """The same secret sealed with the first key; the same bytes where it is already.

        Raises:
            StoreError: no key of ours opens it.
        """
        return sealed if self.sealed_with(sealed) == 0 else self.seal(self.open(sealed))

    def _current(self) -> _Ring:
        """The keys, read again if their file is another one: a look at it costs microseconds."""
        if self._path is not None and _version(self._path) != self._version:
            with self._loading:
                self._load_again(self._path)
        ring = self._ring
        if ring.dropped and time.monotonic() > ring.until:
            with self._loading:
                # Another thread may have put a newer one there meanwhile.
                if self._ring is ring:
                    self._ring = _Ring(ring.keys)
        return self._ring

    def _load_again(self, path: Path) -> None:
        version = _version(path)
        if version == self._version:
            return
        # Whatever comes of it, this version is not tried again: one warning is enough.
        self._version = version
        try:
            keys = _keys(path)
        except ConfigurationError as error:
            LOG.warning("the encryption keys in use are kept: %s", error)
            return
        before = self._ring
        dropped = [key for key in (*before.keys, *before.dropped) if key not in keys]
        self._ring = _Ring(keys, dropped)
        LOG.info("encryption keys were read again; %s seals", self._ring.fingerprints[0])
        if dropped:
            LOG.info("%d that are not there any more open for another %.0f s", len(dropped), _DROPPED_SECONDS)


class _Ring:
    """Keys that belong together; never changed, so that a thread sees the old ones or the new ones.

    Args:
        keys: of the file.
        dropped: keys that were in it until now. They open for some time yet, and do nothing else.
    """

    def __init__(self, keys: list[bytes], dropped: Sequence[bytes] = ()) -> None:
        self.keys, self.dropped = keys, dropped
        self.until = time.monotonic() + _DROPPED_SECONDS
        self.ciphers = [Fernet(key) for key in keys]
        self.cipher = MultiFernet(self.ciphers)
        self.opening = MultiFernet([*self.ciphers, *map(Fernet, dropped)])
        self.fingerprints = tuple(
            hashlib.sha256(_FINGERPRINT_OF + key).hexdigest()[:_FINGERPRINT_DIGITS] for key in keys
        )


def _version(path: Path) -> _Version | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def _keys(path: Path) -> list[bytes]:
    try:
        mode = path.stat().st_mode
        if mode & stat.S_IRWXO:
            raise ConfigurationError(
                _WANTED,
                f"everybody on this machine has access to {path} (mode {stat.S_IMODE(mode):04o})",
                f"Run chmod o-rwx {path}; if others could read it, replace the keys (docs/secrets.md).",
            )
        keys = path.read_bytes().split()
    except OSError as error:
        raise ConfigurationError(_WANTED, str(error), _REMEDY) from error
    if not keys:
        raise ConfigurationError(_WANTED, f"{path} is empty", _REMEDY)
    for line, key in enumerate(keys, start=1):
        try:
            Fernet(key)
        except ValueError:
            # Not what was raised: a traceback would lead through a frame with the key.
            raise ConfigurationError(_WANTED, f"line {line} of {path} is no Fernet key", _REMEDY) from None
    return keys
