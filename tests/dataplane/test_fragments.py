# SPDX-License-Identifier: Apache-2.0
"""Fragments do not bypass the firewall of listeners, VRRP, and the stick tables of a pair."""

from __future__ import annotations

import itertools
import socket
from contextlib import closing

import fragments
import pytest
from fragments import TCP, VRRP, Addresses
from restricted import ALLOWED, FAMILY, FORBIDDEN, OWN, RST, SECONDS, SYN_ACK, VIP, Link, restrict, serving

from amphora_agent.network import firewall

pytestmark = pytest.mark.root

SERVED = {4: fragments.SERVED4, 6: fragments.SERVED6}
DROPPED = {4: fragments.DROPPED4, 6: fragments.DROPPED6}
UNUSUAL = {4: {}, 6: fragments.UNUSUAL6}
_numbers, _ports = itertools.count(1000, 2), itertools.count(20000)


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def version(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["TCP alone", "UDP too"])
def restricted(request, wire, version):
    """A namespace with the rules."""
    restrict(wire, version, udp=request.param)
    return wire


def taken(wire, version: int, source: str, target: str, port: int) -> set[str]:
    """Return the forms of a segment from a source that the server answers."""
    ends, sent = Addresses(source, target), {}
    with closing(Link(wire, version)) as link:
        for name, make in {**DROPPED[version], **UNUSUAL[version], **SERVED[version]}.items():
            sent[next_port := next(_ports)] = name
            link.send(make(ends, next(_numbers), TCP, fragments.syn(ends, next_port, port)))
        # The server or the rules answer this segment after all others.
        last = next(_ports)
        link.send(SERVED[version]["whole"](ends, next(_numbers), TCP, fragments.syn(ends, last, port)))
        replies = link.replies(last)
    assert replies[last] in (SYN_ACK, RST, RST | 0x10)
    return {name for number, name in sent.items() if replies.get(number) == SYN_ACK}


@pytest.mark.parametrize(("port", "own"), [(80, False), (firewall.PEERS_PORT, True)], ids=["listener", "stick tables"])
def test_the_rules_apply_to_fragmented_segments(restricted, version, port, own):
    target = (OWN if own else VIP)[version]
    with serving(restricted, version, target, port):
        assert taken(restricted, version, FORBIDDEN[version], target, port) == set()
        assert taken(restricted, version, ALLOWED[version], target, port) - UNUSUAL[version].keys() == set(
            SERVED[version]
        )


def test_the_rules_apply_to_fragmented_advertisements(restricted, version):
    forms = {**DROPPED[version], **UNUSUAL[version], **SERVED[version]}
    with (
        closing(Link(restricted, version)) as link,
        restricted.inner.run(socket.socket, FAMILY[version], socket.SOCK_RAW, VRRP) as heard,
    ):
        heard.settimeout(SECONDS)
        for source in (FORBIDDEN[version], ALLOWED[version]):
            for name, make in forms.items():
                said = f"{source} {name}".encode().ljust(64)
                link.send(make(Addresses(source, OWN[version]), next(_numbers), VRRP, said))
        last = b"the last".ljust(64)
        link.send(SERVED[version]["whole"](Addresses(ALLOWED[version], OWN[version]), next(_numbers), VRRP, last))
        found = []
        while not (message := heard.recv(2048)).endswith(last):
            found.append(message[-64:].decode().strip())
    assert {one for one in found if one.startswith(FORBIDDEN[version])} == set()
    served = {one.removeprefix(f"{ALLOWED[version]} ") for one in found}
    assert served - UNUSUAL[version].keys() - {"tiny"} == set(SERVED[version]) - {"tiny"}
