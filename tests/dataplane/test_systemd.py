# SPDX-License-Identifier: Apache-2.0
"""An amphora under systemd as process 1, with the units of the image."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import systemd_lab
from amphora_lab import FIXED, MEMBERS, ROOT, VIP, Client, Network, alive, children, eventually, get
from configuration_text import listener, text
from datagrams import UdpMember, member, name_of, virtual_server
from systemd_lab import AGENT, SystemdAmphora

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(systemd_lab.missing() is not None, reason=str(systemd_lab.missing())),
]
HEALTH = "/run/amphora-agent/haproxy.health"
HOSTILE = [
    "",
    "a b",
    '"',
    "'",
    "\\",
    "\\x41",
    "%n",
    "%%",
    "$HOME",
    "${HOME}",
    "$$",
    ";",
    "a;b",
    "\n",
    "\t\x01",
    "\u00e9",
    "#",
]
# Writes its arguments to a file.
PROGRAM = "import json,sys,time\njson.dump(sys.argv[1:], open('/run/amphora-agent/hostile','w'))\ntime.sleep(1000)"


@pytest.fixture(scope="module")
def place():
    made = Network(f"sd{os.getpid()}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def vm(place, authority, tmp_path_factory):
    place.plug()
    made = SystemdAmphora(place, tmp_path_factory.mktemp("machine"), authority)
    made.generation = 0
    try:
        made.start()
        # 2 s on an idle machine.
        eventually(made.answers, "the agent answers", 120.0)
        yield made
    finally:
        made.power_off()
        place.unplug()


@pytest.fixture
def machine(vm):
    """A serving machine under systemd."""
    eventually(vm.answers, "the agent answers", 120.0)
    push(vm, text(listener(["m1", "m2"])))
    eventually(lambda: said(vm) == "0", "HAProxy answers")
    return vm


def push(machine, configuration, **changes) -> dict:
    machine.generation += 1
    status, answer = machine.push(machine.generation, configuration, **changes)
    assert status == 200, answer
    return answer


def said(machine) -> str:
    with suppress(FileNotFoundError):
        return machine.file(HEALTH).read_text()
    return "no file"


def serving(machine) -> int:
    """Return the serving worker's PID on the host; older workers may still drain."""
    answer = machine.ask_haproxy("show info")
    return machine.outside_pid(int(next(line for line in answer.splitlines() if line.startswith("Pid: "))[5:]))


def services(machine, program: str):
    """Run a program with the agent's `services` on the machine, and return its result."""
    lines = (
        "import json, signal, sys",
        "from pathlib import Path",
        "from amphora_agent.paths import Paths",
        "from amphora_agent.services.connect import connect_service_manager",
        "from amphora_agent.services.control import ServicePolicy",
        "services = connect_service_manager('systemd', Paths())",
        f"said = {program}",
        "print(json.dumps(said, default=vars))",
    )
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", "\n".join(lines)]
    return json.loads(machine.run(*command))


def test_serves(machine, place):
    assert place.thread("cl").run(get)[0] == 200
    assert machine.run("systemctl", "is-active", AGENT).strip() == "active"
    assert machine.run("systemctl", "--failed", "--quiet", "--plain", "--no-legend") == ""


def test_a_killed_agent_restarts_alone(machine, place):
    before = {name: machine.pid(name) for name in ("haproxy", "responder", "health-watcher", "agent")}
    assert None not in before.values()
    with Client(place) as client:
        os.kill(before["agent"], signal.SIGKILL)
        eventually(lambda: machine.pid("agent") not in (None, before["agent"]), "systemd starts another agent")
        eventually(machine.answers, "the agent answers", 120.0)
        client.hears("m1")
    assert client.failures == []
    assert {name: machine.pid(name) for name in ("haproxy", "responder", "health-watcher")} == {
        name: before[name] for name in ("haproxy", "responder", "health-watcher")
    }
    assert push(machine, text(listener(["m1", "m3"])))["how"] == "runtime"


def test_an_agent_that_hangs_is_restarted(machine):
    """The timer of the agent sends SIGALRM, here sent by the test."""
    os.kill(agent := machine.pid("agent"), signal.SIGALRM)
    eventually(lambda: machine.pid("agent") not in (None, agent), "another agent starts")
    eventually(machine.answers, "the new agent answers", 120.0)
    assert "most recent call first" in machine.run("journalctl", "--unit", AGENT, "--output=cat")


def test_an_agent_that_always_exits_is_restarted_with_pauses(machine):
    """systemd never gives up, and never restarts an agent without a pause."""
    assert "StartLimitIntervalUSec=0" in machine.run("systemctl", "show", AGENT)
    begin = time.monotonic()
    for _ in range(3):
        os.kill(agent := machine.pid("agent"), signal.SIGKILL)
        eventually(lambda agent=agent: machine.pid("agent") not in (None, agent), "another agent starts")
    assert time.monotonic() - begin > 3 * 0.5
    eventually(machine.answers, "the new agent answers", 120.0)


@pytest.mark.parametrize("alone", [False, True], ids=["agent runs", "agent is stopped"])
def test_a_killed_haproxy_is_restarted(machine, place, alone, record_property):
    agent, old = machine.pid("agent"), machine.pid("haproxy")
    workers = children(old)
    if alone:
        os.kill(agent, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        os.kill(old, signal.SIGKILL)
        while said(machine) != "1" and time.monotonic() < begin + 10:
            time.sleep(0.0002)
        seconds = time.monotonic() - begin
        record_property("seconds_to_the_file", seconds)
        assert said(machine) == "1" or machine.pid("haproxy") not in (None, old)
        eventually(lambda: machine.pid("haproxy") not in (None, old), "systemd starts another HAProxy")
        eventually(lambda: said(machine) == "0", "HAProxy answers")
        assert not any(map(alive, workers))
        assert place.thread("cl").run(get)[0] == 200
    finally:
        os.kill(agent, signal.SIGCONT)
    # A few milliseconds on an idle machine, more on a busy one.
    assert seconds < 2.0


def test_haproxy_and_its_watcher_end_together(machine):
    old, watcher = machine.pid("haproxy"), machine.pid("health-watcher")
    os.kill(watcher, signal.SIGSTOP)  # the watcher notices nothing
    os.kill(old, signal.SIGKILL)
    eventually(lambda: said(machine) == "1", "the script of the unit reports the end")
    eventually(lambda: machine.pid("haproxy") not in (None, old), "systemd starts another HAProxy")
    os.kill(watcher, signal.SIGKILL)
    eventually(lambda: said(machine) == "0", "the new watcher reports that HAProxy answers")


def test_a_frozen_haproxy(machine):
    worker = serving(machine)
    os.kill(worker, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        eventually(lambda: said(machine) == "1", "the file reports the freeze")
        assert time.monotonic() - begin > 0.4  # a short silence is no freeze
    finally:
        os.kill(worker, signal.SIGCONT)
    eventually(lambda: said(machine) == "0", "HAProxy answers again")


def test_an_unwanted_haproxy_is_not_reported_missing(machine):
    push(machine, None)
    assert machine.pid("haproxy") is None
    time.sleep(0.3)  # the watcher checks twice in this time
    assert said(machine) == "0"
    push(machine, text(listener(["m1"])))
    assert machine.pid("haproxy") is not None


def test_held_connections_outlive_the_agent(machine, place):
    """The traffic of a replaced worker is counted until its end, also if the agent is killed meanwhile."""

    def begin():
        opened = socket.create_connection((VIP, 80), 30)
        opened.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")  # an incomplete request
        return opened

    held = place.thread("cl").run(begin)
    try:
        old = children(machine.pid("haproxy"))
        push(machine, text(listener(["m1"], extra="    timeout queue 7s\n")))
        assert all(map(alive, old))
        count = ("systemctl", "show", "--property=NFileDescriptorStore", "--value", AGENT)
        assert int(machine.run(*count)) >= 1
        agent = machine.pid("agent")
        os.kill(agent, signal.SIGKILL)
        eventually(lambda: not alive(agent), "the agent is dead")
        eventually(machine.answers, "another agent answers", 120.0)
        assert int(machine.run(*count)) >= 1
        assert all(map(alive, old))
    finally:
        held.close()
    eventually(lambda: int(machine.run(*count)) == 0, "the new agent has closed the connections", 60.0)
    eventually(lambda: not any(map(alive, old)), "the old worker has ended", 60.0)


def test_keepalived_follows_the_state_of_haproxy(machine):
    """There is no partner. The test checks in which states the amphora holds and releases the VIP."""
    vrrp = {
        "interface": "eth1",
        "router_id": 7,
        "priority": 200,
        "advert_interval": 0.3,
        "local": {"name": machine.id, "address": FIXED},
        "peers": [{"name": str(uuid.uuid4()), "address": "198.51.100.12"}],
    }

    def held() -> bool:
        return f" {VIP}/" in machine.run("ip", "-n", "amphora-haproxy", "-4", "addr", "show", "dev", "eth1")

    try:
        push(machine, text(listener(["m1", "m2"])), vrrp=vrrp)
        eventually(held, "the amphora has the VIP")
        worker = serving(machine)
        os.kill(worker, signal.SIGSTOP)
        eventually(lambda: not held(), "an amphora that does not serve releases the VIP")
        os.kill(worker, signal.SIGCONT)
        eventually(held, "the amphora has the VIP again")
        parent, haproxy = machine.pid("keepalived"), machine.pid("haproxy")
        os.kill(parent, signal.SIGKILL)
        eventually(lambda: machine.pid("keepalived") not in (None, parent), "keepalived is started again")
        eventually(held, "the amphora has the VIP")
        assert machine.pid("haproxy") == haproxy
    finally:
        push(machine, text(listener(["m1", "m2"])))
    assert machine.pid("keepalived") is None


# -- permissions ----------------------------------------------------------------------------------------------------

NOT_ROOT = {"responder": ["NET_RAW"], "checker": ["NET_ADMIN", "NET_RAW"]}
# Numbers of capabilities(7).
NUMBERS = {"NET_ADMIN": 12, "NET_RAW": 13}


def rights(pid: int) -> dict[str, str]:
    """Return the kernel's status of a process: users, capabilities, filters."""
    lines = (line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: said.strip() for name, said in (line for line in lines if len(line) == 2)}


def monitor() -> dict:
    nothing = dict.fromkeys(("method", "path", "host", "version"))
    times = dict.fromkeys(("interval", "timeout", "rise", "fall"), 1)
    return {"id": name_of("monitor"), "type": "UDP-CONNECT", **times, **nothing, "codes": []}


@pytest.fixture
def datagrams(machine):
    """Return a UDP listener that is served beside the one of HAProxy."""
    server = UdpMember(machine.network.thread("mem"), "m1", MEMBERS["m1"])
    try:
        wanted = virtual_server(member("m1", MEMBERS["m1"]), monitor=monitor())
        push(machine, text(listener(["m1", "m2"])), virtual_servers=[wanted])
        yield wanted
    finally:
        push(machine, text(listener(["m1", "m2"])))
        server.close()


def test_each_daemon_has_no_more_rights_than_it_needs(machine, datagrams):
    for service in ("haproxy", "responder", "checker", "health-watcher", "agent"):
        found = rights(machine.pid(service))
        assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2"), service
        assert int(found["CapBnd"], 16) < (1 << 25), service  # higher numbers are time, devices, audit
        user = machine.run("getent", "passwd", f"amphora-{service}", check=False)
        assert found["Uid"].split()[0] == (user.split(":")[2] if service in NOT_ROOT else "0"), service
    for service, capabilities in NOT_ROOT.items():
        found = rights(machine.pid(service))
        has = sum(1 << NUMBERS[one] for one in capabilities)
        assert {int(found[kind], 16) for kind in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {has}, service
    watcher = rights(machine.pid("health-watcher"))
    assert {watcher[kind] for kind in ("CapEff", "CapBnd", "CapAmb")} == {"0" * 16}


def test_checks_and_metrics_without_root(machine, place, datagrams):
    """The checker finds a member, UDP is served, and the responder exports metrics of both daemons."""
    listed = machine.call("GET", "/v2/diagnostics")[1]["virtual servers"]["listeners"]
    assert list(listed) == [datagrams["id"]]

    def up() -> bool:
        found = machine.call("GET", "/v2/diagnostics")[1]["virtual servers"]["listeners"][datagrams["id"]]
        return set(found["pool"]["members"].values()) == {"UP"}

    eventually(up, "the checker finds the member")

    def ask() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(5)
            client.sendto(b"x", (VIP, datagrams["port"]))
            return client.recv(100).decode()

    assert place.thread("cl").run(ask).startswith("m1 ")
    told = machine.run(
        *("ip", "netns", "exec", "amphora-haproxy", sys.executable, "-c"),
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9101/metrics').read().decode())",
    )
    assert f'listener="{datagrams["id"]}"' in told
    assert "octavia_loadbalancer_max_connections" in told


def test_a_confined_daemon_cannot_change_the_machine(machine):
    """A daemon without an entry in CONFINEMENTS can write only to the run directory."""
    tried = (
        "import json, os, socket",
        "said = {}",
        "def attempt(name, what):",
        "    try:",
        "        what(); said[name] = 'done'",
        "    except OSError as error:",
        "        said[name] = type(error).__name__",
        "for place in ('/etc', '/var/lib/amphora-agent', '/usr'):",
        "    attempt(place, lambda: open(place + '/confined', 'w').close())",
        "attempt('chroot', lambda: os.chroot('/'))",
        "attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
        "attempt('internet', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))",
        "attempt('user', lambda: os.setuid(1))",
        "json.dump(said, open('/run/amphora-agent/confined', 'w'))",
        "import time; time.sleep(1000)",
    )
    argv = [sys.executable, "-c", "\n".join(tried)]
    services(machine, f"services.start('confined', {argv!r}, inner=False)")
    file = machine.file("/run/amphora-agent/confined")
    eventually(lambda: file.exists() and file.read_text().endswith("}"), "the program has tried all actions")
    assert "done" not in json.loads(file.read_text()).values()
    services(machine, "services.stop('confined')")


# -- services without the agent -------------------------------------------------------------------------------------


def test_arguments_arrive_as_they_are(machine):
    argv = [sys.executable, "-c", PROGRAM, *HOSTILE]
    status = services(machine, f"services.start('hostile', {argv!r}, inner=True)")
    assert status["pid"] is not None
    file = machine.file("/run/amphora-agent/hostile")
    eventually(lambda: file.exists() and file.read_text().endswith("]"), "the program has written its arguments")
    assert json.loads(file.read_text()) == HOSTILE
    inner = machine.run("stat", "--dereference", "--format=%i", "/run/netns/amphora-haproxy")
    assert machine.run("stat", "--dereference", "--format=%i", f"/proc/{status['pid']}/ns/net") == inner
    limits = machine.file(f"/proc/{status['pid']}/limits").read_text()
    # As many as this process's own limits allow.
    most = min(1048576, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3] == str(most)
    # A container may not set this, a machine may.
    assert machine.run("systemctl", "show", "--property=OOMScoreAdjust", "--value", "amphora-hostile").strip() == "-900"
    services(machine, "services.stop('hostile')")
    assert services(machine, "services.status('hostile')") == {
        "pid": None,
        "starts": 1,
        "last_exit": -signal.SIGTERM,
        "wanted": False,
    }


def test_the_reported_states_of_a_daemon(machine):
    """systemd's units have the same states as the supervisor of the namespaces lab."""
    assert services(machine, "services.status('life')") is None
    assert services(machine, "services.log('life')") == []
    sleep = "['sleep', '1000']"
    first = services(machine, f"services.start('life', {sleep}, inner=False)")
    assert (first["starts"], first["last_exit"], first["wanted"]) == (1, None, True)
    assert services(machine, f"services.start('life', {sleep}, inner=False)") == first
    with pytest.raises(AssertionError, match="it runs with other arguments"):
        services(machine, "services.start('life', ['sleep', '2000'], inner=False)")
    services(machine, "services.dismiss('life')")
    assert services(machine, "services.status('life')") == {**first, "wanted": False}
    assert services(machine, f"services.start('life', {sleep}, inner=False)") == first
    services(machine, "services.dismiss('life')")
    services(machine, "services.signal('life', signal.SIGTERM)")
    eventually(lambda: services(machine, "services.status('life')")["pid"] is None, "the daemon has ended")
    time.sleep(0.5)  # systemd would restart the daemon at once
    ended = services(machine, "services.status('life')")
    assert ended == {"pid": None, "starts": 1, "last_exit": -signal.SIGTERM, "wanted": False}
    # Other arguments are accepted, because the daemon does not run.
    again = services(machine, "services.start('life', ['sleep', '2000'], inner=False)")
    assert (again["starts"], again["last_exit"], again["wanted"]) == (2, None, True)
    os.kill(machine.pid("life"), signal.SIGKILL)
    eventually(lambda: services(machine, "services.status('life')")["starts"] == 3, "the daemon is started again")
    services(machine, "services.stop('life')")


def test_a_crashing_daemon_is_restarted_with_back_off(machine):
    """Restarts have growing intervals, and the last output is readable."""
    argv = [sys.executable, "-c", "print('out of luck'); raise SystemExit(7)"]
    services(machine, f"services.start('unlucky', {argv!r}, inner=False)")
    eventually(lambda: services(machine, "services.status('unlucky')")["starts"] >= 4, "systemd restarts the daemon")
    rests = "services.status('unlucky')"
    status = eventually(lambda: (found := services(machine, rests))["pid"] is None and found, "the daemon waits")
    assert (status["last_exit"], status["wanted"]) == (7, True)
    # Starts at 0, 0.1, 0.3, 0.7, 1.5, 3.1 s and so on. Without a back-off there would be hundreds.
    assert status["starts"] < 20
    assert "out of luck" in services(machine, "services.log('unlucky')")
    services(machine, "services.stop('unlucky', missed=True)")
    assert services(machine, "services.status('unlucky')")["wanted"] is False
    assert services(machine, "services.start('unlucky', ['sleep', '9'], inner=False)")["pid"] is not None
    services(machine, "services.stop('unlucky')")


def test_the_restart_delay_of_a_daemon(machine):
    leftover = machine.file("/run/leftover")
    policy = (
        "ServicePolicy(health=Path('/run/amphora-agent/patient.health'), restart_delay=2.5,"
        " leftovers=(Path('/run/leftover'),))"
    )
    leftover.write_text("")
    start = f"services.start('patient', ['sleep', '1000'], inner=False, policy={policy})"
    services(machine, start)
    assert not leftover.exists()
    health = machine.file("/run/amphora-agent/patient.health")
    eventually(lambda: health.exists() and health.read_text() == "0", "a daemon without a probe is healthy")
    leftover.write_text("")
    begin = time.monotonic()
    os.kill(machine.pid("patient"), signal.SIGKILL)
    eventually(lambda: health.read_text() == "1", "the daemon is reported missing")
    status = services(machine, start)  # a request does not shorten the delay
    assert (status["pid"], status["wanted"], status["starts"]) == (None, True, 1)
    eventually(lambda: services(machine, "services.status('patient')")["pid"] is not None, "the daemon runs again")
    assert time.monotonic() - begin >= 2.5
    eventually(lambda: health.read_text() == "0", "the daemon is reported healthy", 120.0)
    assert not leftover.exists()
    services(machine, "services.stop('patient', missed=True)")
    assert health.read_text() == "1"
    services(machine, "services.stop('patient')")
    eventually(lambda: health.read_text() == "0", "an unwanted daemon is not reported missing")


def test_a_daemon_stopped_by_the_operator(machine):
    services(machine, "services.start('halted', ['sleep', '1000'], inner=False)")
    machine.run("systemctl", "stop", "amphora-halted.service")
    status = services(machine, "services.status('halted')")
    assert (status["pid"], status["wanted"]) == (None, False)


def test_a_missing_program_is_reported(machine):
    with pytest.raises(AssertionError, match="there is no program nonsense"):
        services(machine, "services.start('nothing', ['nonsense'], inner=False)")


# -- the machine ----------------------------------------------------------------------------------------------------


def test_a_rebooted_machine_serves_without_a_push(machine, place):
    """The machine serves its confirmed bundle again."""
    machine.shut_down()
    place.unplug()
    place.plug()
    machine.start()
    eventually(machine.answers, "the agent answers", 120.0)
    eventually(lambda: said(machine) == "0" and machine.pid("haproxy"), "HAProxy serves", 60.0)

    def serves() -> bool:
        with suppress(OSError):
            return place.thread("cl").run(get)[0] == 200
        return False

    eventually(serves, "the machine serves")
