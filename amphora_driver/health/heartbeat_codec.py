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
from hashlib import sha256

import msgspec

from amphora_driver.errors import HeartbeatRefused
from amphora_driver.health.status import Report
from amphora_driver.secret import Secret

MAGIC = b"AHB1"
# The header consists of magic bytes, amphora id, epoch and sequence number.
_ORDER = struct.Struct("!QQ")
_ORDER_OFFSET = 20
_HEADER_SIZE = _ORDER_OFFSET + _ORDER.size
_SIGNATURE_SIZE = 32
_MIN_SIZE = _HEADER_SIZE + _SIGNATURE_SIZE
# Block of SHA-256, and tables that combine each byte of a key with the constants of HMAC.
_BLOCK_SIZE = 64
_INNER_PAD = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD = bytes(byte ^ 0x5C for byte in range(256))
# Maximum size in bytes of a decompressed heartbeat. An agent's heartbeat has at most 600,000 bytes.
_MAX_DOCUMENT = 2 << 20
# The database column for the generation has 64 bits with a sign.
_MAX_GENERATION = 2**63 - 1
_OPERATION = "read a heartbeat"
_decode_report = msgspec.json.Decoder(Report).decode

Datagram = bytes | bytearray | memoryview


class VerifiedDatagram(msgspec.Struct, frozen=True, gc=False):
    """A datagram with a verified signature. `compressed` is a view that stays valid as long as the buffer."""

    amphora_id: str
    epoch: int
    sequence: int
    compressed: memoryview


class Heartbeat(msgspec.Struct, frozen=True, gc=False):
    """One authentic datagram. The pair (epoch, sequence) increases with each datagram of an amphora."""

    amphora_id: str
    epoch: int
    sequence: int
    report: Report


class AmphoraKey:
    """The key of one amphora, prepared for the verification of many datagrams.

    HMAC (RFC 2104) hashes the key in two states, which are the same for each datagram. A copy of both states takes a
    third of the time of `hmac.digest`.
    """

    __slots__ = ("_inner", "_outer", "amphora_id")

    def __init__(self, amphora_id: str, key: Secret) -> None:
        self.amphora_id = amphora_id
        value = key.reveal()
        block = (value if len(value) <= _BLOCK_SIZE else sha256(value).digest()).ljust(_BLOCK_SIZE, b"\0")
        self._inner = sha256(block.translate(_INNER_PAD))
        self._outer = sha256(block.translate(_OUTER_PAD))

    def is_signed(self, signed: Datagram, signature: Datagram) -> bool:
        """Return whether the signature belongs to these bytes and this key."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(signed)
        outer.update(inner.digest())
        return hmac.compare_digest(outer.digest(), signature)


def read_raw_id(datagram: Datagram) -> bytes:
    """Return the 16 bytes of the unverified amphora id. Raise HeartbeatRefused without a header."""
    if len(datagram) < _MIN_SIZE:
        raise HeartbeatRefused(_OPERATION, f"{len(datagram)} bytes are too few", reason="short")
    if datagram[:4] != MAGIC:
        raise HeartbeatRefused(_OPERATION, "the magic bytes are missing", reason="magic")
    return bytes(datagram[4:20])


def raw_amphora_id(amphora_id: str) -> bytes:
    """Return the bytes of an amphora id in a datagram.

    A text that is no id has bytes that no amphora sends.
    """
    try:
        return bytes.fromhex(amphora_id.replace("-", ""))
    except ValueError:
        return amphora_id.encode()


def format_amphora_id(raw: bytes) -> str:
    """Return the amphora id with these bytes as text."""
    digits = raw.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def read_amphora_id(datagram: Datagram) -> str:
    """Return the unverified amphora id in the header. Raise HeartbeatRefused without a header."""
    return format_amphora_id(read_raw_id(datagram))


def verify_datagram(view: memoryview, key: AmphoraKey) -> VerifiedDatagram:
    """Verify a datagram with a header and the key of its amphora. Raise HeartbeatRefused on a mismatch."""
    signed = view[:-_SIGNATURE_SIZE]
    if not key.is_signed(signed, view[-_SIGNATURE_SIZE:]):
        raise HeartbeatRefused(
            _OPERATION, f"the signature does not match the key of amphora {key.amphora_id}", reason="signature"
        )
    epoch, sequence = _ORDER.unpack_from(view, _ORDER_OFFSET)
    return VerifiedDatagram(key.amphora_id, epoch, sequence, signed[_HEADER_SIZE:])


def verify_signature(datagram: Datagram, key: Secret) -> VerifiedDatagram:
    """Verify a datagram with the key of its amphora. Raise HeartbeatRefused on a mismatch."""
    return verify_datagram(memoryview(datagram), AmphoraKey(read_amphora_id(datagram), key))


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
    # covers. No other object has this report yet, so it may still change.
    msgspec.structs.force_setattr(report, "amphora_id", amphora_id)
    return Heartbeat(amphora_id, verified.epoch, verified.sequence, report)


def decode_datagram(datagram: Datagram, key: Secret) -> Heartbeat:
    """Verify and decode a datagram, without comparing it with earlier heartbeats."""
    verified = verify_signature(datagram, key)
    return parse_document(verified, decompress_document(verified))
