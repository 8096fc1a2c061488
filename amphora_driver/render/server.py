# SPDX-License-Identifier: Apache-2.0
"""A member as HAProxy's `server` line.

Invariant: the line is complete, because HAProxy's runtime command `add server` does not read `default-server`. The
line contains only keywords of that command (HAProxy 2.6 management guide, 9.3).
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
    """Return the number of a server for consistent hashing.

    HAProxy hashes the number of a server, by default its position in the backend (manual: `hash-type`). After the
    removal of a member, the next reload would move the clients of all following members. A number that derives from
    the id is the same at all times in all amphorae.
    """
    number = zlib.crc32(member_id.encode(errors="replace")) & 0x7FFFFFFF or 1
    while number in taken:
        number = number % 0x7FFFFFFF + 1
    taken.add(number)
    return number


def servers(members: Sequence[Member], monitor: Monitor | None) -> list[Quoted | None]:
    """Return the lines of ordinary members; None for a member that `server` must render."""
    tail = monitor.check if monitor is not None else None
    beginnings = [f"server {one.id} {one.address}:{one.protocol_port} weight {one.weight}" for one in members]
    lines = quoting.ordinary_servers(beginnings, tail)
    explicit = monitor is not None and monitor.explicit_port
    return [None if explicit or _is_special(one) else line for one, line in zip(members, lines, strict=True)]


def _is_special(member: Member) -> bool:
    if member.backup or not member.admin_state_up or member.vnic_type not in options.VNIC_TYPES:
        return True
    return member.monitor_port is not None or member.monitor_address is not None


def server(member: Member, monitor: Monitor | None, number: int | None) -> Quoted:
    """Return the line of a member (manual section 5.2) without the part that depends on the listener.

    Raise UnsupportedOption for an unsupported option, and QuotingError for a value outside HAProxy's syntax.
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
