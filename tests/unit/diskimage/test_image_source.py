# SPDX-License-Identifier: Apache-2.0
"""The image build on its host: package sources, earlier images and cleanup."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def source(script, *words, path=None):
    """Run a shell snippet with the functions of the build."""
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
def test_the_host_of_a_mirror_is_found(url, host):
    assert source('host_of "$1"', url).stdout.strip() == host


@pytest.mark.parametrize(
    ("mirror", "security"),
    [
        ("http://m.example.org/debian/", "http://m.example.org/debian-security"),
        ("http://m.example.org/debian/{snapshot}/", "http://m.example.org/debian-security/{snapshot}/"),
    ],
)
def test_the_security_archive_is_beside_the_mirror(mirror, security):
    assert source('security_beside "$1"', mirror).stdout.strip() == security


def test_relative_paths_start_at_the_working_directory():
    assert source("seen_from /a b/c").stdout == "/a/b/c\n"
    assert source("seen_from /a /b/c").stdout == "/b/c\n"


@pytest.fixture
def earlier(tmp_path):
    """The relevant fields of the manifest of an earlier image."""
    file = tmp_path / "earlier.manifest"
    content = {"format": 1, "name": "x", "release": "bookworm", "architecture": "arm64", "packages": []}
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file


def test_release_and_architecture_come_from_the_earlier_image(earlier):
    for asked in (("", ""), ("bookworm", ""), ("", "arm64"), ("bookworm", "arm64")):
        assert source('as_in_manifest "$@"', earlier, *asked).stdout == "bookworm arm64\n"


@pytest.mark.parametrize(("release", "architecture", "said"), [("trixie", "", "trixie"), ("", "amd64", "amd64")])
def test_a_manifest_of_another_release_or_architecture_is_refused(earlier, release, architecture, said):
    done = source('as_in_manifest "$@"', earlier, release, architecture)
    assert done.returncode == 1
    assert f"not of {said}" in done.stderr


def test_another_document_is_refused_as_earlier_image(tmp_path):
    file = tmp_path / "x"
    file.write_text("{}\n")
    command = [ROOT / "diskimage/build", "--packages", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "not the manifest of an image" in done.stderr


@pytest.fixture
def machine(tmp_path):
    """A host with its own apt sources, and an archive in a directory in place of the network."""
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


def test_third_party_packages_are_not_used(machine):
    has, find = machine
    has("a-vendor", "bookworm", "Vendor")
    for release in ("bookworm", "trixie"):
        has("debian", release)
        has("updates", f"{release}-security")
    found = find("bookworm a-vendor", "bookworm debian", "bookworm-security updates", "bookworm-updates debian")
    assert found.stdout == "trixie debian updates 3.13\n"
    assert found.stderr == ""


def test_debian_12_replaces_a_missing_13_unless_13_is_requested(machine):
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


def test_the_updates_of_a_given_mirror_are_beside_it(machine):
    has, find = machine
    has("debian", "bookworm")
    has("updates", "bookworm-security")
    has("mine", "trixie", "Mine")
    has("mine-security", "trixie-security", "Mine")
    found = find("bookworm debian", "bookworm-security updates", mirror="mine")
    assert found.stdout == "trixie mine mine-security 3.13\n"


def test_a_host_without_apt_sources_is_reported(machine):
    _, find = machine
    done = find("jammy ubuntu", "jammy-security ubuntu")
    assert done.returncode == 1
    assert "--mirror" in done.stderr


def test_a_process_group_ends_completely_also_with_ignored_signals():
    done = source(
        "setsid bash -c 'trap \"\" TERM; sleep 600 & wait; wait' & builder=$!\n"
        'until pgrep -g "$builder" -x sleep >/dev/null; do sleep 0.05; done\n'
        'end_group "$builder"; while kill -0 -- "-$builder" 2>/dev/null; do sleep 0.05; done; echo gone'
    )
    assert done.stdout == "gone\n"
