# SPDX-License-Identifier: Apache-2.0
"""The version before this one, as code that can be run.

It is taken out of the history. Where there is none (a shallow clone, an archive), what this version has added to the
wire is taken out of a copy of the present agent instead: no test is ever skipped. A change that moves these places has
to be followed here, and says so.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The last commit before an agent looked at itself, and said what it had found.
COMMIT = "fd80907c61ffe95747753c2c469eb54e95982fa5"
# An older commit with the present schema, whose controllers may work beside those of today; None if there is none yet.
SAME_SCHEMA: str | None = None
_MIGRATIONS = Path("amphora_driver/database/migrations/versions")
_NEWS = {
    "app.py": [
        "    Auditor(applier, drift, settings.audit_interval, sender.send_now).start()\n",
        "    app.register_blueprint(configuration.blueprint(paths, applier, inner, drift))\n",
    ],
    "stats/heartbeat_sender.py": ['"agent_version": agent_version(), ', ", **self._drift()"],
    "api/info.py": ['            "drift": drift.document(),\n', '    "audit",\n    "configuration",\n'],
    "config.py": [
        '            audit_interval=_positive(parser.getfloat("audit", "interval", fallback=AUDIT_SECONDS)),\n'
    ],
    "apply/confirmed_bundle.py": [
        '            "text_sha256": None if self._haproxy is None else _sha256(self._haproxy),\n',
    ],
}


def unpacked(folder: Path, *packages: str) -> bool:
    """Have packages of the version before in a folder; whether they are out of the history."""
    if _from_history(folder, COMMIT, packages):
        return True
    rebuilt(folder)
    return False


def same_schema(folder: Path) -> None:
    """Have another version with the same schema in a folder: its control plane; a copy of ours if there is none."""
    packages = ("amphora_driver", "amphora_agent")
    if SAME_SCHEMA is None or not _from_history(folder, SAME_SCHEMA, packages):
        _copied(folder, *packages)
    assert _revisions(folder) == _revisions(ROOT), "the schema has changed: name another commit in tests/previous.py"


def next_schema(folder: Path) -> str:
    """Have the version after this one in a folder: ours, and one more migration; returns what that is called."""
    _copied(folder, "amphora_driver", "amphora_agent")
    last = _revisions(folder)[-1]
    new = f"{int(last) + 1:04}"
    text = f'revision = "{new}"\ndown_revision = "{last}"\n\n\ndef upgrade():\n    pass\n'
    (folder / _MIGRATIONS / f"{new}_next.py").write_text(text, encoding="ascii")
    return new


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


def rebuilt(folder: Path) -> None:
    """Have an agent in a folder that says and knows on the wire what the one before did."""
    shutil.copytree(ROOT / "amphora_agent", folder / "amphora_agent", ignore=shutil.ignore_patterns("__pycache__"))
    for name, pieces in _NEWS.items():
        file = folder / "amphora_agent" / name
        text = file.read_text(encoding="utf-8")
        for piece in pieces:
            assert text.count(piece) == 1, f"{name} has changed: follow it in tests/previous.py: {piece!r}"
            text = text.replace(piece, "")
        file.write_text(text, encoding="utf-8")


def interpreter(file: Path, python: str, folder: Path | None) -> Path:
    """A Python that finds the packages of a folder before its own; None: what it finds anyway.

    Args:
        file: where it is to be.
        python: the interpreter behind it.
        folder: where the packages are. It may be changed later: `interpreter` may be called again.
    """
    first = "" if folder is None else f"PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} "
    fresh = file.with_name(f".{file.name}")
    fresh.write_text(f'#!/bin/sh\n{first}exec {python} "$@"\n', encoding="ascii")
    fresh.chmod(0o755)
    fresh.replace(file)
    return file
