# SPDX-License-Identifier: Apache-2.0
"""The packages in an image: Debian packages and Python distributions, read from the file system tree.

Invariant: the data come from the finished tree, never from the requested packages. The tree does not contain the
package files. Their digests come from apt's index, which an element has saved, and from the wheels of the build.
"""

from __future__ import annotations

import email
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ENVIRONMENT = "opt/amphora-agent"
# Lines of name, version, architecture and SHA-256; elements/amphora/finalise.d/90-amphora-digests writes it.
_DEB_DIGESTS = "usr/share/amphora/deb-digests"


@dataclass(frozen=True, order=True)
class Package:
    """One package.

    Attributes:
        kind: "deb" or "pypi", as in package URLs.
        source: name and version of the source package of a deb; its own name and version if there is no field.
        sha256: the digest of the package file in hexadecimal; empty if unknown.
    """

    kind: str
    name: str
    version: str
    architecture: str = ""
    source: tuple[str, str] = ("", "")
    licence: str = ""
    sha256: str = ""


def digest(file: Path) -> str:
    """The SHA-256 digest of a file in hexadecimal."""
    found = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(2**20):
            found.update(block)
    return found.hexdigest()


def debs(status: str, digests: str = "") -> tuple[Package, ...]:
    """The installed Debian packages.

    Args:
        status: the content of dpkg's status file (deb822).
        digests: the lines that the element has saved.
    """
    known = {tuple(line.split()[:3]): line.split()[3] for line in digests.splitlines()}
    found = []
    for paragraph in re.split(r"\n\s*\n", status):
        fields: dict[str, str] = dict(re.findall(r"^([A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name, version = fields["Package"], fields["Version"]
        source, _, of = fields.get("Source", name).partition(" ")
        architecture = fields["Architecture"]
        sha256 = known.get((name, version, architecture), "")
        built_from = (source, of.strip("()") or version)
        found.append(Package("deb", name, version, architecture, built_from, sha256=sha256))
    return tuple(sorted(found))


def wheels(folder: Path) -> dict[tuple[str, str], str]:
    """The SHA-256 digests of the wheels in a directory, by canonical name and version."""
    split = ((wheel, *wheel.name.split("-")[:2]) for wheel in folder.glob("*.whl"))
    return {(canonical(name), version): digest(wheel) for wheel, name, version in split}


def canonical(name: str) -> str:
    """The normalized name of a Python distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(place: Path, digests: Mapping[tuple[str, str], str]) -> tuple[Package, ...]:
    """The Python distributions of an environment, with the digests of their wheels."""
    found = []
    for metadata in place.glob("lib/python*/site-packages/*.dist-info/METADATA"):
        headers = email.message_from_string(metadata.read_text(encoding="utf-8"))
        name, version = canonical(headers["Name"]), headers["Version"]
        licence = headers["License-Expression"] or ""
        found.append(Package("pypi", name, version, licence=licence, sha256=digests.get((name, version), "")))
    return tuple(sorted(found))


def packages(tree: Path, given: Path | None = None) -> tuple[Package, ...]:
    """All packages in a tree.

    Args:
        tree: the root of the file system.
        given: the directory of the wheels of the build; None leaves the digests of Python distributions empty.
    """
    status = (tree / "var/lib/dpkg/status").read_text(encoding="utf-8")
    noted = tree / _DEB_DIGESTS
    digests = noted.read_text(encoding="ascii") if noted.exists() else ""
    return debs(status, digests) + distributions(tree / _ENVIRONMENT, wheels(given) if given else {})


def version_of(tree: Path) -> str:
    """The version of Debian (os-release(5), `VERSION_ID`)."""
    text = (tree / "usr/lib/os-release").read_text(encoding="utf-8")
    found = re.search(r'^VERSION_ID="?([0-9.]+)"?$', text, re.MULTILINE)
    return found[1] if found else ""
