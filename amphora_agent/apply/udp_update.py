# SPDX-License-Identifier: Apache-2.0
"""What the checker has to do for a change of the virtual servers, and how it gets back.

Invariant: what is served is what was asked for last, or nothing is known of it; then the checker is asked once more. A
change has a reason that names the listener, and the member if it is one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from amphora_agent.bundle import Bundle
from amphora_agent.errors import AgentError
from amphora_agent.l4.model import Member, VirtualServer

_log = logging.getLogger(__name__)
_Wanted = tuple[tuple[VirtualServer, ...], bool]


class Forwards(Protocol):
    """Who has virtual servers served (`l4_daemon.client.CheckerClient`). Methods raise `AgentError`."""

    def check_servers(self, servers: Sequence[VirtualServer], /) -> None:
        """Refuse what cannot be served; changes nothing."""

    def serve(self, servers: Sequence[VirtualServer], /, *, paired: bool = False) -> None:
        """Have these served, and no others."""

    def find_drift(self, servers: Sequence[VirtualServer], /, *, paired: bool = False) -> list[str]:
        """What is otherwise, as sentences."""


class VirtualServing:
    """The virtual servers of one amphora, while one bundle takes the place of another. Used by one thread at a time."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards
        # What the checker has confirmed; None where it has to be asked.
        self._served: _Wanted | None = None
        self._checked: _Wanted | None = None

    def doubt(self) -> None:
        """Look at everything, whatever is known."""
        self._served = self._checked = None

    def check(self, bundle: Bundle) -> None:
        """Refuse what cannot be served, before anything is changed.

        Raises:
            AgentError: it cannot.
        """
        wanted = _of(bundle)
        if wanted not in (self._served, self._checked):
            self._forwards.check_servers(wanted[0])
            self._checked = wanted

    def bring_about(self, bundle: Bundle) -> None:
        """Have a bundle's virtual servers served; asks nobody where they are.

        Raises:
            AgentError: what was served before still is.
        """
        wanted = _of(bundle)
        if wanted == self._served:
            return
        known, self._served = self._served, None
        # Who has begun, or says the same once more, looks first; the checker then writes anew what it has found.
        if known is None:
            self._forwards.find_drift(wanted[0], paired=wanted[1])
        self._serve(bundle)

    def _serve(self, bundle: Bundle) -> None:
        servers, paired = _of(bundle)
        self._forwards.serve(servers, paired=paired)
        self._served = servers, paired

    def go_back(self, served: Bundle | None, failed: Bundle) -> None:
        """Have served what was, if it may be otherwise by now."""
        before = replace(failed, virtual_servers=(), vrrp=None) if served is None else served
        wanted = _of(before)
        # Who was only asked whether it could serve them has been started for that, and is to end.
        is_idle = bool(failed.virtual_servers) and not wanted[0]
        if not is_idle and (wanted == self._served or (self._served is None and not wanted[0])):
            return
        try:
            self._serve(before)
        except AgentError as error:
            self._served = None
            _log.error("Going back to the virtual servers of before: %s", error)

    def differences(self, bundle: Bundle) -> list[str]:
        """What is not as a bundle wants it, as sentences; changes nothing.

        Raises:
            AgentError: it cannot be found out.
        """
        servers, paired = _of(bundle)
        return self._forwards.find_drift(servers, paired=paired)


def _of(bundle: Bundle) -> _Wanted:
    return bundle.virtual_servers, bundle.vrrp is not None


# -- for a person to read -------------------------------------------------------------------------------------------


def difference(before: Sequence[VirtualServer], after: Sequence[VirtualServer]) -> str:
    """What changed, as words; empty if nothing did. The first change is named, the others are counted."""
    changes = list(_changes(before, after))
    return changes[0] + (f", and {len(changes) - 1} more" if changes[1:] else "") if changes else ""


def _changes(before: Sequence[VirtualServer], after: Sequence[VirtualServer]) -> Iterator[str]:
    mine, theirs = ({one.id: one for one in each} for each in (before, after))
    for name in theirs.keys() - mine.keys():
        yield f"{theirs[name].protocol} listener {name} added"
    for name in mine.keys() - theirs.keys():
        yield f"{mine[name].protocol} listener {name} removed"
    for name in theirs:
        if name in mine and mine[name] != theirs[name]:
            where = f"{theirs[name].protocol} listener {name}"
            yield from (f"{where}: {change}" for change in _within(mine[name], theirs[name]))


def _within(mine: VirtualServer, theirs: VirtualServer) -> Iterator[str]:
    for name in theirs.__dataclass_fields__:
        if name != "members" and getattr(mine, name) != getattr(theirs, name):
            yield f"{name} changed"
    former, latter = ({one.id: one for one in each.members} for each in (mine, theirs))
    yield from (f"member {name} added" for name in latter if name not in former)
    yield from (f"member {name} removed" for name in former if name not in latter)
    for name, member in latter.items():
        if name in former and former[name] != member:
            yield f"member {name}: {_of_member(former[name], member)}"
    if former == latter and mine.members != theirs.members:
        yield "members in another order"


def _of_member(former: Member, member: Member) -> str:
    changed = [name for name in member.__dataclass_fields__ if getattr(former, name) != getattr(member, name)]
    return ", ".join(f"{name} {getattr(former, name)} -> {getattr(member, name)}" for name in changed)
