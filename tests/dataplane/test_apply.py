# SPDX-License-Identifier: Apache-2.0
"""The agent applies bundles: results, refusals, and repeated pushes."""

from __future__ import annotations

import json
import socket
import subprocess

import pytest
from amphora_lab import FIXED, MAC, VIP, VIP6, Client, eventually, get
from configuration_text import CHECK, LISTENER, MEMBER_IDS, POOL, SECOND, listener, text

pytestmark = pytest.mark.root
RULE = "7a9d0c1e-0000-4000-8000-000000000007"


def fetch(amphora, *args, **kwargs):
    return amphora.network.thread("cl").run(get, *args, **kwargs)


def test_the_first_bundle_starts_haproxy(amphora):
    status, answer = amphora.push(1, text(listener(["m1", "m2"])))
    assert status == 200, answer
    assert (answer["generation"], answer["how"]) == (1, "start")
    assert answer["reason"]
    assert answer["loaded"] == {"listeners": [LISTENER], "members": 2}
    for address in (VIP, VIP6):
        assert {fetch(amphora, address)[1] for _ in range(8)} == {"m1", "m2"}
    status, answer = amphora.call("GET", "/v2/bundle")
    assert (status, answer["generation"], len(answer["digest"])) == (200, 1, 64)
    status, answer = amphora.call("GET", "/v2/info")
    assert answer["amphora_id"] == amphora.id
    assert f"\nVersion: {answer['haproxy_version']}\n" in amphora.ask_haproxy("show info")
    assert answer["hostname"] == f"amphora-{amphora.id[:8]}"
    assert "bundle-1" in answer["capabilities"]
    status, answer = amphora.call("GET", "/v2/diagnostics")
    assert status == 200
    assert LISTENER in answer["haproxy.cfg"]
    assert answer["interfaces"][0]["routes"] == [{"destination": "0.0.0.0/0", "gateway": "198.51.100.1"}]
    assert "BEGIN" not in json.dumps(answer)


def test_the_same_generation_again_is_unchanged_and_an_older_one_stale(amphora):
    amphora.push(5, text(listener(["m1"])))
    status, answer = amphora.push(5, text(listener(["m1"])))
    assert (status, answer["how"], answer["reason"]) == (200, "unchanged", "")
    for generation, content in ((4, ["m1"]), (5, ["m2"])):
        status, answer = amphora.push(generation, text(listener(content)))
        assert (status, answer["generation"]) == (409, 5)
    status, answer = amphora.push(6, text(), amphora_id=amphora.load_balancer_id)
    assert status == 409


def test_an_invalid_bundle_is_refused(amphora):
    status, answer = amphora.call("PUT", "/v2/bundle", b"{not json")
    assert status == 400
    assert answer["error"]["wanted"] == "read the bundle"
    status, answer = amphora.push(1, text(), surprise=1)
    assert status == 400
    assert "surprise" in answer["error"]["happened"]
    assert amphora.call("GET", "/v2/nothing")[0] == 404


def test_a_broken_configuration_is_refused_and_the_old_one_serves(amphora):
    amphora.push(1, text(listener(["m1"])))
    with Client(amphora.network) as client:
        broken = {
            MEMBER_IDS["m2"]: text(listener(["m1", "m2"], m2="chek")),
            POOL: text(listener(["m1"], extra="    balance nonsense\n")),
            LISTENER: text(listener(["m1"]).replace("    default_backend", "    no_such_word")),
            RULE: text(listener(["m1"]).replace("    default_b", f"    acl {RULE} path_reg (\n    default_b")),
        }
        for line in (
            "http-request return file /etc/amphora-agent/server.pem",
            "bind unix@/run/x",
            "acl a src -f /etc/x",
        ):
            status, answer = amphora.push(
                2, text(listener(["m1"]).replace("    default_b", f"    {line}\n    default_b"))
            )
            assert (status, answer["object_id"]) == (422, LISTENER)
            assert f"'{line.partition(' ')[0]}" in answer["error"]["happened"]
        for object_id, wrong in broken.items():
            status, answer = amphora.push(2, wrong)
            assert status == 422, answer
            assert answer["object_id"] == object_id
            assert answer["error"]["happened"].startswith("line ")
            assert "/var/" not in answer["error"]["happened"]
        status, answer = amphora.push(2, "global\n    maxconn 1\n" + text(listener(["m1"])))
        assert status == 422
        assert "'global'" in answer["error"]["happened"]
        client.hears("m1")
    assert client.failures == []
    status, answer = amphora.push(2, text(listener(["m1", "m2"])))
    assert (status, answer["how"]) == (200, "runtime")


def test_members_are_added_and_removed_without_reload_or_failed_request(amphora):
    amphora.push(1, text(listener(["m1"])))
    master = amphora.status("haproxy")["pid"]
    worker = amphora.ask_haproxy("show info").partition("\nPid: ")[2].split()[0]
    with Client(amphora.network) as client:
        client.hears("m1")
        status, answer = amphora.push(2, text(listener(["m1", "m2"])))
        assert (status, answer["how"]) == (200, "runtime"), answer
        assert MEMBER_IDS["m2"] in answer["reason"]
        client.hears("m2")
        steps = [
            text(listener(["m1", "m2", "m3"], m2=f"weight 5 {CHECK}")),
            text(listener(["m1", "m2", "m3"], m2=f"weight 5 {CHECK} disabled")),
            text(listener(["m2", "m3"], m2=f"weight 1 {CHECK}")),
        ]
        for generation, wanted in enumerate(steps, start=3):
            status, answer = amphora.push(generation, wanted)
            assert (status, answer["how"]) == (200, "runtime"), answer
        before = client.answers["m1"]
        client.hears("m2")
        client.hears("m3")
        assert client.answers["m1"] <= before + 2
    assert client.failures == []
    assert amphora.status("haproxy")["pid"] == master
    assert f"\nPid: {worker}\n" in amphora.ask_haproxy("show info")
    # The file on disk has the same changes as the running HAProxy.
    configuration = (amphora.var / "haproxy.cfg").read_text()
    assert MEMBER_IDS["m3"] in configuration
    assert MEMBER_IDS["m1"] not in configuration


def test_a_member_disabled_from_the_start_is_enabled_without_a_reload(amphora):
    off = f"weight 1 {CHECK} disabled"
    amphora.push(1, text(listener(["m1", "m2"], m1=off)))
    assert {fetch(amphora)[1] for _ in range(4)} == {"m2"}
    for generation, keywords, names in ((2, {}, {"m1", "m2"}), (3, {"m1": off}, {"m2"}), (4, {}, {"m1", "m2"})):
        status, answer = amphora.push(generation, text(listener(["m1", "m2"], **keywords)))
        assert (status, answer["how"]) == (200, "runtime"), answer
        assert {fetch(amphora)[1] for _ in range(8)} == names


def test_a_member_with_a_request_in_flight_is_removed_by_a_reload(amphora):
    amphora.push(1, text(listener(["m1"])))
    slow = amphora.network.thread("cl")._thread.submit(get, VIP, 80, "/slow")
    eventually(lambda: ",1," in _sessions(amphora, "m1"), "the request is in flight")
    status, answer = amphora.push(2, text(listener(["m2"])))
    assert (status, answer["how"]) == (200, "reload"), answer
    assert "at run time" in answer["reason"]
    assert slow.result(10) == (200, "m1")
    assert fetch(amphora)[1] == "m2"


def _sessions(amphora, name):
    rows = amphora.ask_haproxy("show stat -1 4 -1").splitlines()
    return next(f",{row.split(',')[4]}," for row in rows if f",{MEMBER_IDS[name]}," in row)


def test_a_new_listener_is_a_reload_without_a_failed_request(amphora):
    amphora.push(1, text(listener(["m1", "m2"])))
    with Client(amphora.network) as client:
        client.hears("m1")
        wanted = text(listener(["m1", "m2"]), listener(["m3"], listener_id=SECOND, port=8080))
        status, answer = amphora.push(2, wanted)
        assert (status, answer["how"]) == (200, "reload"), answer
        assert answer["reason"].startswith(f"frontend {SECOND} added")
        assert answer["loaded"] == {"listeners": sorted([LISTENER, SECOND]), "members": 3}
        assert fetch(amphora, VIP, 8080) == (200, "m3")
        client.hears("m2")
        status, answer = amphora.push(3, text(listener(["m1", "m2"])))
        assert (status, answer["how"]) == (200, "reload")
    assert client.failures == []


def test_a_member_that_is_down_stays_down_over_a_reload(amphora, network):
    amphora.push(1, text(listener(["m1", "m2"])))
    network.stop_member("m1")
    try:
        eventually(lambda: f",{MEMBER_IDS['m1']}," in _down(amphora), "the check fails")
        slow = "weight 3 check inter 60s fall 1 rise 1"
        status, answer = amphora.push(2, text(listener(["m1", "m2"], m1=slow, extra="    fullconn 7\n")))
        assert (status, answer["how"]) == (200, "reload")
        assert f",{MEMBER_IDS['m1']}," in _down(amphora)
    finally:
        network.start_member("m1", "198.51.100.101")


def _down(amphora):
    return "\n".join(row for row in amphora.ask_haproxy("show stat -1 4 -1").splitlines() if ",DOWN," in row)


def test_haproxy_stops_with_the_last_listener(amphora):
    amphora.push(1, text(listener(["m1"])))
    status, answer = amphora.push(2, None)
    assert (status, answer["how"], answer["loaded"]) == (200, "stop", {"listeners": [], "members": 0})
    assert amphora.status("haproxy")["pid"] is None
    with pytest.raises(ConnectionRefusedError):
        fetch(amphora)
    assert amphora.push(3, text(listener(["m1"])))[1]["how"] == "start"


def test_interfaces_follow_the_bundle(amphora):
    amphora.push(1, text(listener(["m1"])))
    eth1 = {"mac": MAC.upper(), "name": "eth2", "mtu": 1400, "addresses": [f"{FIXED}/24"], "vips": [], "routes": []}
    assert amphora.push(2, text(listener(["m1"])), interfaces=[eth1])[0] == 200
    found = amphora.call("GET", "/v2/diagnostics")[1]["interfaces"]
    assert found == [{"name": "eth2", "mac": MAC, "mtu": 1400, "up": True, "addresses": [f"{FIXED}/24"], "routes": []}]
    status, answer = amphora.push(3, text(listener(["m1"])), interfaces=[{**eth1, "mac": "02:00:00:00:5e:99"}])
    assert status == 500
    assert "02:00:00:00:5e:99" in answer["error"]["happened"]
    assert amphora.call("GET", "/v2/diagnostics")[1]["interfaces"] == found
    assert amphora.push(4, None, interfaces=[])[0] == 200
    assert amphora.call("GET", "/v2/diagnostics")[1]["interfaces"] == []
    assert amphora.push(5, text(listener(["m1"])))[0] == 200  # the interface is in the outer namespace
    assert fetch(amphora) == (200, "m1")


def test_manual_changes_are_corrected_by_a_push(amphora):
    amphora.push(1, text(listener(["m1"])))
    assert amphora.push(2, text(listener(["m1"], m1="chek")))[0] == 422
    amphora.ask_haproxy(f"set server {POOL}:{LISTENER}/{MEMBER_IDS['m1']} state maint")
    status, answer = amphora.push(1, text(listener(["m1"])))
    assert (status, answer["how"], answer["reason"]) == (200, "reload", "HAProxy did not run its configuration")
    assert fetch(amphora) == (200, "m1")
    assert amphora.push(1, text(listener(["m1"])))[1]["how"] == "unchanged"


def test_a_new_vip_is_announced(amphora):
    amphora.push(1, None, interfaces=[])
    listening = amphora.network.thread("cl").run(_packets)
    try:
        assert amphora.push(2, text(listener(["m1"])))[0] == 200
        assert amphora.push(3, text(listener(["m1", "m2"])))[0] == 200
        seen = {"arp": 0, "advertisement": 0}
        while frame := _next(listening):
            hardware = bytes.fromhex(MAC.replace(":", ""))
            seen["arp"] += frame[12:14] == b"\x08\x06" and frame[28:32] == frame[38:42] == socket.inet_aton(VIP)
            target = socket.inet_pton(socket.AF_INET6, VIP6)
            # The answer to a solicitation goes to the neighbour; an announcement goes to all nodes.
            to_all = frame[:6] == bytes.fromhex("333300000001") and frame[6:12] == hardware
            seen["advertisement"] += to_all and frame[54:55] == b"\x88" and frame[62:78] == target
    finally:
        listening.close()
    assert seen == {"arp": 2, "advertisement": 1}


def _packets():
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    opened.bind(("eth0", 3))
    opened.settimeout(0.3)
    return opened


def _next(listening):
    try:
        return listening.recv(2048)
    except TimeoutError:
        return b""


def test_members_with_source_ip_persistence_change_at_runtime(amphora):
    def hashed(**ids):
        servers = {name: f"weight 1 {CHECK} id {number}" for name, number in ids.items()}
        return text(listener(ids, extra="    balance source\n    hash-type consistent\n", **servers))

    amphora.push(1, hashed(m1=11))
    with Client(amphora.network) as client:
        client.hears("m1")
        for generation, wanted in enumerate(
            (hashed(m1=11, m2=22), hashed(m1=11), hashed(m1=11, m2=22), hashed(m2=22), hashed(m2=22, m3=11)), start=2
        ):
            status, answer = amphora.push(generation, wanted)
            assert (status, answer["how"]) == (200, "runtime"), answer
    assert client.failures == []
    known = [line.split() for line in amphora.ask_haproxy("show servers state").splitlines() if "198.51.100" in line]
    assert {(row[3], row[2]) for row in known} == {(MEMBER_IDS["m2"], "22"), (MEMBER_IDS["m3"], "11")}


def test_early_changes_are_rolled_back_after_a_refused_check(amphora):
    amphora.push(1, text(listener(["m1"])))
    with Client(amphora.network) as client:
        status, answer = amphora.push(2, text(listener(["m1", "m2", "m3"], m3="chek")))
        assert (status, answer["object_id"]) == (422, MEMBER_IDS["m3"])
        assert amphora.call("GET", "/v2/bundle")[1]["generation"] == 1
        assert MEMBER_IDS["m2"] not in amphora.ask_haproxy("show servers state")
        assert MEMBER_IDS["m2"] not in (amphora.var / "haproxy.cfg").read_text()
        client.hears("m1")
        status, answer = amphora.push(2, text(listener(["m1", "m2"])))
        assert (status, answer["how"]) == (200, "runtime"), answer
        client.hears("m2")
    assert client.failures == []


@pytest.mark.parametrize(
    "change",
    [
        f"addr del {VIP}/32 dev eth1",
        f"addr del {VIP6}/128 dev eth1",
        "addr add 192.0.2.77/24 dev eth1",
        "route del default",
        "link set eth1 down",
        "link set eth1 mtu 1400",
    ],
)
def test_edited_interfaces_are_repaired_with_any_change(amphora, change):
    amphora.push(1, text(listener(["m1"])))
    before = amphora.call("GET", "/v2/diagnostics")[1]["interfaces"]
    # The agent checks all interfaces with each change until its announcements end.
    for generation in (2, 3):
        assert amphora.push(generation, text(listener(["m1", "m2"][: generation - 1])))[0] == 200
    inner = f"/proc/{amphora.init()}/root/run/netns/amphora-haproxy"
    subprocess.run(["nsenter", f"--net={inner}", "ip", *change.split()], check=True)
    assert amphora.call("GET", "/v2/diagnostics")[1]["interfaces"] != before
    status, answer = amphora.push(4, text(listener(["m1"])))
    assert (status, answer["how"]) == (200, "runtime"), answer
    assert amphora.call("GET", "/v2/diagnostics")[1]["interfaces"] == before
    # A check that failed meanwhile has set the member down; the next check sets it up.
    eventually(lambda: fetch(amphora, VIP) == fetch(amphora, VIP6) == (200, "m1"), "the amphora serves both families")
