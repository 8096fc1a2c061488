# SPDX-License-Identifier: Apache-2.0
"""An agent of this version under a controller and a health manager of the previous version."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import previous
import pytest
from amphora_lab import AMPHORA, CONTROLLER, FIXED, HEARTBEATS, MAC, MEMBERS, Amphora, eventually, get

from amphora_agent.drift.report import Difference, DriftReport
from amphora_agent.stats.heartbeat_codec import encode

pytestmark = pytest.mark.root
HERE = Path(__file__).parent


@pytest.fixture
def amphora(network, authority, tmp_path):
    """An amphora whose agent.conf is of the previous version."""
    network.plug()
    made = Amphora(network, tmp_path, authority, audit=None)
    try:
        made.start()
        eventually(made.answers, "the agent answers")
        yield made
    finally:
        made.power_off()
        network.unplug()


def datagram(amphora) -> bytes:
    """Return a heartbeat with all fields of this version's agent."""
    drift = DriftReport()
    found = [Difference("interface", "eth1 is gone"), Difference("files", "one is damaged")]
    drift.record(found, found)
    said = {
        "generation": 7,
        "listeners": {},
        "pools": {},
        "holds_vip": True,
        "agent_version": "9.9",
        **drift.heartbeat(),
    }
    assert said["drift"]
    return encode(uuid.UUID(amphora.id), amphora.key, 1, 1, said)


def test_both_versions_serve_and_understand_each_other(amphora, tmp_path):
    assert "[audit]" not in (tmp_path / "etc/agent.conf").read_text()
    before = tmp_path / "before"
    before.mkdir()
    # Without a git history, this version's controller replaces the previous one: only answers have new fields.
    is_old = previous.unpacked(before, "amphora_driver")
    told = {
        "amphora": amphora.id,
        "address": AMPHORA,
        "controller": CONTROLLER,
        "port": HEARTBEATS,
        "client": str(amphora.client_certificate),
        "authority": str(amphora.write("authority.pem", amphora.authority.pem)),
        "key": amphora.key.hex(),
        "mac": MAC,
        "fixed": FIXED,
        "member": MEMBERS["m1"],
        "datagram": datagram(amphora).hex(),
    }
    amphora.load_balancer_id = None
    done = subprocess.run(
        ["ip", "netns", "exec", amphora.network.name("ctl"), sys.executable, HERE / "old_controller.py"],
        input=json.dumps(told),
        env={**os.environ, "PYTHONPATH": f"{before if is_old else previous.ROOT}:{HERE}"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["code"].startswith(str(before)) == is_old
    assert said["how"] == ["start", "runtime", "unchanged"]
    assert said["loaded"] == 1
    assert (said["report"]["generation"], len(said["report"]["listeners"])) == (2, 1)
    state = amphora.call("GET", "/v2/bundle")[1]
    assert said["state"] == [2, state["digest"]]
    assert said["info"][:2] == [amphora.id, 2]
    assert said["diagnosed"]
    assert said["with_news"] == [7, True]
    assert amphora.network.thread("cl").run(get) == (200, "m1")
