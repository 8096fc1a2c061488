# SPDX-License-Identifier: Apache-2.0
"""SCTP listeners: new associations over raw sockets, because this machine's kernel has no SCTP."""

from __future__ import annotations

import contextlib
import socket
import struct
import uuid

import pytest
from amphora_lab import FIXED, VIP, VIP6, eventually
from checked_members import sctp
from datagrams import Clients, UdpMember, member, name_of, virtual_server
from log_receivers import TcpReceiver
from test_logs import use

from amphora_agent.l4_checks import sctp_packet

pytestmark = pytest.mark.root
PORT, MEMBER_PORT = 5400, 5454
PLACES = {4: ("198.51.100.114", "198.51.100.115"), 6: ("2001:db8:1::114", "2001:db8:1::115")}


class _Namespaces:
    """The lab's namespaces, as `checked_members` expects them."""

    members = "mem"

    def __init__(self, lab) -> None:
        self._lab = lab

    def within(self, name, function):
        return self._lab.network.thread(name).run(function)


@pytest.fixture
def sctp_members(lab):
    with contextlib.ExitStack() as closing:
        made = {}
        for place in (*PLACES[4], *PLACES[6]):
            made[place] = sctp(_Namespaces(lab), place, port=MEMBER_PORT)
            closing.callback(made[place].close)
        yield made
    lab.amphora.push(next(lab.generations), None)


def associate(lab, source: str, vip: str, port: int = PORT, own_port: int = 46000):
    """Send INIT, and return the packet of the answer, or the number of the socket's error."""
    return lab.network.thread("cl").run(_associate, source, vip, port, own_port)


def _associate(source, vip, port, own_port):
    six = ":" in vip
    family = socket.AF_INET6 if six else socket.AF_INET
    with socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_SCTP) as link:
        link.bind((source, 0))
        link.connect((vip, 0))
        # IP_RECVERR, IPV6_RECVERR (linux/in.h, linux/in6.h): the socket reports ICMP errors.
        link.setsockopt(socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP, 25 if six else 11, 1)
        link.settimeout(1.0)
        for _ in range(5):
            link.send(sctp_packet.init(own_port, port, 0x01020304))
            try:
                data = link.recv(2048)
            except TimeoutError:
                continue
            except OSError as error:
                return error.errno
            data = data if six else data[4 * (data[0] & 15) :]
            bare = data[:8] + bytes(4) + data[12:]
            assert struct.unpack_from("<I", data, 8)[0] == sctp_packet.crc32c(bare), "the checksum is wrong"
            return sctp_packet.parse(data)
    return None


def _listener(*members, **more):
    return virtual_server(*members, protocol="SCTP", port=PORT, **more)


@pytest.mark.parametrize(("source", "vip"), [("198.51.100.20", VIP), ("2001:db8:1::20", VIP6)])
def test_an_association_begins_through_the_vip(lab, sctp_members, source, vip):
    members = [member(place, place, MEMBER_PORT) for place in sctp_members]
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=[_listener(*members)])
    assert status == 200, answer
    for number in range(4):
        packet = associate(lab, source, vip, own_port=46000 + number)
        assert (packet.kind, packet.source, packet.destination) == (sctp_packet.INIT_ACK, PORT, 46000 + number)
        assert packet.tag == 0x01020304
    version = 6 if ":" in vip else 4
    # Members note a packet before they answer, and count `heard` later.
    assert all(len(sctp_members[place].seen) >= 2 for place in PLACES[version]), "round robin"


def test_an_association_without_a_member_is_refused_beside_udp(lab, sctp_members):
    servers = [_listener(), virtual_server(member("u", PLACES[4][0], MEMBER_PORT), port=PORT)]
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=servers)
    assert status == 200, answer
    # ECONNREFUSED or EHOSTUNREACH (linux/errno.h), which depends on the kind of socket.
    assert isinstance(associate(lab, "198.51.100.20", VIP, own_port=46100), int)
    clients = Clients(lab.network.thread("cl"))
    with (
        contextlib.closing(clients),
        contextlib.closing(UdpMember(lab.network.thread("mem"), "u", PLACES[4][0], MEMBER_PORT)),
    ):
        assert clients.flow(port=PORT).ask().seen == FIXED


def test_forbidden_client_has_no_association(lab, sctp_members):
    place = PLACES[4][0]
    allowed = [{"protocol": "sctp", "port": PORT, "networks": ["198.51.100.20/32"]}]
    servers = [_listener(member("s", place, MEMBER_PORT))]
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=servers, allowed=allowed)
    assert status == 200, answer
    assert isinstance(associate(lab, "198.51.100.21", VIP, own_port=46200), int)
    assert associate(lab, "198.51.100.20", VIP, own_port=46201).kind == sctp_packet.INIT_ACK
    assert name_of("listener", PORT, "SCTP") != name_of("listener", PORT, "UDP")


def test_an_ended_association_is_logged_and_forwarded(lab, sctp_members):
    tag, place = str(uuid.uuid4()), PLACES[6][0]
    made = _listener(member("s", place, MEMBER_PORT), log_format=f"{tag} %ci %cp %si %sp %ts %[protocol]")
    with contextlib.closing(lab.network.thread("ctl").run(TcpReceiver)) as target:
        use(lab.amphora, tenant=[target.url])
        status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=[made])
        assert status == 200, answer
        assert associate(lab, "2001:db8:1::20", VIP6, own_port=46300).kind == sctp_packet.INIT_ACK
        status, answer = lab.amphora.push(next(lab.generations), None)
        assert status == 200, answer
        message = target.wait_for(tag)
        use(lab.amphora)
    expected = f"{tag} 2001:db8:1::20 46300 {place} {MEMBER_PORT} D- SCTP"
    assert " amphora-checker - flow " in message
    assert expected in message

    def lines():
        return [one for one in lab.amphora.call("GET", "/v2/diagnostics")[1]["checker log"] if tag in one]

    assert eventually(lines, "a line of the log") == [expected]
