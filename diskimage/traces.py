# SPDX-License-Identifier: Apache-2.0
"""Finds traces of the build machine in an image.

Invariant: the build fails if an image has a trace. Unchanged files of packages (/usr and the scripts of dpkg) are not
searched for words, because they do not depend on the build machine.

    python3 -m diskimage.traces TREE WORD...
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Patterns of files that must not exist, relative to the root.
FORBIDDEN = (
    *("etc/apt/sources.list", "etc/apt/sources.list.d/*", "etc/apt/preferences.d/*", "etc/apt/auth.conf*"),
    *("etc/apt/apt.conf.d/*proxy*", "var/lib/apt/lists/*", "var/cache/apt/**/*.deb", "var/cache/apt/*.bin"),
    *(
        "root/.ssh/*",
        "root/.cache",
        "root/.*history",
        "root/.netrc",
        "root/.config/*",
        "home/*/.ssh/*",
        "home/*/.cache",
    ),
    *("etc/ssh/ssh_host_*", "var/lib/systemd/random-seed", "boot/efi/loader/random-seed", "etc/hostname"),
    *(
        "var/log/**/*",
        "etc/dib-manifests",
        "etc/resolv.conf.ORIG",
        "tmp/*",
        "var/tmp/*",
        "opt/*/**/pip",
        "usr/local/bin/*",
    ),
)
_SEARCHED = ("boot", "etc", "home", "opt", "root", "srv", "usr/local", "var")
_AS_PACKAGED = ("var/lib/dpkg/info/",)
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}")
_LARGEST = 64 * 2**20


def find_traces(tree: Path, words: Sequence[str]) -> Iterator[str]:
    """Search a tree; yields one message for each trace.

    Args:
        tree: the root of the file system.
        words: the host name of the build machine, the host of the mirror, the build directory.
    """
    for pattern in FORBIDDEN:
        for path in sorted(tree.glob(pattern)):
            if not (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
                yield f"/{path.relative_to(tree)} must not exist"
    yield from _files_that_should_be_empty(tree)
    sought = [(word, word.encode()) for word in words if word]
    for path in _searched(tree):
        data = path.read_bytes()
        name = f"/{path.relative_to(tree)}"
        yield from (f"{name} contains {word!r}" for word, as_bytes in sought if as_bytes in data)
        if _PRIVATE_KEY.search(data):
            yield f"{name} contains a private key"


def _files_that_should_be_empty(tree: Path) -> Iterator[str]:
    for name in ("etc/machine-id", "var/lib/dbus/machine-id"):
        path = tree / name
        if path.is_file() and not path.is_symlink() and path.read_text(encoding="ascii").strip():
            yield f"/{name} is not empty"
    resolver = tree / "etc/resolv.conf"
    if resolver.is_file() and re.search(r"^\s*nameserver", resolver.read_text(encoding="utf-8"), re.MULTILINE):
        yield "/etc/resolv.conf names a resolver"
    shadow = tree / "etc/shadow"
    for line in shadow.read_text(encoding="utf-8").splitlines() if shadow.exists() else ():
        user, password = line.split(":")[:2]
        if password[:1] not in {"*", "!"}:
            yield f"/etc/shadow has a password of {user}"


def _searched(tree: Path) -> Iterator[Path]:
    for name in _SEARCHED:
        for path in sorted((tree / name).rglob("*")):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
                continue
            if not str(path.relative_to(tree)).startswith(_AS_PACKAGED):
                yield path


if __name__ == "__main__":
    lines = list(find_traces(Path(sys.argv[1]), sys.argv[2:]))
    if lines:
        sys.exit("\n".join(lines))
