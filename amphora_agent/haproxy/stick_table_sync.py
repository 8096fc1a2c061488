# SPDX-License-Identifier: Apache-2.0
"""Stick tables, and whether a worker would hand them to the next one.

Invariant: pure. A worker teaches its successor only after it has learned itself: from its own predecessor (some
100 ms after a reload), or, as the first one, after waiting five seconds for a predecessor in vain. One whose
predecessor had not learned yet waits five seconds for it, and as long for others (HAProxy 2.6 and 2.8, not 3.0;
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
    """Whether the answer to `QUESTION` tells of any."""
    return _USED.search(answer) is not None


def would_be_lost(answer: str, *, heir: bool = False) -> bool:
    """Whether the answer to `QUESTION` tells of entries that a reload now would lose.

    Args:
        heir: the worker has a predecessor that had some. It may not have learned of a single one yet.
    """
    flags = _FLAGS.search(answer)
    some = has_entries(answer) or (heir and _TABLE.search(answer) is not None)
    return some and flags is not None and int(flags.group(1), 16) & _LEARNED != _LEARNED
