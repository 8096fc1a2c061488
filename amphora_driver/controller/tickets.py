# SPDX-License-Identifier: Apache-2.0
"""The keys that seal TLS session tickets: a client may resume its session with either amphora, and after any reload.

Invariant: pure. Keys are derived, never stored, and only from what is sealed in the store. Three are in use at a time:
the one before, the one that seals, and the next; so an amphora that is a period ahead or behind still understands the
tickets of the other.
Source: HAProxy configuration manual, `tls-ticket-keys`; HKDF is RFC 5869.
"""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from amphora_driver.secret import Secret

SEED_LENGTH = 32
# AES-256: 16 bytes of name, 32 for the MAC and 32 for the cipher.
_KEY_LENGTH = 80
_INFO = b"amphora tls ticket key "


def ticket_keys(seed: Secret, number: int) -> Secret:
    """The file for HAProxy: the last line but one seals, all of them open.

    Args:
        seed: what the load balancer's keys are made from, `SEED_LENGTH` random bytes.
        number: which key seals; it grows by one with every period.
    """
    keys = (_key(seed, one) for one in (number - 1, number, number + 1))
    return Secret(b"".join(base64.b64encode(key) + b"\n" for key in keys))


def _key(seed: Secret, number: int) -> bytes:
    info = _INFO + number.to_bytes(8, "big")
    return HKDF(algorithm=hashes.SHA256(), length=_KEY_LENGTH, salt=None, info=info).derive(seed.reveal())
