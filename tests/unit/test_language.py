# SPDX-License-Identifier: Apache-2.0
"""The language of code and documents: terms that hide the subject, long first lines, wide documents."""

from __future__ import annotations

import ast
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("amphora_driver", "amphora_agent", "amphora_cluster", "sandbox", "diskimage", "scripts")
TESTS = ("tests", "benchmarks")
PERSONS = re.compile(r"\b(?:who|whom|whoever|nobody|somebody|anybody|everybody|he|him|his|himself)\b", re.IGNORECASE)
# The name of an unprivileged user.
QUOTED = ('"nobody"', "`nobody`", "User=nobody")
MOST_COLUMNS, MOST_FIRST = 120, 100


@cache
def tracked() -> tuple[Path, ...]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:  # an archive without a history
        return tuple(sorted(path for path in ROOT.rglob("*") if path.is_file() and ".sandbox" not in path.parts))
    return tuple(sorted(path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()))


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def product(suffix: str) -> list[Path]:
    return [one for one in tracked() if one.relative_to(ROOT).parts[0] in PRODUCT and one.name.endswith(suffix)]


def modules_of_tests() -> list[Path]:
    found = [one for one in tracked() if one.relative_to(ROOT).parts[0] in TESTS and one.suffix == ".py"]
    return [one for one in found if one != Path(__file__)]


def documents() -> list[Path]:
    return [one for one in tracked() if one.suffix in {".md", ".rst"} and "tests" not in one.relative_to(ROOT).parts]


def persons(text: str, name: str, line: int = 1) -> list[str]:
    """Lines of a text that contain one of the words outside the quoted terms."""
    found = []
    for number, content in enumerate(text.splitlines(), line):
        rest = content
        for term in QUOTED:
            rest = rest.replace(term, "")
        if match := PERSONS.search(rest):
            found.append(f"{name}:{number}: {match[0]}: {content.strip()[:100]}")
    return found


@cache
def suspects() -> tuple[Path, ...]:
    """Modules with one of the words anywhere. The exact checks parse these only, because parsing all takes seconds."""
    every = [*product(".py"), *modules_of_tests()]
    return tuple(path for path in every if PERSONS.search(path.read_text(encoding="utf-8").replace("_", " ")))


def spoken(path: Path) -> list[tuple[int, str]]:
    """Comments and strings of a module, with their lines."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    with path.open("rb") as file:
        return [(one.start[0], one.string) for one in tokenize.tokenize(file.readline) if one.type in kinds]


def test_the_check_finds_violations():
    assert persons("The process that has it", "x") == []
    assert persons("a\nWhoever has it", "x") == ["x:2: Whoever: Whoever has it"]
    assert len(product(".py")) > 100


def test_code_names_the_subject():
    assert len(modules_of_tests()) > 100
    wrong = [one for path in suspects() for line, text in spoken(path) for one in persons(text, place(path), line)]
    assert wrong == []


def test_names_of_functions_and_classes_name_the_subject():
    wrong = [
        f"{place(path)}:{node.lineno}: {node.name}"
        for path in suspects()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and persons(node.name.replace("_", " "), "")
    ]
    assert wrong == []


@pytest.mark.parametrize("suffix", [".j2", ".js", ".css", ".sh", ".mako", ".json", ".service"])
def test_other_files_of_the_product_name_the_subject(suffix):
    wrong = [one for path in product(suffix) for one in persons(path.read_text(encoding="utf-8"), place(path))]
    assert wrong == []


def test_documents_name_the_subject():
    wrong = [one for path in documents() for one in persons(path.read_text(encoding="utf-8"), place(path))]
    assert wrong == []


def test_documents_have_no_wide_lines():
    wrong = [
        f"{place(path)}:{number}"
        for path in documents()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MOST_COLUMNS and "://" not in line
    ]
    assert wrong == []


def test_the_first_line_of_a_docstring_is_short():
    wrong = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in product(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and len(text.split("\n", 1)[0]) > MOST_FIRST:
                wrong.append(f"{place(path)}:{getattr(node, 'lineno', 1)}")
    assert wrong == []


def test_generated_strings_are_checked(tmp_path):
    """The constant parts of an f-string are text, too."""
    file = tmp_path / "one.py"
    file.write_text('x = 1\ny = f"nobody {x}"\n')
    texts = [text for _, text in spoken(file)]
    assert any(persons(text, "one.py") for text in texts)
