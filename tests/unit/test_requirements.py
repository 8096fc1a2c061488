# SPDX-License-Identifier: Apache-2.0
"""Requirements for installations as root: pinned, with digests, and complete."""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import hash_requirements as hashing  # noqa: E402 - scripts/ is no package

FILES = {path.stem: path for path in sorted((ROOT / "requirements").iterdir())}
# The installing commands: each use of pip must be one of these.
INSTALLERS = [
    *(ROOT / "scripts").glob("*.sh"),
    *(ROOT / "diskimage").glob("*.sh"),
    *(ROOT / "diskimage").glob("elements/*/*.d/*"),
    *(ROOT / name for name in ("quickstart", "run-tests", "diskimage/build", "diskimage/boot", "benchmarks/run")),
]


def read(path):
    """The lines of a requirements file, with joined continuation lines and without comments."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pinned(path):
    """By name, version, marker and digests."""
    found = {}
    for line in read(path):
        if not line.startswith("-r "):
            words = re.fullmatch(r"([a-z0-9-]+)==(\S+)(?: ; (.*?))?((?:\s+--hash=sha256:[0-9a-f]{64})+)", line)
            assert words, f"{path.name}: {line[:80]}"
            assert words[1] not in found
            found[words[1]] = (words[2], words[3] or "", words[4].split())
    return found


def included(name):
    """All names of a requirements file and of the files that it includes."""
    found = set(pinned(FILES[name]))
    for line in read(FILES[name]):
        if line.startswith("-r "):
            found |= included(line.removeprefix("-r ").removesuffix(".txt"))
    return found


def test_every_requirement_has_a_version_and_digests():
    assert set(FILES) == {listing.name for listing in hashing.LISTINGS}
    for path in FILES.values():
        assert pinned(path), path.name


def test_the_listings_have_the_versions_of_the_constraints():
    versions = hashing.constraints()
    listed = {}
    for path in FILES.values():
        for name, (version, _, digests) in pinned(path).items():
            assert version == versions[name], f"{path.name}: {name}"
            # A package has the same version in all files.
            assert listed.setdefault(name, digests) == digests
    assert versions.keys() == listed.keys()


@pytest.mark.parametrize("listing", hashing.LISTINGS, ids=lambda listing: listing.name)
def test_a_listing_satisfies_all_requirements(listing):
    versions, there = hashing.constraints(), included(listing.name)
    for requirement in hashing.direct_requirements(listing):
        name = canonicalize_name(requirement.name)
        assert name in there, f"{requirement}: run scripts/hash_requirements.py"
        assert requirement.specifier.contains(versions[name]), requirement


@pytest.mark.parametrize("name", ["venv", "agent-venv", "test-venv"])
def test_a_listing_is_complete(name):
    """The requirements of the installed distributions: pip does not resolve dependencies here."""
    listing = next(one for one in hashing.LISTINGS if one.name == name)
    needs = {canonicalize_name(one.metadata["Name"]): list(one.requires or ()) for one in metadata.distributions()}
    versions = hashing.constraints()
    python = ".".join(map(str, sys.version_info[:2]))
    here = next(one for one in hashing.environments() if one["python_version"] == python)
    wanted = hashing.resolve_requirements(hashing.direct_requirements(listing), needs, here)
    assert wanted - included(name) == set()
    for one in wanted:
        for line in needs[one]:
            requirement = Requirement(line)
            of = canonicalize_name(requirement.name)
            if requirement.marker is None or requirement.marker.evaluate({**here, "extra": ""}):
                assert requirement.specifier.contains(versions[of]), f"{one} requires {line}"


@pytest.mark.parametrize("script", INSTALLERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_pip_installs_nothing_without_a_digest(script):
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        command = re.search(r"pip\"? (install|download|wheel)\b.*", line)
        if command is None or line.lstrip().startswith("#"):
            continue
        words = command[0]
        from_here = "--no-build-isolation" in words and "--no-deps" in words and " -r " not in words
        assert "--require-hashes" in words or "--no-index" in words or from_here, words


def test_requirements_of_the_newest_python_only():
    assert hashing.python_marker(hashing.PYTHONS) == ""
    assert hashing.python_marker(("3.13",)) == ' ; python_version >= "3.13"'
    assert hashing.python_marker(("3.11", "3.12")) == ' ; python_version <= "3.12"'
    with pytest.raises(ValueError, match=r"3\.12"):
        hashing.python_marker(("3.12",))


def test_requirements_of_requirements_are_listed():
    needs = {"a": ["B[more]>=1", "c; python_version >= '3.13'"], "b": ["d; extra == 'more'", "a"], "c": [], "d": []}
    old, new = ({"python_version": python} for python in ("3.11", "3.13"))
    assert hashing.resolve_requirements([Requirement("A")], needs, old) == {"a", "b", "d"}
    assert hashing.resolve_requirements([Requirement("a")], needs, new) == {"a", "b", "c", "d"}
    with pytest.raises(LookupError, match=r"e is needed, and constraints\.txt"):
        hashing.resolve_requirements([Requirement("e")], needs, new)


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        (Tag("py3", "none", "any"), True),
        (Tag("py2", "none", "any"), False),
        (Tag("cp313", "cp313", "manylinux_2_28_x86_64"), True),
        (Tag("cp313", "cp313t", "manylinux_2_28_x86_64"), False),
        (Tag("cp313", "cp313", "manylinux_2_28_aarch64"), False),
        (Tag("cp313", "cp313", "musllinux_1_2_x86_64"), False),
        (Tag("cp312", "cp312", "manylinux_2_28_x86_64"), False),
        (Tag("cp311", "abi3", "manylinux2014_x86_64"), True),
        (Tag("cp314", "abi3", "manylinux2014_x86_64"), False),
        (Tag("pp311", "none", "any"), False),
    ],
    ids=str,
)
def test_matching_wheels_are_found(tag, fits):
    assert hashing.fits_environment(tag, "3.13", "x86_64") is fits


def test_the_source_is_used_on_machines_without_a_wheel():
    source, pure = "a-1.0.tar.gz", "a-1.0-py3-none-any.whl"
    intel = [f"a-1.0-cp3{minor}-cp3{minor}-manylinux_2_28_x86_64.whl" for minor in (11, 12, 13)]
    others = ["a-1.1.tar.gz", "a-1.0-cp310-cp310-win_amd64.whl", "a-1.0.egg", "nonsense.whl"]
    assert hashing.usable_files([source, pure, *others], "1.0") == [pure]
    assert hashing.usable_files([source, *intel, *others], "1.0") == sorted([source, *intel])
    assert hashing.usable_files([source, *others], "1.0") == [source]
