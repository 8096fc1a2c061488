# SPDX-License-Identifier: Apache-2.0
"""What a checker leaves to the one after it, in two files of its run directory.

Invariant: a file has its old content or its new one. What cannot be read counts as nothing known: then members are
checked anew, and whoever wants virtual servers says so again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amphora_agent.l4 import model
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4.monotonic_counters import Counted
from amphora_agent.l4_checks import member_state
from amphora_agent.l4_checks.member_state import Key, State

SERVERS, STATES = "virtual-servers.json", "virtual-states.json"


@dataclass(frozen=True)
class Wish:
    """What is to be served. ``digest`` is of all of it; None: nobody has wanted anything yet.

    ``paired`` is whether the amphora has a partner.
    """

    digest: str | None
    servers: tuple[VirtualServer, ...]
    paired: bool


NOTHING = Wish(None, (), False)


def wish(found: Mapping[str, Any]) -> Wish:
    """Read one.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    return Wish(str(found["digest"]), model.parse(found["servers"]), found["paired"] is True)


@dataclass
class Left:
    """What was found."""

    wish: Wish = field(default_factory=lambda: NOTHING)
    states: Mapping[Key, State] = field(default_factory=dict)
    counted: Counted = field(default_factory=Counted)


class Record:
    """The files."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def read(self) -> Left:
        left = Left()
        try:
            left.wish = wish(self._load(SERVERS))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _complain(SERVERS, error)
        try:
            found = self._load(STATES)
            left.states = member_state.restored(found["states"])
            left.counted = Counted.restored(found["counted"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _complain(STATES, error)
        return left

    def serves(self, served: Wish) -> None:
        """Write down what is served.

        Raises:
            OSError: there is no room.
        """
        self._replace(SERVERS, document(served))

    def knows(self, known: Mapping[Key, State], counted: Counted) -> None:
        """Write down what is known. If there is no room the next one checks anew."""
        try:
            self._replace(STATES, {"states": member_state.document(known), "counted": counted.document()})
        except OSError as error:
            _complain(STATES, error)

    def _load(self, name: str) -> Any:
        with open(self._path(name), encoding="utf-8") as file:  # noqa: PTH123 (pathlib is a megabyte)
            return json.load(file)

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def _replace(self, name: str, document: Any) -> None:
        temporary = self._path(f".{name}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"))
        os.replace(temporary, self._path(name))  # noqa: PTH105 (as above)


def document(served: Wish) -> dict[str, Any]:
    """What `wish` reads."""
    return {"digest": served.digest, "paired": served.paired, "servers": model.document(served.servers)}


def _complain(name: str, error: Exception) -> None:
    sys.stderr.write(f"checker: {name}: {type(error).__name__}: {error}\n")
    sys.stderr.flush()
