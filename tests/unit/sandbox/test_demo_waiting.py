# SPDX-License-Identifier: Apache-2.0
"""The output of the demonstration during its waits."""

import http.client
from types import SimpleNamespace

import pytest

from sandbox import config_files, demo, vm_wait
from sandbox.settings import SandboxError, Settings

SETTINGS = Settings(
    state="/nowhere", prefix="x", octavia_port=1, network_port=2, agent_python="/usr/bin/python3", compute="qemu"
)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Machines are emulated, sleeps return at once, and each poll prints a line."""
    monkeypatch.setattr(config_files, "uses_emulation", lambda settings: settings.compute == "qemu")
    for module in (demo, vm_wait):
        monkeypatch.setattr(module, "_POLL_INTERVAL", 0.0)
    monkeypatch.setattr(vm_wait, "_NOTE_INTERVAL", -1.0)


def octavia(*statuses):
    left = list(statuses)
    balancer = lambda _: SimpleNamespace(name="demo", provisioning_status=left.pop(0))  # noqa: E731
    return SimpleNamespace(load_balancer=SimpleNamespace(get_load_balancer=balancer))


def test_the_demo_reports_a_boot_until_active():
    said = []
    found = demo.wait_active(SETTINGS, octavia("PENDING_CREATE", "PENDING_CREATE", "ACTIVE"), "x", said.append)
    assert found.provisioning_status == "ACTIVE"
    assert len(said) == 2
    assert "PENDING_CREATE" in said[0]


def test_the_demo_stops_at_an_error():
    with pytest.raises(SandboxError, match="it is ERROR"):
        demo.wait_active(SETTINGS, octavia("PENDING_CREATE", "ERROR"), "x", lambda _: None)


def test_a_restarted_amphora_answers_after_its_boot(monkeypatch):
    answers = [OSError("no route"), http.client.RemoteDisconnected(), (503, ""), (200, "member1")]

    def get(*_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(demo, "get", get)
    said = []
    demo.wait_for_response(SETTINGS, "198.51.100.10", said.append)
    assert answers == []
    assert len(said) == 3


def test_the_demo_does_not_wait_for_namespace_amphorae(monkeypatch):
    monkeypatch.setattr(demo, "get", lambda *_: pytest.fail("requested"))
    settings = Settings(state="/nowhere", prefix="x", octavia_port=1, network_port=2, agent_python="/usr/bin/python3")
    demo.wait_for_response(settings, "198.51.100.10", lambda _: None)
