# SPDX-License-Identifier: Apache-2.0
"""Manual changes of an amphora are repaired and reported; clients are served if possible."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from amphora_lab import FIXED, MAC, VIP, VIP6, Amphora, Client, alive, eventually, get
from configuration_text import LISTENER, MEMBER_IDS, POOL, listener, text

pytestmark = pytest.mark.root
INTERVAL = 0.2
BACKEND = f"{POOL}:{LISTENER}"
ONE, TWO = (f"{BACKEND}/{MEMBER_IDS[name]}" for name in ("m1", "m2"))
ALLOWED = [{"port": 80, "networks": ["198.51.100.0/24", "2001:db8:1::/64"]}]
TEXT = text(listener(["m1", "m2"]))


class Audited(Amphora):
    """An amphora whose agent audits continuously."""

    def inside(self, command: str) -> None:
        self.said(command)

    def said(self, command: str) -> str:
        place = f"--net=/proc/{self.init()}/root/run/netns/amphora-haproxy"
        return subprocess.run(
            ["nsenter", place, "--", *command.split()], check=True, capture_output=True, text=True
        ).stdout

    def drift(self):
        return self.call("GET", "/v2/info")[1]["drift"]

    def mends(self, word: str, since: int) -> dict:
        """Wait until a finding with this word is repaired and no finding is left."""

        def mended():
            found = self.drift()
            last = found["last"]
            return (
                last if found["counts"].get(word, 0) > since and last["repaired"] and not found["unrepaired"] else None
            )

        return eventually(mended, f"the drift of {word} is repaired")

    def counted(self, word: str) -> int:
        return self.drift()["counts"].get(word, 0)

    def looks(self, more: int = 3) -> None:
        """Wait for this number of audits."""
        before = self.drift()["checks"]
        eventually(lambda: self.drift()["checks"] >= before + more, "the agent audits")

    def kill_agent(self) -> None:
        agent = self.agent_pid()
        os.kill(agent, signal.SIGKILL)
        eventually(lambda: not alive(agent), "the agent has ended")
        eventually(self.answers, "the agent answers")

    def edit(self, name: str, before: str, after: str, *, rename: bool = False) -> None:
        file = self.var / name
        content = file.read_text()
        assert before in content
        if rename:
            other = self.var / "by-hand"
            other.write_text(content.replace(before, after))
            other.replace(file)
        else:
            file.write_text(content.replace(before, after))


@pytest.fixture(scope="module")
def machine(network, authority, tmp_path_factory):
    network.plug()
    made = Audited(network, tmp_path_factory.mktemp("audited"), authority, audit=INTERVAL)
    try:
        made.start()
        eventually(made.answers, "the agent answers")
        yield made
    finally:
        made.power_off()
        network.unplug()


@pytest.fixture
def audited(machine):
    """A serving amphora without drift."""
    state = machine.call("GET", "/v2/bundle")[1]
    status, answer = machine.push((state["generation"] or 0) + 1, TEXT, allowed=ALLOWED)
    assert status == 200, answer
    eventually(lambda: machine.network.thread("cl").run(get)[0] == 200, "the amphora serves")
    eventually(lambda: not machine.drift()["unrepaired"], "the drift of an earlier test is repaired")
    return machine


# Manual change, and its word in the report.
BY_HAND = {
    "file-in-place": (lambda one: one.edit("haproxy.cfg", "timeout client 10s", "timeout client 1s"), "haproxy.cfg"),
    "file-replaced": (
        lambda one: one.edit("haproxy.cfg", "retries 3", "retries 1", rename=True),
        "haproxy.cfg",
    ),
    "file-head": (lambda one: one.edit("haproxy.cfg", "    localpeer", "    # mine\n    localpeer"), "haproxy.cfg"),
    "file-removed": (lambda one: (one.var / "haproxy.cfg").unlink(), "haproxy.cfg"),
    "machine-file": (lambda one: (one.var / "machine.cfg").write_text("# mine\n"), "machine.cfg"),
    "weight": (lambda one: one.ask_haproxy(f"set server {ONE} weight 7"), "haproxy"),
    "maintenance": (lambda one: one.ask_haproxy(f"set server {ONE} state maint"), "haproxy"),
    "drain": (lambda one: one.ask_haproxy(f"set server {ONE} state drain"), "haproxy"),
    "address-of-member": (lambda one: one.ask_haproxy(f"set server {ONE} addr 198.51.100.103 port 80"), "haproxy"),
    "listener-limit": (lambda one: one.ask_haproxy(f"set maxconn frontend {LISTENER} 77"), None),
    "default-route": (lambda one: one.inside("ip route del default"), "route"),
    "table-route": (lambda one: one.inside("ip route flush table 1"), "route"),
    "strange-route": (lambda one: one.inside("ip route add 192.0.2.0/24 via 198.51.100.1"), "route"),
    "rule": (lambda one: one.inside(f"ip rule del from {VIP} lookup 1"), "rule"),
    "rule6": (lambda one: one.inside(f"ip -6 rule del from {VIP6} lookup 1"), "rule"),
    "strange-rule": (lambda one: one.inside("ip rule add from 192.0.2.7 lookup 9"), "rule"),
    "strange-address": (lambda one: one.inside("ip addr add 192.0.2.8/24 dev eth1"), "address"),
    "mtu": (lambda one: one.inside("ip link set eth1 mtu 1400"), "interface"),
    "firewall-flushed": (lambda one: one.inside("nft flush ruleset"), "firewall"),
    "firewall-opened": (lambda one: one.inside("nft flush chain inet amphora beginning"), "firewall"),
}
BY_HAND = {name: case for name, case in BY_HAND.items() if case[1] is not None}
NOTICED = {
    "vip": (lambda one: one.inside(f"ip addr del {VIP}/32 dev eth1"), "address"),
    "vip6": (lambda one: one.inside(f"ip addr del {VIP6}/128 dev eth1"), "address"),
    "fixed": (lambda one: one.inside(f"ip addr del {FIXED}/24 dev eth1"), "address"),
    "down": (lambda one: one.inside("ip link set eth1 down"), "interface"),
    "renamed": (lambda one: one.inside("ip link set eth1 down name mine"), "interface"),
    "moved-out": (lambda one: one.inside(f"ip link set eth1 netns {one.init()}"), "interface"),
    "listener": (lambda one: one.ask_haproxy(f"disable frontend {LISTENER}"), "haproxy"),
    "member-removed": (lambda one: one.ask_haproxy(f"set server {ONE} state maint; del server {ONE}"), "haproxy"),
}


# One of each kind; the others are variants.
EVERY_RUN = {
    "file-replaced",
    "file-removed",
    "weight",
    "address-of-member",
    "default-route",
    "rule",
    "firewall-flushed",
}


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one in EVERY_RUN else pytest.mark.extended) for one in BY_HAND]
)
def test_manual_changes_are_repaired_during_service(audited, case):
    do, word = BY_HAND[case]
    before = audited.counted(word)
    with Client(audited.network) as client:
        do(audited)
        found = audited.mends(word, before)
        client.hears("m1")
        client.hears("m2")
    assert client.failures == []
    assert word in found["kinds"]
    assert found["sentences"]
    again = audited.push(audited.call("GET", "/v2/bundle")[1]["generation"], TEXT, allowed=ALLOWED)
    assert again[1]["how"] == "unchanged", again


@pytest.mark.parametrize("case", list(NOTICED))
def test_changes_that_stop_the_service_are_repaired(audited, case):
    do, word = NOTICED[case]
    before = audited.counted(word)
    do(audited)
    audited.mends(word, before)
    with Client(audited.network) as client:
        client.hears("m1")
        client.hears("m2")
    again = audited.push(audited.call("GET", "/v2/bundle")[1]["generation"], TEXT, allowed=ALLOWED)
    assert again[1]["how"] == "unchanged", again


def test_a_manual_reload_with_another_file_is_detected_after_the_file_is_restored(audited):
    before = audited.counted("haproxy.cfg")
    audited.looks()
    file = audited.var / "haproxy.cfg"
    right = file.read_text()
    agent = audited.agent_pid()
    os.kill(agent, signal.SIGSTOP)
    try:
        file.write_text(right.replace("timeout client 10s", "timeout client 3s"))
        served_by = info_pid(audited)
        audited.supervisor(op="signal", name="haproxy", signal=int(signal.SIGUSR2))
        eventually(lambda: info_pid(audited) not in (None, served_by), "HAProxy has read the other file")
        file.write_text(right)
    finally:
        os.kill(agent, signal.SIGCONT)
    audited.mends("haproxy.cfg", before)


def info_pid(amphora) -> str | None:
    try:
        said = amphora.ask_haproxy("show info")
    except OSError:
        return None
    return next((line for line in said.splitlines() if line.startswith("Pid: ")), None)


def test_a_restarted_agent_serves_the_confirmed_text_after_a_repair(audited):
    """HAProxy's file and the confirmed text are one file with two names."""
    before = audited.counted("haproxy.cfg")
    audited.edit("haproxy.cfg", "timeout client 10s", "timeout client 2s")
    audited.mends("haproxy.cfg", before)
    generation = audited.call("GET", "/v2/bundle")[1]["generation"]
    audited.kill_agent()
    assert audited.call("GET", "/v2/bundle")[1]["generation"] == generation
    assert audited.push(generation, TEXT, allowed=ALLOWED)[1]["how"] == "unchanged"


def test_changes_without_an_agent_are_detected(audited):
    """No other file has the confirmed text: the amphora reports no generation, and needs a push."""
    generation = audited.call("GET", "/v2/bundle")[1]["generation"]
    agent = audited.agent_pid()
    os.kill(agent, signal.SIGSTOP)
    audited.edit("haproxy.cfg", "timeout client 10s", "timeout client 4s")
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: not alive(agent), "the agent has ended")
    eventually(audited.answers, "the agent answers")
    assert audited.call("GET", "/v2/bundle")[1]["generation"] is None
    assert audited.push(generation, TEXT, allowed=ALLOWED)[0] == 200
    assert "timeout client 4s" not in (audited.var / "haproxy.cfg").read_text()


def test_a_missing_interface_is_reported_until_it_returns(audited, receiver_of):
    receiver = receiver_of(audited)
    audited.network.unplug()
    heard = eventually(lambda: "interface" in receiver.next().document.get("drift", []) or None, "drift is reported")
    assert heard
    said = receiver.next().document
    assert said["drift"] == ["interface"]
    assert said["drifted"]["repaired"] is False
    assert any(MAC in sentence for sentence in said["drifted"]["sentences"])
    assert audited.drift()["unrepaired"] == ["interface"]
    audited.network.plug()
    eventually(lambda: "drift" not in receiver.next().document, "heartbeats report no drift")
    eventually(lambda: audited.network.thread("cl").run(get)[0] == 200, "the amphora serves")


@pytest.mark.parametrize("how", ["written", "removed"])
def test_a_changed_file_is_reported_and_repaired_by_the_same_push(audited, how):
    name = f"tls/{LISTENER}/policy.pem"
    wanted = text(listener(["m1", "m2"]))
    generation = audited.call("GET", "/v2/bundle")[1]["generation"] + 1
    body = audited.bundle(generation, wanted, {name: "/a b\n"}, allowed=ALLOWED)
    status, answer = audited.call("PUT", "/v2/bundle", body)
    assert status == 200, answer
    root = Path(f"/proc/{audited.init()}/root/run/amphora-agent/files")
    (file,) = (one for one in root.rglob("*") if one.is_file())
    if how == "written":
        file.write_text("/a b\n/c d\n", encoding="ascii")
    else:
        file.unlink()
    with Client(audited.network) as client:
        eventually(lambda: audited.drift()["unrepaired"] == ["files"], "the agent reports the file")
        status, answer = audited.call("PUT", "/v2/bundle", body)
        assert (status, answer["how"]) == (200, "unchanged"), answer
        eventually(lambda: audited.drift()["unrepaired"] == [], "the agent reports no drift")
        client.hears("m1")
    assert client.failures == []


def test_pushes_and_crashes_are_no_drift(audited):
    """Pushes, reloads and kills of HAProxy or the agent are transitions, not drift."""
    before = audited.drift()["counts"]
    generation = audited.call("GET", "/v2/bundle")[1]["generation"]
    for number in range(1, 13):
        members = ["m1", "m2"] if number % 2 else ["m1"]
        extra = f"    fullconn {number}\n" if number % 3 == 0 else ""
        allowed = ALLOWED if number % 4 else []
        status, answer = audited.push(generation + number, text(listener(members, extra=extra)), allowed=allowed)
        assert status == 200, answer
    audited.looks()
    killed = audited.status("haproxy")["pid"]
    os.kill(audited.outside_pid(killed), signal.SIGKILL)
    eventually(lambda: audited.status("haproxy")["pid"] not in (None, killed), "HAProxy is started again")
    audited.looks()
    assert audited.drift()["counts"] == before
    audited.kill_agent()
    audited.looks()
    assert audited.drift() | {"checks": 0} == {"last": None, "unrepaired": [], "counts": {}, "checks": 0}


def test_a_reboot_is_no_drift(audited):
    generation = audited.call("GET", "/v2/bundle")[1]["generation"]
    audited.power_off()
    audited.network.unplug()
    audited.start()
    eventually(audited.answers, "the agent answers")
    audited.network.plug()
    eventually(lambda: serves(audited), "the confirmed generation is served")
    audited.looks()
    assert audited.call("GET", "/v2/bundle")[1]["generation"] == generation
    assert audited.drift()["unrepaired"] == []


def serves(amphora) -> bool:
    try:
        return amphora.network.thread("cl").run(get, VIP, 80, "/", 1.0)[0] == 200
    except OSError:
        return False


def test_the_drift_report_names_the_configuration(audited):
    status, said = audited.call("GET", "/v2/configuration")
    assert status == 200
    assert said["haproxy"] == TEXT
    assert said["generation"] == said["bundle"]["generation"]
    assert [one["name"] for one in said["interfaces"]] == ["eth1"]
    assert "haproxy" not in said["bundle"]
