# SPDX-License-Identifier: Apache-2.0
"""Log lines: parsing, RFC 5424 messages, JSON lines, the queue of a target, and the settings."""

from __future__ import annotations

import json
import re

import pytest

from amphora_agent import log_settings
from amphora_agent.log_forwarder.line_queue import LineQueue
from amphora_agent.log_forwarder.records import Renderer, Source, parse_admin, parse_loopback
from amphora_agent.log_settings import LogSettings, LogTarget, parse_endpoint
from amphora_agent.services.output_lines import is_admin, to_datagram

LISTENER, OTHER = "11500000-0000-4000-8000-000000000001", "11500000-0000-4000-8000-000000000002"
SOURCE = Source("amphora-1", "0b9d7a52-0000-4000-8000-000000000001", "project", "1b000000-0000-4000-8000-000000000000")
NOW = 1764000000.25
# RFC 5424, 6: a header, one element of structured data, and the text.
MESSAGE = re.compile(
    r"<(?P<pri>\d{1,3})>1 (?P<time>\S+) (?P<host>[!-~]{1,255}) (?P<app>[!-~]{1,48}) (?P<process>[!-~]{1,128}) "
    r"(?P<kind>[!-~]{1,32}) \[(?P<id>[!-~]{1,32})(?P<values>(?: [a-z]+=\"(?:[^\"\\\]]|\\[\"\\\]])*\")*)\] (?P<text>.*)"
)


def flow(text, source=SOURCE):
    return parse_loopback(b"<134>" + text if isinstance(text, bytes) else f"<134>{text}".encode(), source, NOW)


# -- flows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "listener"),
    [
        (f"{SOURCE.project_id} {SOURCE.load_balancer_id} {LISTENER} 192.0.2.1 80", LISTENER),
        (f"{LISTENER} 192.0.2.1 {OTHER}", LISTENER),
        (f"{SOURCE.load_balancer_id} {LISTENER}", LISTENER),
        (LISTENER, LISTENER),
        (f"GET /{OTHER} {OTHER}", ""),
        (f"{SOURCE.project_id} x {OTHER}", ""),
        ("", ""),
    ],
)
def test_the_listener_is_the_first_word_after_the_ids(text, listener):
    assert flow(text).listener == listener


def test_a_project_id_with_any_characters_is_recognized():
    source = Source("h", "a", 'p 1"]\\', "lb")
    record = flow(f'p 1"]\\ lb {LISTENER} x', source)
    assert record.listener == LISTENER
    found = MESSAGE.fullmatch(Renderer(source).syslog(record).decode())
    assert found["values"] == rf' id="a" project="p 1\"\]\\" loadbalancer="lb" listener="{LISTENER}"'


@pytest.mark.parametrize("data", [b"", b"x", b"<>x", b"<133>a notice", b"<30>another facility", b"<9999>x"])
def test_other_datagrams_are_no_flows(data):
    assert parse_loopback(data, SOURCE, NOW) is None


def test_flows_name_their_sender():
    assert flow("x").application == "haproxy"
    assert parse_loopback(b"<142>x", SOURCE, NOW).application == "amphora-checker"


HOSTILE = [
    b"a\nb",
    b"a\r\n<134>1 2026-01-01T00:00:00Z forged - - - - x",
    b"\0\1\x1b[31mred",
    b"\xff\xfe not UTF-8",
    "separator\u2028 bidi\u202e zero\u200b".encode(),
    b'"] [forged@32473 listener="x"] {"a":1}',
    b"%s %n {} $HOME",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_the_text_of_a_line_is_data(text):
    record = flow(LISTENER.encode() + b" " + text)
    rendered = Renderer(SOURCE)
    message, line = rendered.syslog(record).decode(), rendered.json(record)
    assert message.isprintable()
    found = MESSAGE.fullmatch(message)
    assert (found["pri"], found["kind"], found["id"]) == ("134", "flow", "amphora@32473")
    assert found["text"].startswith(LISTENER)
    assert line.count(b"\n") == 1
    document = json.loads(line)
    assert document["message"] == found["text"]
    assert document["listener_id"] == LISTENER


def test_a_message_has_all_fields_of_the_standard():
    message = Renderer(SOURCE).syslog(flow(f"{LISTENER} x")).decode()
    assert message == (
        f'<134>1 2025-11-24T16:00:00.250000Z amphora-1 haproxy - flow [amphora@32473 id="{SOURCE.amphora_id}" '
        f'project="project" loadbalancer="{SOURCE.load_balancer_id}" listener="{LISTENER}"] {LISTENER} x'
    )


# -- administrative lines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"<30>Nov  4 13:40:00 amphora-agent[12]: WARNING agent: x", (4, "amphora-agent", "12", "WARNING agent: x")),
        (b"<28>Nov 24 13:40:00 chronyd[7]: x", (4, "chronyd", "7", "x")),
        (to_datagram("keepalived", "Entering MASTER"), (6, "keepalived", "-", "Entering MASTER")),
        (to_datagram("haproxy", "[ALERT]    (12) : x"), (1, "haproxy", "-", "[ALERT]    (12) : x")),
        (to_datagram("amphora-checker", "checker: x"), (6, "amphora-checker", "-", "checker: x")),
        (b"<4>kernel: out: of memory", (4, "kernel", "-", "out: of memory")),
        (to_datagram("x\u00e9", "y\nz"), (6, "x_", "-", "y#012z")),
    ],
)
def test_administrative_lines(data, found):
    record = parse_admin(data, NOW)
    assert (record.severity, record.application, record.process, record.text) == found
    assert not record.is_flow
    message = MESSAGE.fullmatch(Renderer(SOURCE).syslog(record).decode())
    assert int(message["pri"]) == 17 * 8 + found[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no priority",
        b"<30>",
        b"<30>no name",
        to_datagram("agent", ""),
        to_datagram("haproxy", f"p lb {LISTENER} 192.0.2.1"),
        to_datagram("amphora-checker", f"p lb {LISTENER} 192.0.2.1"),
    ],
)
def test_flows_and_other_data_are_no_administrative_lines(data):
    assert parse_admin(data, NOW) is None


@pytest.mark.parametrize(
    ("service", "line", "admin"),
    [
        ("haproxy", "[WARNING]  (7) : Server a/b is DOWN", True),
        ("haproxy", "Server a/b is DOWN", False),
        ("haproxy", "[x] (7) : ", False),
        ("amphora-checker", "checker: x", True),
        ("amphora-checker", "x checker: ", False),
        ("keepalived", "anything", True),
    ],
)
def test_which_output_is_administrative(service, line, admin):
    assert is_admin(service, line) is admin


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_drops_new_lines_and_counts_them():
    queue = LineQueue(1000)
    queue.put([b"x" * 136] * 4)
    assert (queue.bytes, queue.dropped, queue.is_full) == (800, 0, False)
    queue.put([b"y" * 136] * 4)
    assert (queue.bytes, queue.dropped, queue.is_full) == (1000, 3, True)
    queue.drop(7)
    assert queue.dropped == 10
    assert queue.take(300) == [b"x" * 136] * 2
    assert queue.take(1) == [b"x" * 136], "a line longer than the batch is a batch of its own"
    assert queue.bytes == 400
    queue.close()
    assert (queue.take(300), queue.dropped, queue.bytes) == ([], 12, 0)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("udp://192.0.2.9:0514", "udp://192.0.2.9:514"),
        ("tls://[2001:DB8:0::9]:6514", "tls://[2001:db8::9]:6514"),
        ("https://192.0.2.9:443", "https://192.0.2.9:443/"),
        ("https://192.0.2.9:443/a/b?c=d&e=%20", "https://192.0.2.9:443/a/b?c=d&e=%20"),
    ],
)
def test_a_target_has_one_spelling(url, text):
    assert str(parse_endpoint(url)) == text
    assert str(parse_endpoint(text)) == text


@pytest.mark.parametrize(
    "url",
    [
        *("", "192.0.2.9:514", "ftp://192.0.2.9:1", "udp://host:1", "udp://192.0.2.9", "udp://192.0.2.9:0"),
        *("udp://192.0.2.9:65536", "udp://192.0.2.9:1/", "udp://192.0.2.256:1", "https://u:p@192.0.2.9:1/"),
        *("https://192.0.2.9:1/a b", "https://192.0.2.9:1/\r\nX: y", "udp://192.0.2.9:1\n", "udp://[fe80::1%0]:1"),
    ],
)
def test_an_invalid_target_is_refused(url):
    with pytest.raises(ValueError):
        parse_endpoint(url)


GOOD = LogSettings((LogTarget("udp://192.0.2.9:514"),), (LogTarget("https://192.0.2.9:8443/", "Bearer s"),), "pem")


def changed(**values):
    return {**GOOD.to_document(), **values}


def targets(*urls, authorization=""):
    return [{"url": url, "authorization": authorization} for url in urls]


def test_a_document_is_read_completely():
    assert log_settings.parse(GOOD.to_document()) == GOOD


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "other keys"),
        ({**changed(), "more": 1}, "other keys"),
        (changed(queue_bytes=True), "queue_bytes"),
        (changed(queue_bytes=1), "queue_bytes"),
        (changed(authorities=""), "needs a CA certificate"),
        (changed(authorities=5), "authorities"),
        (changed(project_id="a\nb"), "project_id"),
        (changed(admin={}), "logs.admin"),
        (changed(admin=[{"url": "udp://192.0.2.9:1"}]), "other keys"),
        (changed(admin=[{"url": 5, "authorization": ""}]), "no texts"),
        (changed(admin=targets("udp://192.0.2.9:1", "udp://192.0.2.9:01")), "twice"),
        (changed(admin=targets(*(f"udp://192.0.2.9:{n}" for n in range(1, 6)))), "at most 4"),
        (changed(admin=targets("udp://192.0.2.9:1", authorization="x")), "not https"),
        (changed(admin=targets("https://192.0.2.9:1", authorization="secret\r\nX: y")), "one line"),
    ],
)
def test_an_invalid_document_is_refused(document, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        log_settings.parse(document)
    assert "secret" not in str(caught.value)
