# SPDX-License-Identifier: Apache-2.0
"""Builds the image of the test guests once, and keeps it until its sources change.

It is the default image, of the newest available release.

Invariant: a kept image is complete and named after a digest of all its inputs; it gets its name as the last step.
An interrupted build unmounts its file systems.

    python tests/image/image.py     builds the image and saves a guest of it (`saved_guest`), unless both exist

AMPHORA_TEST_IMAGES names a folder that `disk.make` has filled, to be used instead; AMPHORA_TEST_TREE a tree.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import disk
import saved_guest

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".sandbox/image"
_SOURCES = (
    *("amphora_agent", "diskimage", "setup.cfg", "tests/image/disk.py", "tests/image/remote_shell.py"),
    *(f"requirements/{name}.txt" for name in ("agent-venv", "build", "diskimage-venv", "image")),
)
# A build takes two minutes on an idle machine, and took 15 minutes beside six guests.
_BUILD_SECONDS = 3000


def digest() -> str:
    """Return the digest that identifies an image."""
    made = hashlib.sha256()
    for name in _SOURCES:
        place = ROOT / name
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        for path in files:
            if "__pycache__" not in path.parts:
                content = path.read_bytes()
                made.update(f"{path.relative_to(ROOT)}:{path.stat().st_mode:o}:{len(content)}:".encode() + content)
    return made.hexdigest()[:16]


def images() -> Path:
    """Return the folder of the image; build it if it does not exist."""
    ready = os.environ.get("AMPHORA_TEST_IMAGES")
    if ready:
        return Path(ready)
    HOME.mkdir(parents=True, exist_ok=True)
    place = HOME / digest()
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            _forget_others()
            new = HOME / "new"
            new.mkdir()
            tree = _tree(new)
            disk.make(tree, new)
            shutil.rmtree(tree)
            new.rename(place)
    return place


def _forget_others() -> None:
    """Delete other images (half a gigabyte each) and the remains of a killed run."""
    for entry in HOME.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)


def _tree(place: Path) -> Path:
    tree = place / f"{disk.TAG}.tree"
    ready = os.environ.get("AMPHORA_TEST_TREE")
    if ready:
        subprocess.run(["cp", "-a", ready, tree], check=True)
        return tree
    command = [
        ROOT / "diskimage/build",
        "--output",
        "tree",
        "--name",
        disk.TAG,
        "--directory",
        place,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as build:
        try:
            said, _ = build.communicate(timeout=_BUILD_SECONDS)
        except BaseException:
            build.terminate()  # no kill: the build releases mounts and loop devices itself
            raise
    assert build.returncode == 0, said[-4000:]
    return tree


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = images()
    why = saved_guest.ensure(place)
    sys.stdout.write(f"{place}: {why or 'with a saved guest'}\n")


if __name__ == "__main__":
    main()
