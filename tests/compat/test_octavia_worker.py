# SPDX-License-Identifier: Apache-2.0
"""Octavia 19's worker code drives the amphora: all its calls, and their effect on traffic."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import re
import socket
import ssl
import uuid
from contextlib import closing, suppress
from pathlib import Path

import pytest
from amphora_lab import CONTROLLER, FIXED, VIP, VIP6, Client, eventually, get, ip
from balancers import LB, METRICS, POOL, POOL2, SUBNET, TCP, TLS, WEB, balancer, listener, member, plug, pool
from flask import Flask
from octavia_process import Refused
from throwaway_authority import SERVER

from amphora_agent.octavia_api_v1 import routes

SECOND_MAC = "02:00:00:00:5e:0c"
KEY = "a key of an operator"


@pytest.fixture(scope="module")
def amphora(worker, booted):
    return booted()


@pytest.fixture(scope="module")
def plugged(worker, amphora):
    worker.drive(amphora)
    plug(worker)
    return worker


@pytest.fixture
def client(amphora):
    return amphora.network.thread("cl")


def pid(amphora):
    return next(line for line in amphora.ask_haproxy("show info").splitlines() if line.startswith("Pid:"))


def answers(client, count=6, **where):
    return {client.run(get, **where)[1] for _ in range(count)}


def status(amphora, name):
    """Return HAProxy's state of a member."""
    rows = amphora.ask_haproxy("show stat -1 4 -1").splitlines()
    found = next(row.split(",") for row in rows if row.split(",")[1:2] == [member(name)["id"]])
    return found[17]


# -- calls -------------------------------------------------------------------------------------------------------------


def test_every_call_of_the_client_has_a_route(plugged):
    app = Flask("routes")
    app.register_blueprint(routes.blueprint(None, None, None, None, None, None))
    bound = app.url_map.bind("amphora")
    calls = plugged("requests")
    assert len(calls) == 22
    # The client has a method for this call, but no amphora has the route, and Octavia never calls it.
    assert calls.pop("get_listener_status") == ["GET", "listeners/x"]
    for method, path in calls.values():
        bound.match(f"/1.0/{path}", method)


def test_the_worker_gets_the_description_of_the_amphora(plugged):
    found = plugged("call", "get_info")
    assert found["api_version"] == "1.0"
    assert re.match(r"\d+\.\d+\.\d+", found["haproxy_version"])
    details = plugged("call", "get_details")
    assert {key: type(value) for key, value in details.items()} == {
        **dict.fromkeys(("hostname", "haproxy_version", "api_version", "keepalived_version", "ipvsadm_version"), str),
        **dict.fromkeys(("active_tuned_profiles", "topology", "topology_status"), str),
        **dict.fromkeys(("networks", "cpu", "memory", "disk", "packages"), dict),
        **dict.fromkeys(("haproxy_count", "cpu_count", "lvs_listener_process_count"), int),
        **dict.fromkeys(("load", "listeners"), list),
        "active": bool,
    }
    assert details["memory"]["total"] > details["memory"]["free"] > 0
    assert details["networks"]["eth1"]["network_tx"] > 0
    assert int(details["cpu"]["user"]) <= details["cpu"]["total"]


def test_interfaces_are_found_by_address(plugged):
    assert plugged("interface", FIXED) == "eth1"
    assert plugged("interface", VIP) == "eth1"
    for address, error in (("192.0.2.99", "NotFound"), ("nonsense", "InvalidRequest")):
        with pytest.raises(Refused) as refused:
            plugged("interface", address)
        assert refused.value.name == error


def test_the_worker_waits_for_a_missing_interface(plugged):
    with pytest.raises(Refused) as refused:
        plugged("plug_network", {"mac": "02:00:00:00:00:99", "mtu": 1500}, [])
    assert refused.value.name == "TimeOutException"


# -- listeners and pools ---------------------------------------------------------------------------------------


def test_a_load_balancer_is_served_on_all_its_vips(plugged, amphora, client):
    done = plugged("update", balancer(listener(), pool(member("m1"))))
    assert done["details"] == f"Listener {LB} reloaded"
    assert answers(client) == answers(client, address=VIP6) == {"m1"}
    assert plugged("call", "get_all_listeners") == [{"status": "ACTIVE", "uuid": WEB, "type": "HTTP"}]
    details = plugged("call", "get_details")
    assert (details["listeners"], details["haproxy_count"]) == ([WEB], 1)
    found = plugged("fetch", f"loadbalancer/{LB}/haproxy")
    assert found["status"] == 200
    assert found["text"].startswith("# Configuration for loadbalancer")
    assert found["etag"] == hashlib.md5(found["text"].encode()).hexdigest()
    assert plugged("fetch", f"loadbalancer/{POOL}/haproxy")["status"] == 404


def test_members_change_without_a_reload(plugged, amphora, client):
    """Octavia's own amphora starts a new process for each change."""
    plugged("update", balancer(listener(), pool(member("m1"))))
    before = pid(amphora)
    done = plugged("update", balancer(listener(), pool(member("m1"), member("m2"))))
    assert done["how"] == "runtime"
    assert answers(client) == {"m1", "m2"}
    done = plugged("update", balancer(listener(), pool(member("m1", weight=0), member("m2"))))
    assert done["how"] == "runtime"
    assert answers(client) == {"m2"}
    done = plugged("update", balancer(listener(), pool(member("m1", enabled=False), member("m2"), member("m3"))))
    assert done["how"] == "runtime"
    assert answers(client) == {"m2", "m3"}
    assert plugged("update", balancer(listener(), pool(member("m2"), member("m3"))))["how"] == "runtime"
    assert plugged("update", balancer(listener(), pool(member("m2"), member("m3"))))["how"] == "unchanged"
    assert pid(amphora) == before


def test_no_request_fails_during_changes(plugged, amphora):
    one, two = member("m1"), member("m2")
    plugged("update", balancer(listener(), pool(one)))
    with Client(amphora.network) as clients:
        clients.hears("m1")
        for served in ([one, two], [two], [two, member("m3")]):
            plugged("update", balancer(listener(), pool(*served)))
            clients.hears(next(name for name in ("m3", "m2") if member(name) in served))
        done = plugged("update", balancer(listener(), listener(id=TCP, protocol_port=8080), pool(one, two)))
        assert done["how"] == "reload"
        clients.hears("m1")
    assert clients.failures == []


def test_a_configuration_that_haproxy_refuses_changes_nothing(plugged, amphora, client):
    plugged("update", balancer(listener(), pool(member("m1"))))
    served = plugged("fetch", f"loadbalancer/{LB}/haproxy")["text"]
    for wrong in ("balance nonsense", "errorfile 503 /etc/passwd"):
        with pytest.raises(Refused) as refused:
            plugged("call", "upload_config", LB, served.replace("balance roundrobin", wrong))
        assert refused.value.name == "InvalidRequest"
    assert plugged("fetch", f"loadbalancer/{LB}/haproxy")["text"] == served
    plugged("call", "reload_listener", LB)
    assert answers(client) == {"m1"}


def test_start_and_stop_of_known_and_unknown_load_balancers(plugged, amphora, client):
    plugged("update", balancer(listener(), pool(member("m1"))))
    assert plugged("fetch", "info")["status"] == 200
    for object_id, action, error in ((POOL, "start_listener", "NotFound"), (POOL, "reload_listener", "NotFound")):
        with pytest.raises(Refused) as refused:
            plugged("call", action, object_id)
        assert refused.value.name == error
    with pytest.raises(Refused) as refused:
        plugged("call", "_action", "stop", LB)
    assert refused.value.name == "AttributeError"  # the action is the first path element: the client has no stop method
    assert plugged("call", "start_listener", LB)["status"] == 202
    assert answers(client) == {"m1"}


def test_a_load_balancer_without_enabled_listeners_is_not_served(plugged, amphora, client):
    done = plugged("update", balancer(listener(enabled=False), pool(member("m1"))))
    assert done["how"] in ("stop", "unchanged")
    with pytest.raises(OSError):
        client.run(get)
    plugged("update", balancer(listener(), pool(member("m1"))))
    assert answers(client) == {"m1"}


def test_terminated_https_with_sni(plugged, client, tenant_secrets):
    secure = listener(
        id=TLS, protocol="TERMINATED_HTTPS", protocol_port=443, tls_certificate_id="one.test", sni=["two.test"]
    )
    plugged("update", balancer(listener(), secure, pool(member("m1"))))
    authority, issued = tenant_secrets["authority"], tenant_secrets["issued"]
    for name in ("one.test", "two.test"):
        assert client.run(shown, name, authority.pem) == (issued[name].der, "m1")
    kinds = {each["uuid"]: each["type"] for each in plugged("call", "get_all_listeners")}
    assert kinds == {WEB: "HTTP", TLS: "TERMINATED_HTTPS"}
    # One certificate fewer: the worker deletes files, uploads the remaining ones and reloads.
    done = plugged("update", balancer(listener(), {**secure, "sni": []}, pool(member("m1"))))
    assert done["how"] != "unchanged"
    assert client.run(shown, "two.test", authority.pem, False)[0] == issued["one.test"].der
    names = [line for line in plugged("fetch", f"loadbalancer/{LB}/haproxy")["text"].split() if line.endswith(".pem")]
    file = Path(names[0]).name
    content = plugged("call", "get_cert_md5sum", LB, file)
    assert len(content) == 32
    assert plugged("call", "delete_cert_pem", LB, file)["status"] == 200
    with pytest.raises(Refused):
        plugged("call", "get_cert_md5sum", LB, file)
    with pytest.raises(Refused) as refused:
        plugged("call", "upload_cert_pem", LB, "no.name", "x")
    assert refused.value.name == "InvalidRequest"


def test_client_certificates_are_verified(plugged, client, tenant_secrets, tmp_path):
    secure = listener(
        id=TLS,
        protocol="TERMINATED_HTTPS",
        protocol_port=443,
        tls_certificate_id="one.test",
        client_ca_tls_certificate_id="ca",
        client_authentication="MANDATORY",
        insert_headers={"X-SSL-Client-CN": "true"},
    )
    plugged("update", balancer(secure, pool(member("m1"))))
    pem = tmp_path / "client.pem"
    pem.write_text(tenant_secrets["client"].pem)
    assert client.run(shown, "one.test", tenant_secrets["authority"].pem, True, pem)[1] == "m1"
    with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
        client.run(shown, "one.test", tenant_secrets["authority"].pem)


def shown(name, trust, verified=True, certificate=None):
    """Return the certificate that the VIP presents for a server name, and its answer."""
    context = ssl.create_default_context(cadata=trust)
    context.check_hostname = verified
    if certificate is not None:
        context.load_cert_chain(certificate)
    with socket.create_connection((VIP, 443), 10) as plain, context.wrap_socket(plain, server_hostname=name) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: one.test\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := link.recv(4096):
            answer += part
        return link.getpeercert(binary_form=True), answer.rpartition(b"\r\n\r\n")[2].decode()


def test_tcp_is_forwarded(plugged, client):
    plain = listener(id=TCP, protocol="TCP", protocol_port=8080)
    plugged("update", balancer(plain, pool(member("m2"), protocol="TCP")))
    assert answers(client, port=8080) == {"m2"}


def test_a_prometheus_listener_serves_metrics(plugged, client):
    metrics = {"id": METRICS, "protocol": "PROMETHEUS", "protocol_port": 8088}
    plugged("update", balancer(listener(), metrics, pool(member("m1"))))
    found = client.run(get, port=8088, path="/metrics")
    assert found[0] == 200
    assert "octavia_" in found[1]


@pytest.mark.parametrize(
    "monitor",
    [
        {"type": "HTTP", "http_method": "GET", "url_path": "/health", "expected_codes": "200"},
        {"type": "TCP"},
        {"type": "PING"},
    ],
    ids=lambda monitor: monitor["type"],
)
def test_members_are_checked(plugged, amphora, client, monitor):
    # No interface has the third address.
    away = {**member("m3"), "ip_address": "198.51.100.199"}
    plugged("update", balancer(listener(), pool(member("m1"), away, monitor=monitor)))
    eventually(lambda: status(amphora, "m1").startswith("UP"), "the first member is up")
    eventually(lambda: status(amphora, "m3").startswith("DOWN"), "the third member is down")
    assert answers(client) == {"m1"}


def test_sessions_stay_with_their_member(plugged, amphora, client):
    sticky = pool(member("m1"), member("m2"), persistence={"type": "HTTP_COOKIE"})
    plugged("update", balancer(listener(), sticky))
    cookie = client.run(cookie_of)
    assert cookie.split("=")[1].partition(";")[0] in (member("m1")["id"], member("m2")["id"])
    sticky = pool(member("m1"), member("m2"), persistence={"type": "SOURCE_IP"})
    plugged("update", balancer(listener(), sticky))
    [before] = answers(client)
    # After a reload Octavia's own amphora would have no stick-table entries.
    done = plugged("update", balancer(listener(connection_limit=1000), sticky))
    assert done["how"] == "reload"
    assert answers(client) == {before}


def cookie_of():
    with closing(http.client.HTTPConnection(VIP, 80, timeout=10)) as connection:
        connection.request("GET", "/", headers={"Connection": "close"})
        with connection.getresponse() as answer:
            return answer.headers["Set-Cookie"]


def test_l7_policies_are_applied(plugged, client):
    def rule(path):
        return [{"type": "PATH", "compare_type": "STARTS_WITH", "value": path, "invert": False}]

    policies = [
        {"id": "reject", "action": "REJECT", "rules": rule("/no")},
        {"id": "away", "action": "REDIRECT_TO_URL", "redirect_url": "http://example.com/", "rules": rule("/away"),
         "redirect_http_code": 302},
        {"id": "pool", "action": "REDIRECT_TO_POOL", "to_pool": POOL2, "rules": rule("/other")},
    ]  # fmt: skip
    other = {**pool(member("m3")), "id": POOL2}
    plugged("update", balancer(listener(policies=policies), pool(member("m1")), other))
    assert client.run(get, path="/")[1] == "m1"
    assert client.run(get, path="/other")[1] == "m3"
    assert client.run(get, path="/no")[0] == 403
    assert client.run(get, path="/away")[0] == 302


def test_rules_close_all_unnamed_ports(plugged, amphora, client):
    plugged("update", balancer(listener(), listener(id=TCP, protocol_port=8080), pool(member("m1"))))

    def allow(port, *cidrs):
        return [{"protocol": "TCP", "cidr": cidr, "port": port} for cidr in cidrs]

    try:
        plugged("rules", VIP, allow(80, "198.51.100.20/32") + allow(8080, "192.0.2.0/24"))
        assert answers(client) == {"m1"}
        with pytest.raises(OSError):
            client.run(get, port=8080, timeout=1.0)
        plugged("rules", VIP, allow(80, None) + allow(8080, "198.51.100.0/24"))
        assert answers(client) == answers(client, port=8080) == {"m1"}
        plugged("rules", VIP, allow(8080, None))
        with pytest.raises(OSError):
            client.run(get, timeout=1.0)
    finally:
        plugged("rules", VIP, allow(80, None) + allow(443, None) + allow(8080, None) + allow(8088, None))
    with pytest.raises(Refused) as refused:
        plugged("rules", VIP, [{"protocol": "TCP"}])
    assert refused.value.name == "InvalidRequest"


def test_a_member_network_is_plugged(plugged, amphora, client):
    network = amphora.network
    switch, members = network.name("sw"), network.name("mem")
    ip(
        f"-n {switch} link add port2 type veth peer name new1 netns {network.name('amp')} address {SECOND_MAC}",
        f"-n {switch} link set port2 master vip up",
        f"-n {members} addr add 192.0.2.2/24 dev eth0",
    )
    try:
        network.start_member("far", "192.0.2.2")
        plugged("update", balancer(listener(), pool(member("m1"))))
        fixed = {"ip_address": "192.0.2.11", "cidr": "192.0.2.0/24", "gateway": "192.0.2.1"}
        plugged("plug_network", {"mac": SECOND_MAC, "mtu": 1400}, [fixed])
        assert plugged("interface", "192.0.2.11") == "eth2"
        far = {"id": str(uuid.uuid4()), "ip_address": "192.0.2.2"}
        assert plugged("update", balancer(listener(), pool(far)))["how"] == "runtime"
        assert answers(client) == {"far"}
        # The last member is removed: the port stays, and its addresses are removed.
        plugged("plug_network", {"mac": SECOND_MAC, "mtu": 1400}, [])
        with pytest.raises(Refused):
            plugged("interface", "192.0.2.11")
    finally:
        with suppress(KeyError):
            network.stop_member("far")
        ip(f"-n {members} addr del 192.0.2.2/24 dev eth0")


def test_udp_is_refused_with_a_reason(plugged):
    with pytest.raises(Refused) as refused:
        plugged("call", "upload_udp_config", TCP, "virtual_server_group {}")
    assert refused.value.name == "InternalServerError"
    assert plugged("fetch", f"listeners/{TCP}/udp_listener")["status"] == 404
    with pytest.raises(Refused) as refused:
        plugged("call", "reload_listener", TCP)
    assert refused.value.name == "NotFound"


# -- the agent -------------------------------------------------------------------------------------------------


def test_octavia_reads_the_heartbeats(plugged, amphora, client):
    away = {**member("m3"), "ip_address": "198.51.100.199"}
    monitor = {"type": "HTTP", "http_method": "GET", "url_path": "/health", "expected_codes": "200"}
    leaving = {**member("m1"), "id": str(uuid.uuid4()), "weight": 0}
    served = [member("m1"), member("m2", enabled=False), away, leaving]
    plugged("update", balancer(listener(), pool(*served, monitor=monitor)))
    eventually(lambda: status(amphora, "m3").startswith("DOWN"), "the third member is down")
    targets = [f"{CONTROLLER}:5601", f"{CONTROLLER}:5602"]
    plugged("listen", KEY, CONTROLLER, 5601, 5602)
    plugged("configure", "SINGLE", heartbeat_key=KEY, controller_ip_port_list=targets, heartbeat_interval=1)
    # The first heartbeat contains the traffic before Octavia received one.
    plugged("heartbeats", 1)
    answers(client, 7)
    heard = plugged("heartbeats", 3)
    beat = heard[-1][1]
    assert (beat["id"], beat["ver"]) == (amphora.id, 3)
    assert beat["listeners"][WEB]["status"] == "OPEN"
    assert beat["pools"][f"{POOL}:{WEB}"] == {
        "status": "UP",
        "members": {
            member("m1")["id"]: "UP",
            member("m2")["id"]: "MAINT",
            member("m3")["id"]: "DOWN",
            leaving["id"]: "DRAIN",
        },
    }
    # The health managers get the heartbeats in turn. Each request counts in one of them.
    assert {abs(here - there) for (here, _), (there, _) in itertools.pairwise(heard)} == {1}
    assert sum(each["listeners"][WEB]["stats"]["totconns"] for _, each in heard) == 7


def test_a_foreign_key_or_amphora_is_refused(plugged):
    with pytest.raises(Refused) as refused:
        plugged("call", "update_agent_config", f"[amphora_agent]\namphora_id = {LB}\n")
    assert refused.value.name == "InternalServerError"


def test_the_agents_certificate_is_rotated(plugged, amphora):
    pem = amphora.authority.issue(amphora.id, SERVER)
    wanted = ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----BEGIN PRIVATE")])

    def presented():
        connection = amphora.connection(amphora.tls(amphora.client_certificate))
        with closing(connection):
            connection.connect()
            return connection.sock.getpeercert(binary_form=True)

    plugged("rotate", pem)
    eventually(lambda: amphora.network.thread("ctl").run(presented) == wanted, "the agent presents the new certificate")
    assert plugged("check") == "1.0"


def test_a_restarted_agent_continues_the_sums(plugged, amphora, client):
    plugged("update", balancer(listener(), pool(member("m1"))))
    before = pid(amphora)
    starts = amphora.status("amphora-agent")["starts"]
    amphora.supervisor(op="signal", name="amphora-agent", signal=9)
    eventually(lambda: amphora.status("amphora-agent")["starts"] > starts, "the agent restarts")
    eventually(amphora.answers, "the agent answers")
    amphora.disconnect()
    assert plugged("update", balancer(listener(), pool(member("m1"), member("m2"))))["how"] == "runtime"
    assert answers(client) == {"m1", "m2"}
    assert pid(amphora) == before
    # The heartbeats keep Octavia's targets and format.
    plugged("listen", KEY, CONTROLLER, 5601, 5602)
    assert plugged("heartbeats", 1)[0][1]["id"] == amphora.id


def test_a_push_of_this_provider_is_refused(plugged, amphora, client):
    plugged("update", balancer(listener(), pool(member("m1"))))
    found, body = amphora.push(1000, None)
    assert found == 409
    assert "Octavia" in body["error"]["happened"]
    assert answers(client) == {"m1"}


# -- pairs -----------------------------------------------------------------------------------------------------


def test_keepalived_takes_the_vip_of_a_pair(plugged, amphora, client):
    partner = {"id": str(uuid.uuid4()), "vrrp_ip": "198.51.100.12", "lb_network_ip": "203.0.113.12"}
    pair = balancer(listener(), pool(member("m1")), partners=[partner])
    with pytest.raises(Refused) as refused:
        plugged("vrrp", "start", pair, SUBNET)
    assert refused.value.name == "InternalServerError"
    plugged("update", pair)
    plugged("vrrp", "upload", pair, SUBNET)
    plugged("vrrp", "start", pair, SUBNET)
    eventually(lambda: served_by(client) == "m1", "keepalived has taken the VIP")
    plugged("vrrp", "reload", pair, SUBNET)
    assert plugged("interface", VIP) == "eth1"
    plugged("vrrp", "stop", pair, SUBNET)
    eventually(lambda: served_by(client) is None, "the VIP does not answer")


def served_by(client):
    with suppress(OSError, http.client.HTTPException):
        return client.run(get, timeout=1.0)[1]
    return None


# -- end ---------------------------------------------------------------------------------------------------------------


def test_the_last_listener_ends_haproxy(plugged, amphora, client):
    wanted = balancer(listener(), listener(id=TCP, protocol_port=8080), pool(member("m1")))
    plugged("update", wanted)
    plugged("delete", wanted, TCP)
    assert plugged("call", "get_details")["listeners"] == [WEB]
    plugged("delete", {**wanted, "listeners": wanted["listeners"][:1]}, WEB)
    assert plugged("call", "get_all_listeners") == []
    assert plugged("call", "get_details")["haproxy_count"] == 0
    assert plugged("fetch", f"loadbalancer/{LB}/haproxy")["status"] == 404
    assert plugged("call", "delete_listener", LB)["status"] == 200
    assert amphora.status("haproxy")["pid"] is None
