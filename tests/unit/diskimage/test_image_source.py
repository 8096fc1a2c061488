# SPDX-License-Identifier: Apache-2.0
"""What the build does with the machine it runs on: where packages come from, what an earlier image was, what stays."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def source(script, *words, path=None):
    """Run a piece of shell with the build's functions."""
    command = ["bash", "-euo", "pipefail", "-c", f". diskimage/source.sh; {script}", "build", *map(str, words)]
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://packages.example.org/debian", "packages.example.org"),
        ("https://user:secret@packages.example.org:8443/debian/", "packages.example.org"),
        ("http://192.0.2.1:3142/x/debian", "192.0.2.1"),
        ("file:///srv/mirror", ""),
    ],
)
def test_the_host_of_a_mirror(url, host):
    assert source('host_of "$1"', url).stdout.strip() == host


@pytest.mark.parametrize(
    ("mirror", "security"),
    [
        ("http://m.example.org/debian/", "http://m.example.org/debian-security"),
        ("http://m.example.org/debian/{snapshot}/", "http://m.example.org/debian-security/{snapshot}/"),
    ],
)
def test_security_updates_lie_beside_the_mirror(mirror, security):
    assert source('security_beside "$1"', mirror).stdout.strip() == security


def test_files_are_seen_from_where_the_order_is_given():
    assert source("seen_from /a b/c").stdout == "/a/b/c\n"
    assert source("seen_from /a /b/c").stdout == "/b/c\n"


@pytest.fixture
def earlier(tmp_path):
    """The manifest of an earlier image, as far as it matters here."""
    file = tmp_path / "earlier.manifest"
    content = {"format": 1, "name": "x", "release": "bookworm", "architecture": "arm64", "packages": []}
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file


def test_release_and_architecture_are_those_of_the_earlier_image(earlier):
    for asked in (("", ""), ("bookworm", ""), ("", "arm64"), ("bookworm", "arm64")):
        assert source('as_in_manifest "$@"', earlier, *asked).stdout == "bookworm arm64\n"


@pytest.mark.parametrize(("release", "architecture", "said"), [("trixie", "", "trixie"), ("", "amd64", "amd64")])
def test_the_packages_of_another_release_or_architecture_are_refused(earlier, release, architecture, said):
    done = source('as_in_manifest "$@"', earlier, release, architecture)
    assert done.returncode == 1
    assert f"not of {said}" in done.stderr


def test_something_else_is_no_earlier_image(tmp_path):
    file = tmp_path / "x"
    file.write_text("{}\n")
    command = [ROOT / "diskimage/build", "--packages", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "not the manifest of an image" in done.stderr


@pytest.fixture
def machine(tmp_path):
    """A machine whose apt has sources of its own, and an archive in a folder instead of the network."""
    programs, archive = tmp_path / "bin", tmp_path / "archive"
    programs.mkdir()
    (programs / "apt-get").write_text(f"#!/bin/sh\ncat {tmp_path}/sources\n")
    (programs / "apt-get").chmod(0o755)

    def has(place, release, origin="Debian"):
        folder = archive / place / "dists" / release
        folder.mkdir(parents=True)
        (folder / "InRelease").write_text(f"Origin: {origin}\nSuite: {release}\n")

    def find(*sources, release="", mirror="", security=""):
        (tmp_path / "sources").write_text("".join(f"{line}\n" for line in sources))
        return source(
            f'place={tmp_path} log={tmp_path}/log release="$1" mirror="$2" security="$3" python=3.13\n'
            f'has_release() {{ cp "{archive}/$2/dists/$1/InRelease" "$place/InRelease" 2>/dev/null; }}\n'
            'find_mirrors; echo "$release $mirror $security $python"',
            *(release, mirror, security),
            path=programs,
        )

    return has, find


def test_other_peoples_packages_are_not_taken_for_debians(machine):
    has, find = machine
    has("a-vendor", "bookworm", "Vendor")
    for release in ("bookworm", "trixie"):
        has("debian", release)
        has("updates", f"{release}-security")
    found = find("bookworm a-vendor", "bookworm debian", "bookworm-security updates", "bookworm-updates debian")
    assert found.stdout == "trixie debian updates 3.13\n"
    assert found.stderr == ""


def test_without_debian_13_it_is_12_unless_13_was_asked_for(machine):
    has, find = machine
    has("debian", "bookworm")
    has("updates", "bookworm-security")
    sources = ("bookworm debian", "bookworm-security updates")
    found = find(*sources)
    assert found.stdout == "bookworm debian updates 3.11\n"
    assert "no trixie" in found.stderr
    refused = find(*sources, release="trixie")
    assert refused.returncode == 1
    assert "It has: bookworm" in refused.stderr


def test_a_mirror_that_was_named_has_its_updates_beside_it(machine):
    has, find = machine
    has("debian", "bookworm")
    has("updates", "bookworm-security")
    has("mine", "trixie", "Mine")
    has("mine-security", "trixie-security", "Mine")
    found = find("bookworm debian", "bookworm-security updates", mirror="mine")
    assert found.stdout == "trixie mine mine-security 3.13\n"


def test_a_machine_without_sources(machine):
    _, find = machine
    done = find("jammy ubuntu", "jammy-security ubuntu")
    assert done.returncode == 1
    assert "--mirror" in done.stderr


def test_all_of_a_group_of_processes_ends_even_what_does_not_want_to():
    done = source(
        "setsid bash -c 'trap \"\" TERM; sleep 600 & wait; wait' & builder=$!\n"
        'until pgrep -g "$builder" -x sleep >/dev/null; do sleep 0.05; done\n'
        'end_group "$builder"; while kill -0 -- "-$builder" 2>/dev/null; do sleep 0.05; done; echo gone'
    )
    assert done.stdout == "gone\n"
