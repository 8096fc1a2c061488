# SPDX-License-Identifier: Apache-2.0
"""HAProxy's statistics as Prometheus wants them, under the names that dashboards for Octavia know.

Invariant: the samples are those of HAProxy's own exporter, renamed: same labels but their names, same values. Means of
times are better ones: the exporter of 2.6 divides by 1024 requests before there were as many.

All of it is made from the CSV of the stats socket: for a thousand members that is 0.4 MB where the exporter's answer
is 12 MB, of which most would be thrown away.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence

import psutil

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.configuration import OWN
from amphora_agent.haproxy.runtime import Socket
from amphora_agent.responder.families import (
    CODES,
    CPU,
    MEMORY,
    PROCESS,
    RESPONSES,
    STATES,
    STATISTICS,
    STATUS,
    Family,
    Subject,
)
from amphora_agent.stats.collect import QUESTION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNKNOWN = "NaN"
_ATTEMPTS = 3
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SPECIAL = re.compile(r'[\\"\n]')
# By the first word of HAProxy's status; all others ("OPEN", "FULL", "no check" …) are UP.
_STATE_OF = {"DOWN": "DOWN", "STOP": "DOWN", "MAINT": "MAINT", "DRAIN": "DRAIN", "NOLB": "NOLB"}
_Row = list[str]


def scrape(worker: Socket) -> Iterator[str]:
    """Ask HAProxy, and return what a scraper is told, family by family.

    Raises:
        HaproxyError: it does not answer.
    """
    return exposition(_ask(worker), load=_load(), memory=psutil.virtual_memory().percent)


def _ask(worker: Socket) -> str:
    """Ask until a worker that stays answers all of it.

    One that is being replaced calls its listeners stopped, and may end in the middle of its answer. The next one is
    there already when that happens.
    """
    error = HaproxyError("read HAProxy's statistics", "its worker is leaving")
    for _ in range(_ATTEMPTS):
        try:
            answer = worker.ask(QUESTION)
        except HaproxyError as failure:
            error = failure
            continue
        if "# pxname," in answer and answer.endswith("\n\n") and "\nStopping: 1\n" not in answer:
            return answer
    raise error


def _load() -> float:
    return 100 * os.getloadavg()[0] / (os.cpu_count() or 1)


def exposition(answer: str, *, load: float, memory: float) -> Iterator[str]:
    """Translate the answer to `QUESTION`; each part is the whole of a family."""
    yield f"{CPU.head}{CPU.name} {load:.1f}\n{MEMORY.head}{MEMORY.name} {memory:.1f}\n"
    info, _, table = answer.partition("# pxname,")
    known = dict(re.findall(r"^([A-Za-z_-]+): (\d+)$", info, re.MULTILINE))
    yield "".join(f"{one.head}{one.name} {known.get(one.column, _UNKNOWN)}\n" for one in PROCESS)
    columns, rows = _read(table)
    mode = columns["mode"]
    for subject, families in STATISTICS.items():
        everything = of_http = _Part(subject, columns, rows[subject])
        if any(row[mode] != "http" for row in rows[subject]):
            of_http = _Part(subject, columns, [row for row in rows[subject] if row[mode] == "http"])
        for family in families:
            yield family.head + "".join((of_http if family.of_http else everything).samples(family))


def _read(table: str) -> tuple[dict[str, int], dict[Subject, list[_Row]]]:
    """The columns' places and the rows that are not about sections of our own."""
    head, *lines = table.split("\n")
    columns = {name: place for place, name in enumerate(("pxname", *head.split(",")))}
    rows: dict[str, list[_Row]] = {subject.value: [] for subject in Subject}
    kind = columns["type"]
    for line in lines:
        if not line or line.startswith(OWN):
            continue
        row = next(csv.reader((line,))) if '"' in line else line.split(",")
        rows[row[kind]].append(row)
    return columns, {subject: rows[subject.value] for subject in Subject}


class _Part:
    """The rows that the samples of a family are made from.

    A thousand members have fifty thousand samples, so the lines of a family are joined from lists of their parts, by
    few operations on whole lists instead of several on each line.
    """

    def __init__(self, subject: Subject, columns: dict[str, int], rows: list[_Row]) -> None:
        self._subject = subject
        self._places = columns
        self._columns = list(zip(*rows, strict=True)) or [()] * len(columns)
        self._labels = [_labels(subject, row) for row in rows]

    def samples(self, family: Family) -> Iterator[str]:
        if family.column == STATUS:
            present = [_STATE_OF.get(value.partition(" ")[0], "UP") for value in self._columns[self._places[STATUS]]]
            for state in STATES[self._subject]:
                yield self._lines(family, ["1" if one == state else "0" for one in present], f',state="{state}"')
        elif family.column == RESPONSES:
            for code in CODES:
                yield self._lines(family, self._values(f"{RESPONSES}{code}"), f',code="{code}"')
        elif family.in_milliseconds:
            values = self._values(family.column)
            seconds = {value: f"{int(value) / 1000:.6f}" for value in set(values) if value != _UNKNOWN}
            yield self._lines(family, [seconds.get(value, _UNKNOWN) for value in values])
        else:
            yield self._lines(family, self._values(family.column))

    def _values(self, column: str) -> Sequence[str]:
        place = self._places.get(column)
        if place is None:
            return [_UNKNOWN] * len(self._columns[0])
        values = self._columns[place]
        return [value or _UNKNOWN for value in values] if "" in values else values

    def _lines(self, family: Family, values: Sequence[str], more: str = "") -> str:
        count = len(self._labels)
        parts = [f"\n{family.name}{{"] * (4 * count)
        parts[1::4] = self._labels
        parts[2::4] = [f"{more}}} "] * count
        parts[3::4] = values
        return "".join(parts)[1:] + "\n" if count else ""


def _labels(subject: Subject, row: _Row) -> str:
    if subject is Subject.MEMBER:
        return f'pool="{_escaped(row[0])}",member="{_escaped(row[1])}"'
    return f'{subject.name.lower()}="{_escaped(row[0])}"'


def _escaped(name: str) -> str:
    return name.translate(_ESCAPES) if _SPECIAL.search(name) else name
