# SPDX-License-Identifier: Apache-2.0
"""Older and newer versions of the product, as code that can run beside this version.

Older versions come from the git history. Without a history (a shallow clone, an archive) the tests use a copy of this
version. A change of the wire format or of a module path before 0.1.0 needs new baseline commits.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# An older commit with the present wire format: its agents work under the present controllers and vice versa.
BASELINE = "a318c63b9ed8919b30a7b8dea86a559333fb6ec6"
# The first commit whose processes work with a newer schema (decision record 0026). It stands for a release while the
# history has none before this version.
FIRST_ROLLING = "b40566e9711741fc446be57593ec456de9554dc5"
_PRODUCT = ("amphora_driver", "amphora_agent", "amphora_cluster")
_TAGS = "[0-9]*.[0-9]*.[0-9]*"


class Tables(NamedTuple):
    """The migrations of a database, and a table to which `next_schema` adds a column."""

    migrations: Path
    table: str


DRIVER = Tables(Path("amphora_driver/database/migrations/versions"), "job")
CLUSTER = Tables(Path("amphora_cluster/database/migrations/versions"), "cluster_group")


def unpacked(folder: Path, *packages: str, commit: str = BASELINE) -> bool:
    """Put packages of a commit or of this version into a folder; return whether it is the commit."""
    found = _from_history(folder, commit, packages)
    if not found:
        _copied(folder, *packages)
    return found


def release_before(root: Path = ROOT) -> str:
    """Return the tag of the newest release before this version, or `FIRST_ROLLING` without one.

    A release with the same product as HEAD does not count: an upgrade from it would be no upgrade.
    """
    # An unpacked archive can be inside the work tree of another project, whose tags mean nothing here.
    if (root / ".git").exists():
        tags = _git(root, "tag", "--merged", "HEAD", "--sort=-version:refname", "--list", _TAGS)
        for tag in tags.stdout.decode().split():
            if _git(root, "diff", "--quiet", tag, "HEAD", "--", *_PRODUCT).returncode == 1:
                return tag
    return FIRST_ROLLING


def release(folder: Path, tables: Tables = DRIVER) -> str:
    """Put the newest release before this version into a folder; return the newest revision of its schema."""
    unpacked(folder, *_PRODUCT, "sandbox", commit=release_before())
    return _revisions(folder, tables)[-1]


def next_schema(folder: Path, tables: Tables = DRIVER) -> tuple[str, str]:
    """Put this version with an expand migration and a contract migration into a folder; return their numbers."""
    _copied(folder, *_PRODUCT, "sandbox")
    last = _revisions(folder, tables)[-1]
    expand, contract = (f"{int(last) + number:04}" for number in (1, 2))
    column = f'add_column("{tables.table}", sa.Column("next", sa.Integer, nullable=True))'
    _migration(folder / tables.migrations, f"{expand}_expand", last, column)
    _migration(folder / tables.migrations, f"{contract}_contract", expand, f'drop_column("{tables.table}", "next")')
    return expand, contract


def _migration(folder: Path, name: str, after: str, statement: str) -> None:
    text = (
        "import sqlalchemy as sa\n\nfrom amphora_driver.database.migrations import repeatable\n\n"
        f'revision = "{name[:4]}"\ndown_revision = "{after}"\n\n\ndef upgrade():\n    repeatable.{statement}\n'
    )
    (folder / f"{name}_next.py").write_text(text, encoding="ascii")


def _from_history(folder: Path, commit: str, packages: tuple[str, ...]) -> bool:
    done = _git(ROOT, "archive", commit, *packages)
    if done.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
    return done.returncode == 0


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    # The user of the tests need not own the checkout.
    command = ["git", "-C", str(root), "-c", "safe.directory=*", *words]
    try:
        return subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, b"", b"git is not installed")


def _copied(folder: Path, *packages: str) -> None:
    for one in packages:
        shutil.copytree(ROOT / one, folder / one, ignore=shutil.ignore_patterns("__pycache__"))


def _revisions(folder: Path, tables: Tables) -> list[str]:
    return sorted(file.name.partition("_")[0] for file in (folder / tables.migrations).glob("[0-9]*.py"))


def interpreter(file: Path, python: str, folder: Path | None) -> Path:
    """Create a Python that finds the packages of a folder before its own; None: its own packages only.

    Args:
        file: the path of the new interpreter.
        python: the interpreter behind it.
        folder: the folder of the packages. Another call of `interpreter` can change it later.
    """
    first = "" if folder is None else f"PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} "
    fresh = file.with_name(f".{file.name}")
    fresh.write_text(f'#!/bin/sh\n{first}exec {python} "$@"\n', encoding="ascii")
    fresh.chmod(0o755)
    fresh.replace(file)
    return file
