# SPDX-License-Identifier: Apache-2.0
"""Metrics of a process, and their documentation."""

import re
from pathlib import Path

import pytest
from fleet_rows import INTERVAL, NOW, balancer, fleet, identifier, machine
from octavia_lib.api.drivers.exceptions import UpdateStatusError
from test_alerts import AUTHORITY, GOING, ROTATION

from amphora_driver import metrics
from amphora_driver.errors import AgentRefused, AgentUnreachable, LeaseLost, StoreError
from amphora_driver.metrics import ProcessMetrics
from amphora_driver.store.failovers import Cause, FailoverOutcome
from amphora_driver.store.sealed_secrets import ExpiringSecret
from amphora_driver.telemetry import fleet_metrics
from amphora_driver.telemetry.alerts import find_notices
from amphora_driver.telemetry.fleet_snapshot import BreakerInfo, DetectorInfo, OutboxInfo, SparePoolInfo
from amphora_driver.telemetry.snapshot_cache import View

EXPIRING = ExpiringSecret(load_balancer_id="lb", object_id="li", kind="listener", expires_at=NOW - 7)
DOCUMENT = Path(__file__).parents[3] / "docs/reference/metrics.md"


def value(meters, name, **labels):
    return meters.registry.get_sample_value(name, labels)


def full():
    found = fleet(
        balancers=(
            balancer(),
            balancer(2, due=True, due_at=NOW - 40, generation=6, committed=5, accepted_at=NOW - 50, attempts=1),
            balancer(3, due=True, due_at=NOW + 40, state="ERROR", operating="ERROR"),
            balancer(4, owner="me", due=True, state="PENDING_UPDATE"),
        ),
        amphorae=(
            machine(),
            machine(1002, confirmed=4, heard_at=NOW - 30, silence="silent", drift="nft", drifts=True),
            machine(1003, state="retiring", heard_at=None),
            machine(1004, role="SPARE", wanted=0),
            machine(1005, near_limit=("cpu", "memory", "listener_connections")),
        ),
        failovers=(GOING,),
        breaker=BreakerInfo(state="trial", silent=1, watched=3),
        sight=DetectorInfo(state="blind", reason="no route"),
        pools=(SparePoolInfo(id="p", wanted=2, booted=1, ready=1, error=None),),
        rotations=(ROTATION,),
        authorities=(AUTHORITY,),
        outbox=OutboxInfo(waiting=3, oldest=NOW - 20),
        orphans=2,
        expiring=(EXPIRING,),
    )
    return View(number=1, fleet=found, notices=find_notices(found, INTERVAL))


def told(view, own=None):
    text, _ = fleet_metrics.encode_metrics("", own, view, "1.2", "controller")
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.decode().splitlines()
        if not line.startswith("#")
    }


def test_jobs_and_steps_are_counted():
    meters = ProcessMetrics()
    with meters.job() as job:
        job.outcome = "finished"
    with pytest.raises(RuntimeError), meters.job():
        raise RuntimeError
    with meters.job() as job:
        job.outcome = "something new"
    assert value(meters, "amphora_jobs_total", outcome="finished") == 1
    assert value(meters, "amphora_jobs_total", outcome="failed") == 1
    assert value(meters, "amphora_jobs_total", outcome="other") == 1
    assert value(meters, "amphora_job_seconds_count") == 3
    with pytest.raises(RuntimeError), meters.step("Boot"):
        raise RuntimeError
    assert value(meters, "amphora_step_failures_total", step="Boot") == 1
    assert value(meters, "amphora_step_seconds_count", step="Boot") == 1


def test_pushes_are_counted():
    meters = ProcessMetrics()
    meters.count_push("reload")
    meters.count_push("anything <else>")
    meters.count_push_failure(AgentUnreachable("push", "it is away"))
    meters.count_push_failure(AgentRefused("push", "no"))
    meters.observe_apply(None, 5.0)
    meters.observe_apply(3.0, 5.0)
    assert value(meters, "amphora_pushes_total", how="reload") == 1
    assert value(meters, "amphora_pushes_total", how="other") == 1
    assert value(meters, "amphora_push_failures_total", error="AgentRefused") == 1
    assert value(meters, "amphora_push_failures_total", error="AgentUntrusted") == 0
    assert (value(meters, "amphora_apply_seconds_count"), value(meters, "amphora_apply_seconds_sum")) == (1, 2)


def test_failed_transactions_are_counted():
    meters = ProcessMetrics()
    for error in (StoreError("read", "away"), LeaseLost("write", "taken over")):
        with pytest.raises(StoreError), meters.transaction("read"):
            raise error
    assert value(meters, "amphora_database_failures_total", kind="read") == 1
    assert value(meters, "amphora_database_seconds_count", kind="read") == 2


def test_calls_of_octavia_and_their_results_are_counted():
    meters = ProcessMetrics()
    with meters.octavia_call("barrier"):
        pass
    with pytest.raises(UpdateStatusError), meters.octavia_call("statuses"):
        raise UpdateStatusError(fault_string="no such file")
    with pytest.raises(UpdateStatusError), meters.octavia_call("statuses"):
        raise UpdateStatusError(fault_string="not there", status_object="listeners", status_object_id="li")
    meters.count_reports("accepted", 3)
    meters.count_reports("refused")
    assert value(meters, "amphora_octavia_seconds_count", call="barrier") == 1
    assert value(meters, "amphora_octavia_seconds_count", call="statuses") == 2
    assert value(meters, "amphora_octavia_seconds_count", call="statistics") == 0
    assert value(meters, "amphora_octavia_failures_total", call="barrier") == 0
    assert value(meters, "amphora_octavia_failures_total", call="statuses") == 1, "a refusal is an answer"
    assert value(meters, "amphora_reports_total", outcome="accepted") == 3
    assert value(meters, "amphora_reports_total", outcome="refused") == 1


def test_heartbeat_counters_are_read_from_the_receiver():
    meters = ProcessMetrics()
    assert value(meters, "amphora_heartbeats_received_total") is None
    meters.set_heartbeat_source(lambda: (7, {"signature": 2}))
    assert value(meters, "amphora_heartbeats_received_total") == 7
    assert value(meters, "amphora_heartbeats_refused_total", reason="signature") == 2


def test_label_values_are_those_of_the_rows():
    assert set(metrics.CAUSES) == {one.value for one in Cause}
    assert set(metrics.ENDS) == {one.value for one in FailoverOutcome}


def test_the_metrics_of_the_fleet():
    found = told(full())
    for series, expected in {
        "amphora_fleet_up": 1,
        "amphora_fleet_alert_level": 2,
        'amphora_fleet_load_balancers{status="ACTIVE"}': 2,
        'amphora_fleet_load_balancers{status="ERROR"}': 1,
        'amphora_fleet_load_balancers{status="PENDING_CREATE"}': 0,
        'amphora_fleet_queue_depth{state="due"}': 1,
        'amphora_fleet_queue_depth{state="waiting"}': 1,
        'amphora_fleet_queue_depth{state="running"}': 1,
        'amphora_fleet_queue_depth{state="failing"}': 1,
        "amphora_fleet_queue_oldest_seconds": 40,
        "amphora_fleet_unconfirmed_oldest_seconds": 50,
        "amphora_fleet_uncommitted": 1,
        'amphora_fleet_amphorae{state="ready"}': 3,
        'amphora_fleet_amphorae_near_limit{resource="memory"}': 1,
        'amphora_fleet_amphorae_near_limit{resource="conntrack"}': 0,
        f'amphora_fleet_amphora_near_limit{{amphora="{identifier(1005)}",load_balancer="{identifier(1)}",'
        'resource="cpu"}': 1,
        'amphora_fleet_tls_certificate_expiry_seconds{kind="listener",load_balancer="lb",object="li"}': -7,
        'amphora_fleet_amphorae{state="retiring"}': 1,
        "amphora_fleet_amphorae_outdated": 1,
        'amphora_fleet_amphorae_silent{kind="silent"}': 1,
        "amphora_fleet_amphorae_drifting": 1,
        'amphora_fleet_heartbeat_age_seconds{percentile="100"}': 30,
        'amphora_fleet_failovers_open{cause="silent"}': 1,
        'amphora_fleet_circuit_breaker{state="trial"}': 1,
        'amphora_fleet_circuit_breaker{state="open"}': 0,
        "amphora_fleet_circuit_breaker_held": 0,
        'amphora_fleet_detector{state="seeing"}': 0,
        'amphora_fleet_detector{state="blind"}': 1,
        'amphora_fleet_spares{pool="p",state="ready"}': 1,
        "amphora_fleet_rotations": 1,
        "amphora_fleet_outbox": 3,
        "amphora_fleet_outbox_oldest_seconds": 20,
        "amphora_fleet_orphans": 2,
        "amphora_fleet_certificate_expiry_seconds": 600_000,
        'amphora_fleet_ca_expiry_seconds{kind="amphora",state="current"}': 3600,
    }.items():
        assert found[series] == expected, series


def test_metric_names_match_the_documentation():
    meters = ProcessMetrics()
    meters.set_heartbeat_source(lambda: (1, {"magic": 1}))
    with meters.step("Push"):
        pass
    with pytest.raises(RuntimeError), meters.step("Push"):
        raise RuntimeError
    series = told(full(), meters.registry)
    names = {re.sub(r"_(bucket|count|sum)$", "", name.partition("{")[0]) for name in series}
    ours = {name for name in names if name.startswith("amphora_")}
    documented = set(re.findall(r"^\| `(amphora_\w+)`", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    # tests/unit/cluster/test_cluster_controller.py compares the metrics of cluster membership.
    assert ours == {name for name in documented if not name.startswith("amphora_cluster_")}
