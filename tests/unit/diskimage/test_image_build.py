# SPDX-License-Identifier: Apache-2.0
"""The image build command: refused arguments, and the contents of the agent package."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from diskimage import agent_source

ROOT = Path(__file__).parents[3]
SCRIPTS = [
    ROOT / "diskimage/build",
    ROOT / "diskimage/check-updates",
    ROOT / "diskimage/source.sh",
    *sorted(ROOT.glob("diskimage/elements/*/*.d/*")),
    *sorted(ROOT.glob("diskimage/elements/*/static/usr/libexec/amphora/*")),
]


def build(*words):
    return subprocess.run([ROOT / "diskimage/build", *words], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--release", "sid"], "--release sid"),
        (["--arch", "riscv64"], "--arch riscv64"),
        (["--size", "2"], "--size 2"),
        (["--size", "0G"], "--size 0G"),
        (["--size", "999M"], "--size 999M"),
        (["--size", "2T"], "--size 2T"),
        (["--output", "vhd"], "--output vhd"),
        (["--output", "qcow2,iso"], "--output iso"),
        (["--name", "../x"], "--name ../x"),
        (["--name", "-x"], "--name -x"),
        (["--element", "a b"], "--element a b"),
        (["--elements", "/nonexistent"], "--elements /nonexistent"),
        (["--ntp", "time.example.org"], "--ntp time.example.org"),
        (["--packages", "/nonexistent"], "--packages /nonexistent"),
        (["--snapshot", "yesterday", "--mirror", "x{snapshot}"], "--snapshot yesterday"),
        (["--snapshot", "20261101T000000Z"], "{snapshot}"),
        (["--frobnicate", "x"], "--frobnicate"),
        (["--size"], "--size needs a value"),
        (["trixie"], "trixie is not an option"),
    ],
)
def test_contradictory_arguments_are_refused(words, said):
    done = build(*words)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""


def test_help_names_every_option():
    done = build("--help")
    assert done.returncode == 0
    options = re.findall(r"^    (--[a-z-]+)\)", (ROOT / "diskimage/build").read_text(), re.MULTILINE)
    assert len(options) > 10
    assert [option for option in options if f"  {option} " not in done.stdout] == []


def test_the_agent_package_contains_no_control_plane():
    """The agent package has no entry point, package or dependency of the control plane."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(agent_source.agent_setup_cfg((ROOT / "setup.cfg").read_text()))
    assert parser["options.packages.find"]["include"].split() == ["amphora_agent*"]
    assert list(parser["options.extras_require"]) == ["agent"]
    assert list(parser["options.entry_points"]) == ["console_scripts"]
    assert (
        parser["options.entry_points"]["console_scripts"].strip() == "amphora-haproxy-agent = amphora_agent.server:main"
    )
    assert list(parser["options.package_data"]) == ["amphora_agent"]


def test_the_source_of_the_agent_is_complete(tmp_path):
    agent_source.stage_source(ROOT, tmp_path / "agent")
    assert (tmp_path / "agent/amphora_agent/server.py").exists()
    assert not list(tmp_path.rglob("*.pyc"))
    assert not (tmp_path / "agent/amphora_driver").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT / "diskimage")))
def test_build_scripts_have_a_licence_and_an_interpreter(script):
    lines = script.read_text().splitlines()
    assert "# SPDX-License-Identifier: Apache-2.0" in lines[:2]
    if script.name != "source.sh":
        assert lines[0].startswith("#!")
        assert script.stat().st_mode & 0o111
    if shutil.which("shellcheck"):
        command = ["shellcheck", "-x", "-e", "SC2016", script]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout == ""
