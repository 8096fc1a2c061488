# SPDX-License-Identifier: Apache-2.0
"""The interface of health checks. A check never blocks, and reports at most once before its end."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from amphora_agent.l4.event_loop import EventLoop
from amphora_agent.l4.model import Member, Monitor

OnResult = Callable[[bool, str], None]
"""Called with the result: whether the member serves, and the reason in a few words."""
# Errors of the amphora itself, for example a lack of sockets. A check with such an error does not change the member's
# state.
_LOCAL_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN))


@dataclass(frozen=True)
class Target:
    """The address and the monitor of a check. ``direct`` is whether clients use the same address and port."""

    address: str
    port: int
    monitor: Monitor
    direct: bool

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    @property
    def endpoint(self) -> tuple[str, int]:
        return self.address, self.port


def target_of(member: Member, monitor: Monitor) -> Target:
    """Return the target for a member."""
    address, port = member.check_address or member.address, member.check_port or member.port
    return Target(str(address), port, monitor, (address, port) == (member.address, member.port))


class Check(Protocol):
    """One pending check."""

    def expire(self) -> tuple[bool, str]:
        """Return the result after the monitor's time-out."""

    def end(self) -> None:
        """Release all resources; may be called more than once."""


class CheckType(Protocol):
    """All checks of one monitor type."""

    def start(self, target: Target, on_result: OnResult) -> Check:
        """Start a check; raises OSError if the check could not be sent."""

    def close(self) -> None: ...


Factories = Mapping[str, Callable[[EventLoop], CheckType]]
"""Functions that create the checks, by monitor type."""


def is_local_error(error: OSError) -> bool:
    """Return whether an error is about this machine and not about the member."""
    return error.errno in _LOCAL_ERRORS


def error_text(error: OSError) -> str:
    """Return an error as a few words."""
    return (error.strerror or str(error)).lower()
