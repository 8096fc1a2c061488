# SPDX-License-Identifier: Apache-2.0
"""The diagnostics report: independent parts, time limits, size limits, and no secrets."""

from __future__ import annotations

import json

import pytest

from amphora_agent import redaction
from amphora_agent.redaction import TimeBudget, document, errors_without_content, redacted, sessions


def told(parts, secrets=()):
    return json.loads("".join(document(parts, secrets)))


def test_a_failed_part_has_a_reason_and_keeps_the_others():
    def fails():
        raise RuntimeError("it is gone")

    assert told({}) == {}
    assert told({"a": lambda: 1, "b": fails, "c": lambda: ["x"]}) == {
        "a": 1, "b": {"error": "RuntimeError: it is gone"}, "c": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\n-----BEGIN PRIVATE KEY-----\nMII\nxyz\n-----END PRIVATE KEY-----\nb", "a\n***\nb"),
        ("-----BEGIN EC PRIVATE KEY-----\nMII\n-----END EC PRIVATE KEY-----", "***"),
        ("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII cut", "***"),
        ("    dynamic-cookie-key 0123\n    server a", "    dynamic-cookie-key ***\n    server a"),
        ("  auth_pass  word\n", "  auth_pass  ***\n"),
        ("heartbeat_key = word\n", "heartbeat_key = ***\n"),
        ("the key is s3cret.", "the key is ***."),
        ("-----BEGIN CERTIFICATE-----\nMII", "-----BEGIN CERTIFICATE-----\nMII"),
        ("timeout connect 2s", "timeout connect 2s"),
    ],
)
def test_secrets_are_redacted(text, left):
    assert redacted(text, ["s3cret"]) == left
    assert told({"a": lambda: {"b": [text]}}, ["s3cret"]) == {"a": {"b": [left]}}


def test_a_long_text_is_truncated(monkeypatch):
    monkeypatch.setattr(redaction, "MOST", 10)
    assert redacted("x" * 25, []) == "x" * 10 + "\n[cut: 25 characters in total]\n"


def test_client_data_is_redacted():
    answer = (
        "Total events captured on [..] : 1\n \n[..] frontend one (#2): invalid request\n"
        "  backend <NONE> (#-1), server <NONE> (#-1), event #0, src 192.0.2.1:1\n"
        "  buffer starts at 0 (including 0 out), 16316 free,\n \n"
        "  00000  GET / HTTP/1.1\\r\\n\n  00016  Authorization: secret\\r\\n\n  00020+ more\n"
    )
    left = errors_without_content(answer)
    assert "invalid request" in left
    assert "Authorization" not in left
    assert "more" not in left


def test_sessions_are_counted_by_frontend_backend_and_server():
    answer = (
        "0x1: proto=tcpv4 src=192.0.2.1:1 fe=one be=pool srv=m1 ts=00 age=1s\n"
        "0x2: proto=tcpv4 src=192.0.2.2:1 fe=one be=pool srv=m1 ts=00 age=1s\n"
        "0x3: proto=unix_stream src=unix:1 fe=GLOBAL be=<NONE> srv=<none> ts=00 age=0s\n"
    )
    found = sessions(answer)
    assert found["total"] == 3
    assert found["by_way"]["one > pool > m1"] == 2
    assert "192.0.2.1" not in json.dumps(found)


def test_the_report_does_not_wait_again_for_a_silent_component(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(redaction.time, "monotonic", lambda: now[0])
    waited = []

    def silence(seconds):
        waited.append(seconds)
        now[0] += seconds
        raise TimeoutError("nothing")

    clock = TimeBudget(5.5)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="nothing"):
            clock.ask(silence)
    with pytest.raises(TimeoutError, match="nothing"):
        clock.ask(silence)
    with pytest.raises(TimeoutError, match="used the time budget"):
        clock.ask(silence)
    assert waited == pytest.approx([5.0, 0.3, 0.2])
