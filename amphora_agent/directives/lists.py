# SPDX-License-Identifier: Apache-2.0
"""Lists of certificates (HAProxy manual, "crt-list"), which name files as a configuration does.

Invariant: pure. A list that is accepted names certificates of the bundle alone, and sets nothing but ALPN for them.
"""

from __future__ import annotations

import re

from amphora_agent.directives.allowed import FILE

_LINE = re.compile(
    rf"[ \t]*(?:{FILE}(?:[ \t]+\[[ \t]*alpn[ \t]+[A-Za-z0-9./,-]+[ \t]*\])?(?:[ \t]+[!A-Za-z0-9*._-]+)*[ \t]*)?(?:#.*)?"
)


def refused_line(text: str) -> int | None:
    """The number, from 1, of the first line that is refused; None if all are accepted."""
    for number, line in enumerate(text.split("\n"), start=1):
        if _LINE.fullmatch(line) is None:
            return number
    return None
