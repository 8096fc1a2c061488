# SPDX-License-Identifier: Apache-2.0
"""The agent's connections and certificate, and the responder, which runs without the agent."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import amphora_lab
import pki
import pytest
from amphora_lab import AMPHORA, ROOT, VIP, Amphora, eventually
from configuration_text import MEMBER_IDS, listener, text
from test_metrics import PROMETHEUS, scrape
from test_ping import dropping_echoes_to, pinged
from throwaway_authority import CLIENT, SERVER, Authority

from amphora_agent import server, tls_gate
from amphora_agent.network.namespace import Namespace
from amphora_driver.agent.client import AgentClient
from amphora_driver.errors import AgentRefused, AgentUntrusted
from amphora_driver.secret import Secret

pytestmark = pytest.mark.root
PINGS = {MEMBER_IDS[name]: amphora_lab.MEMBERS[name] for name in ("m1", "m2")}


@pytest.fixture
def client(amphora):
    """The controller's own client; call its methods in the controller's namespace."""
    trust = amphora.write("trust.pem", amphora.authority.pem)
    made = AgentClient(
        SimpleNamespace(
            amp_agent=SimpleNamespace(port=9443, connect_timeout=10, request_timeout=60),
            amp_certificates=SimpleNamespace(
                client_certificate=str(amphora.client_certificate), ca_certificate=str(trust)
            ),
        )
    )
    yield made
    made.close()


@pytest.fixture
def controller(network):
    """Run functions in the controller's namespace."""
    return network.thread("ctl").run


# -- connections ----------------------------------------------------------------------------------------------------


def ports():
    """Return the local ports of all connections to the agent, including those in TIME_WAIT."""
    rows = [row.split() for row in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[2].endswith(f":{9443:04X}")}


def test_many_requests_use_one_handshake(amphora, client, controller):
    before = controller(ports)

    def ask():
        for _ in range(20):
            client.info(amphora.id, AMPHORA)
            client.bundle_state(amphora.id, AMPHORA)
            client.diagnostics(amphora.id, AMPHORA)
        with pytest.raises(AgentRefused):
            client.put_bundle(amphora.id, AMPHORA, b"{}" + b" " * 1_000_000)
        client.info(amphora.id, AMPHORA)

    controller(ask)
    assert len(controller(ports) - before) == 1


def test_concurrent_requests_keep_their_answers(amphora, network):
    """Each answer contains an id that only one request has, in bodies of all sizes."""
    assert amphora.push(1, text(listener(["m1"])))[0] == 200
    context = amphora.tls(amphora.client_certificate)

    def work(number):
        inside = Namespace(Path("/run/netns") / network.name("ctl"))
        try:
            return inside.run(send_requests, number)
        finally:
            inside.close()

    def send_requests(number):
        connection = amphora.connection(context)
        try:
            for turn in range(12):
                stranger = str(uuid.uuid4())
                bundle = {
                    "format": 1, "amphora_id": stranger, "load_balancer_id": stranger, "generation": 1,
                    "haproxy": "#" * (10 ** (1 + (number + turn) % 6)) + "\n", "files": [], "pings": {},
                    "limits": {"connections": None, "threads": None, "drain": None, "workers": None},
                    "allowed": [], "vrrp": None, "interfaces": [],
                }  # fmt: skip
                status, said = exchange(connection, "PUT", "/v2/bundle", json.dumps(bundle).encode())
                assert (status, stranger in said["error"]["happened"]) == (409, True)
                status, said = exchange(connection, "GET", "/v2/info")
                assert (status, said["amphora_id"]) == (200, amphora.id)
                status, said = exchange(connection, "GET", f"/v2/{stranger}")
                assert (status, said.keys()) == (404, {"error"})
                status, said = exchange(connection, "GET", "/v2/bundle")
                assert (status, said["generation"]) == (200, 1)
                if turn % 4 == number % 4:
                    status, said = exchange(connection, "GET", "/v2/diagnostics")
                    assert (status, amphora.id in said["agent.conf"]) == (200, True)
        finally:
            connection.close()
        return True

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [True] * 8


def exchange(connection, method, path, body=None):
    connection.request(method, path, body)
    with connection.getresponse() as answer:
        return answer.status, json.loads(answer.read())


def test_unresponsive_clients_delay_no_other_client(amphora, controller):
    """The silent clients of each kind exceed the threads; clients with an unfinished request do not."""
    known = amphora.tls(amphora.client_certificate)

    def connect(*said):
        connection = socket.create_connection((AMPHORA, 9443), 10)
        for part in said:
            connection.sendall(part)
        return connection

    def connect_tls(*said):
        connection = known.wrap_socket(connect(), server_hostname=amphora.id)
        for part in said:
            connection.sendall(part)
        return connection

    def open_connections():
        many = 2 * server.THREADS
        silent = [connect() for _ in range(many)]
        begun = [connect(b"\x16\x03\x01\x02\x00\x01\x00") for _ in range(many)]
        proven = [connect_tls() for _ in range(many)]
        slow = [connect_tls(b"PUT /v2/bundle HTTP/1.1\r\nContent-Le") for _ in range(server.THREADS // 2)]
        return [*silent, *begun, *proven, *slow]

    lingering = controller(open_connections)
    try:
        amphora.disconnect()
        for _ in range(3):
            assert amphora.call("GET", "/v2/info")[0] == 200
            amphora.disconnect()
        # Above the limit, the gate closes the oldest connection first.
        lingering += controller(lambda: [connect() for _ in range(tls_gate.MOST + 10)])
        assert amphora.call("GET", "/v2/info")[0] == 200
        refused = amphora.call("GET", "/v2/diagnostics")[1]["certificate"]["refused_handshakes"]
        assert refused["too many others"] >= 10
    finally:
        for one in lingering:
            one.close()


# -- a killed agent -------------------------------------------------------------------------------------------------


def member_rows(amphora):
    """Return state and number of failures by member."""
    rows = [line.split(",") for line in amphora.ask_haproxy("show stat -1 4 -1").splitlines()]
    columns = {name: place for place, name in enumerate(rows[0])}
    place, count = columns["status"], columns["chkdown"]
    return {row[1]: (row[place], row[count]) for row in rows[1:] if len(row) > count and row[1] in PINGS}


def test_killed_agent_leaves_no_process(amphora):
    agent = amphora.agent_pid()
    every = [agent, *amphora_lab.descendants(agent)]
    amphora.supervisor(op="stop", name="amphora-agent", signal=9)
    eventually(lambda: not any(map(amphora_lab.alive, every)), "all processes of the agent have ended")


def test_pinged_members_and_metrics_do_not_need_the_agent(amphora, network):
    assert amphora.push(1, pinged("m1", "m2") + PROMETHEUS, pings=PINGS)[0] == 200
    one, two = (MEMBER_IDS[name] for name in ("m1", "m2"))
    eventually(lambda: [row[0] for row in member_rows(amphora).values()] == ["UP", "UP"], "both members are up")
    responder = amphora.status("amphora-responder")
    argv = amphora.status("amphora-agent")["argv"]
    amphora.disconnect()
    amphora.supervisor(op="stop", name="amphora-agent", signal=9)
    # Without an agent, the responder detects the failure and the recovery of one member. The other one stays up.
    with dropping_echoes_to(network, amphora_lab.MEMBERS["m1"]):
        eventually(lambda: member_rows(amphora)[one][0] == "DOWN", "the member without answers is down")
    eventually(lambda: member_rows(amphora)[one][0] == "UP", "the member is up again")
    assert member_rows(amphora)[two] == ("UP", "0")
    status, _, said = network.thread("cl").run(scrape)
    assert status == 200
    assert f'member="{one}",state="UP"}} 1' in said
    # The restarted agent uses the running responder.
    amphora.supervisor(op="start", name="amphora-agent", argv=argv, inner=False, restart=True)
    eventually(amphora.answers, "the agent answers")
    assert amphora.push(2, pinged("m2") + PROMETHEUS, pings={two: PINGS[two]})[0] == 200
    eventually(lambda: amphora.call("GET", "/v2/bundle")[1]["generation"] == 2, "the agent reports generation 2")
    after = amphora.status("amphora-responder")
    assert (after["pid"], after["starts"]) == (responder["pid"], responder["starts"])
    assert member_rows(amphora)[two][0] == "UP"


def test_a_killed_responder_is_restarted(amphora):
    assert amphora.push(1, pinged("m1"), pings=PINGS)[0] == 200
    before = amphora.status("amphora-responder")
    amphora.supervisor(op="signal", name="amphora-responder", signal=9)
    eventually(lambda: amphora.status("amphora-responder")["starts"] > before["starts"], "the responder restarts")
    eventually(lambda: member_rows(amphora)[MEMBER_IDS["m1"]][0] == "UP", "the member is up")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the agent's sources that the test can change."""
    place = tmp_path / "sources"
    shutil.copytree(ROOT / "amphora_agent", place / "amphora_agent")
    monkeypatch.setattr(amphora_lab, "ROOT", place)
    monkeypatch.chdir(place)  # `python -m` searches this directory first
    return place / "amphora_agent"


def test_the_processes_of_the_agent_need_little_memory(network, authority, tmp_path):
    """Proportional set size; an interpreter of a distribution needs some megabytes more or less."""
    network.plug()
    amphora = Amphora(network, tmp_path, authority, forked=False)
    try:
        amphora.start()
        eventually(amphora.answers, "the agent answers", 30)
        assert amphora.push(1, text(listener(["m1"])))[0] == 200
        every = [amphora.init(), *amphora_lab.descendants(amphora.init())]
        ours = [pid for pid in every if b"amphora_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ours) == 3, "supervisor, agent and responder"
        sizes = [Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0] for pid in ours]
        assert sum(map(int, sizes)) < 55 * 1024
    finally:
        amphora.power_off()
        network.unplug()


def test_a_new_version_replaces_the_responder_without_a_failed_check(copied, network, authority, tmp_path):
    (tmp_path / "amphora").mkdir()
    network.plug()
    amphora = Amphora(network, tmp_path / "amphora", authority, forked=False)
    try:
        amphora.start()
        eventually(amphora.answers, "the agent answers", 30)
        assert str(copied) in " ".join(amphora.status("amphora-responder")["argv"])
        assert amphora.push(1, pinged("m1", "m2"), pings=PINGS)[0] == 200
        eventually(lambda: [row[0] for row in member_rows(amphora).values()] == ["UP", "UP"], "both members are up")
        responder = amphora.status("amphora-responder")
        inside = Namespace(Path(f"/proc/{amphora.init()}/root/run/netns/amphora-haproxy"))
        try:
            before = inside.run(version)
            with (copied / "responder/metric_families.py").open("a") as source:
                source.write("# changed\n")
            amphora.supervisor(op="signal", name="amphora-agent", signal=9)
            eventually(lambda: inside.run(version) not in (None, before), "the responder's new version answers", 30)
        finally:
            inside.close()
        after = amphora.status("amphora-responder")
        assert (after["pid"], after["starts"]) == (responder["pid"], responder["starts"])
        assert [row[1] for row in member_rows(amphora).values()] == ["0", "0"]
        assert [row[0] for row in member_rows(amphora).values()] == ["UP", "UP"]
    finally:
        amphora.power_off()
        network.unplug()


def version():
    connection = http.client.HTTPConnection("127.0.0.1", 9101, timeout=5)
    try:
        connection.request("GET", "/version")
        with connection.getresponse() as answer:
            return answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


# -- the certificate ------------------------------------------------------------------------------------------------


def shown(amphora, trust=None):
    """Return the certificate of a new handshake."""
    context = amphora.tls(amphora.client_certificate, trust=trust)
    with (
        socket.create_connection((AMPHORA, 9443), 10) as plain,
        context.wrap_socket(plain, server_hostname=amphora.id) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def der_of(pem):
    return ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n")


def key_of(pem):
    """Return a line that only this key contains."""
    return pem.partition("PRIVATE KEY-----\n")[2].splitlines()[0]


def put(amphora, pem, **more):
    return amphora.call("PUT", "/v2/certificate", {"certificate": pem, **more})


def test_a_new_certificate_is_presented_at_once(amphora, client, controller):
    kept = controller(amphora.connection, amphora.tls(amphora.client_certificate))
    try:
        assert controller(exchange, kept, "GET", "/v2/info")[0] == 200
        new = amphora.authority.issue(amphora.id, SERVER, hours=0.5)
        before = client_expiry(amphora)
        said = controller(client.renew, amphora.id, AMPHORA, Secret(new.encode()))
        assert controller(shown, amphora) == der_of(new)
        assert client_expiry(amphora) != before
        assert client_expiry(amphora) == said.expires_at.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert (amphora.write("x", "").parent / "etc/server.pem").stat().st_mode & 0o777 == 0o600
        # The earlier connection continues.
        assert controller(exchange, kept, "GET", "/v2/info")[0] == 200
    finally:
        kept.close()
    # The restarted agent presents the new certificate.
    starts = amphora.status("amphora-agent")["starts"]
    amphora.supervisor(op="signal", name="amphora-agent", signal=9)
    eventually(lambda: amphora.status("amphora-agent")["starts"] > starts, "the agent restarts")
    eventually(amphora.answers, "the agent answers")
    assert controller(shown, amphora) == der_of(new)


def client_expiry(amphora):
    return amphora.call("GET", "/v2/info")[1]["certificate_expires_at"]


def test_a_wrong_certificate_changes_nothing(amphora, controller):
    own, other = amphora.authority, Authority("controllers")
    good, better = own.issue(amphora.id, SERVER), own.issue(amphora.id, SERVER)
    refused = {
        "of another amphora": (own.issue(str(uuid.uuid4()), SERVER), {}),
        "of another authority": (other.issue(amphora.id, SERVER), {}),
        "expired": (own.issue(amphora.id, SERVER, hours=-1), {}),
        "of a client": (own.issue(amphora.id, CLIENT), {}),
        "with the key of another certificate": (
            good.partition("-----BEGIN PRIVATE")[0] + better[better.index("-----BEGIN P") :],
            {},
        ),
        "without a key": (good.partition("-----BEGIN PRIVATE")[0], {}),
        "no PEM": ("nonsense", {}),
        "with an invalid server authority": (good, {"server_ca": "nonsense"}),
        "with an invalid client authority": (good, {"client_ca": "nonsense"}),
        "with a client authority that excludes the sender": (good, {"client_ca": pki.Authority("other").pem}),
    }
    before = controller(shown, amphora)
    said = ""
    for what, (pem, more) in refused.items():
        status, answer = put(amphora, pem, **more)
        assert status == 422, f"{what}: {answer}"
        said += json.dumps(answer)
        amphora.disconnect()
        assert controller(shown, amphora) == before, what
    for body in (b"nonsense", b"[]", b"{}", b'{"certificate": 5}', b'{"certificate": "", "other": 1}'):
        status, answer = amphora.call("PUT", "/v2/certificate", body)
        assert status == 400, answer
    said += "\n".join(amphora.supervisor(op="log", name="amphora-agent")["lines"])
    assert not any(key_of(pem) in said for pem in (good, better))


def test_authorities_are_exchanged_in_three_steps(amphora, controller):
    """The agent trusts both authorities, gets certificates of the new one, then trusts only that one."""
    old, new = amphora.authority, Authority("newer")
    both = old.pem + new.pem
    assert put(amphora, new.issue(amphora.id, SERVER), client_ca=both, server_ca=both)[0] == 200
    amphora.disconnect()
    amphora.authority = new
    amphora.client_certificate = amphora.write("newer.pem", new.issue("controller", CLIENT))
    assert amphora.call("GET", "/v2/info")[0] == 200
    assert put(amphora, new.issue(amphora.id, SERVER), client_ca=new.pem, server_ca=new.pem)[0] == 200
    amphora.disconnect()
    assert amphora.call("GET", "/v2/info")[0] == 200
    amphora.disconnect()
    amphora.client_certificate = amphora.write("older.pem", old.issue("controller", CLIENT))
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        amphora.call("GET", "/v2/info")
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        controller(shown, amphora, old.pem)


def test_an_expired_certificate_is_replaced(amphora, client, controller):
    etc = amphora.write("x", "").parent / "etc"
    amphora.disconnect()
    (etc / "server.pem").write_text(amphora.authority.issue(amphora.id, SERVER, hours=-1))
    with pytest.raises(AgentUntrusted, match="expired"):
        controller(client.info, amphora.id, AMPHORA)
    new = Secret(amphora.authority.issue(amphora.id, SERVER).encode())
    controller(client.renew, amphora.id, AMPHORA, new)
    assert controller(client.info, amphora.id, AMPHORA).amphora_id == amphora.id


def test_an_unreadable_file_does_not_replace_the_certificate(amphora, controller):
    """The compute backend may write files with an expired CA, for example."""
    etc = amphora.write("x", "").parent / "etc"
    before = controller(shown, amphora)
    (etc / "server.pem").write_text("nonsense")
    assert controller(shown, amphora) == before
    new = amphora.authority.issue(amphora.id, SERVER)
    (etc / "server.pem").write_text(new)
    assert controller(shown, amphora) == der_of(new)


# -- the debug bundle -----------------------------------------------------------------------------------------------

PARTS = {
    "time", "versions", "agent.conf", "machine.cfg", "haproxy.cfg", "keepalived.conf", "generation", "changes",
    "holds_vip", "certificate", "interfaces", "routing", "neighbours", "firewall", "services", "agent log",
    "haproxy log", "keepalived log", "responder log", "heartbeat errors", "processes", "memory", "load", "disk",
    "show info", "show stat", "show servers state", "show activity", "show table", "show ssl cert", "show peers",
    "show startup-logs", "show errors", "show sess", "show proc",
}  # fmt: skip


def failed(document):
    return {name for name, said in document.items() if isinstance(said, dict) and said.keys() == {"error"}}


def test_diagnostics_contain_no_secrets(amphora, tenant, network):
    certificate = tenant.issue("www.example.com")
    name = f"tls/{uuid.uuid4()}/default.pem"
    tls = f"frontend {uuid.uuid4()}\n    bind {VIP}:443 ssl crt {name}\n    http-request return status 200\n"
    cookie = "    cookie SRV insert indirect\n    dynamic-cookie-key canary-of-the-cookie\n"
    assert amphora.push(1, text(listener(["m1"], extra=cookie), tls), {name: certificate.pem})[0] == 200

    def send_invalid():
        """Send an invalid request, which HAProxy keeps for `show errors`."""
        with socket.create_connection((VIP, 80), 5) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: canary-of-a-user\r\nBad Header: x\r\n\r\n")
            connection.recv(4096)

    network.thread("cl").run(send_invalid)
    eventually(lambda: "canary-of-a-user" in amphora.ask_haproxy("show errors"), "HAProxy has kept the request")
    status, document = amphora.call("GET", "/v2/diagnostics")
    assert status == 200
    assert document.keys() >= PARTS
    assert failed(document) == set()
    assert name.rpartition("/")[2] in document["show ssl cert"]
    assert document["certificate"]["expires_at"] == client_expiry(amphora)
    assert "invalid" in document["show errors"]
    assert document["changes"]["start"]["count"] == 1
    assert document["services"]["haproxy"]["pid"] is not None
    assert VIP in json.dumps(document["interfaces"])
    assert {one["name"] for one in document["processes"]} >= {"haproxy"}
    said = json.dumps(document)
    own = (amphora.write("x", "").parent / "etc/server.pem").read_text()
    for secret in (key_of(certificate.pem), key_of(own), amphora.key.hex(), "canary-of"):
        assert secret not in said


def test_a_silent_service_affects_its_own_part_only(amphora):
    status, document = amphora.call("GET", "/v2/diagnostics")
    assert status == 200
    assert failed(document) == {name for name in PARTS if name.startswith("show ")}
    assert document["haproxy.cfg"] is None
    assert document["processes"]


def test_status_of_ten_thousand_members(amphora):
    """The diagnostics are smaller than the limit of the controller's client."""
    lines = [
        f"    server {uuid.uuid5(uuid.NAMESPACE_DNS, str(n))} 198.51.100.101:{1024 + n} weight 1\n"
        for n in range(10000)
    ]
    listeners = [
        listener([], listener_id=str(uuid.uuid4()), port=1000 + n, extra="".join(lines[n * 1000 : (n + 1) * 1000]))
        for n in range(10)
    ]
    status, said = amphora.push(1, text(*listeners))
    assert (status, said["loaded"]["members"]) == (200, 10000)
    status, document = amphora.call("GET", "/v2/diagnostics")
    assert (status, failed(document)) == (200, set())
    assert document["show servers state"].count("\n") > 10000
    assert len(json.dumps(document)) < 32 << 20
