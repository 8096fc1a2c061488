# SPDX-License-Identifier: Apache-2.0
"""Secrets at rest.

Invariant: a secret reaches a table only as what `Vault.seal` made of it. The first key seals, all keys open, so that
keys are rotated by putting a new one on top.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.secret import Secret


class Vault:
    """Seals and opens secrets with the keys of one file (one Fernet key a line)."""

    def __init__(self, keys: list[bytes]) -> None:
        self._cipher = MultiFernet([Fernet(key) for key in keys])

    @classmethod
    def load(cls, path: str) -> Vault:
        """The vault whose keys are in this file.

        Raises:
            ConfigurationError: the file is missing, empty, or holds something else.
        """
        remedy = "Set [store] encryption_key_file to a file with one Fernet key a line."
        try:
            keys = Path(path).read_bytes().split()
            if not keys:
                raise ConfigurationError("read the encryption keys", f"{path} is empty", remedy)
            return cls(keys)
        except OSError as error:
            raise ConfigurationError("read the encryption keys", str(error), remedy) from error
        except ValueError as error:
            raise ConfigurationError("read the encryption keys", f"{path} holds no valid key", remedy) from error

    def seal(self, secret: Secret) -> bytes:
        """What may be written to a table."""
        return self._cipher.encrypt(secret.reveal())

    def open(self, sealed: bytes) -> Secret:
        """What was sealed.

        Raises:
            StoreError: no key of ours opens it.
        """
        try:
            return Secret(self._cipher.decrypt(sealed))
        except InvalidToken as error:
            raise StoreError(
                "open a secret",
                "none of the encryption keys fits",
                "Put the key it was sealed with back into the file.",
            ) from error
