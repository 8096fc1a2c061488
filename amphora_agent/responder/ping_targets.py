# SPDX-License-Identifier: Apache-2.0
"""The addresses to ping, in a file: the agent writes it, the responder reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def text_of(pings: Mapping[str, object]) -> str:
    """Return the text of the file: a line for each member with its id and address."""
    return "".join(f"{member} {address}\n" for member, address in pings.items())


class Targets:
    """The content of the file. Only a replacement of the file causes a new reading."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._known: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        """Return the address to ping, by member."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 (pathlib needs a megabyte)
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            if mark != self._mark:
                with open(self._path, encoding="ascii") as file:  # noqa: PTH123 (pathlib needs a megabyte)
                    self._known = {words[0]: words[1] for words in map(str.split, file) if len(words) == 2}
                self._mark = mark
        except OSError:
            # If the file is unreadable, the targets of the last successful read stay in use.
            pass
        return self._known
