# SPDX-License-Identifier: Apache-2.0
"""The corpus: strings that an attacker puts into a field to change its meaning.

`every_string.jsonl` has the strings for every field: one string with its kind in each line. `<field>/cases.jsonl` has
the outcomes of these strings in the field, and the field's own cases. Later lines override earlier ones:

    {"every": "*", "outcome": "refused"}                 all strings of every_string.jsonl
    {"every": "line break", "outcome": "refused"}        the strings of one kind
    {"every": "*", "after": "/", "outcome": …}           all strings, each after a prefix
    {"value": "200, 202", "outcome": {"reads": "200,202"}}

Outcomes:

    refused         the refusal names the option, and all else is served
    as written      the configuration equals that of a harmless value, with this value in its place
    nothing         accepted, without a trace in the configuration
    absent          the same as an unset field
    {"reads": ...}  like `as written`, in another notation
    elsewhere       accepted, with directives of another form; another file of the field has the value `as written`

A pair of text and number stands for the repeated text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
OUTCOMES = {"refused", "as written", "nothing", "absent", "elsewhere"}


@dataclass(frozen=True)
class Case:
    value: str
    outcome: str
    reads: str | None = None
    """Only with the outcome `reads`."""


def _text(value: str | list) -> str:
    return value if isinstance(value, str) else value[0] * value[1]


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]


@lru_cache
def every_string() -> tuple[tuple[str, str], ...]:
    """Return the kind and the text of each string."""
    return tuple((line["kind"], _text(line["text"])) for line in _lines(HERE / "every_string.jsonl"))


KINDS = {kind for kind, _ in every_string()}
STRINGS = tuple(text for _, text in every_string())


@lru_cache
def cases(file: str) -> tuple[Case, ...]:
    """Return the cases of a field by the name of its file without `.jsonl`."""
    found: dict[str, Case] = {}
    for line in _lines(HERE / f"{file}.jsonl"):
        outcome = line["outcome"]
        if isinstance(outcome, str):
            assert outcome in OUTCOMES, line
            made = (outcome, None)
        else:
            made = ("reads", _text(outcome["reads"]))
        if "value" in line:
            assert line.keys() <= {"value", "outcome", "because"}, line
            values = [_text(line["value"])]
        else:
            assert line.keys() <= {"every", "after", "outcome", "because"}, line
            assert line["every"] in KINDS | {"*"}, line
            values = [line.get("after", "") + text for kind, text in every_string() if line["every"] in ("*", kind)]
        for value in values:
            found[value] = Case(value, *made)
    return tuple(found.values())
