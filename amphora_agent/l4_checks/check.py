# SPDX-License-Identifier: Apache-2.0
"""What is checked, and what a kind of checks is asked to do.

Invariant: nothing here blocks. A check calls `done` at most once, and never after it was ended.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from amphora_agent.l4.model import Member, Monitor

# Whether the member serves, and what was seen, as a few words.
Done = Callable[[bool, str], None]
# What the machine lacks says nothing of a member: there is no verdict then.
_OUR_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN))


@dataclass(frozen=True)
class Target:
    """Where a member is checked, and how. ``direct`` is whether that is where clients reach it too."""

    address: str
    port: int
    monitor: Monitor
    direct: bool

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    @property
    def place(self) -> tuple[str, int]:
        return self.address, self.port


def target(member: Member, monitor: Monitor) -> Target:
    """Where this member is checked."""
    address, port = member.check_address or member.address, member.check_port or member.port
    return Target(str(address), port, monitor, (address, port) == (member.address, member.port))


class Check(Protocol):
    """One question that waits for its answer."""

    def expire(self) -> tuple[bool, str]:
        """It has waited as long as it may: what that means."""

    def end(self) -> None:
        """Let go of all it has; more than once does no harm."""


class Kind(Protocol):
    """How members are asked. One for all members."""

    def begin(self, asked: Target, done: Done) -> Check:
        """Ask.

        Raises:
            OSError: the question could not even be sent.
        """

    def close(self) -> None: ...


def is_ours(error: OSError) -> bool:
    """Whether an error is about this machine and not about the member."""
    return error.errno in _OUR_OWN


def words(error: OSError) -> str:
    """An error, as short as can be."""
    return (error.strerror or str(error)).lower()
