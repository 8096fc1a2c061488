# SPDX-License-Identifier: Apache-2.0
"""The sandboxing options of each systemd unit. tests/dataplane/test_systemd.py runs the daemons with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from amphora_agent.services.systemd_units import CONFINEMENTS, Unit, render_unit, unit_name

IMAGE = Path(__file__).parents[3] / "diskimage/elements/amphora"
STATIC = IMAGE / "static/usr/lib/systemd/system"
AGENT, NETNS = "amphora-agent.service", "amphora-netns.service"
DAEMONS = [unit_name(name) for name in (*CONFINEMENTS, "amphora-health-watcher")]
UNITS = [*DAEMONS, *sorted(file.name for file in STATIC.glob("*.service"))]
# Both share the host's mounts: one opens network namespaces, the other creates one.
SHARED_MOUNTS = (AGENT, NETNS)
EXPOSURE, EXPOSURE_OF_THE_AGENT = 4.0, 7.0
NEED_MOUNTS = ("Protect", "Private", "ReadOnly", "ReadWrite", "Inaccessible", "Bind", "RootDirectory", "TemporaryFile")


def rendered(name: str) -> str:
    service = next((one for one in CONFINEMENTS if unit_name(one) == name), "amphora-health-watcher")
    words = ("/usr/bin/true",)
    run = Path("/run/amphora-agent")
    return render_unit(Unit(service, words, Path("/run/netns/inner"), Path("/lib/daemon.sh"), run / "services", run))


def text(name: str) -> str:
    return (STATIC / name).read_text() if (STATIC / name).exists() else rendered(name)


def settings(name: str) -> dict[str, str]:
    lines = (line.partition("=") for line in text(name).splitlines() if "=" in line and not line.startswith("#"))
    return {key: value for key, _, value in lines}


def judges() -> bool:
    """Whether systemd-analyze can check unit files (systemd 250)."""
    if shutil.which("systemd-analyze") is None:
        return False
    said = subprocess.run(["systemd-analyze", "--help"], capture_output=True, text=True, check=False)
    return "--offline" in said.stdout


@pytest.mark.skipif(not judges(), reason="there is no systemd-analyze of systemd 250 or later")
@pytest.mark.parametrize("name", UNITS)
def test_systemds_exposure_level_is_bounded(tmp_path, name):
    file = tmp_path / name
    file.write_text(text(name))
    most = EXPOSURE_OF_THE_AGENT if name == AGENT else EXPOSURE
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={round(most * 10)}"]
    said = subprocess.run([*words, str(file)], capture_output=True, text=True, check=False, timeout=60)
    assert "Overall exposure level" in said.stdout
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("name", UNITS)
def test_every_unit_is_bounded(name):
    found = settings(name)
    assert found["NoNewPrivileges"] == found["RestrictRealtime"] == found["RestrictSUIDSGID"] == "yes"
    assert found["LockPersonality"] == "yes"
    assert found["SystemCallArchitectures"] == "native"
    assert found["SystemCallFilter"].startswith("@system-service")
    assert found["RestrictAddressFamilies"].startswith("AF_")
    assert not found["CapabilityBoundingSet"].startswith("~")
    shared = [key for key in found if key.startswith(NEED_MOUNTS)]
    if name in SHARED_MOUNTS:
        assert shared == []
    else:
        assert found["ProtectSystem"] == "strict"
        assert found["ProtectHome"] == found["PrivateTmp"] == "yes"


def test_network_facing_daemons_are_not_root():
    made = (IMAGE / "post-install.d/50-amphora-units").read_text()
    for service, user, capabilities in (
        ("responder", "responder", "CAP_NET_RAW"),
        ("checker", "checker", "CAP_NET_ADMIN CAP_NET_RAW"),
        ("log-forwarder", "logs", ""),
    ):
        found = settings(f"amphora-{service}.service")
        assert found["User"] == found["Group"] == f"amphora-{user}"
        assert found["AmbientCapabilities"] == found["CapabilityBoundingSet"] == capabilities
        assert f" {found['User']}" in next(line for line in made.splitlines() if line.startswith("for user in "))


def test_unnamed_unit_has_no_permissions():
    found = settings("amphora-health-watcher.service")
    assert found["CapabilityBoundingSet"] == ""
    assert found["ReadWritePaths"] == "/run/amphora-agent"
