# SPDX-License-Identifier: Apache-2.0
"""A killed process of an amphora restarts, and the other processes continue."""

from __future__ import annotations

import os
import signal
import time

import pytest
from amphora_lab import VIP, Client, alive, descendants, eventually, get
from configuration_text import LISTENER, SECOND, listener, text

pytestmark = pytest.mark.root


def serves(amphora) -> bool:
    try:
        return amphora.network.thread("cl").run(get, VIP, 80, "/", 1.0)[0] == 200
    except OSError:
        return False


def test_a_killed_haproxy_is_restarted(amphora):
    amphora.push(1, text(listener(["m1"])))
    before = amphora.status("haproxy")["pid"]
    os.kill(amphora.outside_pid(before), signal.SIGKILL)
    eventually(lambda: amphora.status("haproxy")["pid"] not in (None, before), "HAProxy is started again")
    eventually(lambda: serves(amphora), "HAProxy serves again")
    status, answer = amphora.push(2, text(listener(["m1", "m2"])))
    assert (status, answer["how"]) == (200, "runtime")


def test_a_killed_agent_is_restarted_without_a_change_of_haproxy(amphora):
    amphora.push(7, text(listener(["m1"])))
    haproxy = amphora.status("haproxy")["pid"]
    killed = amphora.agent_pid()
    with Client(amphora.network) as client:
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: not alive(killed), "the killed process is dead")
        eventually(amphora.answers, "the agent answers")
        eventually(lambda: amphora.push(8, text(listener(["m1", "m2"])))[0] == 200, "the agent applies a bundle")
        client.hears("m2")
    assert client.failures == []
    assert amphora.status("haproxy")["pid"] == haproxy


def test_a_reload_that_fails_leaves_the_old_worker_serving(amphora):
    amphora.push(1, text(listener(["m1"])))
    squat = f"import socket; s = socket.create_server(('{VIP}', 8080)); print('bound', flush=True); s.accept()"
    amphora.supervisor(op="start", name="squatter", argv=["python3", "-c", squat], inner=True, restart=False)
    eventually(lambda: "bound" in amphora.supervisor(op="log", name="squatter")["lines"], "the port is taken")
    wanted = text(listener(["m1"]), listener(["m2"], listener_id=SECOND, port=8080))
    with Client(amphora.network) as client:
        status, answer = amphora.push(2, wanted)
        assert status == 500, answer
        assert "8080" in answer["error"]["happened"]
        assert amphora.call("GET", "/v2/bundle")[1]["generation"] == 1
        client.hears("m1")
        # HAProxy pauses its old worker for a second, because that worker could have the port.
        client.forgive()
        amphora.supervisor(op="stop", name="squatter")
        status, answer = amphora.push(2, wanted)
        assert (status, answer["how"]) == (200, "reload"), answer
    assert client.failures == []


def test_a_power_cut_leaves_the_last_confirmed_bundle(amphora, network):
    amphora.push(7, text(listener(["m1", "m2"])))
    assert amphora.push(8, text(listener(["m1"], m1="chek")))[0] == 422
    amphora.power_off()
    network.unplug()
    amphora.start()
    eventually(amphora.answers, "the agent answers")
    assert amphora.call("GET", "/v2/bundle")[1]["generation"] == 7
    network.plug()
    eventually(lambda: serves(amphora), "the last confirmed bundle is served")
    assert amphora.push(6, text(listener(["m1"])))[0] == 409
    assert amphora.push(7, text(listener(["m1", "m2"])))[1]["how"] == "unchanged"


@pytest.mark.quiet
def test_sigterm_ends_all_processes(amphora):
    amphora.push(1, text(listener(["m1"])))
    everything = descendants(amphora.init())
    assert len(everything) >= 4
    started = time.monotonic()
    amphora.terminate()
    assert time.monotonic() - started < 4
    assert not any(alive(pid) for pid in everything)


def test_totals_equal_the_number_of_requests_over_reloads_and_restarts(amphora, receiver):
    amphora.push(1, text(listener(["m1"])))
    with Client(amphora.network) as client:
        for generation in range(2, 7):
            client.hears("m1")
            extra = f"    fullconn {generation}\n"
            status, answer = amphora.push(generation, text(listener(["m1"], extra=extra)))
            assert (status, answer["how"]) == (200, "reload")
    assert client.failures == []
    requests = client.total

    def total() -> int:
        found = receiver.next().document["listeners"].get(LISTENER)
        return found["total_connections"] if found else 0

    eventually(lambda: total() == requests, f"{requests} requests are reported")
    agent = amphora.agent_pid()
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: not alive(agent), "the agent is dead")
    eventually(lambda: total() == requests, "the counters survive the agent")
    os.kill(amphora.outside_pid(amphora.status("haproxy")["pid"]), signal.SIGKILL)
    # The worker outlives its master for some milliseconds; its last requests cannot be counted.
    eventually(lambda: serves(amphora) and total() > requests, "the counters survive HAProxy")
