# SPDX-License-Identifier: Apache-2.0
"""PING monitors: HAProxy asks the agent, and the agent sends an echo request to the member."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from amphora_lab import MEMBERS, VIP, eventually, ip
from configuration_text import CHECK, DEFAULTS, LISTENER, MEMBER_IDS, POOL

from amphora_agent.responder import http_server
from amphora_agent.responder.http_server import Responder

pytestmark = pytest.mark.root
MEMBER, MEMBER6, OTHER, SILENT = "198.51.100.101", "2001:db8:1::101", "198.51.100.102", "198.51.100.99"
IDS = {address: str(uuid.uuid5(uuid.NAMESPACE_DNS, address)) for address in (MEMBER, MEMBER6, OTHER, SILENT)}
PORT = 9101


def pinged(*names):
    """Return a configuration with the checks that the renderer writes for a PING monitor."""
    servers = "".join(
        f"    server {MEMBER_IDS[name]} {MEMBERS[name]}:80 weight 1 {CHECK} addr 127.0.0.1 port 9101\n"
        for name in names
    )
    return (
        f"{DEFAULTS}frontend {LISTENER}\n    bind {VIP}:80\n    default_backend {POOL}:{LISTENER}\n"
        f"backend {POOL}:{LISTENER}\n    option httpchk\n    http-check send meth GET uri-lf /ping/%[srv_name]\n"
        f"    timeout check 500ms\n    load-server-state-from-file global\n{servers}"
    )


@contextmanager
def dropping_echoes_to(network, address):
    """Drop echo requests to an address of the members' host."""
    nft = ["ip", "netns", "exec", network.name("mem"), "nft"]
    subprocess.run([*nft, "add table inet ping"], check=True)
    try:
        subprocess.run([*nft, "add chain inet ping input { type filter hook input priority 0; }"], check=True)
        subprocess.run([*nft, f"add rule inet ping input ip daddr {address} icmp type echo-request drop"], check=True)
        yield
    finally:
        subprocess.run([*nft, "delete table inet ping"], check=True)


def test_a_member_is_up_while_it_answers(amphora, network):
    pings = {MEMBER_IDS[name]: MEMBERS[name] for name in ("m1", "m2")}
    assert amphora.push(1, pinged("m1", "m2"), pings=pings)[0] == 200

    def statuses():
        rows = [line.split(",") for line in amphora.ask_haproxy("show stat -1 4 -1").splitlines()]
        return {row[1]: row[17] for row in rows if len(row) > 17 and row[1] in pings}

    def are(one, two):
        wanted = {MEMBER_IDS["m1"]: one, MEMBER_IDS["m2"]: two}
        eventually(lambda: statuses() == wanted, f"{wanted}, not {statuses()}")

    are("UP", "UP")
    with dropping_echoes_to(network, MEMBERS["m1"]):
        are("DOWN", "UP")
    are("UP", "UP")
    mem = network.name("mem")
    ip(f"-n {mem} addr del {MEMBERS['m2']}/24 dev eth0")
    try:
        are("UP", "DOWN")
    finally:
        ip(f"-n {mem} addr add {MEMBERS['m2']}/24 dev eth0")
    are("UP", "UP")


def test_an_added_member_is_pinged_at_once(amphora):
    assert amphora.push(1, pinged("m1"), pings={MEMBER_IDS["m1"]: MEMBERS["m1"]})[0] == 200
    pings = {MEMBER_IDS[name]: MEMBERS[name] for name in ("m1", "m2")}
    status, said = amphora.push(2, pinged("m1", "m2"), pings=pings)
    assert (status, said["how"]) == (200, "runtime")

    def up():
        rows = [line.split(",") for line in amphora.ask_haproxy("show stat -1 4 -1").splitlines()]
        return {row[1] for row in rows if len(row) > 17 and row[17] == "UP" and row[36] == "L7OK"} == set(pings)

    eventually(up, "both members are checked and up")


# -- the responder alone, in the client's namespace ------------------------------------------------------------------


@pytest.fixture
def member6(network):
    """An IPv6 address on the members' host."""
    mem = network.name("mem")
    ip(f"-n {mem} addr replace {MEMBER6}/64 dev eth0 nodad")
    yield
    ip(f"-n {mem} addr del {MEMBER6}/64 dev eth0")


@pytest.fixture
def responder(network):
    targets = {name: address for address, name in IDS.items()}
    made = Responder(network.thread("cl").run, PORT, lambda: iter(()), lambda: targets)
    made.targets = targets
    made.start()
    eventually(lambda: network.thread("cl").run(connects), "the responder listens")
    yield made
    made.close()


def connects():
    with suppress(OSError), socket.create_connection(("127.0.0.1", PORT), 1):
        return True
    return False


def begin(path):
    connection = socket.create_connection(("127.0.0.1", PORT), 5)
    connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    return connection


def end(connection, seconds=5.0):
    """Return the status of the answer: 0 if it is empty, None after the time-out."""
    with connection:
        connection.settimeout(seconds)
        with suppress(TimeoutError):
            said = b""
            while part := connection.recv(4096):
                said += part
            return int(said.split(b" ")[1]) if said else 0
    return None


def ping(address, seconds=5.0):
    return end(begin(f"/ping/{IDS[address]}"), seconds)


@pytest.mark.parametrize("address", [MEMBER, MEMBER6])
def test_an_answering_member_is_reported_up(network, responder, member6, address):
    assert network.thread("cl").run(ping, address) == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /ping/unknown HTTP/1.1\r\n\r\n", 404),
        (b"GET /ping/ HTTP/1.1\r\n\r\n", 404),
        (b"GET // HTTP/1.1\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"POST /ping/x HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"GET /" + b"x" * (8192 - 5), 431),
    ],
)
def test_other_requests_are_refused(network, responder, request_, status):
    def ask():
        connection = socket.create_connection(("127.0.0.1", PORT), 5)
        connection.sendall(request_)
        return end(connection)

    assert network.thread("cl").run(ask) == status


def test_an_address_without_a_route_is_refused_at_once(network, responder):
    responder.targets["far"] = "2001:db8:ffff::1"
    began = time.monotonic()
    assert network.thread("cl").run(lambda: end(begin("/ping/far"))) == 503
    assert time.monotonic() - began < 2


def test_a_silent_address_is_reported_after_the_timeout(network, monkeypatch, responder):
    monkeypatch.setattr(http_server, "LONGEST_SECONDS", 0.3)
    assert network.thread("cl").run(ping, SILENT) == 503


LISTENING, TIME_WAIT = "0A", "06"
"""States in /proc/net/tcp."""


def test_connections_of_gone_clients_are_closed(network, responder):
    def ask_and_go():
        for _ in range(50):
            begin(f"/ping/{IDS[SILENT]}").close()
        return ping(MEMBER)

    def open_connections():
        rows = [row.split() for row in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]]
        return [row for row in rows if row[1].endswith(f":{PORT:04X}") and row[3] not in (LISTENING, TIME_WAIT)]

    client = network.thread("cl")
    assert client.run(ask_and_go) == 200
    eventually(lambda: not client.run(open_connections), "the responder has closed the connections")


class EchoReplies:
    """A host whose echo replies the test builds."""

    def __init__(self) -> None:
        self.raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)

    def question(self):
        """Return the sender and the request after its checksum."""
        while True:
            assert select.select([self.raw], [], [], 5)[0], "the responder sent no echo request"
            packet, (pinger, _) = self.raw.recvfrom(2048)
            message = packet[4 * (packet[0] & 15) :]
            if message[0] == 8:
                return pinger, message[4:]

    @staticmethod
    def answer(pinger, rest, source=MEMBER, kind=0):
        message = struct.pack("!BBH", kind, 0, 0) + rest
        total = sum(struct.unpack(f"!{len(message) // 2}H", message))
        total = (total & 0xFFFF) + (total >> 16)
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sender:
            sender.bind((source, 0))
            sender.sendto(struct.pack("!BBH", kind, 0, ~(total + (total >> 16)) & 0xFFFF) + rest, (pinger, 0))


@pytest.fixture
def echo_replies(network):
    """Disable the echo replies of the members' host: the test sends them."""
    switch = Path("/proc/sys/net/ipv4/icmp_echo_ignore_all")
    members = network.thread("mem")
    members.run(switch.write_text, "1")
    made = members.run(EchoReplies)
    yield made
    made.raw.close()
    members.run(switch.write_text, "0")


@pytest.mark.parametrize(
    ("change", "source", "kind"),
    [
        (lambda rest: rest[:4] + bytes(16), MEMBER, 0),
        (lambda rest: rest[:-1] + bytes([rest[-1] ^ 1]), MEMBER, 0),
        (lambda rest: rest[:2] + b"\xff\xff" + rest[4:], MEMBER, 0),
        (lambda rest: rest[:4], MEMBER, 0),
        (lambda rest: rest + b"..", MEMBER, 0),
        (lambda rest: rest, OTHER, 0),
        (lambda rest: rest, MEMBER, 3),
    ],
    ids=["guessed", "one bit off", "other sequence", "too short", "too long", "other sender", "unreachable"],
)
def test_foreign_echo_replies_do_not_count(network, responder, echo_replies, change, source, kind):
    client, members = network.thread("cl").run, network.thread("mem").run
    connection = client(begin, f"/ping/{IDS[MEMBER]}")
    pinger, rest = members(echo_replies.question)
    members(echo_replies.answer, pinger, change(rest), source, kind)
    assert not select.select([connection], [], [], 0.2)[0]
    members(echo_replies.answer, pinger, rest)
    assert end(connection) == 200


def test_a_late_reply_does_not_count_for_the_next_request(network, responder, echo_replies):
    client, members = network.thread("cl").run, network.thread("mem").run
    first = client(begin, f"/ping/{IDS[MEMBER]}")
    pinger, late = members(echo_replies.question)
    first.close()
    second = client(begin, f"/ping/{IDS[MEMBER]}")
    _, rest = members(echo_replies.question)
    members(echo_replies.answer, pinger, late)
    assert not select.select([second], [], [], 0.2)[0]
    members(echo_replies.answer, pinger, rest)
    assert end(second) == 200


def test_an_overfull_queue_keeps_the_newest_requests(network, monkeypatch):
    monkeypatch.setattr(http_server, "MOST_OPEN", 20)
    targets = {name: address for address, name in IDS.items()}
    made = Responder(network.thread("cl").run, PORT, lambda: iter(()), lambda: targets)
    made.start()
    try:
        eventually(lambda: network.thread("cl").run(connects), "the responder listens")

        def ask_many():
            silent = [begin(f"/ping/{IDS[SILENT]}") for _ in range(30)]
            status = ping(MEMBER)
            return status, [end(one, 0.05) for one in silent]

        status, others = network.thread("cl").run(ask_many)
        assert status == 200
        assert others == [503] * 11 + [None] * 19
    finally:
        made.close()


def test_the_responder_waits_for_its_port(network):
    client = network.thread("cl").run
    occupied = client(socket.create_server, ("127.0.0.1", PORT))
    targets = {IDS[MEMBER]: MEMBER}
    made = Responder(network.thread("cl").run, PORT, lambda: iter(()), lambda: targets)
    made.start()
    try:
        eventually(lambda: "in use" in made.last_error, "the responder reports that the port is in use")
        occupied.close()
        eventually(lambda: client(connects), "the responder listens")
        assert client(ping, MEMBER) == 200
    finally:
        made.close()
    assert not client(connects)


def test_the_responder_restarts_after_an_internal_failure(network, responder):
    client = network.thread("cl").run
    responder.targets[IDS[OTHER]] = 5
    assert client(ping, OTHER) == 0
    eventually(lambda: client(connects), "the responder listens again")
    assert client(ping, MEMBER) == 200


@pytest.mark.quiet
def test_a_thousand_members_take_little_processor_time(network, responder):
    def many():
        for _ in range(500):
            assert ping(MEMBER) == 200

    before = time.process_time()
    mine = network.thread("cl").run(lambda: (time.thread_time(), many(), time.thread_time()))
    spent = (time.process_time() - before - (mine[2] - mine[0])) / 500
    assert spent < 0.001, f"{spent * 1e6:.0f} µs a ping: a thousand members every five seconds take {spent * 200:.0%}"


def test_many_requests_wait_in_few_threads(network, responder):
    before = threading.active_count()

    def ask_many():
        return [begin(f"/ping/{IDS[SILENT]}") for _ in range(200)]

    waiting_ = network.thread("cl").run(ask_many)
    assert network.thread("cl").run(ping, MEMBER) == 200
    assert threading.active_count() == before
    for one in waiting_:
        one.close()
