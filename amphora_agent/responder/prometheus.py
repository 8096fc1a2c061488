# SPDX-License-Identifier: Apache-2.0
"""HAProxy's statistics in the Prometheus text format, under the metric names of Octavia.

The source is the CSV of the stats socket: 0.4 MB for a thousand members, where HAProxy's own exporter has 12 MB. Mean
times are more exact: the exporter of 2.6 divides by 1024 also before 1024 requests.
"""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.responder import metric_families
from amphora_agent.responder.metric_families import RESPONSES, STATUS, Family, Subject
from amphora_agent.stats.former_workers import FormerWorkers, read

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# These two constants are copies, because an import of the defining modules would double the responder's memory. A unit
# test compares the copies.
OWN = "amphora:"
QUESTION = "show info;show stat -1 7 -1;show info"
_UNKNOWN = "NaN"
# Seconds to wait for an answer of HAProxy. During a reload, HAProxy's old worker pauses its statistics socket until the
# new worker listens.
ASK_SECONDS = 1.0
# Seconds to wait for the counters of former workers. After a crash of HAProxy, the agent writes these counters with its
# next sample, up to six seconds later.
SUMS_SECONDS = 7.0
_OTHERS_SECONDS = 1.0
_POLL_SECONDS, _MAX_POLL_SECONDS, _POLL_FACTOR = 0.02, 0.5, 9
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SPECIAL = re.compile(r'[\\"\n]')
# States in the metrics by the first word of HAProxy's status. Other words, such as "OPEN" and "FULL", mean UP.
_STATE_OF = {"DOWN": "DOWN", "STOP": "DOWN", "MAINT": "MAINT", "DRAIN": "DRAIN", "NOLB": "NOLB"}
_Row = list[str]


def scrape(worker: Socket, sums: str = "", others: str = "") -> Iterator[str]:
    """Ask HAProxy and return the text of a scrape, one part for each metric.

    ``sums`` is the path of the file with the counters of former workers (`amphora_agent.stats.former_workers`); empty
    without such a file. ``others`` is the path of the socket of the L4 daemon (`amphora_agent.l4.stat_rows`), which may
    not run.

    Raises HaproxyError if HAProxy does not answer, or the counters of former workers are not known. Without them
    counters would seem to restart at zero; a failed scrape does less harm.
    """
    if not sums:
        return exposition(_ask(worker), load=_load(), memory=_memory(), others=_ask_others(others))
    deadline = time.monotonic() + SUMS_SECONDS
    while True:
        begun = time.monotonic()
        answer = _ask(worker)
        asked = time.monotonic() - begun
        found = _read_sums(sums)
        if found is not None and f"\nPid: {found.present}\n" in answer:
            return exposition(answer, load=_load(), memory=_memory(), before=found, others=_ask_others(others))
        if time.monotonic() > deadline:
            cause = "the agent has not written the counters of its former workers"
            raise HaproxyError("read HAProxy's statistics", cause)
        # After a reload, the file of counters belongs to the former worker until the agent writes it again, so the
        # responder polls. HAProxy serves no client while it answers, so each pause is longer than the answer took.
        time.sleep(max(_POLL_SECONDS, min(_POLL_FACTOR * asked, _MAX_POLL_SECONDS)))


def _ask_others(path: str) -> str:
    """Return the rows of UDP and SCTP listeners; empty without an answer of the L4 daemon."""
    if path and os.path.exists(path):  # noqa: PTH110 (pathlib needs a megabyte)
        with suppress(HaproxyError):
            return Socket(path).ask('{"op":"rows"}', seconds=_OTHERS_SECONDS)
    return ""


def _read_sums(path: str) -> FormerWorkers | None:
    with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:  # noqa: PTH123 (pathlib needs a megabyte)
        return read(file.read())
    return None


def _ask(worker: Socket) -> str:
    """Ask until a worker that is not stopping gives a complete answer, for at most `ASK_SECONDS`."""
    deadline = time.monotonic() + ASK_SECONDS
    while True:
        error = HaproxyError("read HAProxy's statistics", "its worker is stopping")
        try:
            answer = worker.ask(QUESTION)
        except HaproxyError as failure:
            error = failure
        else:
            if "# pxname," in answer and answer.endswith("\n\n") and "\nStopping: 1\n" not in answer:
                return answer
        if time.monotonic() > deadline:
            raise error
        time.sleep(_POLL_SECONDS)


def _load() -> float:
    return 100 * os.getloadavg()[0] / (os.cpu_count() or 1)


def _memory() -> float:
    """Return the percentage of the machine's memory that is not available (proc(5), meminfo)."""
    with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 (pathlib needs a megabyte)
        sizes = {words[0]: int(words[1]) for words in map(str.split, file) if len(words) > 1}
    total = sizes["MemTotal:"]
    return 100 * (total - sizes["MemAvailable:"]) / total


def exposition(
    answer: str, *, load: float, memory: float, before: FormerWorkers | None = None, others: str = ""
) -> Iterator[str]:
    """Translate the answer to `QUESTION` and further rows; each part is one metric with all samples."""
    machine = ((metric_families.CPU, load), (metric_families.MEMORY, memory))
    yield "".join(f"{one.head}{one.name} {value:.1f}\n" for one, value in machine)
    info, _, table = answer.partition("# pxname,")
    known = dict(re.findall(r"^([A-Za-z_-]+): (\d+)$", info, re.MULTILINE))
    yield "".join(f"{one.head}{one.name} {known.get(one.column, _UNKNOWN)}\n" for one in metric_families.PROCESS)
    columns, rows = _read(table)
    _add(others, columns, rows)
    mode = columns["mode"]
    for subject, families in metric_families.STATISTICS.items():
        everything = of_http = _Part(subject, columns, rows[subject], before)
        if any(row[mode] != "http" for row in rows[subject]):
            of_http = _Part(subject, columns, [row for row in rows[subject] if row[mode] == "http"], before)
        for family in families:
            yield family.head + "".join((of_http if family.of_http else everything).samples(family))


def _read(table: str) -> tuple[dict[str, int], dict[Subject, list[_Row]]]:
    """Return the places of the columns, and the rows without those of the agent's own sections."""
    head, *lines = table.partition("\n\n")[0].split("\n")
    columns = {name: place for place, name in enumerate(("pxname", *head.split(",")))}
    rows: dict[str, list[_Row]] = {subject.value: [] for subject in Subject}
    kind = columns["type"]
    for line in lines:
        if not line or line.startswith(OWN):
            continue
        row = next(csv.reader((line,))) if '"' in line else line.split(",")
        rows[row[kind]].append(row)
    return columns, {subject: rows[subject.value] for subject in Subject}


def _add(others: str, columns: dict[str, int], rows: dict[Subject, list[_Row]]) -> None:
    """Add rows of the L4 daemon in HAProxy's columns."""
    head, *lines = others.split("\n")
    names = head.split(",")
    for line in filter(None, lines):
        known = dict(zip(names, line.split(","), strict=True))
        rows[Subject(known["type"])].append([known.get(name, "") for name in columns])


class _Part:
    """The rows for the samples of a metric, as lists: a thousand members have fifty thousand samples."""

    def __init__(
        self, subject: Subject, columns: dict[str, int], rows: list[_Row], before: FormerWorkers | None
    ) -> None:
        self._subject = subject
        self._places = columns
        self._columns = list(zip(*rows, strict=True)) or [()] * len(columns)
        self._labels = [_labels(subject, row) for row in rows]
        self._before: dict[str, Sequence[str]] = {}
        sums = [before.sums.get(f"{row[0]},{row[1]}") for row in rows] if before is not None and before.sums else []
        if before is not None and any(sums):
            nothing = ["0"] * len(before.columns)
            self._before = dict(zip(before.columns, zip(*(one or nothing for one in sums), strict=True), strict=True))

    def samples(self, family: Family) -> Iterator[str]:
        if family.column == STATUS:
            present = [_STATE_OF.get(value.partition(" ")[0], "UP") for value in self._columns[self._places[STATUS]]]
            for state in metric_families.STATES[self._subject]:
                yield self._lines(family, ["1" if one == state else "0" for one in present], f',state="{state}"')
        elif family.column == RESPONSES:
            for code in metric_families.CODES:
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
        values: Sequence[str] = self._columns[place]
        if column in self._before:
            before = self._before[column]
            values = [str(int(value) + int(more)) if value else "" for value, more in zip(values, before, strict=True)]
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
