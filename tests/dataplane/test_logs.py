# SPDX-License-Identifier: Apache-2.0
"""Log lines of an amphora reach real receivers of each kind; targets change without a reload of HAProxy."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import stat
from pathlib import Path

import pytest
from amphora_lab import CONTROLLER, MEMBERS, eventually, get
from configuration_text import LISTENER, listener, text
from cryptography.x509.oid import NameOID
from datagrams import PORT, Clients, UdpMember, member, name_of, virtual_server
from log_receivers import HttpsReceiver, TcpReceiver, TlsReceiver, UdpReceiver, requiring, self_signed
from pki import Authority

from amphora_agent.log_forwarder.daemon import SERVICE
from amphora_driver.render.agent_settings import LogTarget, render_agent_settings, render_log_settings
from amphora_driver.secret import Secret

pytestmark = pytest.mark.root
PROJECT, BALANCER = "5f2d9c1e7a4b4c8f9e0d1a2b3c4d5e6f", "1b000000-0000-4000-8000-000000000009"
FORMAT = f"{PROJECT} {BALANCER} %f %ci %{{+Q}}r %ST"
LOGGED = f"    log stdout format raw local0 info\n    log global\n    log-format '{FORMAT}'\n"
HEADER = re.compile(
    r"<134>1 \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z amphora-[0-9a-f]{8} haproxy - flow "
    r'\[amphora@32473 id="[0-9a-f-]{36}" project="(\w+)" loadbalancer="([\w-]+)" listener="([\w-]+)"\] '
)


@pytest.fixture
def secured(tmp_path):
    """The TLS context of a receiver, and its CA certificate."""
    return self_signed(tmp_path)


@pytest.fixture
def ctl(network):
    """Open receivers in the controller's namespace; they are closed at the end."""
    opened = []

    def make(kind, *arguments, **more):
        opened.append(network.thread("ctl").run(kind, *arguments, **more))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def logged_listener(*, checked=False):
    """Return the text of a listener with a flow log. Without health checks, its member is never DOWN."""
    plain = listener(["m1"]) if checked else listener(["m1"], m1="weight 1")
    return text(plain.replace("    default_backend", f"{LOGGED}    mode http\n    default_backend", 1))


def settings(amphora, *, admin=(), tenant=(), authorities="", authorization="", certificate="", queue_bytes=1 << 20):
    def target(url):
        allowed = authorization if url.startswith("https") else ""
        shown = certificate if url.startswith(("https", "tls")) else ""
        return LogTarget(url, Secret(allowed.encode()), Secret(shown.encode()))

    def targets(urls):
        return [target(url) for url in urls]

    ids = {"project_id": PROJECT, "load_balancer_id": BALANCER}
    logs = render_log_settings(targets(admin), targets(tenant), authorities, queue_bytes, **ids)
    return render_agent_settings([f"{CONTROLLER}:5555"], 0.5, 3600.0, logs)


def use(amphora, **given):
    """Send settings and wait until the log forwarder has them."""
    wanted = settings(amphora, **given)
    status, answer = amphora.call("PUT", "/v2/settings", wanted.encode())
    assert (status, answer["digest"]) == (200, wanted.digest), answer
    urls = {kind: sorted(given.get(kind, ())) for kind in ("admin", "tenant")}

    def in_use():
        shown = counters(amphora)
        if not any(urls.values()):
            return shown is None
        return shown and all(sorted(one["url"] for one in shown[kind] or ()) == urls[kind] for kind in urls)

    eventually(in_use, "the log forwarder has the targets")
    return answer


def counters(amphora):
    return amphora.call("GET", "/v2/info")[1]["logs"]


def writable_files(pid):
    """Return the files that a process has open for writing."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        flags = re.search(r"^flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/{link.name}").read_text(), re.MULTILINE)
        if stat.S_ISREG(link.stat().st_mode) and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
            found.append(str(link.readlink()))
    return found


def ask(network, path):
    assert network.thread("cl").run(get, path=path) == (200, "m1")


def test_flows_reach_each_kind_of_target(amphora, network, ctl, secured):
    context, authorities = secured
    kinds = [(UdpReceiver,), (TcpReceiver,), (TlsReceiver, context), (HttpsReceiver, context)]
    receivers = [ctl(*one) for one in kinds]
    urls = [one.url for one in receivers]
    assert amphora.push(1, logged_listener())[0] == 200
    answer = use(amphora, tenant=urls, authorities=authorities, authorization="Bearer sesame-7")
    assert {one["authorization"] for one in answer["logs"]["tenant"]} == {"", "***"}
    ask(network, '/one?q="]%20[x')
    for one in receivers[:3]:
        message = one.wait_for("/one")
        found = HEADER.match(message)
        assert found, message
        assert found.groups() == (PROJECT, BALANCER, LISTENER)
        assert message[found.end() :].startswith(f"{PROJECT} {BALANCER} {LISTENER} 198.51.100.20 ")
    https = receivers[3]
    document = json.loads(https.wait_for("/one"))
    assert {key: document[key] for key in ("kind", "severity", "application", "project_id", "load_balancer_id")} == {
        "kind": "flow",
        "severity": "info",
        "application": "haproxy",
        "project_id": PROJECT,
        "load_balancer_id": BALANCER,
    }
    assert (document["listener_id"], document["amphora_id"]) == (LISTENER, amphora.id)
    assert https.requests[0] == ("/ingest?kind=amphora", "Bearer sesame-7", "application/x-ndjson")
    shown = eventually(
        lambda: counters(amphora) if all(one["sent"] for one in counters(amphora)["tenant"]) else None, "counters"
    )
    assert [one["dropped"] for one in shown["tenant"]] == [0] * 4
    assert amphora.call("GET", "/v2/bundle")[1]["log_lines"]["sent"] >= 4
    diagnosis = json.dumps(amphora.call("GET", "/v2/diagnostics")[1])
    assert "sesame-7" not in diagnosis + amphora.log()
    stored = "".join(file.read_text(errors="replace") for file in amphora.var.rglob("*") if file.is_file())
    assert urls[0] in stored
    assert "sesame-7" not in stored


def test_targets_change_without_a_reload_and_survive_the_agent(amphora, network, ctl):
    old, new, admin = ctl(UdpReceiver), ctl(TcpReceiver), ctl(UdpReceiver)
    assert amphora.push(1, logged_listener())[0] == 200
    use(amphora, tenant=[old.url])
    ask(network, "/first")
    old.wait_for("/first")
    worker = amphora.status("haproxy")
    sockets = amphora.ask_haproxy("show info")
    use(amphora, tenant=[new.url], admin=[admin.url])
    ask(network, "/second")
    new.wait_for("/second")
    assert not [one for one in old.messages if "/second" in one]
    assert amphora.status("haproxy") == worker
    pid = re.search(r"^Pid: \d+", sockets, re.MULTILINE)
    assert pid is not None
    assert pid[0] in amphora.ask_haproxy("show info"), "the worker of HAProxy is the same"

    forwarder = amphora.status(SERVICE)["pid"]
    os.kill(amphora.outside_pid(amphora.status("amphora-agent")["pid"]), signal.SIGKILL)
    ask(network, "/third")
    new.wait_for("/third")
    admin.wait_for("amphora-agent exited")
    eventually(amphora.answers, "the restarted agent answers")
    eventually(lambda: (counters(amphora) or {}).get("received"), "the agent knows the log forwarder")
    assert amphora.status(SERVICE)["pid"] == forwarder

    os.kill(amphora.outside_pid(forwarder), signal.SIGKILL)

    def arrives():
        ask(network, "/fourth")
        return [one for one in new.messages if "/fourth" in one]

    eventually(arrives, "the restarted log forwarder sends lines")
    use(amphora)
    eventually(lambda: amphora.status(SERVICE)["pid"] is None, "the log forwarder has ended")
    ask(network, "/fifth")


def test_administrative_lines_are_apart_from_flows(amphora, network, ctl):
    admin, tenant = ctl(TcpReceiver), ctl(TcpReceiver)
    use(amphora, admin=[admin.url], tenant=[tenant.url])
    assert amphora.push(1, logged_listener())[0] == 200
    ask(network, "/apart")
    tenant.wait_for("/apart")
    assert amphora.push(2, logged_listener(checked=True))[0] == 200
    network.stop_member("m1")
    try:
        down = admin.wait_for("is DOWN")
        assert re.match(r"<140>1 \S+ amphora-\w+ haproxy - - \[amphora@32473 .* \[WARNING\] ", down)
    finally:
        network.start_member("m1", "198.51.100.101")
    assert amphora.call("PUT", "/v2/settings", b"{")[0] == 400
    refused = admin.wait_for("A request to the API of the agent failed")
    assert refused.startswith("<140>1 "), "local1, warning"
    assert " amphora-agent - - " in refused
    assert not [one for one in admin.messages if "/apart" in one]
    assert not [one for one in tenant.messages if "DOWN" in one]


def test_udp_flows_are_forwarded(amphora, network, ctl):
    tenant = ctl(TcpReceiver)
    use(amphora, tenant=[tenant.url])
    place = MEMBERS["m1"]
    served = UdpMember(network.thread("mem"), "w1", place)
    clients = Clients(network.thread("cl"))
    try:
        form = f"{PROJECT} {BALANCER} %f %ci %cp %[protocol]"
        server = virtual_server(member("w1", place), log_format=form)
        assert amphora.push(1, None, virtual_servers=[server])[0] == 200
        assert clients.flow(own_port=45300).ask().member == "w1"
        # The removal of the member ends its flows.
        assert amphora.push(2, None, virtual_servers=[virtual_server(log_format=form)])[0] == 200
        message = tenant.wait_for(" 45300 UDP")
    finally:
        clients.close()
        served.close()
    assert f' listener="{name_of("listener", PORT, "UDP")}"]' in message
    assert " amphora-checker - flow " in message


def test_a_target_without_a_valid_certificate_gets_nothing(amphora, network, ctl, tmp_path):
    foreign, _ = self_signed(tmp_path)
    other_address, other_pem = self_signed(tmp_path, "203.0.113.99")
    untrusted, misnamed = ctl(TlsReceiver, foreign), ctl(HttpsReceiver, other_address)
    assert amphora.push(1, logged_listener())[0] == 200
    use(amphora, tenant=[untrusted.url, misnamed.url], authorities=other_pem, authorization="Bearer sesame-8")
    ask(network, "/secret")

    def refused():
        shown = {one["url"].partition(":")[0]: one["error"] for one in counters(amphora)["tenant"]}
        return "CERTIFICATE_VERIFY_FAILED" in shown["tls"] and "IP address mismatch" in shown["https"]

    eventually(refused, "both targets are refused")
    assert untrusted.messages + misnamed.messages == []
    assert misnamed.requests == []


def test_a_target_that_returns_gets_the_waiting_lines(amphora, network, ctl):
    first = ctl(TcpReceiver)
    assert amphora.push(1, logged_listener())[0] == 200
    use(amphora, tenant=[first.url])
    ask(network, "/before")
    first.wait_for("/before")
    first.close()
    for number in range(5):
        ask(network, f"/while-{number}")
    eventually(lambda: counters(amphora)["tenant"][0]["error"], "the target is away")
    assert writable_files(amphora.outside_pid(amphora.status(SERVICE)["pid"])) == [], "lines wait in memory"
    second = ctl(TcpReceiver, port=first.port)
    for number in range(5):
        second.wait_for(f"/while-{number} ")
    (shown,) = counters(amphora)["tenant"]
    assert shown["dropped"] == 0


def test_an_idle_connection_that_the_target_closed_is_no_failure(amphora, network, ctl, secured):
    context, authorities = secured
    receiver = ctl(HttpsReceiver, context, idle_seconds=0.2)
    assert amphora.push(1, logged_listener())[0] == 200
    use(amphora, tenant=[receiver.url], authorities=authorities)
    for number in (1, 2):
        ask(network, f"/idle-{number}")
        receiver.wait_for(f"/idle-{number} ")
        eventually(lambda wanted=number: receiver.closed >= wanted, "the server closes the connection")
    log = amphora.call("GET", "/v2/diagnostics")[1]["log forwarder log"]
    assert not [line for line in log if "cannot send" in line], log


def test_https_lines_are_retried_or_counted(amphora, network, ctl, secured):
    context, authorities = secured
    receiver = ctl(HttpsReceiver, context)
    assert amphora.push(1, logged_listener())[0] == 200
    use(amphora, tenant=[receiver.url], authorities=authorities)
    receiver.status = 503
    ask(network, "/retried")
    eventually(lambda: receiver.requests, "a refused request")
    receiver.status = 200
    receiver.wait_for("/retried")
    receiver.status = 413
    ask(network, "/refused")
    eventually(lambda: counters(amphora)["tenant"][0]["dropped"] == 1, "the refused line is counted")
    receiver.status = 200
    ask(network, "/later")
    receiver.wait_for("/later")
    assert not [one for one in receiver.messages if "/refused" in one]


CLIENTS = Authority("clients of collectors")
FORMER, NEW = (CLIENTS.issue(f"amphora-{name}", number=number) for number, name in enumerate(("former", "new"), 50))
STRANGER = Authority("another authority").issue("stranger", number=52)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["tls12", "tls13"])
def test_targets_see_the_client_certificate_and_its_rotation(amphora, network, ctl, tmp_path, version):
    context, authorities = requiring(tmp_path, CLIENTS.pem)
    context.minimum_version = context.maximum_version = version
    receivers = [ctl(kind, context) for kind in (TlsReceiver, HttpsReceiver)]
    urls = [one.url for one in receivers]
    assert amphora.push(1, logged_listener())[0] == 200
    for number, certificate in enumerate((FORMER, NEW)):
        answer = use(amphora, tenant=urls, authorities=authorities, certificate=certificate.pem)
        assert {one["client_certificate"] for one in answer["logs"]["tenant"]} == {"***"}

        def arrive(word=f"/shown-{number}"):
            ask(network, word)
            return all(any(word in message for message in list(one.messages)) for one in receivers)

        eventually(arrive, "both targets get lines")
        eventually(lambda name=certificate: {one.clients[-1] for one in receivers} == {common(name)}, "the new name")
    diagnosis = json.dumps(amphora.call("GET", "/v2/diagnostics")[1])
    stored = "".join(file.read_text(errors="replace") for file in amphora.var.rglob("*") if file.is_file())
    assert urls[0] in stored
    for certificate in (FORMER, NEW):
        for line in certificate.key_pem.splitlines()[1:-1]:
            assert line not in diagnosis + amphora.log() + stored


def common(certificate):
    (found,) = certificate.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return found.value


@pytest.mark.parametrize("tickets", [True, False], ids=["tickets", "no-tickets"])
@pytest.mark.parametrize("shown", ["", STRANGER.pem], ids=["none", "stranger"])
def test_no_line_is_lost_at_a_target_that_refuses_the_amphora(amphora, network, ctl, tmp_path, shown, tickets):
    context, authorities = requiring(tmp_path, CLIENTS.pem, tickets=tickets)
    receivers = [ctl(kind, context) for kind in (TlsReceiver, HttpsReceiver)]
    urls = [one.url for one in receivers]
    assert amphora.push(1, logged_listener())[0] == 200
    use(amphora, tenant=urls, authorities=authorities, certificate=shown)
    ask(network, "/early")

    def refused():
        errors = [one["error"] for one in counters(amphora)["tenant"]]
        return all(re.search("certificate|unknown ca", one, re.IGNORECASE) for one in errors)

    eventually(refused, "both targets refuse the certificate")
    found = [(one["sent"], one["dropped"], one["uncertain"]) for one in counters(amphora)["tenant"]]
    assert found == [(0, 0, 0)] * 2
    assert [one.messages for one in receivers] == [[], []]
    # The lines that wait reach the targets with the next certificate.
    ask(network, "/waiting")
    eventually(lambda: all(one["waiting_bytes"] for one in counters(amphora)["tenant"]), "a line waits")
    use(amphora, tenant=urls, authorities=authorities, certificate=FORMER.pem)
    for one in receivers:
        one.wait_for("/waiting")


def test_an_unusable_client_certificate_keeps_the_former_targets(amphora, network, ctl, tmp_path):
    context, authorities = requiring(tmp_path, CLIENTS.pem)
    receiver = ctl(TlsReceiver, context)
    assert amphora.push(1, logged_listener())[0] == 200
    use(amphora, tenant=[receiver.url], authorities=authorities, certificate=FORMER.pem)
    ask(network, "/before")
    receiver.wait_for("/before")
    mixed = FORMER.certificate_pem + NEW.key_pem
    wanted = settings(amphora, tenant=[receiver.url], authorities=authorities, certificate=mixed)
    assert amphora.call("PUT", "/v2/settings", wanted.encode())[0] == 200
    found = eventually(lambda: counters(amphora)["error"], "the log forwarder refuses the certificate")
    assert "BEGIN" not in found
    ask(network, "/after")
    receiver.wait_for("/after")
