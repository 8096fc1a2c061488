# SPDX-License-Identifier: Apache-2.0
"""What of the machine an image was built on is left in it.

Invariant: an image in which anything is found is not shipped. Files that came out of packages as they are (/usr, and
dpkg's own scripts) are not searched for words: they are everybody's.

    python3 -m diskimage.traces TREE WORD...
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# What must not be there at all, as patterns from the root.
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


def found(tree: Path, words: Sequence[str]) -> Iterator[str]:
    """One sentence for each trace.

    Args:
        words: what would betray the machine: its name, the mirror's host, the folder it built in.
    """
    for pattern in FORBIDDEN:
        for path in sorted(tree.glob(pattern)):
            if not (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
                yield f"/{path.relative_to(tree)} is there"
    yield from _files_that_should_be_empty(tree)
    sought = [(word, word.encode()) for word in words if word]
    for path in _searched(tree):
        data = path.read_bytes()
        name = f"/{path.relative_to(tree)}"
        yield from (f"{name} has {word!r} in it" for word, as_bytes in sought if as_bytes in data)
        if _PRIVATE_KEY.search(data):
            yield f"{name} has a private key in it"


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
    lines = list(found(Path(sys.argv[1]), sys.argv[2:]))
    if lines:
        sys.exit("\n".join(lines))
