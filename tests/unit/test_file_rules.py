# SPDX-License-Identifier: Apache-2.0
"""Rules for all files: licence, length, names, imports and secrets."""

from __future__ import annotations

import ast
import copy
import logging
import pickle
import re
import shutil
import subprocess
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora_driver.secret import Secret

ROOT = Path(__file__).parents[2]
SPDX = "# SPDX-License-Identifier: Apache-2.0"
MOST_LINES, MOST_MODULES = 500, 20
SHIPPED = ("amphora_driver", "amphora_agent", "amphora_cluster")
# Modules with these names collect unrelated code.
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "misc"}
FOREIGN = {"octavia", "eventlet", "oslo_service", "oslo_messaging", "taskflow"}
# An operator chooses the registries and mirrors, not the source code.
REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted\.org|docker\.(?:io|com)|quay\.io|\bghcr\.io|\bgcr\.io|registry\.k8s\.io"
    r"|npmjs\.(?:org|com)|crates\.io|rubygems\.org|proxy\.golang\.org"
    r"|\b(?:registry|artifactory|nexus|mirrors?)(?:\.[a-z0-9-]+)+\.[a-z]{2,}\b",
    re.IGNORECASE,
)


@lru_cache(maxsize=1)
def tracked():
    """Files that belong to the project: tracked ones, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    git = shutil.which("git")
    listed = git and subprocess.run([git, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed and listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        # An unpacked source distribution, or a machine without git.
        paths = [path for name in (*SHIPPED, "tests") for path in (ROOT / name).rglob("*")]
    # git lists deleted files until the commit.
    return tuple(sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts))


def inside(*packages, suffix=""):
    found = [path for path in tracked() if place(path).parts[0] in packages]
    return [path for path in found if path.name.endswith(suffix)]


def place(path):
    return path.relative_to(ROOT)


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imported(path):
    """Names of all modules imported anywhere in a file, also inside functions."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append(node.module)
    return tuple(found)


def test_the_file_lists_are_not_empty():
    assert len(inside(*SHIPPED, suffix=".py")) > 10


def test_every_file_begins_with_its_licence():
    files = [path for path in tracked() if path.suffix == ".py"]
    wrong = [str(place(path)) for path in files if path.read_text(encoding="utf-8").split("\n", 1)[0] != SPDX]
    assert wrong == []


def test_no_file_is_too_long():
    counted = {
        str(place(path)): path.read_bytes().count(b"\n")
        for path in inside(*SHIPPED, "sandbox", "tests")
        if path.suffix in {".py", ".j2", ".sh", ".mako"}
    }
    assert {name: lines for name, lines in counted.items() if lines > MOST_LINES} == {}


def test_no_package_has_too_many_modules():
    number = Counter(place(path).parent for path in inside(*SHIPPED, "sandbox", suffix=".py"))
    assert {str(folder): found for folder, found in number.items() if found > MOST_MODULES} == {}
    assert len(number) > 40


def test_no_module_has_a_meaningless_name():
    wrong = [
        str(place(path))
        for path in inside(*SHIPPED, "sandbox", "tests", suffix=".py")
        if EMPTY_NAMES & {path.stem, *place(path).parent.parts}
    ]
    assert wrong == []


def test_folders_are_not_deep():
    # Alembic requires its revisions in a separate folder.
    wrong = [
        str(place(path))
        for path in inside(*SHIPPED, suffix=".py")
        if len(place(path).parts) > 3 and place(path).parts[1:3] != ("database", "migrations")
    ]
    assert wrong == []


def test_only_named_packages_import_octavia():
    wrong = [
        f"{place(path)}: {module}"
        for path in inside(*SHIPPED, suffix=".py")
        for module in imported(path)
        if module.split(".")[0] in FOREIGN
    ]
    assert wrong == []


def test_the_agent_imports_nothing_of_the_control_plane():
    wrong = [
        f"{place(path)}: {module}"
        for path in inside("amphora_agent", suffix=".py")
        for module in imported(path)
        if module.split(".")[0] == "amphora_driver"
    ]
    assert wrong == []


def test_two_packages_import_openstack():
    wrong = [
        f"{place(path)}: {module}"
        for path in inside(*SHIPPED, suffix=".py")
        if place(path).parts[:2] not in {("amphora_driver", "openstack"), ("amphora_cluster", "cloud")}
        for module in imported(path)
        if module.split(".")[0] in {"openstack", "keystoneauth1"}
    ]
    assert wrong == []


def test_no_registry_is_named():
    assert REGISTRIES.search("https://pypi.org/simple")
    assert not REGISTRIES.search("https://docs.openstack.org")
    wrong = []
    for path in tracked():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [f"{place(path)}: {found.group()}" for found in REGISTRIES.finditer(text)]
    assert wrong == []


# --- secrets -----------------------------------------------------------------------------------------------


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz", min_size=4).map(str.encode))
def test_a_secret_is_not_printable(value):
    secret = Secret(value)
    for text in (
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r:>40}",
        f"{secret:s}",
        f"{[secret]} { ({1: secret}) }",
        logging.makeLogRecord({"msg": "%s %r", "args": (secret, secret)}).getMessage(),
    ):
        assert value.decode() not in text
        assert "***" in text


def test_a_secret_is_not_serialised_by_accident():
    secret = Secret(b"hush")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(secret)
    with pytest.raises(TypeError):
        msgspec.json.encode({"key": secret})
    with pytest.raises(TypeError):
        bytes(secret)
    assert not hasattr(secret, "__dict__")


def test_a_secret_equals_only_a_secret_with_the_same_value():
    assert Secret(b"hush") == Secret(b"hush")
    assert Secret(b"hush") != Secret(b"loud")
    assert Secret(b"hush") != b"hush"
    assert len({Secret(b"hush"), Secret(b"hush")}) == 1


def test_no_secret_is_revealed_into_text():
    """`reveal()` within an f-string, a format, a log line or an exception would undo what Secret is for."""
    wrong = []
    for path in inside(*SHIPPED, suffix=".py"):
        if "reveal" not in path.read_text(encoding="utf-8"):
            continue  # most files; parsing them is slow
        speaking = [node for node in ast.walk(parsed(path)) if _makes_text(node)]
        wrong += [
            f"{place(path)}:{node.lineno}" for node in speaking if any(_reveals(inner) for inner in ast.walk(node))
        ]
    assert wrong == []


def _makes_text(node):
    if isinstance(node, (ast.JoinedStr, ast.Raise)):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        spoken = node.func.value
        return node.func.attr == "format" or (isinstance(spoken, ast.Name) and spoken.id in {"LOG", "log", "logging"})
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "repr", "str"}


def _reveals(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reveal"


def test_names_of_test_modules_are_unique():
    """All test folders are on one path: of two modules with one name, all tests would import the same one."""
    names = Counter(path.name for path in tracked() if path.suffix == ".py" and ROOT / "tests" in path.parents)
    del names["conftest.py"]
    assert [name for name, number in names.items() if number > 1] == []
