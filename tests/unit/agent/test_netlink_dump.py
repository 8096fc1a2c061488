# SPDX-License-Identifier: Apache-2.0
"""Dumps of the kernel's objects: complete, refused, and interrupted by a change of the objects."""

import errno
import socket
import struct

import pytest

from amphora_agent.l4 import netlink
from amphora_agent.l4_nftables import kernel_table
from amphora_agent.network.libnftables import NftError

REQUEST = b"request"
INTERRUPTED = 0x10


def message(kind, body=b"", flags=2):
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body


def read_dump(*blocks):
    """Return the messages of a dump that consists of these blocks."""
    here, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with here, kernel:
        here.settimeout(5)
        for one in blocks:
            kernel.send(one)
        found = [answer[at:end] for answer, spans in netlink.dump(here, REQUEST) for at, end in spans]
        assert kernel.recv(100) == REQUEST
    return found


def test_a_dump_has_the_messages_of_all_blocks():
    some = [message(100, bytes((number,)) * 4) for number in range(3)]
    assert read_dump(some[0] + some[1], some[2] + message(netlink.DONE)) == some


@pytest.mark.parametrize("kind", [100, netlink.DONE], ids=["message", "end"])
def test_a_dump_during_a_change_is_an_error(kind):
    with pytest.raises(InterruptedError):
        read_dump(message(100), message(kind, flags=2 | INTERRUPTED) + message(netlink.DONE))


def test_a_refused_dump_is_an_error():
    with pytest.raises(OSError, match="refused") as refused:
        read_dump(message(netlink.ERROR, struct.pack("=i", -errno.EPERM)))
    assert refused.value.errno == errno.EPERM


@pytest.mark.parametrize("interrupted", [1, 100])
def test_an_interrupted_dump_of_rules_is_repeated(monkeypatch, interrupted):
    calls = []

    def dump(_link, _request):
        calls.append(1)
        if len(calls) <= interrupted:
            raise InterruptedError
        yield b"", []

    monkeypatch.setattr(netlink, "dump", dump)
    if interrupted == 1:
        assert kernel_table.counters("absent") == {}
        assert len(calls) == 2
    else:
        with pytest.raises(NftError, match="other programs changed rules"):
            kernel_table.counters("absent")
