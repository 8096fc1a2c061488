# SPDX-License-Identifier: Apache-2.0
"""PROMETHEUS listeners export HAProxy's counters under Octavia's names, quickly and despite failures."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import threading
import uuid
from pathlib import Path

import pytest
from amphora_lab import VIP, VIP6, descendants, eventually, get
from configuration_text import LISTENER, MEMBER_IDS, POOL, listener, text
from prometheus_client.parser import text_string_to_metric_families

from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.network.namespace import Namespace
from amphora_agent.responder import prometheus
from amphora_agent.responder.metric_families import CPU, MEMORY, PROCESS, STATISTICS

pytestmark = pytest.mark.root
SCRAPED = str(uuid.uuid5(uuid.NAMESPACE_DNS, "prometheus"))
PROMETHEUS = f"frontend {SCRAPED}\n    bind {VIP}:9100\n    bind [{VIP6}]:9100\n    default_backend amphora:metrics\n"
KNOWN = {family.name for family in (CPU, MEMORY, *PROCESS, *(one for part in STATISTICS.values() for one in part))}
# Scrapes change these samples. The exporter of HAProxy 2.6 computes each mean over 1024 requests.
RESTLESS = re.compile(
    r"octavia_(?:loadbalancer_(?:\w*connection\w*|\w*session_rate|requests_total|cpu|memory)|memory"
    r"|\w+time_average_seconds)"
)


def scrape(address=VIP, port=9100, path="/metrics", method="GET", version=11):
    """Return status, content type and text of one answer."""
    connection = http.client.HTTPConnection(address, port, timeout=10)
    connection._http_vsn, connection._http_vsn_str = version, f"HTTP/1.{version - 10}"
    try:
        connection.request(method, path)
        with connection.getresponse() as answer:
            return answer.status, answer.getheader("Content-Type"), answer.read().decode()
    finally:
        connection.close()


def parsed(said):
    """Return the samples by name and labels; each family is declared once, before its samples."""
    names = [line.split()[2] for line in said.splitlines() if line.startswith("# TYPE ")]
    assert len(set(names)) == len(names)
    found = {}
    for family in text_string_to_metric_families(said):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    assert {name for name, _ in found} <= set(names) == KNOWN
    return found


def of(found, name, **labels):
    return found[name, frozenset(labels.items())]


@pytest.fixture
def client(network):
    return network.thread("cl").run


@pytest.fixture
def inside(amphora):
    """Return a function that runs another one in the inner namespace."""
    entered = Namespace(Path(f"/proc/{amphora.init()}/root/run/netns/amphora-haproxy"))
    yield entered.run
    entered.close()


@pytest.mark.parametrize("address", [VIP, VIP6])
@pytest.mark.parametrize("version", [10, 11])
def test_a_scrape_has_the_metrics_of_dashboards(amphora, client, address, version):
    assert amphora.push(1, text(listener(["m1", "m2"], m2="weight 1 disabled"), PROMETHEUS))[0] == 200
    for _ in range(3):
        assert client(get) == (200, "m1")
    status, kind, said = client(scrape, address, version=version)
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert "version=0.0.4" in kind
    found = parsed(said)
    pool = f"{POOL}:{LISTENER}"
    assert of(found, "octavia_listener_http_requests_total", listener=LISTENER) == 3
    assert of(found, "octavia_listener_http_responses_total", listener=LISTENER, code="2xx") == 3
    assert of(found, "octavia_listener_status", listener=LISTENER, state="UP") == 1
    assert of(found, "octavia_listener_http_requests_total", listener=SCRAPED) >= 1
    assert of(found, "octavia_pool_active_members", pool=pool) == 1
    one, two = MEMBER_IDS["m1"], MEMBER_IDS["m2"]
    assert of(found, "octavia_member_http_responses_total", pool=pool, member=one, code="2xx") == 3
    assert of(found, "octavia_member_bytes_out_total", pool=pool, member=one) > 0
    assert of(found, "octavia_member_status", pool=pool, member=one, state="UP") == 1
    assert of(found, "octavia_member_status", pool=pool, member=two, state="MAINT") == 1
    assert of(found, "octavia_member_status", pool=pool, member=two, state="UP") == 0
    assert 0 < of(found, "octavia_loadbalancer_memory") < 100
    assert "amphora:" not in said


def test_a_prometheus_listener_serves_metrics_and_nothing_else(amphora, client):
    pings = {MEMBER_IDS["m1"]: "198.51.100.101"}
    assert amphora.push(1, text(listener(["m1"]), PROMETHEUS), pings=pings)[0] == 200
    for path in ("//", f"/ping/{MEMBER_IDS['m1']}", "/metrics/", "//metrics", "/metrics/../ping/x", "/version"):
        assert client(scrape, path=path)[0] == 404, path
    assert client(scrape, path="/metrics?scope=global")[0] == 200
    status, kind, said = client(scrape, path="/")
    assert (status, kind.split(";")[0], said.count("\n")) == (200, "text/plain", 1)
    assert "/metrics" in said
    assert client(scrape, method="POST")[0] == 405
    assert client(scrape, path="/", method="POST")[0] == 405
    for address in (VIP, "198.51.100.11"):
        with pytest.raises(ConnectionRefusedError):
            client(socket.create_connection, (address, 9101), 2)


def test_a_scrape_without_haproxy_has_the_reason(amphora, inside):
    assert amphora.push(1, text(listener(["m1"])))[0] == 200
    assert inside(scrape, "127.0.0.1", 9101)[0] == 200
    assert amphora.push(2, None)[0] == 200
    status, _, said = inside(scrape, "127.0.0.1", 9101)
    assert status == 503
    assert "to HAProxy: no answer" in said
    assert amphora.push(3, text(listener(["m1"])))[0] == 200
    assert inside(scrape, "127.0.0.1", 9101)[0] == 200


def test_no_scrape_fails_during_reloads(amphora, inside):
    """The test scrapes in the inner namespace, without a connection through a draining worker."""
    assert amphora.push(1, text(listener(["m1"])))[0] == 200
    ending, answers = threading.Event(), []

    def keep_scraping():
        entered = Namespace(Path(f"/proc/{amphora.init()}/root/run/netns/amphora-haproxy"))
        while not ending.is_set():
            answers.append(entered.run(scrape, "127.0.0.1", 9101))
        entered.close()

    thread = threading.Thread(target=keep_scraping)
    thread.start()
    try:
        for generation in range(2, 7):
            before = len(answers)
            extra = f"    timeout queue {generation}s\n"
            status, said = amphora.push(generation, text(listener(["m1"], extra=extra)))
            assert (status, said["how"]) == (200, "reload")
            eventually(lambda before=before: len(answers) > before + 2, "scrapes continue")
    finally:
        ending.set()
        thread.join()
    assert {status for status, *_ in answers} == {200}
    for *_, said in answers:
        assert of(parsed(said), "octavia_listener_status", listener=LISTENER, state="UP") == 1


def test_a_restarted_agent_serves_metrics(amphora, inside):
    assert amphora.push(1, text(listener(["m1"])))[0] == 200
    before = amphora.status("amphora-agent")["starts"]
    assert amphora.supervisor(op="signal", name="amphora-agent", signal=9)["ok"]
    eventually(lambda: amphora.status("amphora-agent")["starts"] > before, "the agent starts again")

    def answers():
        try:
            return inside(scrape, "127.0.0.1", 9101)[0] == 200
        except OSError:
            return False

    eventually(answers, "the responder answers again")


def processor_time(amphora) -> float:
    """Return the processor seconds of the amphora's processes."""
    ticks = 0
    for pid in descendants(amphora.init()):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.quiet
def test_a_scrape_of_a_thousand_members_takes_less_than_100_ms(amphora, client):
    servers = "".join(
        f"    server {uuid.uuid5(uuid.NAMESPACE_DNS, str(n))} 198.51.100.101:{1024 + n} weight 1\n" for n in range(1000)
    )
    status, said = amphora.push(1, text(listener([], extra=servers), PROMETHEUS))
    assert (status, said["loaded"]["members"]) == (200, 1000)
    # Processor time of the amphora's processes: elapsed time depends on other processes of the machine.
    began, scrapes = processor_time(amphora), 10
    for _ in range(scrapes):
        status, _, said = client(scrape)
        assert status == 200
    took = (processor_time(amphora) - began) / scrapes
    found = parsed(said)
    members = {dict(labels)["member"] for name, labels in found if name == "octavia_member_status"}
    assert len(members) == 1000
    assert took < 0.1, f"{took * 1000:.0f} ms"


# -- compared with HAProxy's exporter -------------------------------------------------------------------------------

EVERY_STATE = """global
    stats socket {place}/stats mode 600 level admin
defaults
    mode http
    timeout connect 2s
    timeout client 10s
    timeout server 10s
    timeout check 10s
frontend amphora:exporter
    bind unix@{place}/exporter
    http-request use-service prometheus-exporter
frontend web
    bind unix@{place}/web
    http-request deny if {{ path /denied }}
    http-request return status 200
frontend front
    bind unix@{place}/front
    default_backend pool:web
backend pool:web
    option httpchk GET /
    server up unix@{place}/web check inter 2s fastinter 100 rise 1 fall 2
    server bad unix@{place}/absent check inter 100 fall 1
    server backup unix@{place}/web backup
    server heavy unix@{place}/web weight 100 maxconn 10 maxqueue 5 slowstart 60s
frontend bytes
    mode tcp
    bind unix@{place}/bytes
    default_backend pool:bytes
backend pool:bytes
    mode tcp
    server up unix@{place}/web
    server none unix@{place}/web weight 0
    server checked unix@{place}/web weight 0 check inter 2s fastinter 100 rise 1 fall 2
    server off unix@{place}/web disabled
    server leaving unix@{place}/web
    server left unix@{place}/web check inter 2s fastinter 100 rise 1 fall 2
backend pool:empty
"""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, place):
        super().__init__("localhost", timeout=10)
        self._place = place

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(self._place))


def ask_unix(place, path):
    connection = UnixConnection(place)
    try:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            return answer.read().decode()
    finally:
        connection.close()


def exported(place):
    """Return the samples of HAProxy's exporter that have a name in Octavia, under that name."""
    subjects = {"frontend": "listener", "backend": "pool", "server": "member", "process": "loadbalancer"}
    renamed = {
        "octavia_pool_active_servers": "octavia_pool_active_members",
        "octavia_pool_backup_servers": "octavia_pool_backup_members",
        "octavia_pool_server_aborts_total": "octavia_pool_member_aborts_total",
    }
    found = {}
    body = ask_unix(place / "exporter", "/metrics")
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            _, subject, rest = sample.name.split("_", 2)
            if subject not in subjects:  # "resolver" (3.0)
                continue
            name = f"octavia_{subjects[subject]}_{rest}".replace("loadbalancer_pool_", "memory_pool_")
            name = renamed.get(name, name)
            labels = dict(sample.labels)
            if name in KNOWN and labels.get("proxy") != "amphora:exporter":
                if "proxy" in labels:
                    labels["listener" if subject == "frontend" else "pool"] = labels.pop("proxy")
                if "server" in labels:
                    labels["member"] = labels.pop("server")
                found[name, frozenset(labels.items())] = repr(float(sample.value)), family.type
    return found


def ours(place):
    found = {}
    said = "".join(prometheus.scrape(Socket(place / "stats")))
    parsed(said)
    for family in text_string_to_metric_families(said):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = repr(float(sample.value)), family.type
    return found


def test_samples_are_those_of_haproxys_own_exporter(tmp_path):
    (tmp_path / "haproxy.cfg").write_text(EVERY_STATE.format(place=tmp_path))
    with (tmp_path / "log").open("wb") as log:
        haproxy = subprocess.Popen(["haproxy", "-db", "-f", tmp_path / "haproxy.cfg"], stdout=log, stderr=log)
    try:
        eventually((tmp_path / "stats").exists, "HAProxy runs")
        worker = Socket(tmp_path / "stats")
        for server in ("leaving", "left"):
            worker.order(f"set server pool:bytes/{server} state drain")
        for path in ("/", "/", "/", "/denied"):
            ask_unix(tmp_path / "front", path)

        def settled():
            rows = [line.split(",") for line in worker.ask("show stat").splitlines()]
            states = {tuple(row[:2]): row[17] for row in rows if len(row) > 17}
            return states["pool:web", "bad"] == "DOWN" and "/" not in "".join(states.values())

        eventually(settled, "the members' states are known")
        for server in ("web/up", "web/bad", "bytes/checked", "bytes/left"):
            worker.order(f"disable health pool:{server}")  # checks change no state and no counter any more
        for _ in range(50):  # rates change when a second ends between the two scrapes
            mine, native = ours(tmp_path), exported(tmp_path)
            steady = [key for key in mine if not RESTLESS.match(key[0])]
            different = {key: (mine[key], native.get(key)) for key in steady if mine[key] != native.get(key)}
            if not different:
                break
        assert not different
    finally:
        haproxy.kill()
        haproxy.wait()
    added = {(family.name, frozenset()) for family in (CPU, MEMORY)}
    assert native.keys() == mine.keys() - added
    present = {key for key, (value, _) in mine.items() if key[0] == "octavia_member_status" and value == "1.0"}
    assert {dict(labels)["state"] for _, labels in present} == {"UP", "DOWN", "MAINT", "DRAIN"}
