# SPDX-License-Identifier: Apache-2.0
"""PROMETHEUS listeners: HAProxy's counters under the names that Octavia's dashboards use."""

from __future__ import annotations

import re
import time

import pytest
from amphora_lab import eventually
from http_clients import CLIENT, OTHER, VIPS, trusting
from wanted import id_of, listener, load_balancer, member, pool

pytestmark = pytest.mark.root

SAMPLE = re.compile(r"([a-z0-9_]+)(?:\{(.*)\})? (\S+)")


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the samples by name and labels. A line that is no sample and no comment fails the test."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        found[match[1], match[2] or ""] = float(match[3])
    return found


def prometheus(port: int = 9100, **more):
    return listener(port, protocol="PROMETHEUS", pool=None, **more)


@pytest.mark.feature("listener.protocol.PROMETHEUS")
@pytest.mark.parametrize("vip", VIPS)
def test_the_exported_counters(served, vip):
    web = served.web()
    served.push(load_balancer(prometheus(), listener(80), pool("pool", member(web))))
    ids = {name: id_of(*what) for name, what in {"listener": ("listener", 80), "member": ("member", "web")}.items()}

    def scrape() -> tuple[float, float, float, float]:
        reply = served.client.fetch("/metrics", port=9100, address=vip)
        assert reply.status == 200
        assert reply.header("Content-Type").startswith("text/plain; version=0.0.4")
        found = samples(reply.body.decode())

        def value(name: str, *labels: str) -> float:
            """Return the only sample of this name with these labels."""
            (one,) = [
                number
                for (each, text), number in found.items()
                if each == name and all(label in text for label in labels)
            ]
            return one

        return (
            value("octavia_listener_http_requests_total", ids["listener"]),
            value("octavia_member_http_responses_total", ids["member"], '"2xx"'),
            value("octavia_member_http_responses_total", ids["member"], '"5xx"'),
            value("octavia_pool_current_sessions", id_of("pool", "pool")),
        )

    # The worker may have served earlier tests: its counters are not 0.
    requests, good, bad, _ = scrape()
    for _ in range(3):
        assert served.client.fetch(address=vip).status == 200
    # The last session to the member ends some time after the answer.
    eventually(lambda: scrape() == (requests + 3, good + 3, bad, 0), "three requests and no session are counted")


@pytest.mark.feature("listener.protocol.PROMETHEUS")
def test_a_prometheus_listener_serves_no_other_path(served):
    served.push(load_balancer(prometheus(), listener(80), pool("pool", member(served.web()))))
    for path in ("//", "/metrics/", "/ping/x", "/v2/info", "/metrics2"):
        assert served.client.fetch(path, port=9100).status in (403, 404)
    assert served.client.fetch("/metrics", port=9100, method="POST", body=b"x").status in (400, 403, 404, 405, 501)
    assert served.client.fetch("/metrics", port=9100).status == 200


@pytest.mark.feature("listener.protocol.PROMETHEUS")
def test_the_front_page_names_the_metrics(served):
    served.push(load_balancer(prometheus()))
    reply = served.client.fetch("/", port=9100)
    assert reply.status == 200
    assert b"/metrics" in reply.body
    assert served.client.fetch("/", port=9100, method="POST", body=b"x").status == 404


@pytest.mark.feature("listener.protocol.PROMETHEUS", "listener.allowed_cidr")
def test_only_allowed_clients_receive_metrics(served):
    served.push(
        load_balancer(prometheus(allowed_cidrs=(f"{CLIENT}/32",)), listener(80), pool("pool", member(served.web())))
    )
    assert served.client.fetch("/metrics", port=9100, source=CLIENT).status == 200
    assert served.client.refused(9100, source=OTHER)


@pytest.mark.feature("listener.protocol.PROMETHEUS", "listener.default_tls_container_ref")
def test_metrics_are_available_over_tls(served, tenant):
    certificate = tenant.issue("www.example.com")
    served.push(load_balancer(prometheus(default_tls_container_ref="cert")), {"cert": certificate.pem})
    reply = served.client.fetch("/metrics", port=9100, tls=trusting(tenant))
    assert reply.status == 200
    assert b"\noctavia_" in reply.body
    plain = served.client.connect(9100)
    plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"octavia_" not in plain.recv(4096)


@pytest.mark.quiet
@pytest.mark.feature("listener.protocol.PROMETHEUS")
def test_metrics_of_a_thousand_members_take_less_than_a_second(served):
    web = served.web()
    members = [
        member(web, id=id_of("member", number), address=f"203.0.113.{number % 250 + 1}", protocol_port=1000 + number)
        for number in range(1000)
    ]
    served.push(load_balancer(prometheus(), listener(80), pool("pool", *members)))
    times = []
    for _ in range(3):
        begin = time.monotonic()
        body = served.client.fetch("/metrics", port=9100).body.decode()
        times.append(time.monotonic() - begin)
    assert len({labels for name, labels in samples(body) if name == "octavia_member_status" and "UP" in labels}) == 1000
    assert min(times) < 1.0  # a bound for a busy machine; benchmarks/ measures the time
