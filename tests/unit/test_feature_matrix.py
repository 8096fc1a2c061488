# SPDX-License-Identifier: Apache-2.0
"""The committed feature matrix equals the markers of the tests."""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from feature_matrix import COMPLETE, KNOWN, LINES, MISSING, PARTIAL, FeatureMatrix, file_name, written

TESTS = Path(__file__).parents[1]
COMMITTED = TESTS.parent / "docs" / "feature-matrix"


def marked(source: str, marker: str = "feature") -> set[str]:
    """Every line in the markers of a file; the markers contain literals so that a text search finds them."""
    found: set[str] = set()
    if marker not in source:
        return found  # most files; parsing them is slow
    for node in ast.walk(ast.parse(source)):
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == marker
        if named and ast.unparse(node.func) == f"pytest.mark.{marker}":
            found.update(ast.literal_eval(argument) for argument in node.args)
    return found


def test_the_committed_matrix_equals_the_tested_one():
    sources = [file.read_text() for file in TESTS.rglob("test_*.py") if file != Path(__file__)]
    whole = set().union(*map(marked, sources))
    partly = set().union(*(marked(source, "feature_partly") for source in sources))
    assert whole | partly <= KNOWN
    for kind in LINES:
        verdicts = {**dict.fromkeys(whole, COMPLETE), **dict.fromkeys(partly, PARTIAL)}
        assert (COMMITTED / file_name(kind)).read_text() == written(kind, verdicts), (
            "run all tests with --feature-matrix docs/feature-matrix"
        )


def item(name: str, *lines: str, marker: str = "feature"):
    return SimpleNamespace(nodeid=name, iter_markers=lambda kind: [SimpleNamespace(args=lines)] * (kind == marker))


def report(name: str, *, passed: bool = True, when: str = "call"):
    return SimpleNamespace(nodeid=name, when=when, passed=passed)


def collect(matrix, items):
    """As pytest does, with a plugin that deselects all tests afterwards."""
    with suppress(StopIteration):
        wrapper = matrix.pytest_collection_modifyitems(items)
        next(wrapper)
        items.clear()
        next(wrapper)


@pytest.fixture
def matrix():
    config = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=lambda *_: None)
    return FeatureMatrix(config)


def test_complete_requires_every_marked_test(matrix):
    line = "member.weight"
    collect(matrix, [item("one", line), item("two", line)])
    assert matrix.verdicts() == {line: MISSING}
    matrix.pytest_runtest_logreport(report("one"))
    assert matrix.verdicts() == {line: PARTIAL}
    matrix.pytest_runtest_logreport(report("two"))
    assert matrix.verdicts() == {line: COMPLETE}
    matrix.pytest_runtest_logreport(report("two", when="teardown", passed=False))
    assert matrix.verdicts() == {line: PARTIAL}
    assert "[operation.weight]\ndriver.haproxy=partial\n" in written("member", matrix.verdicts())


def test_partly_is_never_complete(matrix):
    line = "member.weight"
    collect(matrix, [item("one", line), item("two", line, marker="feature_partly")])
    for name in ("one", "two"):
        matrix.pytest_runtest_logreport(report(name))
    assert matrix.verdicts() == {line: PARTIAL}


def test_the_first_part_of_a_run_counts(matrix):
    line = "member.weight"
    collect(matrix, [item("one", line), item("two", line)])
    matrix.earlier({"one"}, {"skipped"})
    assert matrix.verdicts() == {line: PARTIAL}
    matrix.pytest_runtest_logreport(report("two"))
    assert matrix.verdicts() == {line: COMPLETE}
    matrix.earlier((), {"one"})
    assert matrix.verdicts() == {line: PARTIAL}


def test_a_line_that_does_not_exist_ends_the_collection(matrix):
    with pytest.raises(pytest.UsageError, match=r"listener\.protocol\.QUIC"):
        collect(matrix, [item("one", "listener.protocol.QUIC")])
