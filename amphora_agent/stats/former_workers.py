# SPDX-License-Identifier: Apache-2.0
"""The counters of HAProxy's former workers, as a file for the responder.

Invariant: this module is pure and imports little, because each import costs memory in the responder's process. The file
names the present worker; its sums are valid only together with the counters of this worker.

    present 17
    columns stot,bin
    <listener>,FRONTEND,1,2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Columns whose values are added up over all workers, because they only increase. Counters of health checks are not
# listed, because each worker counts the same checks.
_TRAFFIC = ("stot", "bin", "bout")
_ERRORS = ("ereq", "dreq", "dresp", "econ", "eresp", "wretr", "wredis", "wrew", "cli_abrt", "srv_abrt")
_SESSIONS = ("lbtot", "connect", "reuse", "conn_tot", "dcon", "dses", "req_tot", "intercepted")
_RESPONSES = ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other")
_CONTENT = ("cache_lookups", "cache_hits", "comp_in", "comp_out", "comp_byp", "comp_rsp")
COUNTED = (*_TRAFFIC, *_ERRORS, *_SESSIONS, *_RESPONSES, *_CONTENT)


class FormerWorkers:
    """The parsed file. The keys of ``sums`` are the first two columns of a row, joined by a comma."""

    __slots__ = ("columns", "present", "sums")

    def __init__(self, present: int, columns: Sequence[str], sums: Mapping[str, list[str]]) -> None:
        self.present = present
        self.columns = columns
        self.sums = sums


def compose(present: int, sums: Mapping[str, Sequence[int]]) -> str:
    """Return the text of the file, without rows of zeros."""
    lines = [f"present {present}", f"columns {','.join(COUNTED)}"]
    lines += [f"{row},{','.join(map(str, counts))}" for row, counts in sums.items() if any(counts)]
    return "\n".join(lines) + "\n"


def read(text: str) -> FormerWorkers | None:
    """Parse the file; None if it has another format."""
    lines = text.split("\n")
    if len(lines) < 2 or not lines[0].startswith("present ") or not lines[1].startswith("columns "):
        return None
    sums = {}
    for line in lines[2:]:
        words = line.split(",")
        sums[",".join(words[:2])] = words[2:]
    return FormerWorkers(int(lines[0][8:]), lines[1][8:].split(","), sums)
