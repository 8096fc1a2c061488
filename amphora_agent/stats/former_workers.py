# SPDX-License-Identifier: Apache-2.0
"""What HAProxy's earlier workers have counted, as a file for the responder.

Invariant: pure, and imports nothing: the responder is a process of its own and pays for it. The file says beside
which worker its sums are to be added; to those of any other one they are wrong.

    present 17
    columns stot,bin
    <listener>,FRONTEND,1,2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from amphora_agent.stats.stat_columns import COUNTED


class Earlier:
    """The file, read. ``sums`` are by a row's first two columns with a comma between, in the order of ``columns``."""

    __slots__ = ("columns", "present", "sums")

    def __init__(self, present: int, columns: Sequence[str], sums: Mapping[str, list[str]]) -> None:
        self.present = present
        self.columns = columns
        self.sums = sums


def compose(present: int, sums: Mapping[str, Sequence[int]]) -> str:
    """The file. Rows without anything are left out."""
    lines = [f"present {present}", f"columns {','.join(COUNTED)}"]
    lines += [f"{row},{','.join(map(str, counts))}" for row, counts in sums.items() if any(counts)]
    return "\n".join(lines) + "\n"


def read(text: str) -> Earlier | None:
    """Read it; None if it is something else."""
    lines = text.split("\n")
    if len(lines) < 2 or not lines[0].startswith("present ") or not lines[1].startswith("columns "):
        return None
    sums = {}
    for line in lines[2:]:
        words = line.split(",")
        sums[",".join(words[:2])] = words[2:]
    return Earlier(int(lines[0][8:]), lines[1][8:].split(","), sums)
