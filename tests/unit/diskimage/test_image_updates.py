# SPDX-License-Identifier: Apache-2.0
"""Which packages of an image have a newer version."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from diskimage import updates
from diskimage.updates import Candidate

ROOT = Path(__file__).parents[3]
MADISON = """\
   haproxy | 3.0.11-1+deb13u6 | http://updates.example.org trixie-security/main amd64 Packages
   haproxy | 3.0.11-1+deb13u2 | http://debian.example.org/debian trixie/main amd64 Packages
   haproxy | 3.0.11-1+deb13u2 | http://debian.example.org/debian trixie/main Sources
 libstdc++6 | 14.2.0-19 | http://debian.example.org/debian trixie/main amd64 Packages
"""


def newer(one, other):
    """Compares numbers, in place of dpkg."""
    return int(one) > int(other)


@pytest.mark.parametrize(
    ("installed", "candidates", "found"),
    [
        ("2", [], None),
        ("2", [("2", "trixie")], None),
        ("2", [("1", "trixie"), ("2", "trixie-security")], None),
        ("2", [("1", "trixie"), ("3", "trixie-security")], ("3", "trixie-security", True)),
        ("2", [("3", "trixie-updates")], ("3", "trixie-updates", False)),
        # A later point release contains the fix.
        ("2", [("9", "trixie"), ("3", "trixie-security"), ("10", "trixie")], ("10", "trixie", True)),
        # The image has the fix already. The other updates are not security fixes.
        ("3", [("9", "trixie"), ("3", "trixie-security")], ("9", "trixie", False)),
    ],
)
def test_updates_and_fixes_are_listed(installed, candidates, found):
    got = updates.find_updates({"a": installed}, {"a": [Candidate(*one) for one in candidates]}, newer)
    assert [(one.newest, one.suite, one.fixes) for one in got] == ([] if found is None else [found])


def test_the_output_of_apt_is_parsed():
    found = updates.parse_madison(MADISON + "N: something else\n")
    assert found == {
        "haproxy": (Candidate("3.0.11-1+deb13u6", "trixie-security"), Candidate("3.0.11-1+deb13u2", "trixie")),
        "libstdc++6": (Candidate("14.2.0-19", "trixie"),),
    }


@pytest.mark.parametrize(
    ("one", "other", "found"), [("1.0-1", "1.0~rc1-1", True), ("1:0", "2", True), ("2", "2", False), ("9", "10", False)]
)
def test_versions_are_compared_as_debian_does(one, other, found):
    if shutil.which("dpkg") is None:
        pytest.skip("there is no dpkg on this machine")
    assert updates.is_newer(one, other) is found


@pytest.fixture
def check(tmp_path):
    """The command on a host whose archive is a directory and whose apt prints the given text."""
    if not os.access("/usr/lib/apt/apt-helper", os.X_OK) or shutil.which("dpkg") is None:
        pytest.skip("there is no apt on this machine")
    for place, suite in (("debian", "trixie"), ("debian-security", "trixie-security")):
        folder = tmp_path / place / "dists" / suite
        folder.mkdir(parents=True)
        (folder / "InRelease").write_text(f"Origin: Debian\nSuite: {suite}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    packages = [("haproxy", "3.0.11-1+deb13u5"), ("libstdc++6", "14.2.0-19")]

    def run(*, said=MADISON, status=0, installed=packages, mirror=None):
        for name, script in (
            # The last line of the output names the apt configuration.
            (
                "apt-get",
                f'for word; do echo "$word"; done >{tmp_path}/words\ncp "$APT_LIST" {tmp_path}/list\nexit {status}',
            ),
            ("apt-cache", f"cat <<'END'\n{said}END"),
        ):
            (programs / name).write_text(
                "#!/bin/bash\n"
                "for word; do [[ $word != Dir::Etc::sourcelist=* ]] || APT_LIST=${word#*=}; done\n"
                f"[[ $1 != indextargets ]] || exit 0\n{script}\n"
            )
            (programs / name).chmod(0o755)
        manifest = tmp_path / "a.manifest"
        found = [{"name": name, "version": version} for name, version in installed]
        content = {"format": 2, "name": "a", "release": "trixie", "architecture": "arm64", "packages": found}
        manifest.write_text(json.dumps(content, indent=1) + "\n")
        command = [ROOT / "diskimage/check-updates", "a.manifest", "--mirror", mirror or f"file://{tmp_path}/debian"]
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
        words = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False, **words)

    return run


def test_updates_are_named(check, tmp_path):
    done = check()
    assert done.stderr == ""
    assert done.stdout == "haproxy: 3.0.11-1+deb13u5 in the image, 3.0.11-1+deb13u6 in the archive (security update)\n"
    assert done.returncode == 1
    # Apt uses the release and architecture of the image, and its own indexes.
    listed = (tmp_path / "list").read_text()
    assert re.findall(r"file://\S+ \S+", listed) == [
        f"file://{tmp_path}/debian trixie",
        f"file://{tmp_path}/debian-security trixie-security",
    ]
    words = (tmp_path / "words").read_text().split("\n")
    assert "APT::Architecture=arm64" in words
    assert any(word.startswith(f"Dir::State::lists={tmp_path}/tmp.") for word in words)
    assert list(tmp_path.glob("tmp.*")) == []


def test_an_image_without_updates(check):
    done = check(installed=[("haproxy", "3.0.11-1+deb13u6"), ("mine", "1")])
    assert done.returncode == 0
    assert "No package of the image has a newer version" in done.stdout
    assert done.stderr == "Not compared, because the archive does not have them: mine\n"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"status": 100}, "apt could not read the indexes of trixie"),
        ({"said": ""}, "has no package of the image"),
        ({"installed": []}, "has no Debian package"),
        ({"mirror": "file:///nonexistent"}, "no trixie"),
    ],
)
def test_an_unreadable_list_is_not_up_to_date(check, more, said):
    done = check(**more)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("words", [[], ["--mirror", "x"], ["/nonexistent"], ["x", "--mirror"], ["x", "y", "z"]])
def test_wrong_arguments_are_refused(words):
    command = [ROOT / "diskimage/check-updates", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
