# SPDX-License-Identifier: Apache-2.0
"""The encoding of heartbeats (docs/reference/heartbeat.md) as datagrams of at most `LARGEST` bytes."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import uuid
import zlib
from collections.abc import Iterator
from typing import Any

MAGIC = b"AHB1"
LARGEST = 60_000
_HEADER = struct.Struct("!4s16sQQ")


def encode(amphora_id: uuid.UUID, key: bytes, epoch: int, sequence: int, document: dict[str, Any]) -> bytes:
    """Return one datagram of any length."""
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode())
    signed = _HEADER.pack(MAGIC, amphora_id.bytes, epoch, sequence) + packed
    return signed + hmac.digest(key, signed, hashlib.sha256)


def datagrams(amphora_id: uuid.UUID, key: bytes, epoch: int, first: int, document: dict[str, Any]) -> Iterator[bytes]:
    """Yield the datagrams of a document, with sequence numbers from `first` on."""
    sequence, pending = first, [document]
    while pending:
        part = pending.pop()
        datagram = encode(amphora_id, key, epoch, sequence, part)
        if len(datagram) > LARGEST and (halves := _halves(part)) is not None:
            pending += reversed(halves)
            continue
        sequence += 1
        yield datagram


def _halves(document: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Split a document into two; None if it holds one object only."""
    objects = [("listeners", name, "") for name in document["listeners"]]
    for name, pool in document["pools"].items():
        objects += [("pools", name, member) for member in pool["members"]] or [("pools", name, "")]
    middle = len(objects) // 2
    return [_part(document, objects[:middle]), _part(document, objects[middle:])] if middle else None


def _part(document: dict[str, Any], objects: list[tuple[str, str, str]]) -> dict[str, Any]:
    part: dict[str, Any] = {**document, "listeners": {}, "pools": {}}
    for kind, name, member in objects:
        whole = document[kind][name]
        if kind == "listeners":
            part[kind][name] = whole
            continue
        pool = part[kind].setdefault(name, {"status": whole["status"], "members": {}})
        if member:
            pool["members"][member] = whole["members"][member]
    return part
