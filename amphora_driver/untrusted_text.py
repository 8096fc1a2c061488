# SPDX-License-Identifier: Apache-2.0
"""Text of an amphora, for databases, logs and users.

Invariant: pure. An attacker may control the amphora: no database refuses the result (PostgreSQL takes no NUL, a MariaDB
of utf8mb3 nothing beyond the BMP), and it is one line.
"""

from __future__ import annotations

_CUT = " (cut)"


def printable(text: str, most: int) -> str:
    """At most this many characters of a text, in printable ASCII.

    Args:
        text: anything; line breaks become `; `.
        most: characters of the result.
    """
    # More than that is never looked at.
    head = text[: most + 1]
    line = "; ".join(part.strip() for part in head.splitlines() if part.strip())
    plain = line if line.isascii() and line.isprintable() else ascii(line)[1:-1]
    if len(text) <= most and len(plain) <= most:
        return plain
    return plain[: max(most - len(_CUT), 0)] + _CUT
