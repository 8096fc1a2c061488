# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: from a datagram to a report.

Invariant: nothing of a datagram is believed, unpacked or parsed before its signature was checked with the key of the
amphora it names. What is unpacked is bounded, as a whole and in each part: an attacker may control the amphora.
Source: docs/reference/heartbeat.md.
"""

from __future__ import annotations

import hmac
import struct
import zlib

import msgspec

from amphora_driver.errors import HeartbeatRefused
from amphora_driver.health.status import Report
from amphora_driver.secret import Secret

MAGIC = b"AHB1"
# Magic, amphora id, epoch, sequence.
_HEADER = struct.Struct("!4s16sQQ")
_SIGNATURE = 32
_SHORTEST = _HEADER.size + _SIGNATURE
# Bytes a document may unpack to. A datagram of 60,000 bytes, the longest an agent sends, unpacks to 0.6 million.
_LARGEST_DOCUMENT = 2 << 20
# What the database's columns hold.
_LARGEST_GENERATION = 2**63 - 1
_WANTED = "read a heartbeat"
_report = msgspec.json.Decoder(Report).decode

Datagram = bytes | bytearray | memoryview


class Signed(msgspec.Struct, frozen=True):
    """A datagram with a verified signature. Its amphora and its order are known; its content is not read yet.

    Attributes:
        packed: part of the datagram, valid as long as that is.
    """

    amphora_id: str
    epoch: int
    sequence: int
    packed: memoryview


class Heartbeat(msgspec.Struct, frozen=True):
    """One genuine datagram. (epoch, sequence) grows with each one an amphora sends."""

    amphora_id: str
    epoch: int
    sequence: int
    report: Report


def amphora_id_of(datagram: Datagram) -> str:
    """The amphora a datagram says it comes from; not to be believed before `open_datagram`.

    Raises:
        HeartbeatRefused: it is too short, or something else altogether.
    """
    if len(datagram) < _SHORTEST:
        raise HeartbeatRefused(_WANTED, f"{len(datagram)} bytes are too few", reason="short")
    if datagram[:4] != MAGIC:
        raise HeartbeatRefused(_WANTED, "it does not begin as a heartbeat does", reason="magic")
    digits = datagram[4:20].hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def verify(datagram: Datagram, key: Secret) -> Signed:
    """Check a datagram's signature. Nothing is unpacked.

    Args:
        datagram: as it was received.
        key: the heartbeat key of the amphora that `amphora_id_of` names.

    Raises:
        HeartbeatRefused: the signature is not this amphora's.
    """
    amphora_id = amphora_id_of(datagram)
    view = memoryview(datagram)
    signed, signature = view[:-_SIGNATURE], view[-_SIGNATURE:]
    if not hmac.compare_digest(hmac.digest(key.reveal(), signed, "sha256"), signature):
        raise HeartbeatRefused(_WANTED, f"its signature is not amphora {amphora_id}'s", reason="signature")
    _magic, _id, epoch, sequence = _HEADER.unpack_from(view)
    return Signed(amphora_id, epoch, sequence, signed[_HEADER.size :])


def unpack(signed: Signed) -> bytes:
    """The document of a datagram.

    Raises:
        HeartbeatRefused: it is too large, or damaged.
    """
    return _inflate(signed.packed, signed.amphora_id)


def read(signed: Signed, document: bytes) -> Heartbeat:
    """What a document says.

    Args:
        document: as `unpack` returned it.

    Raises:
        HeartbeatRefused: it is not a report, or longer in a part than any agent's.
    """
    amphora_id = signed.amphora_id
    try:
        report = _report(document)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise HeartbeatRefused(
            _WANTED, f"amphora {amphora_id} sent a document that is no report ({error})", reason="document"
        ) from error
    generation = report.generation
    if generation is not None and not 0 <= generation <= _LARGEST_GENERATION:
        raise HeartbeatRefused(_WANTED, f"amphora {amphora_id} sent an impossible generation", reason="document")
    # Whose report it is, is what the signature proves: whatever the document says about that is not read.
    mine = msgspec.structs.replace(report, amphora_id=amphora_id)
    return Heartbeat(amphora_id, signed.epoch, signed.sequence, mine)


def open_datagram(datagram: Datagram, key: Secret) -> Heartbeat:
    """Check and read a datagram, whatever was received before.

    Raises:
        HeartbeatRefused: it is not a heartbeat of the amphora that it names.
    """
    signed = verify(datagram, key)
    return read(signed, unpack(signed))


def _inflate(packed: memoryview, amphora_id: str) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        document = unpacking.decompress(packed, _LARGEST_DOCUMENT)
    except zlib.error as error:
        raise HeartbeatRefused(
            _WANTED, f"amphora {amphora_id} sent what does not unpack ({error})", reason="packing"
        ) from error
    if not unpacking.eof or unpacking.unused_data:
        raise HeartbeatRefused(
            _WANTED,
            f"amphora {amphora_id} sent a document that is cut off, or over {_LARGEST_DOCUMENT} bytes",
            reason="packing",
        )
    return document
