# SPDX-License-Identifier: Apache-2.0
"""State of the L4 daemon in two files, for its next process. An unreadable file counts as missing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from amphora_agent.l4 import edits, model
from amphora_agent.l4.counters import MonotonicCounters
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4.stderr_log import log
from amphora_agent.l4_checks import member_state
from amphora_agent.l4_checks.member_state import MemberKey, State

SERVERS, STATES = "virtual-servers.json", "virtual-states.json"


@dataclass(frozen=True)
class DesiredState:
    """The virtual servers to serve, whether the amphora has a partner, and the digest of both."""

    digest: str | None
    servers: tuple[VirtualServer, ...]
    paired: bool


def parse_desired(found: Mapping[str, Any], before: DesiredState | None = None) -> DesiredState:
    """Return the desired state of a request or a file; raises KeyError, TypeError or ValueError.

    A request may contain the differences from the state ``before``.
    """
    known = () if before is None else before.servers
    servers = edits.apply_change(known, found["change"]) if "change" in found else model.parse(found["servers"], known)
    return DesiredState(str(found["digest"]), servers, found["paired"] is True)


@dataclass
class LoadedState:
    """The content of both files; defaults for a missing file."""

    desired: DesiredState = DesiredState(None, (), False)
    states: Mapping[MemberKey, State] = field(default_factory=dict)
    counters: MonotonicCounters = field(default_factory=MonotonicCounters)


class StateFiles:
    """The two files."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def load(self) -> LoadedState:
        loaded = LoadedState()
        with _logged_errors(SERVERS):
            loaded.desired = parse_desired(self._read(SERVERS))
        with _logged_errors(STATES):
            found = self._read(STATES)
            loaded.states = member_state.from_document(found["states"])
            loaded.counters = MonotonicCounters.from_document(found["counted"])
        return loaded

    def write_servers(self, desired: DesiredState) -> None:
        """Write the virtual servers that are served; raises OSError if the disk is full, for example."""
        head = json.dumps({"digest": desired.digest, "paired": desired.paired})
        self._replace(SERVERS, f'{head[:-1]}, "servers": {model.to_json(desired.servers)}}}')

    def write_states(self, states: Mapping[MemberKey, State], counters: MonotonicCounters) -> None:
        """Write states and counters. After an error the next process checks all members anew."""
        with _logged_errors(STATES, may_lack=False):
            counted = json.dumps(counters.to_document())
            self._replace(STATES, f'{{"states": {member_state.to_json(states)}, "counted": {counted}}}')

    def _read(self, name: str) -> Any:
        with open(f"{self._directory}/{name}", encoding="utf-8") as file:  # noqa: PTH123 (pathlib needs a megabyte)
            return json.load(file)

    def _replace(self, name: str, text: str) -> None:
        temporary = f"{self._directory}/.{name}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, f"{self._directory}/{name}")  # noqa: PTH105 (pathlib needs a megabyte)


@contextmanager
def _logged_errors(name: str, *, may_lack: bool = True) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not (may_lack and isinstance(error, FileNotFoundError)):
            log(
                f"the L4 daemon cannot read or write its state file {name}, and continues without the "
                f"stored states: {type(error).__name__}: {error}"
            )
