# SPDX-License-Identifier: Apache-2.0
"""Checks crt-lists (HAProxy manual, "crt-list"), which name files as a configuration does.

Invariant: pure. An accepted list names certificates of the bundle only, and sets no option except ALPN.
"""

from __future__ import annotations

import re

from amphora_agent.directives.allowed import FILE

_LINE = re.compile(
    rf"[ \t]*(?:{FILE}(?:[ \t]+\[[ \t]*alpn[ \t]+[A-Za-z0-9./,-]+[ \t]*\])?(?:[ \t]+[!A-Za-z0-9*._-]+)*[ \t]*)?(?:#.*)?"
)


def refused_line(text: str) -> int | None:
    """Return the number, from 1, of the first refused line; None if all lines are accepted."""
    for number, line in enumerate(text.split("\n"), start=1):
        if _LINE.fullmatch(line) is None:
            return number
    return None
