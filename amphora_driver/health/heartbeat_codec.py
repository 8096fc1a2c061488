# SPDX-License-Identifier: Apache-2.0
"""Decodes heartbeat datagrams into reports.

Invariant: no content of a datagram is decompressed or parsed before its signature is verified with the key of the
amphora that it names. The sizes of the document and of its parts are limited: an attacker may control the amphora.
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
# Magic bytes, amphora id, epoch and sequence number.
_HEADER = struct.Struct("!4s16sQQ")
_SIGNATURE_SIZE = 32
_MIN_SIZE = _HEADER.size + _SIGNATURE_SIZE
# Maximum size in bytes of a decompressed heartbeat. An agent's heartbeat has at most 600,000 bytes.
_MAX_DOCUMENT = 2 << 20
# The database column for the generation has 64 bits with a sign.
_MAX_GENERATION = 2**63 - 1
_OPERATION = "read a heartbeat"
_decode_report = msgspec.json.Decoder(Report).decode

Datagram = bytes | bytearray | memoryview


class VerifiedDatagram(msgspec.Struct, frozen=True):
    """A datagram with a verified signature. `compressed` is a view that stays valid as long as the buffer."""

    amphora_id: str
    epoch: int
    sequence: int
    compressed: memoryview


class Heartbeat(msgspec.Struct, frozen=True):
    """One authentic datagram. The pair (epoch, sequence) increases with each datagram of an amphora."""

    amphora_id: str
    epoch: int
    sequence: int
    report: Report


def read_amphora_id(datagram: Datagram) -> str:
    """Return the unverified amphora id in the header. Raise HeartbeatRefused without a header."""
    if len(datagram) < _MIN_SIZE:
        raise HeartbeatRefused(_OPERATION, f"{len(datagram)} bytes are too few", reason="short")
    if datagram[:4] != MAGIC:
        raise HeartbeatRefused(_OPERATION, "the magic bytes are missing", reason="magic")
    digits = datagram[4:20].hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def verify_signature(datagram: Datagram, key: Secret) -> VerifiedDatagram:
    """Verify a datagram with the key of its amphora. Raise HeartbeatRefused on a mismatch."""
    amphora_id = read_amphora_id(datagram)
    view = memoryview(datagram)
    signed, signature = view[:-_SIGNATURE_SIZE], view[-_SIGNATURE_SIZE:]
    if not hmac.compare_digest(hmac.digest(key.reveal(), signed, "sha256"), signature):
        raise HeartbeatRefused(_OPERATION, f"the signature is not amphora {amphora_id}'s", reason="signature")
    _magic, _id, epoch, sequence = _HEADER.unpack_from(view)
    return VerifiedDatagram(amphora_id, epoch, sequence, signed[_HEADER.size :])


def decompress_document(verified: VerifiedDatagram) -> bytes:
    """Decompress the document of a datagram. Raise HeartbeatRefused if it is too large or damaged."""
    amphora_id = verified.amphora_id
    decompressor = zlib.decompressobj()
    try:
        document = decompressor.decompress(verified.compressed, _MAX_DOCUMENT)
    except zlib.error as error:
        happened = f"the document of amphora {amphora_id} cannot be decompressed ({error})"
        raise HeartbeatRefused(_OPERATION, happened, reason="packing") from error
    if not decompressor.eof or decompressor.unused_data:
        happened = (
            f"the document of amphora {amphora_id} is truncated, has trailing bytes, or exceeds {_MAX_DOCUMENT} bytes"
        )
        raise HeartbeatRefused(_OPERATION, happened, reason="packing")
    return document


def parse_document(verified: VerifiedDatagram, document: bytes) -> Heartbeat:
    """Parse the result of `decompress_document`.

    Raise HeartbeatRefused if the document is no report, or if a part of it is longer than an agent sends.
    """
    amphora_id = verified.amphora_id
    try:
        report = _decode_report(document)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        happened = f"the document of amphora {amphora_id} is not a report ({error})"
        raise HeartbeatRefused(_OPERATION, happened, reason="document") from error
    generation = report.generation
    if generation is not None and not 0 <= generation <= _MAX_GENERATION:
        raise HeartbeatRefused(_OPERATION, f"amphora {amphora_id} sent an impossible generation", reason="document")
    # The document could name another amphora. So the report gets the amphora id of the header, which the signature
    # covers.
    identified = msgspec.structs.replace(report, amphora_id=amphora_id)
    return Heartbeat(amphora_id, verified.epoch, verified.sequence, identified)


def decode_datagram(datagram: Datagram, key: Secret) -> Heartbeat:
    """Verify and decode a datagram, without comparing it with earlier heartbeats."""
    verified = verify_signature(datagram, key)
    return parse_document(verified, decompress_document(verified))
