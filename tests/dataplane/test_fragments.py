# SPDX-License-Identifier: Apache-2.0
"""No fragmentation leads around a rule: listeners with allowed networks, VRRP, and the partners' stick tables."""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import fragments
import pytest
from amphora_lab import ip
from fragments import TCP, VRRP, Ends
from wire import bundle, eth1, mac

from amphora_agent.network import firewall, nftables
from amphora_agent.network.firewall import Pair, Port, Restrictions

pytestmark = pytest.mark.root

VIP = {4: "198.51.100.5", 6: "2001:db8:1::5"}
OWN = {4: "198.51.100.11", 6: "2001:db8:1::11"}
ALLOWED = {4: "198.51.100.12", 6: "2001:db8:1::12"}
FORBIDDEN = {4: "198.51.100.13", 6: "2001:db8:1::13"}
SERVED = {4: fragments.SERVED4, 6: fragments.SERVED6}
DROPPED = {4: fragments.DROPPED4, 6: fragments.DROPPED6}
UNUSUAL = {4: {}, 6: fragments.UNUSUAL6}
ETHERTYPE = {4: 0x0800, 6: 0x86DD}
FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
SECONDS = 10.0
_SYN_ACK, _RST, _FLAGS = 0x12, 0x04, 0x17
_numbers, _ports = itertools.count(1000, 2), itertools.count(20000)


def restrictions(version: int, *, udp: bool) -> Restrictions:
    """Port 80 for one client only, one partner, and perhaps a listener that needs virtual servers."""
    one = (int(ipaddress.ip_address(ALLOWED[version])),) * 2
    ranges = {"ipv4": (one,), "ipv6": ()} if version == 4 else {"ipv4": (), "ipv6": (one,)}
    ports = [Port(80, **ranges)] + ([Port(53, **ranges, protocol="udp")] if udp else [])
    pair = Pair(ipaddress.ip_address(OWN[version]), (ipaddress.ip_address(ALLOWED[version]),), 1500)
    return Restrictions(tuple(ports), pair, (ipaddress.ip_address(VIP[version]),) if udp else ())


class Link:
    """The peer's end of the cable: sends packets of IP, and hears what comes back."""

    def __init__(self, wire, version: int) -> None:
        self._version = version
        self._socket = wire.spaces["peer"].run(self._open)

    def _open(self) -> socket.socket:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETHERTYPE[self._version]))
        opened.bind(("far1", ETHERTYPE[self._version]))
        opened.settimeout(SECONDS)
        return opened

    def send(self, packets: list[bytes]) -> None:
        own = self._socket.getsockname()[4]
        for packet in packets:
            frame = bytes.fromhex(mac(1).replace(":", "")) + own
            self._socket.send(frame + ETHERTYPE[self._version].to_bytes(2, "big") + packet)

    def replies(self, until: int) -> dict[int, int]:
        """TCP flags by the port they were sent to, until there is one for this port."""
        found: dict[int, int] = {}
        head, at = (20, 9) if self._version == 4 else (40, 6)
        while until not in found:
            frame = self._socket.recv(2048)
            packet = frame[14:]
            ours = frame[6:12] == bytes.fromhex(mac(1).replace(":", ""))
            if ours and packet[at] == TCP:
                found.setdefault(int.from_bytes(packet[head + 2 : head + 4], "big"), packet[head + 13] & _FLAGS)
        return found

    def close(self) -> None:
        self._socket.close()


@contextmanager
def serving(wire, version: int, address: str, port: int) -> Iterator[None]:
    with wire.inner.run(socket.socket, FAMILY[version], socket.SOCK_STREAM) as opened:
        opened.bind((address, port))
        opened.listen(64)
        yield


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def version(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["TCP alone", "UDP too"])
def restricted(request, wire, version):
    """A machine with these rules."""
    wire.change(bundle(eth1()))
    for address in (ALLOWED[version], FORBIDDEN[version]):
        more = "/64 dev far1 nodad" if version == 6 else "/24 dev far1"
        ip(f"-n {wire.prefix}-peer addr add {address}{more}")
    assert wire.inner.run(nftables.replace, firewall.render(restrictions(version, udp=request.param)))
    return wire


def taken(wire, version: int, source: str, target: str, port: int) -> set[str]:
    """The forms in which a segment from there is answered by the server."""
    ends, sent = Ends(source, target), {}
    with closing(Link(wire, version)) as link:
        for name, make in {**DROPPED[version], **UNUSUAL[version], **SERVED[version]}.items():
            sent[next_port := next(_ports)] = name
            link.send(make(ends, next(_numbers), TCP, fragments.syn(ends, next_port, port)))
        # Answered by the server or by the rules, after all others.
        last = next(_ports)
        link.send(SERVED[version]["whole"](ends, next(_numbers), TCP, fragments.syn(ends, last, port)))
        replies = link.replies(last)
    assert replies[last] in (_SYN_ACK, _RST, _RST | 0x10)
    return {name for number, name in sent.items() if replies.get(number) == _SYN_ACK}


@pytest.mark.parametrize(("port", "own"), [(80, False), (firewall.PEERS_PORT, True)], ids=["listener", "stick tables"])
def test_a_segment_in_pieces_obeys_the_rules(restricted, version, port, own):
    target = (OWN if own else VIP)[version]
    with serving(restricted, version, target, port):
        assert taken(restricted, version, FORBIDDEN[version], target, port) == set()
        assert taken(restricted, version, ALLOWED[version], target, port) - UNUSUAL[version].keys() == set(
            SERVED[version]
        )


def test_an_advertisement_in_pieces_obeys_the_rules(restricted, version):
    forms = {**DROPPED[version], **UNUSUAL[version], **SERVED[version]}
    with (
        closing(Link(restricted, version)) as link,
        restricted.inner.run(socket.socket, FAMILY[version], socket.SOCK_RAW, VRRP) as heard,
    ):
        heard.settimeout(SECONDS)
        for source in (FORBIDDEN[version], ALLOWED[version]):
            for name, make in forms.items():
                said = f"{source} {name}".encode().ljust(64)
                link.send(make(Ends(source, OWN[version]), next(_numbers), VRRP, said))
        last = b"the last".ljust(64)
        link.send(SERVED[version]["whole"](Ends(ALLOWED[version], OWN[version]), next(_numbers), VRRP, last))
        found = []
        while not (message := heard.recv(2048)).endswith(last):
            found.append(message[-64:].decode().strip())
    assert {one for one in found if one.startswith(FORBIDDEN[version])} == set()
    served = {one.removeprefix(f"{ALLOWED[version]} ") for one in found}
    assert served - UNUSUAL[version].keys() - {"tiny"} == set(SERVED[version]) - {"tiny"}
