# SPDX-License-Identifier: Apache-2.0
"""A member as HAProxy's `server` line.

Invariant: the line carries everything, because HAProxy's runtime `add server` does not read `default-server`, and only
words which that command takes (HAProxy 2.6 management guide, 9.3); files that it names are in memory beforehand.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from amphora_driver.model.loadbalancer import Member
from amphora_driver.render import quoting
from amphora_driver.render.health_monitor import Monitor
from amphora_driver.render.quoting import Quoted
from amphora_driver.validation import options

_SERVER, _WEIGHT, _ID, _ADDR, _PORT, _BACKUP, _DISABLED = (
    quoting.keywords(word) for word in ("server", "weight", "id", "addr", "port", "backup", "disabled")
)


def hash_id(member_id: str, taken: set[int]) -> int:
    """The number by which consistent hashing knows a server.

    HAProxy hashes the server's number, which by default is its place in the backend (manual: `hash-type`):
    then a removed member would move the clients of all that follow it at the next reload, and two amphorae
    with different histories would disagree. Derived from the id it is the same everywhere and always.
    """
    number = zlib.crc32(member_id.encode(errors="replace")) & 0x7FFFFFFF or 1
    while number in taken:
        number = number % 0x7FFFFFFF + 1
    taken.add(number)
    return number


def servers(members: Sequence[Member], monitor: Monitor | None) -> list[Quoted | None]:
    """The lines of ordinary members, all at once; None for a member that needs a closer look (`server`)."""
    tail = monitor.check if monitor is not None else None
    beginnings = [f"server {one.id} {one.address}:{one.protocol_port} weight {one.weight}" for one in members]
    lines = quoting.ordinary_servers(beginnings, tail)
    explicit = monitor is not None and monitor.explicit_port
    return [
        None
        if explicit
        or one.backup
        or not one.admin_state_up
        or one.monitor_port is not None
        or one.monitor_address is not None
        or one.vnic_type not in options.VNIC_TYPES
        else line
        for one, line in zip(members, lines, strict=True)
    ]


def server(member: Member, monitor: Monitor | None, number: int | None) -> Quoted:
    """A member's line (manual section 5.2) without what depends on the listener.

    Raises:
        UnsupportedOption: an option of the member is not served.
        QuotingError: HAProxy has no way to write a value of it.
    """
    options.check_member(member)
    words: list[Quoted | int] = [
        _SERVER,
        quoting.identifier(member.id, "the member's id", member.id),
        quoting.endpoint(member.address, member.protocol_port, "the member's address", member.id),
        _WEIGHT,
        quoting.integer(member.weight, "the weight", low=0, high=options.MAX_WEIGHT, object_id=member.id),
    ]
    if number is not None:
        words += [_ID, number]
    if monitor is not None:
        words += _checked(member, monitor)
    if member.backup:
        words.append(_BACKUP)
    if not member.admin_state_up:
        words.append(_DISABLED)
    return quoting.words(words)


def _checked(member: Member, monitor: Monitor) -> list[Quoted | int]:
    if monitor.ping:
        return [monitor.check]
    port = member.monitor_port
    elsewhere = port is not None and port != member.protocol_port
    words: list[Quoted | int] = [monitor.elsewhere if elsewhere else monitor.check]
    if member.monitor_address is not None:
        words += [_ADDR, quoting.address(member.monitor_address, "the monitor address", member.id)]
    if port is not None:
        words += [_PORT, quoting.port(port, "the monitor port", member.id)]
    elif monitor.explicit_port:
        words += [_PORT, member.protocol_port]
    return words
