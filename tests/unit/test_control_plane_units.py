# SPDX-License-Identifier: Apache-2.0
"""The systemd units, users and directories of a control plane (deploy/)."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amphora_driver import config

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EXPOSURE = 2.0
PROGRAMS = "/opt/amphora-driver/bin/"
SETUP = Path(__file__).parents[2] / "setup.cfg"


def settings(unit):
    lines = (line.partition("=") for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#"))
    return {key: value for key, _, value in lines}


def supports(program, option):
    if shutil.which(program) is None:
        return False
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return option in said.stdout


def ids(unit):
    return unit.stem


def test_every_service_has_a_unit():
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.read(SETUP)
    scripts = [line.split(" = ")[0] for line in parser["options.entry_points"]["console_scripts"].splitlines() if line]
    services = set(scripts) - {"amphoractl", "amphora-haproxy-agent"}
    assert {settings(unit)["ExecStart"] for unit in UNITS} == {f"{PROGRAMS}{name}" for name in services}
    assert {unit.stem for unit in UNITS} == services


@pytest.mark.parametrize("unit", UNITS, ids=ids)
def test_every_unit_is_confined(unit):
    found = settings(unit)
    assert found["User"] == found["Group"] != "root"
    assert found["LimitCORE"] == "0"
    assert found["CapabilityBoundingSet"] == ""
    assert found["ProtectSystem"] == "strict"
    # Without AF_NETLINK, openstacksdk cannot connect to any service. The health manager does not use it.
    families = {"AF_UNIX", "AF_INET", "AF_INET6"} | ({"AF_NETLINK"} if unit.stem != "amphora-health-manager" else set())
    assert set(found["RestrictAddressFamilies"].split()) == families
    assert found["NoNewPrivileges"] == found["MemoryDenyWriteExecute"] == found["PrivateDevices"] == "yes"


@pytest.mark.skipif(not supports("systemd-analyze", "--offline"), reason="there is no systemd-analyze of systemd 250")
@pytest.mark.parametrize("unit", UNITS, ids=ids)
def test_systemds_exposure_level_is_bounded(unit):
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={round(EXPOSURE * 10)}"]
    said = subprocess.run([*command, unit], capture_output=True, text=True, check=False, timeout=60)
    assert "Overall exposure level" in said.stdout
    assert said.returncode == 0, said.stdout


@pytest.mark.skipif(not supports("systemd-analyze", "verify"), reason="there is no systemd-analyze")
def test_systemd_accepts_the_units(tmp_path):
    """systemd-analyze reports unknown settings and values; the programs do not exist here."""
    files = []
    for unit in UNITS:
        text = unit.read_text()
        assert f"ExecStart={PROGRAMS}" in text
        files.append(tmp_path / unit.name)
        files[-1].write_text(text.replace(f"ExecStart={PROGRAMS}{unit.stem}", "ExecStart=/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    # The check can fail.
    files[0].write_text(files[0].read_text() + "[Service]\nProtectSystem=perhaps\n")
    done = subprocess.run([*command, files[0]], capture_output=True, text=True, check=False, timeout=60)
    assert "perhaps" in done.stderr


@pytest.mark.skipif(not supports("systemd-sysusers", "--root"), reason="there is no systemd-sysusers")
@pytest.mark.skipif(not supports("systemd-tmpfiles", "--root"), reason="there is no systemd-tmpfiles")
@pytest.mark.root
def test_users_and_directories_are_created(tmp_path):
    (tmp_path / "etc").mkdir()
    users = DEPLOY / "sysusers.d/amphora-driver.conf"
    done = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", users], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {line.split(":")[0]: line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines()}
    assert {settings(unit)["User"] for unit in UNITS} == set(found)
    assert {one[6] for one in found.values()} == {"/usr/sbin/nologin"}
    directories = DEPLOY / "tmpfiles.d/amphora-driver.conf"
    command = ["systemd-tmpfiles", "--create", f"--root={tmp_path}", directories]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    driver, cluster = (int(found[name][3]) for name in ("amphora-driver", "amphora-cluster"))
    modes = {
        name: (oct(stat.st_mode & 0o7777), stat.st_gid)
        for name in ("etc/amphora-driver", "etc/amphora-cluster", "run/amphora-driver/alive", "run/amphora-cluster")
        if (stat := (tmp_path / name).stat())
    }
    assert modes == {
        "etc/amphora-driver": ("0o750", driver),
        "etc/amphora-cluster": ("0o750", cluster),
        "run/amphora-driver/alive": ("0o2770", driver),
        "run/amphora-cluster": ("0o750", cluster),
    }


@pytest.mark.parametrize("unit", UNITS, ids=ids)
def test_every_writable_directory_is_created_by_tmpfiles(unit):
    lines = (DEPLOY / "tmpfiles.d/amphora-driver.conf").read_text().splitlines()
    created = {line.split()[1] for line in lines if line.startswith("d ")}
    assert set(settings(unit)["ReadWritePaths"].split()) <= created


def test_a_program_writes_a_file_of_its_own_for_a_collector(tmp_path):
    (tmp_path / "logs").mkdir()
    file = tmp_path / "amphora-driver.conf"
    database = f"[amp_database]\nconnection = sqlite:///{tmp_path}/without-a-schema.sqlite\n"
    file.write_text(f"[DEFAULT]\nlog_dir = {tmp_path}/logs\nuse_json = true\n\n{database}")
    program = Path(sys.executable).with_name("amphora-controller")
    done = subprocess.run(
        [program], env={**os.environ, config.FILE_VARIABLE: str(file)}, capture_output=True, check=False, timeout=60
    )
    (log,) = (tmp_path / "logs").iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert (done.returncode, log.name) == (1, "amphora-controller.log")
    assert "amphoractl database upgrade" in lines[-1]["message"]
