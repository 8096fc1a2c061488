# SPDX-License-Identifier: Apache-2.0
"""Several receivers (processes) of one host on one UDP port.

Invariant: one receiver processes all heartbeats of a load balancer, because the statuses of a pair follow from both
amphorae. The kernel distributes datagrams by amphora id. A receiver sends a datagram of another receiver's load
balancer on to it, over the loopback address; signature and order are checked there.

The sockets are opened before the processes are forked and stay open in their parent. If a receiver ends, its datagrams
wait for its replacement, and the distribution stays the same. If one receiver hangs, the self-tests of all receivers of
the host fail, because otherwise its amphorae would count as silent. If the parent ends, all receivers end, and a new
group begins only after the last of them.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from amphora_driver.errors import ConfigurationError

# Numbers of Linux's socket option SO_ATTACH_REUSEPORT_CBPF and of three instructions of a classic BPF program
# (linux/filter.h): load a word of the datagram, take the remainder of a division, return the result.
_SO_ATTACH_REUSEPORT_CBPF = 51
_LOAD_WORD, _REMAINDER, _RETURN = 0x20, 0x94, 0x16
_INSTRUCTION = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("@HP")
# Offset of the last four bytes of the amphora id in a datagram. These bytes of an id are random, so they distribute the
# amphorae evenly among the receivers.
_WORD_OFFSET = 16
_WORD = struct.Struct("!I")
_LOOPBACK = "127.0.0.1"
_TIME = struct.Struct("=d")


class Bind(Protocol):
    """Returns a UDP socket with this address and port.

    Port 0 means any free port. `shared` permits further sockets with this port.
    """

    def __call__(self, address: str, port: int, *, shared: bool) -> socket.socket: ...


def word_of(amphora_id: str) -> int:
    """Return the part of an amphora id by which the kernel distributes datagrams."""
    return int(amphora_id.replace("-", "")[-8:], 16)


class GroupMember:
    """One receiver of the group: its sockets, and the load balancers that it processes.

    `owner` may be called by any thread.
    """

    def __init__(self, index: int, receiving: socket.socket, forwarded: list[socket.socket], tested: mmap.mmap) -> None:
        self.index = index
        self.number = len(forwarded)
        self.receiving = receiving
        self.forwarded = forwarded[index]
        self.lost = 0
        self._addresses = [one.getsockname() for one in forwarded]
        self._tested = tested
        self._elsewhere: dict[str, int] = {}
        self._owned: frozenset[str] = frozenset()

    def owner(self, amphora_id: str) -> int:
        """Return which receiver processes the heartbeats of an amphora."""
        return self._elsewhere.get(amphora_id, self.index)

    def forward(self, owner: int, datagram: memoryview) -> None:
        """Send a datagram to another receiver, or drop it if that receiver's buffer is full."""
        try:
            self.forwarded.sendto(datagram, self._addresses[owner])
        except OSError:
            # The receiver only counts the lost datagram, because the amphora soon sends the next heartbeat.
            self.lost += 1

    def distribute(self, amphorae: Iterable[tuple[str, str]], prepare: Callable[[list[str]], None]) -> None:
        """Set which receiver processes which amphora.

        Args:
            amphorae: amphora id and load balancer id, the oldest amphora first. The receiver of the oldest amphora
                processes the load balancer, so a new amphora changes nothing.
            prepare: called with the amphorae that this receiver processes from now on.
        """
        owners: dict[str, int] = {}
        elsewhere, owned = {}, set()
        for amphora_id, load_balancer_id in amphorae:
            owner = owners.setdefault(load_balancer_id, word_of(amphora_id) % self.number)
            if owner == self.index:
                owned.add(amphora_id)
            else:
                elsewhere[amphora_id] = owner
        prepare(sorted(owned - self._owned))
        self._elsewhere, self._owned = elsewhere, frozenset(owned)

    def is_own_probe(self, probe: bytes) -> bool:
        """Return whether the kernel gives this datagram to this receiver."""
        word: int = _WORD.unpack_from(probe, _WORD_OFFSET)[0]
        return word % self.number == self.index

    def record_test(self) -> None:
        """Record that the self-test of this receiver has just succeeded."""
        _TIME.pack_into(self._tested, self.index * _TIME.size, time.monotonic())

    def all_tested(self, seconds: float) -> bool:
        """Return whether the self-tests of all receivers have succeeded within the last seconds."""
        times = (_TIME.unpack_from(self._tested, index * _TIME.size)[0] for index in range(self.number))
        oldest: float = min(times)
        return time.monotonic() - oldest <= seconds


class ReceiverGroup:
    """The sockets of all receivers. The constructor raises ConfigurationError."""

    def __init__(self, bind: Bind, address: str, port: int, number: int) -> None:
        if port:
            # While an earlier service runs, the kernel would distribute datagrams to the processes of both services. So
            # this trial socket, which does not share its port, raises an error until the earlier service has ended.
            bind(address, port, shared=False).close()
        self._receiving: list[socket.socket] = []
        for _ in range(number):
            self._receiving.append(bind(address, port, shared=True))
            port = self._receiving[0].getsockname()[1]
        self.port = port
        # With shared ports, the kernel could choose one port for two of these sockets. So these sockets do not share
        # their ports.
        self._forwarded = [bind(_LOOPBACK, 0, shared=False) for _ in range(number)]
        self._tested = mmap.mmap(-1, number * _TIME.size)
        try:
            _attach(self._receiving[0], number)
        except OSError as error:
            raise ConfigurationError(
                f"start {number} receivers of heartbeats on one port",
                f"the kernel refuses the distribution of datagrams ({error.strerror})",
                "Set [amp_health] receivers to 1.",
            ) from error

    def member(self, index: int) -> GroupMember:
        return GroupMember(index, self._receiving[index], self._forwarded, self._tested)

    def close(self) -> None:
        for one in (*self._receiving, *self._forwarded):
            one.close()


def _attach(receiving: socket.socket, number: int) -> None:
    """Let the kernel choose the socket by the amphora id: its last word, modulo the number of sockets.

    A datagram that is too short goes to the first socket.
    """
    instructions = (
        _INSTRUCTION.pack(_LOAD_WORD, 0, 0, _WORD_OFFSET)
        + _INSTRUCTION.pack(_REMAINDER, 0, 0, number)
        + _INSTRUCTION.pack(_RETURN, 0, 0, 0)
    )
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = _PROGRAM.pack(len(instructions) // _INSTRUCTION.size, ctypes.addressof(buffer))
    receiving.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
