# SPDX-License-Identifier: Apache-2.0
"""Packets of checks: SCTP, HTTP, ICMP errors, and requests to the kernel."""

from __future__ import annotations

import socket
import struct

import pytest

from amphora_agent.l4.model import Monitor
from amphora_agent.l4_checks import http as http_checks
from amphora_agent.l4_checks import icmp_errors, sctp_packet
from amphora_agent.l4_checks.icmp_errors import Flow

# -- SCTP ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),  # the check value of CRC-32C
        # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksums_are_correct(data, checksum):
    assert sctp_packet.crc32c(data) == checksum


def test_an_sctp_init_is_built():
    packet = sctp_packet.init(40000, 36412, 0x01020304)
    assert len(packet) == 32
    assert struct.unpack_from("!HHI", packet) == (40000, 36412, 0)  # section 8.5.1: an INIT's tag is 0
    assert struct.unpack_from("!BBHIIHH", packet, 12) == (1, 0, 20, 0x01020304, 1500, 1, 1)
    bare = packet[:8] + bytes(4) + packet[12:]
    assert struct.unpack_from("<I", packet, 8)[0] == sctp_packet.crc32c(bare)
    assert sctp_packet.parse(packet) == sctp_packet.Packet(40000, 36412, 0, sctp_packet.INIT, 0x01020304)


def test_an_sctp_abort_is_built():
    packet = sctp_packet.abort(40000, 36412, 7)
    assert packet[12:] == b"\x06\x00\x00\x04"
    assert sctp_packet.parse(packet) == sctp_packet.Packet(40000, 36412, 7, sctp_packet.ABORT, None)


@pytest.mark.parametrize("length", range(32))
def test_a_truncated_packet_is_refused(length):
    found = sctp_packet.parse(sctp_packet.init(1, 2, 3)[:length])
    assert found is None


def test_wrong_lengths_are_refused():
    packet = bytearray(sctp_packet.init(1, 2, 3))
    struct.pack_into("!H", packet, 14, 4)
    assert sctp_packet.parse(bytes(packet)) is None


# -- HTTP ----------------------------------------------------------------------------------------------------


def monitor(**changes):
    known = {"method": "GET", "path": "/health", "codes": ("200",), "host": None, "version": "1.0", **changes}
    return Monitor("id", "HTTP", 5, 3, 2, 3, **known)


@pytest.mark.parametrize(
    ("changes", "place", "lines"),
    [
        ({}, ("192.0.2.1", 80), ["GET /health HTTP/1.0"]),
        ({"version": "1.1"}, ("192.0.2.1", 80), ["GET /health HTTP/1.1", "Host: 192.0.2.1"]),
        ({"version": "1.1"}, ("2001:db8::1", 8080), ["GET /health HTTP/1.1", "Host: [2001:db8::1]:8080"]),
        ({"version": "1.1", "host": "a.example"}, ("192.0.2.1", 81), ["GET /health HTTP/1.1", "Host: a.example"]),
        ({"method": "POST"}, ("192.0.2.1", 80), ["POST /health HTTP/1.0", "Content-Length: 0"]),
    ],
)
def test_http_requests_are_built(changes, place, lines):
    text = http_checks.build_request(monitor(**changes), *place).decode()
    assert text.endswith("\r\n\r\n")
    assert text.split("\r\n")[: len(lines)] == lines
    assert "Connection: close" in text.split("\r\n")


@pytest.mark.parametrize(
    ("received", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n", 200),
        (b"HTTP/1.0 204 No Content\r\nEndless: ", 204),
        (b"HTTP/1.1 503\r\n", 503),
        (b"HTTP/1.1 200 \r\n", 200),
        (b"HTTP/1.1 302 Found\nLocation: http://elsewhere/\n", 302),
        (b"", None),
        (b"HTT", None),
        (b"HTTP/1.1 20", None),
        (b"HTTP/1.1 200 " + b"x" * 500, None),
        (b"HTTP/1.1 200 OK" * 60, None),
    ],
)
def test_http_answers_are_parsed(received, status):
    assert http_checks.parse_status(received) == status


@pytest.mark.parametrize(
    "received",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"\r\n",
        b"HTTP/1.1 OK\r\n",
        b"HTTP/1.1 2000 OK\r\n",
        b"HTTP/1.1 099 OK\r\n",
        b"HTTP/2.0 200 OK\r\n",
        b"HTTP/1.1  200 OK\r\n",
        b"HTTP/1.1 200OK\r\n",
        b"HTTP/1.1 200 " + b"x" * 2000,  # a line without an end
        b"HTTP/1.1 \xe2\x82\xac00 OK\r\n",
        b"X",
    ],
)
def test_foreign_packets_are_no_answer(received):
    with pytest.raises(ValueError, match="not an HTTP"):
        http_checks.parse_status(received)


@pytest.mark.parametrize(
    ("status", "codes", "wanted"),
    [
        (200, ("200",), True),
        (201, ("200",), False),
        (203, ("200", "202-204"), True),
        (205, ("200", "202-204"), False),
        (404, ("200", "404"), True),
    ],
)
def test_expected_codes_are_compared(status, codes, wanted):
    assert http_checks.matches_codes(status, codes) is wanted


# -- ICMP errors -------------------------------------------------------------------------------------------------------

MEMBER, US = "192.0.2.7", "192.0.2.1"
MEMBER6, US6 = "2001:db8::7", "2001:db8::1"


def unreachable(source=MEMBER, code=3, member=MEMBER, protocol=17, options=0):
    inner = bytearray(20)
    inner[0], inner[9] = 0x45, protocol
    inner[12:16], inner[16:20] = socket.inet_aton(US), socket.inet_aton(member)
    outer = bytearray(20 + options)
    outer[0], outer[9] = 0x45 + options // 4, 1
    outer[12:16], outer[16:20] = socket.inet_aton(source), socket.inet_aton(US)
    return bytes(outer) + bytes((3, code)) + bytes(6) + bytes(inner) + struct.pack("!HHHH", 4242, 53, 8, 0)


def unreachable6(source=MEMBER6, code=4):
    inner, outer = bytearray(40), bytearray(40)
    inner[6], outer[6] = 17, 58
    for header, ends in ((inner, (US6, MEMBER6)), (outer, (source, US6))):
        header[8:24], header[24:40] = (socket.inet_pton(socket.AF_INET6, one) for one in ends)
    return bytes(outer) + bytes((1, code)) + bytes(6) + bytes(inner) + struct.pack("!HHHH", 4242, 53, 8, 0)


def test_an_icmp_error_names_its_object():
    flow = Flow(socket.AF_INET, 17, (MEMBER, 53), (US, 4242))
    assert icmp_errors.parse_port_unreachable(socket.AF_INET, unreachable()) == flow
    assert icmp_errors.parse_port_unreachable(socket.AF_INET, unreachable(options=8)) == flow
    flow6 = Flow(socket.AF_INET6, 17, (MEMBER6, 53), (US6, 4242))
    assert icmp_errors.parse_port_unreachable(socket.AF_INET6, unreachable6()) == flow6


@pytest.mark.parametrize(
    ("family", "packet"),
    [
        (socket.AF_INET, b""),
        (socket.AF_INET, unreachable(source="192.0.2.99")),  # another host cannot know the quoted ports
        (socket.AF_INET, unreachable(code=1)),
        (socket.AF_INET, unreachable(code=4)),  # too large for the path: the member is reachable
        (socket.AF_INET, unreachable(protocol=6)),
        (socket.AF_INET6, unreachable6(source="2001:db8::99")),
        (socket.AF_INET6, unreachable6(code=0)),
        *((socket.AF_INET, unreachable()[:length]) for length in range(0, 52, 3)),
        *((socket.AF_INET6, unreachable6()[:length]) for length in range(0, 92, 5)),
    ],
)
def test_unrelated_packets_are_ignored(family, packet):
    assert icmp_errors.parse_port_unreachable(family, packet) is None


def neighbour(address, state, kind=28):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    body = struct.pack("=BxxxiHBB", family, 2, state, 0, 1) + struct.pack("=HH", 4 + len(packed), 1) + packed
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def test_unreachable_neighbours_are_found():
    said = neighbour("192.0.2.7", 0x20) + neighbour("192.0.2.8", 0x02) + neighbour("2001:db8::7", 0x20)
    assert icmp_errors.parse_failed_neighbors(said + neighbour("192.0.2.9", 0x20, kind=29)) == [
        "192.0.2.7",
        "2001:db8::7",
    ]
    for length in range(len(said)):
        icmp_errors.parse_failed_neighbors(said[:length])
    assert icmp_errors.parse_failed_neighbors(bytes(64)) == []


def test_a_request_for_a_flow_is_well_formed():
    question = icmp_errors.build_request(Flow(socket.AF_INET, 17, (MEMBER, 53), (US, 4242)))
    length, kind = struct.unpack_from("=IH", question)
    assert (length, kind) == (len(question), 0x101)
    assert socket.inet_aton(MEMBER) in question
    assert struct.pack("!H", 4242) in question


def test_a_missing_flow_is_reported():
    assert not icmp_errors.flow_exists(Flow(socket.AF_INET, 17, ("127.0.0.9", 53), ("127.0.0.8", 4242)))
