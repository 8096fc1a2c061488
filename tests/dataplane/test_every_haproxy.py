# SPDX-License-Identifier: Apache-2.0
"""For every HAProxy version: reloads keep requests, persistence, counters and member states.

The other data-plane tests use the first HAProxy in PATH (README, "Test it").
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

import pytest
from amphora_lab import alive, eventually
from counted import metrics, total
from every_haproxy import on_every_haproxy, worker
from faults import haproxy_pids
from http_clients import CLIENT, CLIENT6, OTHER, OTHER6, VIPS, answer, ask
from peers import MEMBER, MEMBER6
from wanted import VIP, id_of, listener, load_balancer, member, monitor, pool

pytestmark = [pytest.mark.root, on_every_haproxy]
FOREVER = 60_000
"""Milliseconds; each other number is a change that needs a new worker."""


@pytest.fixture
def renewed(served):
    """Push a changed time-out; assert that a new worker serves."""

    def pushed(number: int, *pools, port: int = 80, **more):
        before = worker(served)
        found = served.push(load_balancer(listener(port, timeout_client_data=FOREVER + number, **more), *pools))
        assert (found.how, bool(found.reason)) == ("reload", True), found.answer
        assert worker(served) != before
        return found

    return pushed


def first(served, *pools, **more) -> None:
    served.push(load_balancer(listener(80, timeout_client_data=FOREVER, **more), *pools))


def test_clients_keep_their_members_over_reloads(served, renewed):
    """Stick tables pass from worker to worker, also in immediate succession.

    This test is the first one, because HAProxy up to 2.8 delays a change for five seconds after its start. The delay is
    longer after several new workers.
    """
    peers = [served.web(name, (MEMBER, MEMBER6)[place % 2]) for place, name in enumerate("abc")]
    sticky = pool("pool", *map(member, peers), persistence=("SOURCE_IP", None))
    first(served, sticky)

    def homes():
        return {
            source: served.client.fetch(address=VIPS[":" in source], source=source).member
            for source in (CLIENT, CLIENT6, OTHER, OTHER6)
        }

    before = homes()
    assert len(set(before.values())) == 3
    for number in range(1, 4):
        renewed(number, sticky)
        served.until_learned(4)
        assert homes() == before
    renewed(4, sticky)
    renewed(5, sticky)
    served.until_learned(4)
    assert homes() == before


def test_a_reload_right_after_a_start(served, renewed):
    """HAProxy's master refuses connections for some moments after its worker serves."""
    for _ in range(3):
        served.push(load_balancer())
        first(served, pool("pool", member(served.web("web"))))
        renewed(1, pool("pool", member(served.web("web"))))


def test_no_request_fails_during_reloads(served, renewed):
    """Covers new connections, kept connections, and unfinished requests."""
    web = served.web()
    first(served, pool("pool", member(web)))
    kept, waiting = served.client.connect(), served.client.connect()
    assert ask(kept).status == 200
    with served.client.load() as load:
        for number in range(1, 4):
            waiting.sendall(b"GET / HTTP/1.1\r\nHost: www.example.com\r\n")
            renewed(number, pool("pool", member(web)))
            load.goes_on()
            waiting.sendall(b"\r\n")
            assert answer(waiting).status == 200
            waiting = served.client.connect()
            assert ask(kept).status == 200
            kept = served.client.connect()
            assert ask(kept).status == 200
    assert load.failures == []


def test_a_worker_that_cannot_start_changes_nothing(served, renewed):
    """Another process uses a port: HAProxy accepts the file, and only the new worker fails."""
    web = served.web()
    first(served, pool("pool", member(web)))
    before = worker(served)
    squat = f"import socket; s = socket.create_server(('{VIP}', 81)); print('bound', flush=True); s.accept()"
    served.amphora.supervisor(op="start", name="squatter", argv=["python3", "-c", squat], inner=True, restart=False)
    try:
        log = lambda: served.amphora.supervisor(op="log", name="squatter")["lines"]  # noqa: E731
        eventually(lambda: "bound" in log(), "the port is in use")
        more = load_balancer(listener(80), listener(81), pool("pool", member(web)))
        failed = served.push(more, status=500)
        assert ":81" in failed.answer["error"]["happened"]
        assert served.client.fetch().member == "web"
    finally:
        served.amphora.supervisor(op="stop", name="squatter")
    assert worker(served) == before
    assert served.push(more).how == "reload"
    assert served.client.fetch(port=81).member == "web"


def test_the_refused_line_is_named(served):
    web = served.web()
    first(served, pool("pool", member(web)))
    status, said = served.amphora.push(10**6, "frontend x\n    bind 192.0.2.1:1\n    default_backend nonsense\n")
    assert (status, "nonsense" in said["error"]["happened"]) == (422, True), said
    assert served.client.fetch().member == "web"


def test_members_that_are_down_stay_down_over_reloads(served, renewed):
    """Check results pass to new workers: no request goes to a dead member."""
    good, dead = served.web("good"), served.web("dead", MEMBER6)
    watched = monitor("TCP", delay=1, max_retries=2)
    both = pool("pool", member(good), member(dead), monitor=watched)
    first(served, both)
    served.until_states("pool", {"good": "UP", "dead": "UP"})
    dead.stop()
    served.until_states("pool", {"good": "UP", "dead": "DOWN"})
    # The next worker checks late, so until then it reports the state of its predecessor.
    for number in (1, 2):
        renewed(number, pool("pool", member(good), member(dead), monitor=monitor("TCP", delay=30, timeout=2)))
        assert served.status(id_of("member", "dead")) == {"DOWN"}
        assert {served.client.fetch().member for _ in range(4)} == {"good"}


def test_counters_continue_over_reloads(served, renewed):
    """Counters are sums over replaced workers, one of which still has a client."""
    parts = pool("counted", member(served.web("a")), member(served.web("b", MEMBER6)))
    first(served, parts, pool="counted")
    asked: Counter[str] = Counter()
    lasting = served.client.connect()
    asked[ask(lasting).member] += 1
    before = eventually(lambda: metrics(served.amphora), "metrics are available")
    for number in range(1, 4):
        asked.update(served.client.fetch().member for _ in range(5))
        renewed(number, parts, pool="counted")
    asked[ask(lasting).member] += 1
    lasting.close()
    asked.update(served.client.fetch().member for _ in range(5))

    def told() -> bool:
        after = metrics(served.amphora)
        assert {name for name, value in before.items() if after and after[name] < value} == set()
        labels = f'pool="{id_of("pool", "counted")}:'
        return asked == {
            name: total(after, "member_sessions_total", labels, id_of("member", name)) for name in ("a", "b")
        }

    eventually(told, f"metrics report {asked}")


def test_a_killed_worker_is_replaced(served):
    """The master ends with its worker; the restart reads the file, which contains runtime updates too."""
    a, b = served.web("a"), served.web("b", MEMBER6)
    first(served, pool("pool", member(a)))
    found = served.push(load_balancer(listener(80, timeout_client_data=FOREVER), pool("pool", member(a), member(b))))
    assert found.how == "runtime"
    master, victim = haproxy_pids(served.amphora)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not alive(master) and not alive(victim), "master and worker have ended")
    eventually(lambda: not served.client.refused(), "a member answers")
    assert {served.client.fetch().member for _ in range(4)} == {"a", "b"}
    assert haproxy_pids(served.amphora)[0] != master
    found = served.push(load_balancer(listener(80, timeout_client_data=FOREVER + 1), pool("pool", member(a))))
    assert found.how == "reload"
    assert served.client.fetch().member == "a"


def test_haproxy_logs_no_warning_about_its_configuration(served, renewed, tenant):
    """Covers the whole configuration: the machine's part, the head, and the text."""
    certificate = tenant.issue("www.example.com")
    web = served.web("web")
    parts = (
        listener(80),
        listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="own"),
        pool("pool", member(web), persistence=("HTTP_COOKIE", None), monitor=monitor("HTTP")),
    )
    served.push(load_balancer(*parts), {"own": certificate.pem})
    kept = (*parts[:2], pool("pool", member(web), persistence=("SOURCE_IP", None), monitor=monitor("PING")))
    served.push(load_balancer(*kept), {"own": certificate.pem})
    said = served.amphora.ask_haproxy("show startup-logs")
    lines = [*said.splitlines(), *served.amphora.supervisor(op="log", name="haproxy")["lines"]]
    # A worker's message about a member that is down from its start has the form of a warning.
    complaints = [line for line in lines if re.search(r"deprecated|parsing \[|config : (?!Server )", line)]
    assert complaints == []
