# SPDX-License-Identifier: Apache-2.0
"""Which packages of an image have a newer version: `diskimage/check-updates`.

Invariant: versions are compared by dpkg. A package that no index has is named, and never taken for one without updates.

    python3 -m diskimage.updates names MANIFEST
    python3 -m diskimage.updates compare MANIFEST AVAILABLE     what `apt-cache madison` printed
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diskimage.manifest import read

Newer = Callable[[str, str], bool]


@dataclass(frozen=True)
class Candidate:
    """A version that an archive has, and the suite of the archive ("trixie-security")."""

    version: str
    suite: str


@dataclass(frozen=True)
class Update:
    """A package with a newer version.

    Attributes:
        suite: of the newest version.
        fixes: whether the security suite has a version that is newer than the image's.
    """

    name: str
    installed: str
    newest: str
    suite: str
    fixes: bool

    def __str__(self) -> str:
        kind = "security update" if self.fixes else self.suite
        return f"{self.name}: {self.installed} in the image, {self.newest} in the archive ({kind})"


def available(text: str) -> dict[str, tuple[Candidate, ...]]:
    """What `apt-cache madison` prints, by package: lines of name, version, and address, suite, architecture."""
    found: dict[str, tuple[Candidate, ...]] = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) == 3 and words[2].endswith(" Packages"):
            suite = words[2].split()[-3].split("/")[0]
            found[words[0]] = (*found.get(words[0], ()), Candidate(words[1], suite))
    return found


def updates(
    installed: Mapping[str, str], candidates: Mapping[str, Sequence[Candidate]], newer: Newer
) -> tuple[Update, ...]:
    """Packages with a newer version, by name.

    Args:
        installed: versions in the image.
        candidates: what the archive has.
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


def by_dpkg(one: str, other: str) -> bool:
    """Whether a version is newer than another one."""
    return subprocess.run(["dpkg", "--compare-versions", one, "gt", other], check=False).returncode == 0


def main(words: Sequence[str]) -> None:
    """Console entry."""
    verb, manifest, *rest = words
    try:
        installed = {one["name"]: one["version"] for one in read(Path(manifest))["packages"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"The packages of {manifest} could not be read: {error}")
    if not installed:
        sys.exit(f"{manifest} names no package of Debian.")
    if verb == "names":
        sys.stdout.write("".join(f"{name}\n" for name in sorted(installed)))
        return
    candidates = available(Path(rest[0]).read_text(encoding="utf-8"))
    unknown = sorted(installed.keys() - candidates.keys())
    if len(unknown) == len(installed):
        sys.exit("The archive has none of the image's packages.")
    if unknown:
        sys.stderr.write(f"Not in the archive, so not compared: {', '.join(unknown)}\n")
    sys.stdout.write("".join(f"{one}\n" for one in updates(installed, candidates, by_dpkg)))


if __name__ == "__main__":
    main(sys.argv[1:])
