# SPDX-License-Identifier: Apache-2.0
"""The provider agent's counters of calls to Octavia, and their scrape."""

import http.client
import os
import time

import pytest
from free_ports import free_ports
from octavia_lib.api.drivers import exceptions as octavia_errors
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import job
from amphora_driver.health import statistics
from amphora_driver.metrics import OURS
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Vip
from amphora_driver.provider_agent import process as provider_agent
from amphora_driver.provider_agent import status_reporter as module
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.store import status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)
LISTENER = Listener(id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80)


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        sockets.trees["lb"] = {"loadbalancer_id": "lb", "vip_address": VIP.address, "listeners": [], "pools": []}
        yield sockets


@pytest.fixture
def served(database):
    """Record a load balancer with a listener whose statuses are all due."""
    recorder = RequestRecorder(database, lambda node: None)
    recorder.create_load_balancer(TREE, read_back=False)
    recorder.create_object(Kind.LISTENER, LISTENER)

    def write(connection):
        connection.execute(job.update().values(applied=2))
        status_outbox.confirm_generation(connection, "lb", 2, {})

    database.write(write)


class Counted:
    """Differences of counters since this object was made: other tests of this process count too."""

    def __init__(self):
        self._before = self._now()

    def __getitem__(self, series):
        return self._now().get(series, 0) - self._before.get(series, 0)

    @staticmethod
    def _now():
        found = [one for family in OURS.registry.collect() for one in family.samples]
        return {(one.name, *one.labels.values()): one.value for one in found}


@pytest.mark.usefixtures("served")
def test_accepted_and_refused_reports_are_counted(conf, database, octavia):
    reporter, counted = Reporter(conf, database), Counted()
    octavia.refuse = lambda document: ("listeners", "li") if "listeners" in document else None
    reporter.run_once()
    assert counted["amphora_octavia_seconds_count", "barrier"] == 1
    assert counted["amphora_reports_total", "refused"] == 1
    assert counted["amphora_reports_total", "accepted"] == 0
    assert counted["amphora_octavia_failures_total", "statuses"] == 0, "Octavia answered"
    octavia.refuse = lambda document: None
    deadline = time.monotonic() + 30
    while counted["amphora_reports_total", "accepted"] < 2:
        assert time.monotonic() < deadline
        reporter.run_once()
    assert counted["amphora_reports_total", "refused"] == 1
    reporter.run_once()
    assert counted["amphora_reports_total", "accepted"] == 2, "one report is counted once"


@pytest.mark.usefixtures("served")
def test_calls_to_an_unavailable_octavia_are_counted(conf, database, octavia):
    reporter, counted = Reporter(conf, database), Counted()
    # octavia_lib's client waits for its sockets when it is created.
    assert reporter.library
    octavia.stop()
    with pytest.raises(octavia_errors.UpdateStatusError):
        reporter.run_once()
    assert counted["amphora_octavia_failures_total", "barrier"] == 1
    assert counted["amphora_reports_total", "accepted"] == 0
    octavia.start()
    reporter.run_once()
    assert counted["amphora_octavia_failures_total", "barrier"] == 1
    assert counted["amphora_reports_total", "accepted"] == 2


@pytest.mark.usefixtures("octavia")
def test_calls_with_statistics_are_counted(conf, database):
    RequestRecorder(database, lambda node: None).create_load_balancer(TREE, read_back=False)
    numbers = dict.fromkeys(("active_connections", "bytes_in", "bytes_out", "request_errors", "total_connections"), 1)
    row = statistics.Row(listener_id="li", amphora_id="am", load_balancer_id="lb", **numbers)
    database.write(lambda c: statistics.write_rows(c, [row]))
    reporter, counted = Reporter(conf, database), Counted()
    reporter.run_once()
    reporter.report_statistics()
    reporter.report_statistics()
    assert counted["amphora_octavia_seconds_count", "statistics"] == 1, "no call without changes"


def asked(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.usefixtures("served", "octavia")
def test_metrics_are_served(conf, database, monkeypatch):
    (port,) = free_ports(1)
    conf.set_override("provider_agent_port", port, group="amp_status_page")
    reporter = Reporter(conf, database)
    with provider_agent._start_telemetry(conf, "me", reporter) as watched:
        assert watched.server.wait_until_listening(10)
        reporter.run_once()
        status, text = asked(port, "/metrics")
        assert status == 200
        assert 'kind="provider-agent"' in text
        assert 'amphora_octavia_seconds_count{call="barrier"}' in text
        assert "amphora_fleet_outbox 0.0" in text
        assert asked(port, "/healthz")[0] == 200
        monkeypatch.setattr(module, "_MAX_ROUND_AGE", -1.0)
        assert asked(port, "/healthz")[0] == 503, "the reporter made no recent round"
    with pytest.raises(OSError, match=os.strerror(111)):
        asked(port, "/healthz")


def test_without_a_port_no_metrics_are_served(conf, database):
    with provider_agent._start_telemetry(conf, "me", Reporter(conf, database)) as watched:
        assert watched is None
