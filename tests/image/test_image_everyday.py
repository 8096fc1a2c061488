# SPDX-License-Identifier: Apache-2.0
"""The image from a cold boot to serving: one guest, and one load balancer with all kinds of listeners."""

import json
import re
import socket
import ssl
import time

import pytest
from agent_heartbeats import decode
from balanced import VIP, VIP6, listener, load_balancer, member, monitor, pool
from guest_lab import CONTROLLER, HEARTBEATS, TIME_LIMIT
from http_clients import trusting
from wanted import id_of

pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.quiet, pytest.mark.lasts(1200)]
ONE, TWO, TWO6 = "198.51.100.111", "198.51.100.112", "2001:db8:1::112"


# --- the boot ----------------------------------------------------------------------------------------------


def test_a_booted_guest_answers_with_its_own_certificate(first, guest_lab, record_property):
    """`answers` is mutual TLS: the agent has its certificate, key and settings from the config drive."""
    assert first.answers()
    record_property("power-on to agent, seconds", round(first.booted_after, 1))
    told = first.call("GET", "/v2/info")[1]
    assert told["amphora_id"] == first.id


def test_the_agent_refuses_clients_without_a_controller_certificate(first, guest_lab):
    context = ssl.create_default_context(cadata=guest_lab.authority.pem)

    def ask():
        with (
            socket.create_connection((first.address, 9443), TIME_LIMIT) as raw,
            context.wrap_socket(raw, server_hostname=first.id) as secure,
        ):
            secure.sendall(b"GET /v2/info HTTP/1.1\r\nHost: x\r\n\r\n")
            return secure.recv(100)

    with pytest.raises(OSError, match=r"(?i)certificate|alert|reset|eof"):
        guest_lab.thread("control").run(ask)


def test_config_drive_sets_the_identity(first):
    assert first.run("hostname").strip() == f"amphora-{first.id}"
    listed = json.loads(first.run("ip", "-j", "addr", "show", "to", first.address))
    assert [link["mtu"] for link in listed if link.get("addr_info")] == [1500]
    # Keys are in memory only, and for root only.
    assert first.run("stat", "-f", "-c", "%T", "/etc/amphora-agent").strip() == "tmpfs"
    modes = first.shell("stat -c '%n %a %u' /etc/amphora-agent/*").split()
    assert set(modes[1::3]) == {"600"}, modes
    assert set(modes[2::3]) == {"0"}, modes
    assert {"agent.conf", "server.pem", "client_ca.pem", "heartbeat.key"} <= {
        name.rpartition("/")[2] for name in modes[::3]
    }


def test_the_amphora_sends_heartbeats(first, guest_lab):
    def hear():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            opened.bind((CONTROLLER, HEARTBEATS))
            opened.settimeout(TIME_LIMIT)
            return opened.recv(65536)

    beat = decode(guest_lab.thread("control").run(hear), first.key)
    assert str(beat.amphora_id) == first.id


def test_all_services_are_active(first):
    assert first.run("systemctl", "--failed", "--plain", "--no-legend", check=False).strip() == ""


def test_units_are_confined(first):
    """Checks the units of the image, and the units that the agent writes."""
    ours = first.shell("ls /usr/lib/systemd/system/amphora-*.service /run/systemd/system/amphora-*.service").split()
    assert {"amphora-agent.service", "amphora-responder.service"} <= {name.rpartition("/")[2] for name in ours}
    for unit in ours:
        most = 70 if unit.endswith("/amphora-agent.service") else 40
        first.run("systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={most}", unit)
    assert first.shell("stat -c %U /proc/$(systemctl show -P MainPID amphora-responder)").strip() == "amphora-responder"


def test_the_image_contains_nothing_of_its_build_machine(first):
    sources = first.shell(
        "cat /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/apt/apt.conf.d/*proxy* 2>/dev/null; true"
    )
    assert not re.search(r"^\s*(URIs:|deb |Acquire)", sources, re.MULTILINE)
    # systemd-tmpfiles makes an empty /root/.ssh at each boot.
    left = "/etc/ssh/ssh_host_* /root/.ssh/* /root/.cache /root/.bash_history /var/lib/apt/lists/*Packages* /tmp/pip*"
    assert first.shell(f"ls -d {left} 2>/dev/null; true") == ""
    host = socket.gethostname()
    if len(host) > 4 and host not in {"localhost", "debian"}:
        assert first.shell(f"grep -rIl -- {host} /etc /opt /var/lib /usr/local 2>/dev/null; true") == ""


def test_an_idle_guest_uses_little_memory(first, record_property):
    total, available = (
        int(first.shell(f"awk '/{word}:/ {{print $2}}' /proc/meminfo")) for word in ("MemTotal", "MemAvailable")
    )
    record_property("idle memory in use, MiB", (total - available) // 1024)
    # Of 512 MiB; 103 MiB were measured before the first push.
    assert (total - available) // 1024 < 160


# --- serving -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tenant):
    return tenant.issue("www.example.com")


def everything(**more):
    """Return a load balancer with a listener of each kind; its SCTP pool has no member."""
    web = [member(one) for one in more["web"]]
    datagrams = [member(one) for one in more["udp"]]
    quick = {"delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}
    return load_balancer(
        listener(80, pool="web"),
        listener(443, pool="web", protocol="TERMINATED_HTTPS", default_tls_container_ref="certificate"),
        listener(53, pool="udp", protocol="UDP"),
        listener(3868, pool="sctp", protocol="SCTP"),
        pool("web", *web, monitor=monitor("HTTP", url_path="/health", expected_codes="200")),
        pool("udp", *datagrams, protocol="UDP", monitor=monitor("UDP-CONNECT", **quick)),
        pool("sctp", protocol="SCTP"),
    )


def test_a_push_of_all_protocols_serves_both_families(first, balanced, certificate, tenant, record_property):
    web = [balanced.web("one", ONE), balanced.web("two", TWO6)]
    udp = [balanced.udp("first", ONE), balanced.udp("second", TWO), balanced.udp("third", TWO6)]
    secure = {"port": 443, "tls": trusting(tenant)}
    # An agent counts no check before its first push.
    first.checked = first.drift()["checks"]
    began = time.monotonic()
    balanced.push(everything(web=web, udp=udp), {"certificate": certificate.pem})
    pushed = time.monotonic() - began
    balanced.until(balanced.serves, "the VIP answers")
    served = time.monotonic() - began
    record_property("push, seconds", round(pushed, 1))
    record_property("push to serving, seconds", round(served, 1))
    # The controller pushes as soon as the agent answers.
    record_property("power-on to serving, seconds", round(first.booted_after + served, 1))
    balanced.until(lambda: balanced.answers_of(4) == {"one", "two"}, "both members answer")
    for vip in (VIP, VIP6):
        balanced.until(
            lambda at=vip: balanced.answers_of(4, address=at) == {"one", "two"}, f"members answer HTTP on {vip}"
        )
        balanced.until(
            lambda at=vip: balanced.answers_of(4, address=at, **secure) == {"one", "two"},
            f"members answer TLS on {vip}",
        )
    # A member serves clients of its own family.
    for vip, names in ((VIP, {"first", "second"}), (VIP6, {"third"})):
        balanced.until(
            lambda at=vip, known=names: balanced.datagram(at) in known, f"a member answers a datagram to {vip}"
        )

    udp[0].close()
    balanced.until(lambda: {balanced.datagram() for _ in range(8)} == {"second"}, "the second UDP member answers alone")
    web[0].stop()
    balanced.until(lambda: balanced.answers_of(6) == {"two"}, "the second web member answers alone")
    assert balanced.answers_of(2, **secure) == {"two"}

    balanced.udp("first", ONE)
    web[0].start()
    balanced.until(lambda: {balanced.datagram() for _ in range(12)} == {"first", "second"}, "both UDP members answer")
    balanced.until(lambda: balanced.answers_of(6) == {"one", "two"}, "both web members answer")


def test_heartbeats_report_the_served_objects(first, guest_lab, balanced):
    def hear():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            opened.bind((CONTROLLER, HEARTBEATS))
            opened.settimeout(TIME_LIMIT)
            return opened.recv(65536)

    def told():
        beat = decode(guest_lab.thread("control").run(hear), first.key)
        return {id_of("listener", port) for port in (80, 443, 53)} <= set(beat.document["listeners"])

    balanced.until(told, "heartbeats name the listeners")


def test_the_drift_check_finds_no_difference(first, balanced, second):
    """The programs of the image may print configuration in a different format than this machine's.

    An emulated agent pauses for up to a minute after a check. Meanwhile the second guest boots, for later tests.
    """
    balanced.until(lambda: first.drift()["checks"] > first.checked, "the agent has checked for drift after the push")
    found = first.drift()
    assert (found["counts"], found["unrepaired"]) == ({}, []), found["last"]
