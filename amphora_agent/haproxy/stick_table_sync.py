# SPDX-License-Identifier: Apache-2.0
"""Tells whether a worker would pass its stick tables to the next one.

Invariant: pure. A worker sends its tables to its successor only after it has learned itself: from its own predecessor
(about 100 ms after a reload), or, as the first worker, after five seconds without a predecessor. If the predecessor had
not learned yet, the worker waits five seconds for it, and five more for other peers (HAProxy 2.6 and 2.8, not 3.0;
source: ``show peers`` before and after reloads).
"""

from __future__ import annotations

import re

PEERS = "amphora"
QUESTION = "show table;show peers"
_USED = re.compile(r"^# table: .*\bused:([1-9]\d*)", re.MULTILINE)
_TABLE = re.compile(r"^# table: ", re.MULTILINE)
_FLAGS = re.compile(rf"\bid={PEERS} disabled=\d+ flags=(0x[0-9a-f]+)")
_LEARNED = 0x3


def has_entries(answer: str) -> bool:
    """Whether the answer to `QUESTION` shows a table with entries."""
    return _USED.search(answer) is not None


def would_lose_entries(answer: str, *, has_predecessor: bool = False) -> bool:
    """Whether a reload now would lose entries, according to the answer to `QUESTION`.

    Args:
        has_predecessor: the previous worker had entries, which this one may not have learned yet.
    """
    flags = _FLAGS.search(answer)
    some = has_entries(answer) or (has_predecessor and _TABLE.search(answer) is not None)
    return some and flags is not None and int(flags.group(1), 16) & _LEARNED != _LEARNED
