# SPDX-License-Identifier: Apache-2.0
"""The wheels of a release: version from git, contents, entry points and dependencies."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import build_wheels as wheels  # noqa: E402 - scripts/ is no package
from build_wheels import Position  # noqa: E402

VERSION = "0.1.0.dev7+gabc"
SETUP = (ROOT / "setup.cfg").read_text(encoding="utf-8")


def parsed(text):
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(text)
    return parser


@pytest.mark.parametrize(
    ("planned", "position", "expected"),
    [
        ("0.1.0", Position("0.1.0", 0, "abc", dirty=False), "0.1.0"),
        ("0.1.0", Position(None, 836, "abc", dirty=False), "0.1.0.dev836+gabc"),
        ("0.1.0", Position(None, 836, "abc", dirty=True), "0.1.0.dev836+gabc.dirty"),
        ("0.1.0", Position("0.1.0", 0, "abc", dirty=True), "0.1.1.dev0+gabc.dirty"),
        ("0.1.0", Position("0.1.0", 3, "abc", dirty=False), "0.1.1.dev3+gabc"),
        ("0.2.0", Position("0.1.0", 3, "abc", dirty=False), "0.2.0.dev3+gabc"),
        ("0.10.0", Position("0.9.1", 3, "abc", dirty=False), "0.10.0.dev3+gabc"),
    ],
)
def test_the_version_follows_the_history(planned, position, expected):
    found = wheels.next_version(planned, position)
    assert found == expected
    assert str(Version(found)) == found, "pip would change another spelling"


def test_a_tag_that_differs_from_the_project_is_refused():
    with pytest.raises(ValueError, match=r"0\.2\.0.*setup\.cfg has the version 0\.1\.0"):
        wheels.next_version("0.1.0", Position("0.2.0", 0, "abc", dirty=False))


def test_versions_ascend_from_development_to_release():
    history = [
        ("0.1.0", Position(None, 1, "a", dirty=False)),
        ("0.1.0", Position(None, 2, "b", dirty=False)),
        ("0.1.0", Position("0.1.0", 0, "c", dirty=False)),
        ("0.1.0", Position("0.1.0", 1, "d", dirty=False)),
        ("0.2.0", Position("0.1.0", 2, "e", dirty=False)),
    ]
    found = [Version(wheels.next_version(*one)) for one in history]
    assert found == sorted(set(found))


def test_the_changelog_has_a_heading_for_each_release():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert first == "Unreleased"
    found = [re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", one).groups() for one in releases]
    ordered = sorted(found, key=lambda one: Version(one[0]), reverse=True)
    assert found == ordered
    assert Version(found[0][0]) <= Version(parsed(SETUP)["metadata"]["version"]), "setup.cfg has the next release"


def git(place, *words):
    names = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", place, *names, *words], check=True, capture_output=True)


def test_the_position_is_read_from_git(tmp_path):
    assert wheels.read_position(tmp_path) is None, "an unpacked archive"
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    first = wheels.read_position(tmp_path)
    assert (first.tag, first.commits, first.dirty, len(first.commit)) == (None, 1, False, 9)
    git(tmp_path, "tag", "some-name")
    assert wheels.read_position(tmp_path) == first, "only versions count"
    git(tmp_path, "tag", "-a", "0.1.0", "-m", "release")
    assert wheels.read_position(tmp_path) == first._replace(tag="0.1.0", commits=0)
    (tmp_path / "file").write_text("2")
    assert wheels.read_position(tmp_path) == first._replace(tag="0.1.0", commits=0, dirty=True)
    git(tmp_path, "commit", "-qam", "two")
    second = wheels.read_position(tmp_path)
    assert (second.tag, second.commits, second.dirty) == ("0.1.0", 1, False)


def test_a_shallow_clone_has_a_version_only_with_a_tag(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    git(whole, "init", "-q")
    for name in ("1", "2", "3"):
        (whole / name).write_text(name)
        git(whole, "add", name)
        git(whole, "commit", "-qm", name)
    git(tmp_path, "clone", "-q", "--depth=2", f"file://{whole}", "without")
    with pytest.raises(ValueError, match="git fetch --unshallow --tags"):
        wheels.read_position(tmp_path / "without")
    git(whole, "tag", "-a", "0.1.0", "-m", "release", "HEAD~1")
    git(tmp_path, "clone", "-q", "--depth=2", f"file://{whole}", "with")
    found = wheels.read_position(tmp_path / "with")
    assert found == wheels.read_position(whole)
    assert (found.tag, found.commits) == ("0.1.0", 1)
    git(tmp_path / "without", "fetch", "-q", "--unshallow", "--tags")
    assert wheels.read_position(tmp_path / "without") == found


def test_the_driver_requires_the_agent_of_the_same_version():
    driver, agent = parsed(wheels.driver_setup_cfg(SETUP, VERSION)), parsed(wheels.agent_setup_cfg(SETUP, VERSION))
    assert driver["metadata"]["version"] == agent["metadata"]["version"] == VERSION
    assert (driver["metadata"]["name"], agent["metadata"]["name"]) == (wheels.DRIVER, wheels.AGENT)
    assert f"{wheels.AGENT}=={VERSION}" in driver["options"]["install_requires"].splitlines()
    assert "install_requires" not in agent["options"], "a control plane needs no dependency of an amphora"
    assert set(driver["options.extras_require"]) == {"driver", "distributed", "openstack", "cluster"}
    assert list(agent["options.extras_require"]) == ["agent"]


def test_each_entry_point_is_in_exactly_one_wheel():
    whole, driver, agent = (
        parsed(text)["options.entry_points"]
        for text in (SETUP, wheels.driver_setup_cfg(SETUP, VERSION), wheels.agent_setup_cfg(SETUP, VERSION))
    )
    for group in whole:
        lines = [line for one in (driver, agent) for line in one.get(group, "").splitlines() if line]
        assert sorted(lines) == sorted(line for line in whole[group].splitlines() if line)


# --- real builds ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheels")
    found = wheels.build_wheels(ROOT, out, VERSION, isolation=False)
    return {path.name.split("-")[0]: zipfile.ZipFile(path) for path in found}


def tracked(*folders):
    if not (ROOT / ".git").exists():  # an unpacked archive
        found = (path for one in folders for path in (ROOT / one, *(ROOT / one).rglob("*")))
        return {str(path.relative_to(ROOT)) for path in found if path.is_file() and "__pycache__" not in path.parts}
    command = ["git", "-c", "safe.directory=*", "ls-files", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if (ROOT / line).exists()}


def packed(wheel):
    """Names of the files of a wheel without those that describe it."""
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def described(wheel, name):
    (path,) = (one for one in wheel.namelist() if one.endswith(f".dist-info/{name}"))
    return wheel.read(path)


@pytest.mark.extended
def test_the_wheels_have_all_tracked_files_and_no_others(built):
    assert set(built) == {"octavia_amphora_driver", "octavia_amphora_agent"}
    assert packed(built["octavia_amphora_agent"]) == tracked("amphora_agent")
    share = f"octavia_amphora_driver-{VERSION}.data/data/share/amphora-driver/"
    found = packed(built["octavia_amphora_driver"])
    data = {name.removeprefix(share) for name in found if name.startswith(share)}
    folders = ("systemd", "sysusers.d", "tmpfiles.d", "sysctl.d")
    files = tracked(*(f"deploy/{one}" for one in folders), "deploy/README.md")
    assert data == {name.removeprefix("deploy/") for name in files}
    assert {name for name in found if not name.startswith(share)} == tracked("amphora_driver", "amphora_cluster")


@pytest.mark.extended
def test_the_metadata_of_the_wheels_are_complete(built):
    for name, wheel in built.items():
        metadata = message_from_bytes(described(wheel, "METADATA"))
        assert (metadata["Version"], metadata["License-File"]) == (VERSION, "LICENSE")
        without_extra = {Requirement(one).name for one in metadata.get_all("Requires-Dist") if "extra ==" not in one}
        if name == "octavia_amphora_agent":
            assert without_extra == set()
        else:
            assert {"octavia-lib", "SQLAlchemy", "octavia-amphora-agent"} <= without_extra
            assert not {"pyroute2", "psutil", "pytest", "octavia"} & without_extra
    points = parsed(described(built["octavia_amphora_driver"], "entry_points.txt").decode())
    assert points["octavia.api.drivers"]["haproxy"] == "amphora_driver.driver:AmphoraProviderDriver"
    assert "amphora-haproxy-agent" not in points["console_scripts"]
    assert "amphora-haproxy-agent" in described(built["octavia_amphora_agent"], "entry_points.txt").decode()


@pytest.mark.extended
def test_equal_sources_give_equal_wheels(built, tmp_path):
    again = wheels.build_wheels(ROOT, tmp_path, VERSION, isolation=False)
    assert [path.read_bytes() for path in again] == [
        Path(built[path.name.split("-")[0]].filename).read_bytes() for path in again
    ]
