# SPDX-License-Identifier: Apache-2.0
"""Any datagram is refused, or is a report within the limits that all code behind the decoder accepts.
AMPHORA_HEARTBEATS=1000000 ./run-tests tests/unit/health/test_heartbeat_properties.py sets the number of inputs; the
default is 10,000. Hypothesis draws seeds, and each seed makes `_OF_A_SEED` inputs: a draw for each part of an input
costs ten times as much.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import os
import random
import struct
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from amphora_driver.errors import HeartbeatRefused
from amphora_driver.health import statistics
from amphora_driver.health.amphora_reports import LastReport
from amphora_driver.health.drift_reports import DriftReports
from amphora_driver.health.heartbeat_codec import (
    Heartbeat,
    decode_datagram,
    decompress_document,
    parse_document,
    verify_signature,
)
from amphora_driver.health.near_limits import NearLimits
from amphora_driver.health.status import Report, operating_statuses
from amphora_driver.model.amphora import Resource
from amphora_driver.model.enums import ListenerProtocol, MonitorType, PoolProtocol
from amphora_driver.model.loadbalancer import HealthMonitor, Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.secret import Secret

INPUTS = int(os.environ.get("AMPHORA_HEARTBEATS", "10000"))
_OF_A_SEED = 100
AMPHORA = uuid.UUID("0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11")
KEY = Secret(bytes(range(32)))
NOW = 1_000_000.0
MEMBERS = tuple(Member(id=f"m{n}", pool_id="p", address=f"192.0.2.{n}", protocol_port=80) for n in range(1, 4))
MONITOR = HealthMonitor(id="h", pool_id="p", type=MonitorType.TCP, delay=5, timeout=3, max_retries=2)
TREE = LoadBalancer(
    id="b",
    project_id="x",
    vip=Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p"),
    listeners=tuple(
        Listener(id=one, loadbalancer_id="b", protocol=ListenerProtocol.HTTP, protocol_port=port, default_pool_id="p")
        for port, one in enumerate(("l1", "l2"), 80)
    ),
    pools=(Pool(id="p", loadbalancer_id="b", protocol=PoolProtocol.HTTP, members=MEMBERS, healthmonitor=MONITOR),),
)

# -- inputs ----------------------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, -1, 7, 2**31, 2**59 - 1, 2**59, 2**63 - 1, 2**63, 2**64, 10**40, -(2**63) - 1, 0.5, 1e308, -1e308)
_WORDS = ("UP", "UP 1/3", "DOWN", "DRAIN", "MAINT", "no check", "OPEN", "FULL", "NOLB", "", " ", "interface")
_CHARACTERS = ("a", "Z", " ", "\0", "\n", "\x7f", "é", "\u2028", "\U0001f600", "\ud800", "'", "\\", "%")
_LENGTHS = (0, 1, 5, 63, 64, 65, 79, 80, 81, 2047, 2048, 2049)
_FIELDS = ("active_connections", "bytes_in", "bytes_out", "request_errors", "total_connections")
_PARTS = (b"8", b"1", b"12345678901234567890", b'"UP', b'"', b"true", b"null", b"[]", b"{}", b":", b",", b"\\u0000")
_GOOD = (
    {"generation": None},
    {"generation": 8, "listeners": {"l1": {"status": "OPEN", "bytes_in": 5}}, "pools": {"p:l1": {"status": "UP"}}},
    {
        "generation": 8,
        "listeners": {one: {"status": "OPEN", "active_connections": 1, "bytes_in": 10**12} for one in ("l1", "l2")},
        "pools": {f"p:{one}": {"status": "UP", "members": {"m1": "UP 1/3", "m2": "DOWN"}} for one in ("l1", "l2")},
        "holds_vip": True,
        "drift": ["interface"],
        "drifted": {"at": 1800000000.5, "sentences": ["a rule was missing"], "repaired": False},
        "agent_version": "0.1.0",
        "usage": {"cpu": 90, "memory": 5},
    },
)
_KEYS = ("generation", "listeners", "pools", "holds_vip", "drift", "drifted", "agent_version", "usage", "amphora_id")


def _text(chance: random.Random) -> str:
    size = chance.choice(_LENGTHS) if chance.random() < 0.3 else chance.randrange(9)
    return chance.choice(_CHARACTERS[:3] if chance.random() < 0.8 else _CHARACTERS) * size


def _number(chance: random.Random) -> Any:
    return chance.choice(_NUMBERS) if chance.random() < 0.05 else chance.randrange(2**40)


def _odd(chance: random.Random, depth: int = 0) -> Any:
    """Return any JSON value."""
    kind = chance.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return [_odd(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 7:
        return {_text(chance): _odd(chance, depth + 1) for _ in range(chance.randrange(4))}
    return (None, True, False, _number(chance), _text(chance), chance.choice(_WORDS))[kind]


def _word(chance: random.Random) -> str:
    return chance.choice(_WORDS) if chance.random() < 0.98 else _text(chance)


def _name(chance: random.Random, *known: str) -> str:
    return chance.choice(known) if chance.random() < 0.9 else _text(chance)


def _document(chance: random.Random) -> Any:
    """Return a report with a few invalid values."""
    listeners = {
        _name(chance, "l1", "l2", "l9"): {
            "status": _word(chance),
            **{one: _number(chance) for one in chance.sample(_FIELDS, chance.randrange(6))},
        }
        for _ in range(chance.randrange(3))
    }
    pools = {
        _name(chance, "p:l1", "p:l2", "p", ":", "p9:l1"): {
            "status": _word(chance),
            "members": {_name(chance, "m1", "m2", "m3", "m9"): _word(chance) for _ in range(chance.randrange(4))},
        }
        for _ in range(chance.randrange(3))
    }
    found: dict[str, Any] = {"generation": chance.choice((None, 0, 8, _number(chance))), "listeners": listeners}
    found["pools"] = pools
    if chance.random() < 0.5:
        found["holds_vip"] = chance.choice((None, True, False))
        found["agent_version"] = chance.choice((None, "0.1.0", _text(chance)))
    if chance.random() < 0.5:
        found["drift"] = [_word(chance) for _ in range(chance.choice((0, 1, 31, 32, 33)))]
        sentences = [_text(chance) for _ in range(chance.choice((0, 1, 2, 15, 16, 17)))]
        found["drifted"] = {"at": _number(chance), "sentences": sentences, "repaired": chance.random() < 0.5}
    if chance.random() < 0.3:
        names = [_name(chance, "cpu", "memory", "connections") for _ in range(chance.choice((0, 1, 3, 17)))]
        found["usage"] = {name: chance.choice((0, 85, 100, 101, -1, _number(chance))) for name in names}
    if chance.random() < 0.2:
        found[chance.choice(_KEYS)] = _odd(chance)
    if chance.random() < 0.02:
        count = chance.choice((100, 1000))
        found["pools"] = {f"p:{one}": {"status": "UP", "members": {f"m{one}": "UP"}} for one in range(count)}
    return _odd(chance) if chance.random() < 0.02 else found


def _mutated(chance: random.Random, data: bytes) -> bytes:
    """Return the bytes with up to four changes."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            changed[at : at + chance.randrange(1, 9)] = b""
        elif kind == 1:
            changed[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 2 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << chance.randrange(8)
        else:
            del changed[at:]
    return bytes(changed)


def _encoded(chance: random.Random) -> bytes:
    text = json.dumps(_document(chance), ensure_ascii=chance.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _packed(chance: random.Random, document: bytes) -> bytes:
    kind = chance.randrange(40)
    if kind == 0:
        return gzip.compress(document, 1)
    if kind == 1:
        return document
    packed = zlib.compress(document, chance.choice((0, 1)))
    return packed + packed if kind == 2 else packed


def _header(chance: random.Random) -> bytes:
    return b"AHB1" + AMPHORA.bytes + struct.pack("!QQ", chance.choice((0, 5, 2**64 - 1)), chance.randrange(2**64))


def _signed(content: bytes) -> bytes:
    return content + hmac.digest(KEY.reveal(), content, hashlib.sha256)


def any_bytes(chance: random.Random) -> bytes:
    """Return random bytes; some start like a heartbeat, and some are signed."""
    content = chance.randbytes(chance.choice((0, 3, 35, 36, 67, 68, 100, 500)))
    kind = chance.randrange(4)
    if kind == 0:
        return content
    return (_header(chance) + content, _signed(content), _signed(_header(chance) + content))[kind - 1]


def changed_datagram(chance: random.Random) -> bytes:
    """Return a datagram that is changed after signing, before signing, or before compression."""
    document = json.dumps(chance.choice(_GOOD)).encode()
    kind = chance.randrange(4)
    if kind == 0:
        return _mutated(chance, _signed(_header(chance) + zlib.compress(document, 1)))
    if kind == 1:
        return _signed(_header(chance) + _mutated(chance, zlib.compress(document, 1)))
    if kind == 3:
        document = document.replace(chance.choice(_PARTS), chance.choice(_PARTS), 1)
    return _signed(_header(chance) + zlib.compress(_mutated(chance, document) if kind == 2 else document, 1))


def structured(chance: random.Random) -> bytes:
    """Return a signed datagram whose document has about the structure of a report."""
    return _signed(_header(chance) + _packed(chance, _encoded(chance)))


# -- checks ------------------------------------------------------------------------------------------------------------


def opened(datagram: bytes) -> Heartbeat | None:
    """Decode a datagram; return None if it is refused. Other errors are raised."""
    try:
        found = decode_datagram(datagram, KEY)
    except HeartbeatRefused as error:
        refusal = error
    else:
        signed = verify_signature(datagram, KEY)
        assert parse_document(signed, decompress_document(signed)) == found
        return found
    assert refusal.reason in {"short", "magic", "signature", "packing", "document"}
    assert len(str(refusal)) < 4096
    return None


def _texts(value: Any) -> list[str]:
    """Return all strings in a value, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in _texts(one)]
    return [text for one in value for text in _texts(one)] if isinstance(value, (list, tuple)) else []


def limited(report: Report) -> None:
    """Check the limits of `health/status.py`, implemented a second time."""
    assert report.generation is None or 0 <= report.generation < 2**63
    for name, listener in report.listeners.items():
        assert len(name) <= 80
        assert len(listener.status) <= 64
    for name, pool in report.pools.items():
        assert len(name) <= 80
        assert len(pool.status) <= 64
        assert all(len(one) <= 80 and len(word) <= 64 for one, word in pool.members.items())
    assert len(report.drift) <= 32
    assert all(len(word) <= 64 for word in report.drift)
    if report.drifted is not None:
        assert len(report.drifted.sentences) <= 16
        assert all(len(sentence) <= 2048 for sentence in report.drifted.sentences)
    assert len(report.usage) <= 16
    assert all(len(name) <= 64 and 0 <= used <= 100 for name, used in report.usage.items())
    version = report.agent_version
    assert version is None or (len(version) <= 64 and version.isascii() and version.isprintable())
    for text in _texts(msgspec.to_builtins(report)):
        text.encode()


def understood(heartbeat: Heartbeat, drifts: DriftReports, turn: int) -> None:
    """Pass a report to all code of the health manager that uses reports."""
    report, amphora = heartbeat.report, heartbeat.amphora_id
    statuses = operating_statuses(TREE, [report])
    assert statuses.keys() <= {"b", "l1", "l2", "p", "h", "m1", "m2", "m3"}
    assert all(len(one.reason) < 512 for one in statuses.values())
    for row in statistics.changed_rows({amphora: report}, "b", {"l1", "l2"}, {}):
        values = (row.active_connections, row.bytes_in, row.bytes_out, row.request_errors, row.total_connections)
        assert all(type(one) is int and 0 <= one < 2**59 for one in values)
    now = 100.0 * turn
    seen = LastReport(
        monotonic=now,
        wall=NOW,
        generation=report.generation or 0,
        order=(heartbeat.epoch, heartbeat.sequence),
        holds_vip=report.holds_vip,
        drift=report.drift,
        drifted=report.drifted,
        agent_version=report.agent_version,
        usage=report.usage,
        read_at=now,
    )
    heard, confirmed = {amphora: seen}, {amphora: 8}
    drifts.find_changed_marks(heard, confirmed, set())
    broken = drifts.find_unrepaired(heard, confirmed, now)
    assert all(len(one.kinds) < 512 for one in broken)
    assert all(len(one.found_at) < 64 for one in drifts.find_notices(heard, now).values())
    drifts.record_pushes(broken, now)
    drifts.record_notices(heard, now)
    names = NearLimits(0.0).find_changed(heard, {}).get(amphora) or ""
    assert set(filter(None, names.split(","))) <= {one.value for one in Resource}


@pytest.mark.lasts(3600)
@pytest.mark.parametrize(
    ("make", "share", "accepted"),
    [(any_bytes, 0.2, 0.0), (changed_datagram, 0.4, 0.1), (structured, 0.4, 0.2)],
    ids=["bytes", "changed", "structured"],
)
def test_a_datagram_is_refused_or_within_limits(make: Callable[[random.Random], bytes], share: float, accepted: float):
    found: Counter[bool] = Counter()

    seeds, checks = int(INPUTS * share / _OF_A_SEED), list(HealthCheck)

    @settings(max_examples=seeds, deadline=None, database=None, suppress_health_check=checks)
    @given(st.integers(0, 2**64 - 1))
    def run(seed: int) -> None:
        chance, drifts = random.Random(seed), DriftReports(3.0)
        for turn in range(_OF_A_SEED):
            datagram = make(chance)
            try:
                heartbeat = opened(datagram)
                if heartbeat is not None:
                    assert heartbeat.amphora_id == heartbeat.report.amphora_id == str(AMPHORA)
                    assert 0 <= heartbeat.sequence < 2**64
                    limited(heartbeat.report)
                    understood(heartbeat, drifts, turn)
            except BaseException:
                note(f"input {turn} of seed {seed}: {datagram.hex()}")
                raise
            found[heartbeat is not None] += 1

    run()
    assert found[False] > 0
    assert found[True] >= accepted * found.total(), "too few inputs reached the code behind the decoder"
