# SPDX-License-Identifier: Apache-2.0
"""The addresses to ping, in a file: the agent writes it, the responder reads it.

Invariant: who reads it has either the old addresses or the new ones; an agent that is gone, or a file that cannot be
read for a moment, takes none of them away.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def text_of(pings: Mapping[str, object]) -> str:
    """What the file holds: a line for each member, its id and its address."""
    return "".join(f"{member} {address}\n" for member, address in pings.items())


class Targets:
    """What a file says now. It is read again only when another one stands in its place."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._known: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        """By member, the address that is to answer its pings."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 (pathlib is a megabyte of the responder's memory)
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            if mark != self._mark:
                with open(self._path, encoding="ascii") as file:  # noqa: PTH123 (as above)
                    self._known = {words[0]: words[1] for words in map(str.split, file) if len(words) == 2}
                self._mark = mark
        except OSError:
            pass  # the next ping looks again
        return self._known
