# SPDX-License-Identifier: Apache-2.0
"""Keys of TLS session tickets: a client resumes its session with either amphora and after a reload.

Invariant: no I/O. Three keys are in use at a time: the previous, the current and the next one. An amphora that is one
period ahead or behind therefore accepts the tickets of the other amphora. Each key is derived from its own seed, and
the stored state is the three seeds. Earlier keys cannot be derived from the state. Each new seed includes fresh random
bytes, so a stolen state does not reveal later keys.
Source: HAProxy configuration manual, `tls-ticket-keys`; HKDF is RFC 5869.
"""

from __future__ import annotations

import base64
import secrets

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from amphora_driver.errors import StoreError
from amphora_driver.secret import Secret

SEED_LENGTH = 32
_SEEDS = 3
# A TLS ticket key of HAProxy for AES-256 has 80 bytes: 16 for the name, 32 for the MAC and 32 for the cipher.
_KEY_LENGTH = 80
_KEY, _NEXT = b"amphora tls ticket key", b"amphora tls ticket seed"


def create_ticket_state() -> Secret:
    """Return the first state of a load balancer: one random seed, from which the next two are derived."""
    return Secret(secrets.token_bytes(SEED_LENGTH))


def rotate_ticket_state(state: Secret) -> Secret:
    """Return the state of the next period, without the oldest seed.

    Raises:
        StoreError: the state has another length.
    """
    seeds = _seeds(state)
    fresh = _derive(seeds[-1] + secrets.token_bytes(SEED_LENGTH), _NEXT, SEED_LENGTH)
    return Secret(b"".join((*seeds[1:], fresh)))


def ticket_keys(state: Secret) -> Secret:
    """Return the file for HAProxy: it encrypts with the last key but one and decrypts with all keys.

    Raises:
        StoreError: the state has another length.
    """
    keys = (_derive(seed, _KEY, _KEY_LENGTH) for seed in _seeds(state))
    return Secret(b"".join(base64.b64encode(key) + b"\n" for key in keys))


def _seeds(state: Secret) -> list[bytes]:
    content = state.reveal()
    if len(content) not in (SEED_LENGTH, _SEEDS * SEED_LENGTH):
        happened = f"the stored state has {len(content)} bytes"
        raise StoreError("derive TLS ticket keys", happened, "New keys are created.")
    seeds = [content[start : start + SEED_LENGTH] for start in range(0, len(content), SEED_LENGTH)]
    while len(seeds) < _SEEDS:
        seeds.append(_derive(seeds[-1], _NEXT, SEED_LENGTH))
    return seeds


def _derive(seed: bytes, info: bytes, length: int) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=None, info=info).derive(seed)
