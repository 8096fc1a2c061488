# SPDX-License-Identifier: Apache-2.0
"""Encryption of secrets at rest.

Invariant: a table holds a secret only as a result of `Vault.seal`. A sealed value is bound to its location (table, row,
purpose), which is part of the authenticated content. A copy in another location does not open. The first key seals and
all keys open. A new first key therefore starts a key rotation (docs/explanation/secrets.md).

Running processes reload a changed key file, and keep their keys if the new file is unusable. A removed key still opens
secrets for a minute, because a file that is being written in place may look truncated. The vault refuses a key file
that other users can read. Logs identify keys by line and fingerprint, never by content.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

_READ_KEYS = "read the encryption keys"
_OPEN = "open a secret"
_DOCS = "docs/explanation/secrets.md"
_OPTION = "[amp_database] encryption_key_file"
# The prefix makes the fingerprint differ from hashes of the key that other software computes.
_FINGERPRINT_PREFIX = b"amphora-driver encryption key "
_FINGERPRINT_DIGITS = 12
# Seconds for which the vault still decrypts with a key after the key has disappeared from the file. An editor may
# remove the key for a moment while it writes the file.
_REMOVED_KEY_SECONDS = 60.0
# Inode, modification time in nanoseconds, size and mode of the key file. A difference means that the file has changed.
_FileVersion = tuple[int, int, int, int]
# Before encryption, the vault adds this prefix and a digest of the table and row to the secret. So the vault refuses a
# secret that was copied to another row.
_BOUND_PREFIX = b"amphora-sealed-1"
_DIGEST_LENGTH = 32


class SecretLocation(msgspec.Struct, frozen=True):
    """Location of a sealed secret in the database.

    `row` identifies row and purpose, by the same parts in the same order for all rows of a table.
    """

    table: str
    row: tuple[str, ...]

    def digest(self) -> bytes:
        """Return a digest that is unique to this location."""
        return hashlib.sha256(msgspec.json.encode((self.table, *self.row))).digest()


class Vault:
    """Seals secrets with the first of its Fernet keys and opens them with all keys, from any thread."""

    def __init__(self, keys: list[bytes]) -> None:
        self._path: Path | None = None
        self._option = _OPTION
        self._version: _FileVersion | None = None
        self._reload_lock = threading.Lock()
        self._key_ring = _KeyRing(keys)

    @classmethod
    def load(cls, path: str, option: str = _OPTION) -> Vault:
        """Return a vault with the keys of a file, which it reloads after a change; `option` names the file.

        Raises:
            ConfigurationError: the file is missing, empty, readable by other users, or contains an invalid key.
        """
        # The version is read before the keys, so a change between both reads makes the version outdated. Then the vault
        # reads the keys again.
        version = _file_version(Path(path))
        vault = cls(_read_keys(Path(path), option))
        vault._path, vault._version, vault._option = Path(path), version, option
        return vault

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of the keys, which reveal nothing about the keys; the sealing key comes first."""
        return self._current_ring().fingerprints

    def seal(self, secret: Secret, location: SecretLocation) -> bytes:
        """Encrypt a secret for this location only."""
        return self._current_ring().cipher.encrypt(_BOUND_PREFIX + location.digest() + secret.reveal())

    def open(self, sealed: bytes, location: SecretLocation) -> Secret:
        """Decrypt a result of `seal`; raise `StoreError` if no key opens it, or if it is misplaced."""
        return _require_bound_to(location, self._decrypted(sealed))

    def find_keys(self, values: Iterable[tuple[bytes, SecretLocation]]) -> list[tuple[int | None, bool]]:
        """Return for each value the result of `key_index`, and whether the value is misplaced.

        It is misplaced if a key opens it, but it was sealed for another location. All values use one comparison of the
        key file, which takes a quarter of the time of a single value.
        """
        ring = self._current_ring()
        return [ring.find_key(sealed, location) for sealed, location in values]

    def key_index(self, sealed: bytes) -> int | None:
        """Return the index of the sealing key, from 0; None if it is unknown."""
        for index, cipher in enumerate(self._current_ring().ciphers):
            with contextlib.suppress(InvalidToken):
                # `Fernet.extract_timestamp` verifies the signature without a decryption, so it finds the right key
                # quickly.
                cipher.extract_timestamp(sealed)
                return index
        return None

    def reseal(self, sealed: bytes, location: SecretLocation) -> bytes:
        """Return the secret sealed with the first key, the same bytes if it is so already; see `open`."""
        secret = _require_bound_to(location, self._decrypted(sealed))
        return sealed if self.key_index(sealed) == 0 else self.seal(secret, location)

    def _decrypted(self, sealed: bytes) -> bytes:
        with contextlib.suppress(InvalidToken):
            return self._current_ring().opening.decrypt(sealed)
        raise StoreError(
            _OPEN, "none of the encryption keys decrypts it", "Add the key that encrypted it to the key file again."
        )

    def _current_ring(self) -> _KeyRing:
        """Return the keys; reload them if the file has changed. The comparison takes microseconds."""
        if self._path is not None and _file_version(self._path) != self._version:
            with self._reload_lock:
                self._reload(self._path)
        ring = self._key_ring
        if ring.removed and time.monotonic() > ring.removed_until:
            with self._reload_lock:
                # Another thread may have replaced the key ring while this thread waited for the lock, so the ring is
                # compared again.
                if self._key_ring is ring:
                    self._key_ring = _KeyRing(ring.keys)
        return self._key_ring

    def _reload(self, path: Path) -> None:
        version = _file_version(path)
        if version == self._version:
            return
        # Each version of the key file is read once, so an unusable file causes one warning only.
        self._version = version
        try:
            keys = _read_keys(path, self._option)
        except ConfigurationError as error:
            LOG.warning(
                "the vault keeps the current encryption keys, because the changed key file is not usable: %s",
                error,
            )
            return
        before = self._key_ring
        removed = [key for key in (*before.keys, *before.removed) if key not in keys]
        self._key_ring = _KeyRing(keys, removed)
        LOG.info(
            "the vault has reloaded the encryption keys and now encrypts with the key that has the fingerprint %s",
            self._key_ring.fingerprints[0],
        )
        if removed:
            text = (
                "%d encryption keys were removed from the key file; the vault still decrypts with these keys for %.0f s"
            )
            LOG.info(text, len(removed), _REMOVED_KEY_SECONDS)


def _is_bound_to(location: SecretLocation, content: bytes) -> bool:
    bound = _BOUND_PREFIX + location.digest()
    return hmac.compare_digest(content[: len(bound)], bound)


def _require_bound_to(location: SecretLocation, content: bytes) -> Secret:
    if _is_bound_to(location, content):
        return Secret(content[len(_BOUND_PREFIX) + _DIGEST_LENGTH :])
    raise StoreError(
        _OPEN,
        f"a value in table {location.table} was encrypted for another row or purpose",
        "The value was copied inside the database. Restrict write access to the database, and "
        f"replace the value ({_DOCS}).",
    )


class _KeyRing:
    """A set of keys, which a reload replaces as a whole; `removed` keys only open, and only for some time."""

    def __init__(self, keys: list[bytes], removed: Sequence[bytes] = ()) -> None:
        self.keys, self.removed = keys, removed
        self.removed_until = time.monotonic() + _REMOVED_KEY_SECONDS
        self.ciphers = [Fernet(key) for key in keys]
        self.cipher = MultiFernet(self.ciphers)
        self.opening = MultiFernet([*self.ciphers, *map(Fernet, removed)])
        digests = (hashlib.sha256(_FINGERPRINT_PREFIX + key).hexdigest() for key in keys)
        self.fingerprints = tuple(digest[:_FINGERPRINT_DIGITS] for digest in digests)

    def find_key(self, sealed: bytes, location: SecretLocation) -> tuple[int | None, bool]:
        """Return the result of `Vault.find_keys` for one value."""
        for index, cipher in enumerate(self.ciphers):
            try:
                return index, not _is_bound_to(location, cipher.decrypt(sealed))
            except InvalidToken:
                continue
        try:
            return None, not _is_bound_to(location, self.opening.decrypt(sealed))
        except InvalidToken:
            return None, False


def _file_version(path: Path) -> _FileVersion | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def _read_keys(path: Path, option: str) -> list[bytes]:
    remedy = f"Set {option} to a file with one Fernet key a line."
    try:
        mode = path.stat().st_mode
        if mode & stat.S_IRWXO:
            raise ConfigurationError(
                _READ_KEYS,
                f"other users have access to {path} (mode {stat.S_IMODE(mode):04o})",
                f"Run chmod o-rwx {path}; if other users may have read it, replace the keys ({_DOCS}).",
            )
        keys = path.read_bytes().split()
    except OSError as error:
        raise ConfigurationError(_READ_KEYS, str(error), remedy) from error
    if not keys:
        raise ConfigurationError(_READ_KEYS, f"{path} is empty", remedy)
    for line, key in enumerate(keys, start=1):
        try:
            Fernet(key)
        except ValueError:
            # `from None` drops the original exception, because its traceback has a frame with the encryption key.
            raise ConfigurationError(_READ_KEYS, f"line {line} of {path} is not a Fernet key", remedy) from None
    return keys
