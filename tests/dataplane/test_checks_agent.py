# SPDX-License-Identifier: Apache-2.0
"""The checker in a complete amphora: UDP listeners in heartbeats, and counters without loss."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import pytest
from amphora_lab import Amphora, alive, eventually, ip
from datagrams import PORT, Clients, UdpMember, member, name_of, virtual_server
from faults import apart

pytestmark = pytest.mark.root
PLACES = {"c1": "198.51.100.131", "c2": "198.51.100.132"}
ID, POOL = name_of("listener", PORT, "UDP"), name_of("pool", PORT)
NAME = f"{POOL}:{ID}"
MONITOR = {
    "id": name_of("monitor"),
    "type": "UDP-CONNECT",
    **dict.fromkeys(("interval", "timeout", "rise", "fall"), 1),
    **dict.fromkeys(("method", "path", "host", "version")),
    "codes": [],
}
SERVER = virtual_server(*(member(name, address) for name, address in PLACES.items()), monitor=MONITOR)
# A heartbeat that is earlier than this interval is due to a change.
SELDOM = 3600.0


class Machine(Amphora):
    """An amphora with members, clients, and a receiver of its heartbeats."""

    generation = 0

    def serve(self, *servers, text=None):
        self.generation += 1
        key = {"virtual_servers": list(servers)} if servers else {}
        status, answer = self.push(self.generation, text, **key)
        assert status == 200, answer

    def start_member(self, name):
        self.members[name] = UdpMember(self.network.thread("mem"), name, PLACES[name])

    def checker(self):
        """Return the checker's PID on this machine."""
        status = self.status("amphora-checker")
        return self.outside_pid(status["pid"]) if status is not None and status["pid"] else None

    def heard(self, condition, what):
        """Wait for a heartbeat that fulfils the condition."""

        def next_one():
            said = self.receiver.next().document
            self.said = said
            return condition(said)

        end = time.monotonic() + 30
        while not next_one():
            assert time.monotonic() < end, f"{what}: {self.said}"
        return self.said

    def ask(self, count):
        """Send this number of flows with one datagram each."""
        with contextlib.closing(Clients(self.network.thread("cl"))) as clients:
            for _ in range(count):
                assert clients.flow().ask() is not None


@pytest.fixture
def machine(network, authority, tmp_path, receiver_of, request):
    network.plug()
    made = Machine(network, tmp_path, authority, interval=request.param)
    made.members = {}
    try:
        for name, address in PLACES.items():
            ip(f"-n {network.name('mem')} addr replace {address}/24 dev eth0")
            made.start_member(name)
        made.receiver = receiver_of(made)
        made.start()
        eventually(made.answers, "the agent answers")
        yield made
    finally:
        for one in made.members.values():
            one.close()
        made.power_off()
        network.unplug()


def words(said):
    return said["pools"].get(NAME, {}).get("members")


@pytest.mark.parametrize("machine", [SELDOM], indirect=True)
def test_a_failed_member_is_reported_at_once(machine):
    assert machine.status("amphora-checker") is None, "a checker runs without UDP listeners"
    machine.serve(SERVER)
    ids = {name: name_of("member", name) for name in PLACES}
    said = machine.heard(lambda said: words(said) == dict.fromkeys(ids.values(), "UP"), "both members are up")
    assert said["listeners"][ID]["status"] == "OPEN"
    assert said["pools"][NAME]["status"] == "UP"
    machine.members.pop("c1").close()
    machine.heard(lambda said: words(said) == {ids["c1"]: "DOWN", ids["c2"]: "UP"}, "one member is down")
    status, found = machine.call("GET", "/v2/diagnostics")
    assert status == 200
    pool = found["virtual servers"]["listeners"][ID]["pool"]
    assert pool["reasons"][ids["c1"]] == "port unreachable"
    assert "amphora_virtual" in found["virtual table"]
    assert any("is now DOWN: port unreachable" in line for line in found["checker log"])
    machine.start_member("c1")
    machine.heard(lambda said: words(said) == dict.fromkeys(ids.values(), "UP"), "both members are up again")
    pid = machine.checker()
    machine.serve()
    eventually(lambda: not alive(pid), "the checker has ended")
    machine.heard(lambda said: said["pools"] == {}, "heartbeats contain no pool")


@pytest.mark.parametrize("machine", [0.5], indirect=True)
def test_counters_survive_restarts_of_each_process(machine):
    machine.serve(SERVER)
    machine.heard(lambda said: set((words(said) or {"": ""}).values()) == {"UP"}, "both members are up")
    total = 0

    def counted(more):
        nonlocal total
        machine.ask(more)
        total += more

        def found(said):
            present = said["listeners"].get(ID)
            assert present is None or present["total_connections"] <= total
            return present is not None and present["total_connections"] == total

        return machine.heard(found, f"{total} connections")["listeners"][ID]

    counted(5)
    before = machine.checker()
    os.kill(before, signal.SIGKILL)
    assert machine.members["c1"], "member c1 does not run"
    counted(3)
    eventually(lambda: machine.checker() not in (None, before), "another checker runs")
    assert machine.checker() != before
    os.kill(machine.agent_pid(), signal.SIGKILL)
    machine.ask(4)
    total += 4
    eventually(machine.answers, "the agent answers")
    counted(2)
    machine.serve(SERVER, virtual_server(port=PORT + 1, pool_id=None, monitor=None))
    counted(1)
    machine.serve()  # this removes the table, too
    machine.heard(lambda said: ID not in said["listeners"], "heartbeats do not contain the listener")
    machine.serve(SERVER)
    counted(2)
    machine.terminate()
    assert json.loads((machine.var / "virtual-totals.json").read_text())
    machine.network.unplug()
    machine.network.plug()
    machine.start()
    machine.heard(lambda said: set((words(said) or {"": ""}).values()) == {"UP"}, "both members are up again")
    found = counted(3)
    assert found["bytes_in"] > 20 * total
    assert found["bytes_out"] > 20 * total


@pytest.mark.parametrize("machine", [SELDOM], indirect=True)
def test_checks_continue_after_the_agent_is_killed(machine):
    machine.serve(SERVER)
    ids = {name: name_of("member", name) for name in PLACES}
    machine.heard(lambda said: words(said) == dict.fromkeys(ids.values(), "UP"), "both members are up")
    pid = machine.checker()
    os.kill(machine.agent_pid(), signal.SIGKILL)
    machine.members.pop("c1").close()
    machine.heard(lambda said: words(said) == {ids["c1"]: "DOWN", ids["c2"]: "UP"}, "one member is down")
    assert machine.checker() == pid


@pytest.mark.parametrize("machine", [0.5], indirect=True)
def test_heartbeats_continue_while_the_checker_is_stopped(machine):
    """Heartbeats report HAProxy's listeners too; a push waits for the checker."""
    machine.serve(SERVER)
    machine.heard(lambda said: set((words(said) or {"": ""}).values()) == {"UP"}, "both members are up")
    pid = machine.checker()
    other = virtual_server(member("c1", PLACES["c1"]), monitor=MONITOR)
    os.kill(pid, signal.SIGSTOP)
    try:
        with apart(machine) as push:
            answer = push(machine.bundle(machine.generation + 1, None, virtual_servers=[other]))
            # More heartbeats than the agent may have sent before. The receiver raises TimeoutError without them.
            heard = [machine.receiver.next().sequence for _ in range(6)]
            assert sorted(set(heard)) == heard
            assert not answer.done()
            os.kill(pid, signal.SIGCONT)
            assert answer.result(60)[0] == 200
    finally:
        os.kill(pid, signal.SIGCONT)
