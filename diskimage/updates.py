# SPDX-License-Identifier: Apache-2.0
"""Finds packages of an image that have a newer version: `diskimage/check-updates`.

Invariant: dpkg compares the versions. A package that is in no index is reported; it does not count as up to date.

    python3 -m diskimage.updates names MANIFEST
    python3 -m diskimage.updates compare MANIFEST AVAILABLE     the output of `apt-cache madison`
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diskimage.manifest import read_manifest

Newer = Callable[[str, str], bool]


@dataclass(frozen=True)
class Candidate:
    """A version in an archive, and the suite of the archive ("trixie-security")."""

    version: str
    suite: str


@dataclass(frozen=True)
class Update:
    """A package with a newer version.

    Attributes:
        suite: the suite of the newest version.
        fixes: whether the security suite has a newer version than the image.
    """

    name: str
    installed: str
    newest: str
    suite: str
    fixes: bool

    def __str__(self) -> str:
        kind = "security update" if self.fixes else self.suite
        return f"{self.name}: {self.installed} in the image, {self.newest} in the archive ({kind})"


def parse_madison(text: str) -> dict[str, tuple[Candidate, ...]]:
    """Parse the output of `apt-cache madison`; returns the candidates by package."""
    found: dict[str, tuple[Candidate, ...]] = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) == 3 and words[2].endswith(" Packages"):
            suite = words[2].split()[-3].split("/")[0]
            found[words[0]] = (*found.get(words[0], ()), Candidate(words[1], suite))
    return found


def find_updates(
    installed: Mapping[str, str], candidates: Mapping[str, Sequence[Candidate]], newer: Newer
) -> tuple[Update, ...]:
    """The packages with a newer version, sorted by name.

    Args:
        installed: the versions in the image.
        candidates: the versions in the archive.
        newer: whether the first version is newer than the second.
    """
    found = []
    for name, version in sorted(installed.items()):
        ahead = [one for one in candidates.get(name, ()) if one.version != version and newer(one.version, version)]
        if ahead:
            newest = ahead[0]
            for one in ahead[1:]:
                if one.version != newest.version and newer(one.version, newest.version):
                    newest = one
            fixes = any(one.suite.endswith("-security") for one in ahead)
            found.append(Update(name, version, newest.version, newest.suite, fixes))
    return tuple(found)


def is_newer(one: str, other: str) -> bool:
    """Whether the first version is newer than the second one, according to dpkg."""
    return subprocess.run(["dpkg", "--compare-versions", one, "gt", other], check=False).returncode == 0


def main(words: Sequence[str]) -> None:
    """Entry point of the commands."""
    verb, manifest, *rest = words
    try:
        installed = {one["name"]: one["version"] for one in read_manifest(Path(manifest))["packages"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"Could not read the packages of {manifest}: {error}")
    if not installed:
        sys.exit(f"{manifest} has no Debian package.")
    if verb == "names":
        sys.stdout.write("".join(f"{name}\n" for name in sorted(installed)))
        return
    candidates = parse_madison(Path(rest[0]).read_text(encoding="utf-8"))
    unknown = sorted(installed.keys() - candidates.keys())
    if len(unknown) == len(installed):
        sys.exit("The archive has no package of the image.")
    if unknown:
        sys.stderr.write(f"Not compared, because the archive does not have them: {', '.join(unknown)}\n")
    sys.stdout.write("".join(f"{one}\n" for one in find_updates(installed, candidates, is_newer)))


if __name__ == "__main__":
    main(sys.argv[1:])
