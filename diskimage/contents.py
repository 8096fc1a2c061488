# SPDX-License-Identifier: Apache-2.0
"""What is in an image: packages of the distribution and of Python, as the tree itself says.

Invariant: read from the finished tree, never from what was asked for.
"""

from __future__ import annotations

import email
import re
from dataclasses import dataclass
from pathlib import Path

_ENVIRONMENT = "opt/amphora-agent"


@dataclass(frozen=True, order=True)
class Package:
    """One package.

    Attributes:
        kind: "deb" or "pypi", as in package URLs.
        source: the name and version of what a deb was built from; the same as its own where nothing is said.
    """

    kind: str
    name: str
    version: str
    architecture: str = ""
    source: tuple[str, str] = ("", "")
    licence: str = ""


def debs(status: str) -> tuple[Package, ...]:
    """The installed packages of a dpkg status file (deb822)."""
    found = []
    for paragraph in re.split(r"\n\s*\n", status):
        fields: dict[str, str] = dict(re.findall(r"^([A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name, version = fields["Package"], fields["Version"]
        source, _, of = fields.get("Source", name).partition(" ")
        found.append(Package("deb", name, version, fields["Architecture"], (source, of.strip("()") or version)))
    return tuple(sorted(found))


def distributions(place: Path) -> tuple[Package, ...]:
    """The Python distributions of an environment."""
    found = []
    for metadata in place.glob("lib/python*/site-packages/*.dist-info/METADATA"):
        headers = email.message_from_string(metadata.read_text(encoding="utf-8"))
        name = re.sub(r"[-_.]+", "-", headers["Name"]).lower()
        licence = headers["License-Expression"] or ""
        found.append(Package("pypi", name, headers["Version"], licence=licence))
    return tuple(sorted(found))


def packages(tree: Path) -> tuple[Package, ...]:
    """Everything in a tree that came as a package."""
    status = (tree / "var/lib/dpkg/status").read_text(encoding="utf-8")
    return debs(status) + distributions(tree / _ENVIRONMENT)


def version_of(tree: Path) -> str:
    """The distribution's version (os-release(5), `VERSION_ID`)."""
    text = (tree / "usr/lib/os-release").read_text(encoding="utf-8")
    found = re.search(r'^VERSION_ID="?([0-9.]+)"?$', text, re.MULTILINE)
    return found[1] if found else ""
