# SPDX-License-Identifier: Apache-2.0
"""The receiver's side of the agent's heartbeats (docs/reference/heartbeat.md)."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import uuid
import zlib
from dataclasses import dataclass
from typing import Any

from amphora_agent.stats.heartbeat_codec import MAGIC

_HEADER = struct.Struct("!4s16sQQ")
_MAC_BYTES = 32


@dataclass(frozen=True)
class Heartbeat:
    """The content of a datagram."""

    amphora_id: uuid.UUID
    epoch: int
    sequence: int
    document: dict[str, Any]


def decode(datagram: bytes, key: bytes) -> Heartbeat:
    """Verify and decode a datagram; raises ValueError."""
    if len(datagram) < _HEADER.size + _MAC_BYTES or not datagram.startswith(MAGIC):
        raise ValueError("not a heartbeat")
    signed, mac = datagram[:-_MAC_BYTES], datagram[-_MAC_BYTES:]
    if not hmac.compare_digest(hmac.digest(key, signed, hashlib.sha256), mac):
        raise ValueError("the HMAC was made with another key")
    _, amphora, epoch, sequence = _HEADER.unpack_from(signed)
    document = json.loads(zlib.decompress(signed[_HEADER.size :]))
    return Heartbeat(uuid.UUID(bytes=amphora), epoch, sequence, document)
