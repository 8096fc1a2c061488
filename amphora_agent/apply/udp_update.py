# SPDX-License-Identifier: Apache-2.0
"""The update of the UDP and SCTP listeners (virtual servers) for a bundle, and its rollback.

Invariant: the agent asks the checker again if the state of the checker is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from amphora_agent.bundle import Bundle
from amphora_agent.errors import AgentError
from amphora_agent.l4.model import Member, VirtualServer

if TYPE_CHECKING:
    from amphora_agent.l4_daemon.client import CheckerClient

_log = logging.getLogger(__name__)
_Wanted = tuple[tuple[VirtualServer, ...], bool]


class UdpUpdate:
    """The virtual servers of one amphora during a change of the bundle. Not thread-safe."""

    def __init__(self, service: CheckerClient) -> None:
        self._service = service
        # UDP and SCTP listeners that the L4 daemon has confirmed; None if the daemon's state is unknown.
        self._served: _Wanted | None = None
        self._validated: _Wanted | None = None

    def invalidate(self) -> None:
        self._served = self._validated = None

    def validate(self, bundle: Bundle) -> None:
        """Raise AgentError for unsupported virtual servers, before any change."""
        wanted = _wanted(bundle)
        if wanted not in (self._served, self._validated):
            self._service.check_servers(wanted[0])
            self._validated = wanted

    def apply(self, bundle: Bundle) -> None:
        """Serve the virtual servers of a bundle, unless the checker serves them already.

        Raises AgentError after a failure; the checker then serves the previous virtual servers.
        """
        wanted = _wanted(bundle)
        if wanted == self._served:
            return
        known, self._served = self._served, None
        if known is None:
            # If the daemon's state is unknown, the kernel's rules may differ from the L4 daemon's memory. The drift
            # check makes the daemon read the kernel's rules before a change.
            self._service.find_drift(wanted[0], paired=wanted[1])
        self._serve(bundle)

    def _serve(self, bundle: Bundle) -> None:
        servers, paired = _wanted(bundle)
        self._service.serve(servers, paired=paired)
        self._served = servers, paired

    def roll_back(self, served: Bundle | None, failed: Bundle) -> None:
        """Restore the virtual servers of the previous bundle, unless they are still served."""
        before = replace(failed, virtual_servers=(), vrrp=None) if served is None else served
        wanted = _wanted(before)
        # The failed change may have started an L4 daemon that the previous configuration does not need. In this case,
        # the agent restores the configuration without UDP and SCTP listeners, which stops the daemon.
        is_idle = bool(failed.virtual_servers) and not wanted[0]
        if not is_idle and (wanted == self._served or (self._served is None and not wanted[0])):
            return
        try:
            self._serve(before)
        except AgentError as error:
            self._served = None
            _log.error(
                "The agent could not restore the previous UDP and SCTP listeners, and retries at the next drift check: "
                "%s",
                error,
            )

    def differences(self, bundle: Bundle) -> list[str]:
        """Return the differences from a bundle, as sentences. Raises AgentError without an answer."""
        servers, paired = _wanted(bundle)
        return self._service.find_drift(servers, paired=paired)


def _wanted(bundle: Bundle) -> _Wanted:
    return bundle.virtual_servers, bundle.vrrp is not None


def describe_change(before: Sequence[VirtualServer], after: Sequence[VirtualServer]) -> str:
    """Return the first change in words and the number of others; empty if nothing changed."""
    changes = list(_changes(before, after))
    return changes[0] + (f", and {len(changes) - 1} more" if changes[1:] else "") if changes else ""


def _changes(before: Sequence[VirtualServer], after: Sequence[VirtualServer]) -> Iterator[str]:
    old, new = ({one.id: one for one in each} for each in (before, after))
    for name in new.keys() - old.keys():
        yield f"{new[name].protocol} listener {name} added"
    for name in old.keys() - new.keys():
        yield f"{old[name].protocol} listener {name} removed"
    for name in new:
        if name in old and old[name] != new[name]:
            where = f"{new[name].protocol} listener {name}"
            yield from (f"{where}: {change}" for change in _changes_within(old[name], new[name]))


def _changes_within(old: VirtualServer, new: VirtualServer) -> Iterator[str]:
    for name in new.__dataclass_fields__:
        if name != "members" and getattr(old, name) != getattr(new, name):
            yield f"{name} changed"
    former, latter = ({one.id: one for one in each.members} for each in (old, new))
    yield from (f"member {name} added" for name in latter if name not in former)
    yield from (f"member {name} removed" for name in former if name not in latter)
    for name, member in latter.items():
        # Unchanged members are mostly the same objects (`model.parse`).
        if name in former and former[name] is not member and former[name] != member:
            yield f"member {name}: {_member_change(former[name], member)}"
    if former == latter and old.members != new.members:
        yield "members in another order"


def _member_change(former: Member, member: Member) -> str:
    changed = [name for name in member.__dataclass_fields__ if getattr(former, name) != getattr(member, name)]
    return ", ".join(f"{name} {getattr(former, name)} -> {getattr(member, name)}" for name in changed)
