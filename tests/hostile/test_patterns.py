# SPDX-License-Identifier: Apache-2.0
r"""Validation patterns match the whole value, and "digit" means ASCII.

`$` accepts a newline at the end, `match` any suffix; `\d` accepts all of Unicode's 760 digits.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from re import _constants as constants
from re import _parser as parser

import pytest

DRIVER = Path(__file__).parents[2] / "amphora_driver"
FILES = sorted(file for folder in ("model", "render", "validation") for file in (DRIVER / folder).glob("*.py"))
UNICODE = {"isdigit", "isdecimal", "isnumeric", "isalnum", "isalpha", "isidentifier", "isspace"}


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func.attr, isinstance(node.func.value, ast.Name) and node.func.value.id == "re"


def partial_matches(tree: ast.AST) -> list[str]:
    """Return the calls of `match` on a whole value.

    A call with a start position belongs to a parser, which continues to the end.
    """
    return [
        f"line {node.lineno}: {name}"
        for node, name, of_re in calls(tree)
        if name == "match" and (of_re or len(node.args) == 1)
    ]


def written(node: ast.AST) -> str | None:
    """Return the constant part of a pattern; a letter replaces each value of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    return None


def loose(pattern: str, flags: int = 0) -> list[str]:
    """Return the elements of a pattern that match more than intended."""
    found = []

    def walk(item) -> None:
        if isinstance(item, (list, tuple, parser.SubPattern)):
            parts = list(item)
            if len(parts) == 2 and parts[0] is constants.AT and parts[1] is constants.AT_END:
                found.append("$")
            if len(parts) == 2 and parts[0] is constants.CATEGORY and not flags & re.ASCII:
                found.append(str(parts[1]))
            for part in parts:
                walk(part)

    walk(parser.parse(pattern, flags))
    return found


def read_with(tree: ast.AST) -> set[int]:
    """Return the lines of patterns that only split a text."""
    used: dict[str, set[str]] = {}
    for node, name, _ in calls(tree):
        if isinstance(node.func.value, ast.Name):
            used.setdefault(node.func.value.id, set()).add(name)
    return {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and used.get(node.targets[0].id) == {"finditer"}
    }


def loose_patterns(tree: ast.AST) -> list[str]:
    wrong = []
    readers = read_with(tree)
    for node, name, of_re in calls(tree):
        if of_re and name in ("compile", "match", "fullmatch", "search") and node.args and node.lineno not in readers:
            pattern = written(node.args[0])
            said = {
                word.attr
                for arg in [*node.args[1:], *(k.value for k in node.keywords)]
                for word in ast.walk(arg)
                if isinstance(word, ast.Attribute)
            }
            flags = (re.ASCII if {"ASCII", "A"} & said else 0) | (re.VERBOSE if {"VERBOSE", "X"} & said else 0)
            wrong += [f"line {node.lineno}: {what}" for what in (loose(pattern, flags) if pattern else ())]
    return wrong


def unicode_questions(tree: ast.AST) -> list[str]:
    return [f"line {node.lineno}: {name}" for node, name, _ in calls(tree) if name in UNICODE]


MAKERS = {(unicode_questions, "validation/regex.py")}
"""This module generates texts to test a user's pattern, and validates none."""


@pytest.mark.parametrize("rule", [partial_matches, loose_patterns, unicode_questions])
def test_values_are_matched_in_full(rule):
    assert len(FILES) > 10
    wrong = {str(file.relative_to(DRIVER)): found for file in FILES if (found := rule(ast.parse(file.read_text())))}
    assert {name: found for name, found in wrong.items() if (rule, name) not in MAKERS} == {}


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (partial_matches, "PATTERN.match(value)"),
        (partial_matches, "re.match(r'x', value)"),
        (loose_patterns, "re.compile(r'(?:x|y$)')"),
        (loose_patterns, r"re.compile(rf'{WORD}\d+')"),
        (unicode_questions, "value.isdigit()"),
    ],
)
def test_the_check_detects_violations(rule, source):
    assert rule(ast.parse(source))
