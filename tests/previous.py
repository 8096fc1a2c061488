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

ROOT = Path(__file__).parents[1]
# An older commit with the present wire format: its agents work under the present controllers and vice versa.
BASELINE = "a318c63b9ed8919b30a7b8dea86a559333fb6ec6"
# The first commit whose processes work with a newer schema (decision record 0026). It stands for a release until the
# history has a tag.
FIRST_ROLLING = "b40566e9711741fc446be57593ec456de9554dc5"
_PACKAGES = ("amphora_driver", "amphora_agent", "sandbox")
_MIGRATIONS = Path("amphora_driver/database/migrations/versions")


def unpacked(folder: Path, *packages: str, commit: str = BASELINE) -> bool:
    """Put packages of a commit or of this version into a folder; return whether it is the commit."""
    found = _from_history(folder, commit, packages)
    if not found:
        _copied(folder, *packages)
    return found


def release(folder: Path) -> str:
    """Put the newest release into a folder; return the newest revision of its schema."""
    command = ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0", "--match", "[0-9]*"]
    tag = subprocess.run(command, capture_output=True, check=False, text=True).stdout.strip()
    unpacked(folder, *_PACKAGES, commit=tag or FIRST_ROLLING)
    return _revisions(folder)[-1]


def next_schema(folder: Path) -> tuple[str, str]:
    """Put this version with an expand migration and a contract migration into a folder; return their numbers."""
    _copied(folder, *_PACKAGES)
    last = _revisions(folder)[-1]
    expand, contract = (f"{int(last) + number:04}" for number in (1, 2))
    _migration(folder, f"{expand}_expand", last, 'add_column("job", sa.Column("next", sa.Integer, nullable=True))')
    _migration(folder, f"{contract}_contract", expand, 'drop_column("job", "next")')
    return expand, contract


def _migration(folder: Path, name: str, after: str, statement: str) -> None:
    text = (
        "import sqlalchemy as sa\n\nfrom amphora_driver.database.migrations import repeatable\n\n"
        f'revision = "{name[:4]}"\ndown_revision = "{after}"\n\n\ndef upgrade():\n    repeatable.{statement}\n'
    )
    (folder / _MIGRATIONS / f"{name}_next.py").write_text(text, encoding="ascii")


def _from_history(folder: Path, commit: str, packages: tuple[str, ...]) -> bool:
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit, *packages], capture_output=True, check=False)
    if done.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
    return done.returncode == 0


def _copied(folder: Path, *packages: str) -> None:
    for one in packages:
        shutil.copytree(ROOT / one, folder / one, ignore=shutil.ignore_patterns("__pycache__"))


def _revisions(folder: Path) -> list[str]:
    return sorted(file.name.partition("_")[0] for file in (folder / _MIGRATIONS).glob("[0-9]*.py"))


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
