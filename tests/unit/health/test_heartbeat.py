# SPDX-License-Identifier: Apache-2.0
"""Heartbeat datagrams: decoding, reasons of refusals, and speed."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import time
import uuid
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora_driver.errors import HeartbeatRefused
from amphora_driver.health.heartbeat_codec import decode_datagram, read_amphora_id
from amphora_driver.health.status import ListenerReport, PoolReport, Report
from amphora_driver.secret import Secret

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
KEY = bytes(range(32))
DOCUMENT = {
    "generation": 8,
    "listeners": {
        "listener": {
            "status": "OPEN",
            "active_connections": 3,
            "bytes_in": 1,
            "bytes_out": 2,
            "request_errors": 0,
            "total_connections": 40,
        }
    },
    "pools": {"pool:listener": {"status": "UP", "members": {"member": "UP 1/3"}}},
}


def signed(content, key=KEY):
    return content + hmac.new(key, content, hashlib.sha256).digest()


def header(*, amphora_id=AMPHORA, epoch=5, sequence=7):
    return b"AHB1" + uuid.UUID(amphora_id).bytes + struct.pack("!QQ", epoch, sequence)


def sealed(document, **about):
    """Seal as in docs/reference/heartbeat.md; a second implementation, because the codec belongs to the agent."""
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    return signed(header(**about) + zlib.compress(content))


def refusal(datagram):
    with pytest.raises(HeartbeatRefused) as caught:
        decode_datagram(datagram, Secret(KEY))
    return caught.value.reason


@pytest.mark.parametrize(("said", "heard"), [({}, None), *(({"holds_vip": one}, one) for one in (True, False, None))])
def test_vip_holder(said, heard):
    assert decode_datagram(sealed({**DOCUMENT, **said}), Secret(KEY)).report.holds_vip is heard
    assert refusal(sealed({**DOCUMENT, "holds_vip": "yes"})) == "document"


def test_a_heartbeat_is_decoded():
    heartbeat = decode_datagram(sealed(DOCUMENT), Secret(KEY))
    assert (heartbeat.amphora_id, heartbeat.epoch, heartbeat.sequence) == (AMPHORA, 5, 7)
    assert heartbeat.report == Report(
        generation=8,
        listeners={"listener": ListenerReport("OPEN", 3, 1, 2, 0, 40)},
        pools={"pool:listener": PoolReport(status="UP", members={"member": "UP 1/3"})},
        amphora_id=AMPHORA,
    )


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_type_is_accepted(kind):
    assert decode_datagram(kind(sealed(DOCUMENT)), Secret(KEY)).report.generation == 8
    assert read_amphora_id(kind(sealed(DOCUMENT))) == AMPHORA


def test_an_amphora_without_configuration():
    assert decode_datagram(sealed({"generation": None}), Secret(KEY)).report.generation is None


def test_a_document_cannot_name_another_amphora():
    heartbeat = decode_datagram(sealed({**DOCUMENT, "amphora_id": "another"}), Secret(KEY))
    assert heartbeat.report.amphora_id == AMPHORA


def test_unknown_keys_are_ignored():
    assert decode_datagram(sealed({**DOCUMENT, "new": [1]}), Secret(KEY)).report.generation == 8


def test_a_key_of_another_amphora_is_refused():
    with pytest.raises(HeartbeatRefused, match=AMPHORA) as caught:
        decode_datagram(signed(header() + zlib.compress(b"{}"), b"x" * 32), Secret(KEY))
    assert caught.value.reason == "signature"


def test_a_change_of_any_bit_is_refused():
    datagram = sealed({"generation": 1})
    for index in range(len(datagram)):
        changed = bytearray(datagram)
        changed[index] ^= 1
        assert refusal(changed) == ("magic" if index < 4 else "signature")


@pytest.mark.parametrize("length", [0, 1, 35, 36, 67])
def test_a_short_datagram_is_refused(length):
    assert refusal(sealed(DOCUMENT)[:length]) == "short"


def test_another_format_is_refused():
    assert refusal(b"x" * 100) == "magic"


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"rubbish",
        zlib.compress(b'{"generation": 1}')[:-1],
        zlib.compress(b'{"generation": 1}') + b"x",
    ],
)
def test_invalid_datagrams_are_refused(packed):
    assert refusal(signed(header() + packed)) == "packing"


def test_a_decompression_bomb_is_refused():
    bomb = zlib.compress(b" " * (60 << 20), 9)
    assert len(bomb) < 65000
    begin = time.process_time()
    assert refusal(signed(header() + bomb)) == "packing"
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b'"\\ud800"',
        b"[" * 5000,
        b'{"x":' * 5000,
        b'{"generation": "8"}',
        b'{"generation": -1}',
        b'{"generation": 9223372036854775808}',
        b'{"generation": 1, "listeners": {"a": {}}}',
        b'{"generation": 1, "listeners": {"a": {"status": "\xff"}}}',
        b'{"generation": 1, "pools": {"a": {"status": "UP", "members": {"m": 1}}}}',
    ],
)
def test_a_document_without_the_form_of_a_report_is_refused(document):
    assert refusal(sealed(document)) == "document"


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_without_another_error(content):
    # No document starts with these bytes; an object without known keys is an empty report.
    for datagram in (content, signed(header() + content), sealed(b"!" + content)):
        with pytest.raises(HeartbeatRefused):
            decode_datagram(datagram, Secret(KEY))


def typical():
    """Return a report with 7 listeners and 56 members, as in the measurements behind the target."""
    listeners = {str(uuid.uuid4()): DOCUMENT["listeners"]["listener"] for _ in range(7)}
    members = {"status": "UP"}
    pools = {
        f"{uuid.uuid4()}:{name}": {**members, "members": {str(uuid.uuid4()): "UP" for _ in range(8)}}
        for name in listeners
    }
    return sealed({"generation": 8, "listeners": listeners, "pools": pools})


@pytest.mark.parametrize(
    "said",
    [
        {"agent_version": "a\x00b"},
        {"agent_version": "0.1.0\n"},
        {"agent_version": "\U0001f600"},
        {"agent_version": "1" * 65},
        {"listeners": {"l" * 81: {"status": "OPEN"}}},
        {"listeners": {"l": {"status": "O" * 65}}},
        {"pools": {"p" * 81: {"status": "UP"}}},
        {"pools": {"p:l": {"status": "UP", "members": {"m" * 81: "UP"}}}},
        {"pools": {"p:l": {"status": "UP", "members": {"m": "U" * 65}}}},
        {"drift": ["d" * 65]},
        {"drift": ["d"] * 33},
        {"drifted": {"sentences": ["w" * 2049]}},
        {"drifted": {"sentences": ["w"] * 17}},
    ],
)
def test_oversized_reports_are_refused(said):
    with pytest.raises(HeartbeatRefused) as refusal:
        decode_datagram(sealed({**DOCUMENT, **said}), Secret(KEY))
    assert refusal.value.reason == "document"


def test_a_document_of_three_megabytes_is_not_decompressed():
    many = {f"{number:080}": {"status": "OPEN"} for number in range(30_000)}
    with pytest.raises(HeartbeatRefused) as refusal:
        decode_datagram(sealed({**DOCUMENT, "listeners": many}), Secret(KEY))
    assert refusal.value.reason == "packing"


@pytest.mark.quiet
def test_the_speed_of_decoding(capsys):
    datagram, key = typical(), Secret(KEY)
    fastest = float("inf")
    for _ in range(5):
        begin = time.process_time()
        for _ in range(500):
            decode_datagram(datagram, key)
        fastest = min(fastest, (time.process_time() - begin) / 500)
    with capsys.disabled():
        figure = f"{fastest * 1e6:.1f} us, {1 / fastest:,.0f}/s per core"
        print(f"\nheartbeat of {len(datagram)} bytes: {figure}")  # noqa: T201 - the purpose
    # The bound detects a broken cache or a second parse and tolerates a slow machine.
    assert fastest < 500e-6
