# SPDX-License-Identifier: Apache-2.0
"""An older version of the product, as code that can run beside this version.

It comes from the git history. Without a history (a shallow clone, an archive) the tests use a copy of this version. A
change of the wire format, the schema or a module path needs a new baseline commit.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# An older commit with the present schema and wire format: its controllers and agents work beside the present ones.
BASELINE = "a318c63b9ed8919b30a7b8dea86a559333fb6ec6"
_MIGRATIONS = Path("amphora_driver/database/migrations/versions")


def unpacked(folder: Path, *packages: str) -> bool:
    """Put packages of the baseline or of this version into a folder; return whether it is the baseline."""
    found = _from_history(folder, packages)
    if not found:
        _copied(folder, *packages)
    return found


def same_schema(folder: Path) -> None:
    """Put the control plane of the baseline into a folder."""
    unpacked(folder, "amphora_driver", "amphora_agent")
    assert _revisions(folder) == _revisions(ROOT), "the schema has changed: name another commit in tests/previous.py"


def next_schema(folder: Path) -> str:
    """Put this version with one more migration into a folder; return the migration's name."""
    _copied(folder, "amphora_driver", "amphora_agent")
    last = _revisions(folder)[-1]
    new = f"{int(last) + 1:04}"
    text = f'revision = "{new}"\ndown_revision = "{last}"\n\n\ndef upgrade():\n    pass\n'
    (folder / _MIGRATIONS / f"{new}_next.py").write_text(text, encoding="ascii")
    return new


def _from_history(folder: Path, packages: tuple[str, ...]) -> bool:
    done = subprocess.run(["git", "-C", str(ROOT), "archive", BASELINE, *packages], capture_output=True, check=False)
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
