# SPDX-License-Identifier: Apache-2.0
"""The outcome of every case of the corpus; every HAProxy version accepts the accepted values.

One `haproxy -c` reads all accepted values. Bisection finds the load balancer at fault.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import corpus
import msgspec
import pytest
from fields import FIELDS, Field
from haproxy_versions import NEWER, HAProxy, every_version, machine, write_files
from outcomes import Unexpected, change, judge
from reading import words

from amphora_driver.model import loadbalancer as model
from amphora_driver.render.haproxy import Rendered, render


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_the_outcome_of_each_string(field):
    wrong = []
    for case in corpus.cases(field.corpus):
        try:
            outcome, _ = judge(field, case.value, case.reads)
        except Unexpected as error:
            if case.outcome != "elsewhere":
                wrong.append((case, str(error)))
        except AssertionError as error:
            wrong.append((case, str(error)))
        else:
            if outcome != case.outcome:
                wrong.append((case, outcome))
    assert wrong == []


def test_the_corpus_contains_the_strings_of_other_tests():
    written: dict[str, set[str]] = {}
    for field in FIELDS:
        found = written.setdefault(field.name, set())
        found |= {case.value for case in corpus.cases(field.corpus) if case.outcome == "as written"}
    wrong = [
        (str(field), case.value)
        for field in FIELDS
        for case in corpus.cases(field.corpus)
        if case.outcome == "elsewhere" and case.value not in written[field.name]
    ]
    assert wrong == []


class AcceptedTree(NamedTuple):
    """A load balancer without a refusal, with its own number."""

    field: Field
    value: str
    rendered: Rendered


@lru_cache
def taken() -> tuple[AcceptedTree, ...]:
    """Return one load balancer for each value that changes the configuration, without its neighbour.

    Of the variants of a field that share a corpus, the first has all values and the others have a part.
    """
    found: list[AcceptedTree] = []
    seen: set[str] = set()
    for field in FIELDS:
        cases = [case for case in corpus.cases(field.corpus) if case.outcome in ("as written", "reads")]
        for case in cases[len(found) % 20 :: 20] if field.corpus in seen else cases:
            n = len(found)
            tree = field.make(n, case.value)
            tree = change(tree, listeners=tree.listeners[:1], pools=tree.pools[:1])
            found.append(AcceptedTree(field, case.value, render(tree)))
        seen.add(field.corpus)
    assert len(found) > 1000
    return tuple(found)


def complaints(haproxy: HAProxy, found: tuple[AcceptedTree, ...], folder: Path) -> list[str]:
    """Bisect until each complaint belongs to one value, or to values that HAProxy refuses only together."""
    file = folder / "lb.cfg"
    file.write_text("\n".join(each.rendered.text for each in found))
    said = haproxy.complaint(folder / "machine.cfg", file)
    if said is None:
        return []
    if len(found) == 1:
        return [f"{found[0].field}: {found[0].value!r}: {said}"]
    middle = len(found) // 2
    halves = complaints(haproxy, found[:middle], folder) + complaints(haproxy, found[middle:], folder)
    return halves or [f"{len(found)} together, and neither half of them: {said}"]


@every_version
def test_haproxy_accepts_the_accepted_values(version, tmp_path):
    version.here()
    # PCRE2 checked the regular expressions, and the amphorae use PCRE2.
    found = tuple(each for each in taken() if version.pcre2 or "REGEX" not in str(each.field))
    files = [file for each in found for file in each.rendered.files]
    write_files(files, tmp_path)
    machine(tmp_path, files)
    assert complaints(version, found, tmp_path) == []


@pytest.mark.parametrize("version", NEWER, ids=str)
def test_haproxy_and_the_reader_split_words_equally(version, tmp_path):
    """HAProxy prints the words of every line after its own tokenizer."""
    version.here()
    text = "\n".join(each.rendered.text for each in taken())
    (tmp_path / "lb.cfg").write_text(text)
    ours = ["".join(f"{word} " for word in found) for line in text.split("\n") if (found := words(line))]
    theirs = version.words(tmp_path / "lb.cfg")
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == []


def strings(shape: type) -> set[str]:
    """Return the fields of a type that contain free text."""
    free = (str, str | None, tuple[str, ...] | None, dict[str, object] | None)
    return {field.name for field in msgspec.structs.fields(shape) if field.type in free}


def test_every_string_field_has_a_corpus():
    shapes = [
        shape for shape in vars(model).values() if isinstance(shape, type) and issubclass(shape, model.ModelObject)
    ]
    assert len(shapes) > 8
    wanted = {f"{shape.__name__.lower()}.{name}" for shape in shapes for name in strings(shape)}
    # Ids of Octavia: the load balancer's id is not in the configuration, and errors name the other ids.
    assert wanted - {field.name for field in FIELDS} == {"loadbalancer.id"}


def test_every_corpus_belongs_to_a_field():
    here = {str(file.relative_to(corpus.HERE).with_suffix("")) for file in corpus.HERE.glob("*/*.jsonl")}
    assert here == {field.corpus for field in FIELDS}


def test_joint_refusals_are_reported(tmp_path):
    """Two load balancers with the same names: HAProxy accepts each of them alone."""
    machine(tmp_path)
    one = AcceptedTree(FIELDS[0], "", render(FIELDS[0].make(0, FIELDS[0].harmless(0))))
    assert complaints(HAProxy("system"), (one,), tmp_path) == []
    (said,) = complaints(HAProxy("system"), (one, one), tmp_path)
    assert said.startswith("2 together")
    assert "'l0'" in said
