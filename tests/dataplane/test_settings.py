# SPDX-License-Identifier: Apache-2.0
"""Heartbeats move to other receivers at run time, without a lost heartbeat and without a restart."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from agent_heartbeats import decode
from amphora_lab import CONTROLLER, HEARTBEATS, eventually, get
from configuration_text import listener, text

from amphora_driver.render.agent_settings import render_agent_settings

pytestmark = pytest.mark.root
NEW = HEARTBEATS + 2


class Receiver:
    """A socket of the controller's namespace for heartbeats."""

    def __init__(self, amphora, port: int) -> None:
        self._key = amphora.key
        self._socket = amphora.network.thread("ctl").run(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((CONTROLLER, port))

    def next(self):
        self._socket.settimeout(10)
        return decode(self._socket.recv(65536), self._key)

    def waiting(self) -> list:
        """Return the heartbeats that have arrived."""
        self._socket.setblocking(False)
        found = []
        while True:
            try:
                found.append(decode(self._socket.recv(65536), self._key))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def receivers(amphora):
    """The receiver of agent.conf, and the new one."""
    opened = [Receiver(amphora, port) for port in (HEARTBEATS, NEW)]
    yield opened
    for one in opened:
        one.close()


def wanted(interval: float = 0.2):
    return render_agent_settings([f"{CONTROLLER}:{NEW}"], interval, 3600.0)


def digests(amphora) -> set[str]:
    return {amphora.call("GET", path)[1]["settings_digest"] for path in ("/v2/bundle", "/v2/info")}


def processes(amphora) -> dict[str, int]:
    return {name: amphora.status(name)["pid"] for name in ("amphora-agent", "haproxy", "amphora-responder")}


def test_heartbeats_move_without_a_gap_and_survive_restarts(amphora, receivers, network):
    old, new = receivers
    assert amphora.push(1, text(listener(["m1"])))[0] == 200
    status, before = amphora.call("GET", "/v2/settings")
    targets = [f"{CONTROLLER}:{HEARTBEATS}", f"{CONTROLLER}:{HEARTBEATS + 1}"]
    assert (status, before["heartbeat"]) == (200, {"targets": targets, "interval": 0.5})
    assert before["digest"] == render_agent_settings(targets, 0.5, 3600.0).digest
    assert digests(amphora) == {before["digest"]}
    running = processes(amphora)
    heard = [old.next()]

    status, answer = amphora.call("PUT", "/v2/settings", wanted().encode())
    assert (status, answer["digest"]) == (200, wanted().digest)
    assert digests(amphora) == {wanted().digest}
    first = new.next()
    heard += old.waiting()
    assert (first.epoch, first.sequence) == (heard[-1].epoch, heard[-1].sequence + 1)
    assert [new.next().sequence for _ in range(3)] == [first.sequence + number for number in (1, 2, 3)]
    assert old.waiting() == []
    assert processes(amphora) == running
    assert network.thread("cl").run(get) == (200, "m1")

    os.kill(amphora.outside_pid(running["amphora-agent"]), signal.SIGKILL)
    eventually(lambda: new.next().epoch > first.epoch, "the restarted agent sends to the new receiver")
    eventually(amphora.answers, "the restarted agent answers")
    assert amphora.call("GET", "/v2/settings")[1]["digest"] == wanted().digest

    amphora.power_off()
    network.unplug()
    network.plug()
    new.waiting()
    amphora.start()
    eventually(amphora.answers, "the agent answers after a reboot")
    assert new.next().document["agent_version"]
    assert digests(amphora) == {wanted().digest}
    assert old.waiting() == []


def test_refused_settings_change_nothing(amphora, receivers):
    old, new = receivers
    before = amphora.call("GET", "/v2/settings")
    for body in (b"{", b"{}", wanted().encode().replace(b"0.2", b"0"), wanted().encode().replace(b":55", b":9955")):
        status, answer = amphora.call("PUT", "/v2/settings", body)
        assert (status, answer["error"]["wanted"]) == (400, "read the settings"), body
    assert amphora.call("GET", "/v2/settings") == before
    assert old.next()
    assert new.waiting() == []


def test_octavias_worker_and_controllers_do_not_mix_their_settings(amphora, receivers):
    upload = f"[health_manager]\ncontroller_ip_port_list = {CONTROLLER}:{HEARTBEATS}\nheartbeat_key = k\n"
    assert amphora.call("PUT", "/1.0/config", upload.encode())[0] == 202
    status, answer = amphora.call("PUT", "/v2/settings", wanted().encode())
    assert status == 409
    assert "Octavia's worker" in answer["error"]["happened"]
    assert amphora.call("GET", "/v2/settings")[1]["heartbeat"]["targets"] == [f"{CONTROLLER}:{HEARTBEATS}"]
    assert receivers[1].waiting() == []
