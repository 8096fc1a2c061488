# SPDX-License-Identifier: Apache-2.0
"""Alerts: conditions that need an operator, and conditions that do not."""

import msgspec
import pytest
from fleet_rows import INTERVAL, NOW, PROCESSES, balancer, fleet, identifier, machine, process

from amphora_driver.store.sealed_secrets import ExpiringSecret
from amphora_driver.telemetry.alerts import Level, find_notices, group_notices, worst_level
from amphora_driver.telemetry.fleet_snapshot import (
    AuthorityInfo,
    BreakerInfo,
    DetectorInfo,
    FailoverInfo,
    OutboxInfo,
    RotationInfo,
    SparePoolInfo,
    UnknownAmphoraInfo,
)

GOING = FailoverInfo(
    id=1,
    load_balancer_id=identifier(1),
    amphora_id=identifier(1001),
    cause="silent",
    reason=None,
    asked_by=None,
    silent_since=NOW - 9,
    begun_at=NOW - 2,
    served_at=None,
    ended_at=None,
    outcome=None,
)
ROTATION = RotationInfo(
    id=4, state="paused", max_unavailable=1, asked_by=None, created_at=NOW, ended_at=None, reason="the new one is deaf"
)
AUTHORITY = AuthorityInfo(id=1, kind="amphora", state="current", expires_at=NOW + 3600)
UNKNOWN_AMPHORA = UnknownAmphoraInfo(
    amphora_id=identifier(9), address="192.0.2.9", first_at=NOW - 5, last_at=NOW, verdict=None
)
SILENT = {"silence": "silent", "silent_since": NOW - 9}


def expiring(days):
    expires_at = NOW + days * 86_400
    return ExpiringSecret(load_balancer_id=identifier(1), object_id="li", kind="listener", expires_at=expires_at)


def said(**more):
    return [(one.level, one.text) for one in find_notices(fleet(**more), INTERVAL)]


def test_a_healthy_fleet_has_no_alert():
    assert said() == []
    assert worst_level(()) is Level.OK
    assert said(amphorae=(machine(), machine(1002, holds_vip=None, state="booting", heard_at=None, confirmed=0))) == []


def test_a_vip_report_that_was_not_read_is_no_alert():
    """An overloaded health manager reads the times of heartbeats, but not all values."""
    assert said(amphorae=(machine(holds_vip=None), machine(1002, holds_vip=False))) == []


@pytest.mark.parametrize(
    ("level", "text", "more"),
    [
        (
            Level.CRITICAL,
            "circuit breaker is open, no automatic fail-overs: 9 of 10",
            {"breaker": BreakerInfo(state="open", silent=9, watched=10)},
        ),
        (Level.WARNING, "one automatic fail-over at a time", {"breaker": BreakerInfo(state="trial")}),
        (
            Level.WARNING,
            "holds the circuit breaker open, no automatic fail-overs: switches",
            {"breaker": BreakerInfo(state="open", held=True, reason="switches")},
        ),
        (
            Level.WARNING,
            "blind, no automatic fail-overs: no route",
            {"sight": DetectorInfo(state="blind", reason="no route")},
        ),
        (Level.CRITICAL, "no controller runs", {"processes": PROCESSES[1:]}),
        (Level.CRITICAL, "no health manager runs", {"processes": (PROCESSES[0], PROCESSES[2])}),
        (Level.CRITICAL, "no provider agent runs", {"processes": PROCESSES[:2]}),
        (
            Level.WARNING,
            "sends no heartbeats",
            {"processes": (*PROCESSES, process("controller", name="old", seen_at=NOW - 99))},
        ),
        (
            Level.CRITICAL,
            "every controller is draining",
            {"processes": (process("controller", draining=True), *PROCESSES[1:])},
        ),
        (Level.WARNING, "image rotation 4 is paused: the new one is deaf", {"rotations": (ROTATION,)}),
        (Level.CRITICAL, "CA of amphora certificates expires", {"authorities": (AUTHORITY,)}),
        (
            Level.WARNING,
            "CA of amphora certificates expires",
            {"authorities": (msgspec.structs.replace(AUTHORITY, expires_at=NOW + 86400 * 9),)},
        ),
        (
            Level.WARNING,
            "192.0.2.9 sends heartbeats with the unknown amphora id",
            {"unknown_amphorae": (UNKNOWN_AMPHORA,)},
        ),
        (Level.WARNING, "quota", {"pools": (SparePoolInfo(id="p", wanted=1, booted=0, ready=0, error="quota"),)}),
        (Level.WARNING, "2 orphaned machines", {"orphans": 2}),
        (
            Level.WARNING,
            "3 statuses are not reported to Octavia yet",
            {"outbox": OutboxInfo(waiting=3, oldest=NOW - 60)},
        ),
        (Level.WARNING, "no controller starts its job", {"balancers": (balancer(due=True, due_at=NOW - 60),)}),
        (Level.CRITICAL, "no controller starts its job", {"balancers": (balancer(due=True, due_at=NOW - 600),)}),
        (
            Level.CRITICAL,
            "is in ERROR: quota",
            {"balancers": (balancer(state="ERROR", error="quota", operating="ERROR"),)},
        ),
        (
            Level.WARNING,
            "its job failed 2 times and is retried: no",
            {"balancers": (balancer(attempts=2, error="no"),)},
        ),
        (Level.WARNING, "a user waits for generation 5", {"balancers": (balancer(accepted_at=NOW - 60),)}),
        (Level.CRITICAL, "a user waits for generation 5", {"balancers": (balancer(accepted_at=NOW - 600),)}),
        (
            Level.WARNING,
            "serves no clients: all down",
            {"balancers": (balancer(operating="ERROR", reason="all down"),)},
        ),
        (
            Level.CRITICAL,
            "2 amphorae report that they hold the VIPs",
            {
                "balancers": (balancer(holders=(identifier(1001), identifier(1002))),),
                "amphorae": (machine(holds_vip=True), machine(1002, holds_vip=True)),
            },
        ),
        (
            Level.CRITICAL,
            "no amphora reports that it holds the VIPs",
            {"amphorae": (machine(holds_vip=False), machine(1002, holds_vip=False))},
        ),
        (Level.CRITICAL, "is silent", {"amphorae": (machine(**SILENT),)}),
        (Level.WARNING, "is silent", {"amphorae": (machine(**SILENT),), "failovers": (GOING,)}),
        (
            Level.CRITICAL,
            "has never sent a heartbeat: why",
            {"amphorae": (machine(silence="never_spoke", verdict="why"),)},
        ),
        (Level.WARNING, "sent no heartbeat for ten intervals", {"amphorae": (machine(heard_at=NOW - 99),)}),
        (Level.WARNING, "drifts from its configuration: nft", {"amphorae": (machine(drift="nft", drifts=True),)}),
        (Level.CRITICAL, "its certificate has expired", {"amphorae": (machine(certificate_expires_at=NOW - 1),)}),
        (
            Level.WARNING,
            f"of load balancer {identifier(1)} (shop-1) is near its limit of: CPU, tracked connections",
            {"amphorae": (machine(near_limit=("cpu", "conntrack")),)},
        ),
        (Level.WARNING, "the certificate of listener li expires in 2.0 days", {"expiring": (expiring(2),)}),
        (Level.WARNING, "the certificate of listener li has expired", {"expiring": (expiring(-2),)}),
        (
            Level.WARNING,
            "was not renewed",
            {"amphorae": (machine(certificate_issued_at=NOW - 900, certificate_expires_at=NOW + 100),)},
        ),
    ],
)
def test_each_condition_has_an_alert(level, text, more):
    (found,) = said(**more)
    assert found[0] is level
    assert text in found[1]


def test_automatically_handled_conditions_cause_no_alert():
    young = {"due": True, "due_at": NOW - 2, "accepted_at": NOW - 2, "state": "PENDING_UPDATE", "applied": 4}
    assert said(balancers=(balancer(**young),)) == []
    assert said(balancers=(balancer(due=True, due_at=NOW + 600),)) == []
    assert said(balancers=(balancer(due=True, due_at=NOW - 600, owner="one"),)) == []
    going = (machine(holds_vip=True), machine(1002, holds_vip=True, state="retiring"))
    assert said(balancers=(balancer(holders=(identifier(1001), identifier(1002))),), amphorae=going) == []


def test_an_unknown_amphora_that_sends_nothing_any_more_is_no_alert():
    assert said(unknown_amphorae=(msgspec.structs.replace(UNKNOWN_AMPHORA, last_at=NOW - 301),)) == []


def test_dead_controllers_do_not_hide_that_all_living_ones_drain():
    drained = process("controller", draining=True)
    dead = process("controller", name="old", seen_at=NOW - 99)
    found = said(processes=(drained, dead, *PROCESSES[1:]))
    assert [level for level, _ in found] == [Level.CRITICAL, Level.WARNING]
    assert "every controller is draining" in found[0][1]


def test_the_most_severe_alert_is_first():
    found = find_notices(fleet(orphans=1, balancers=(balancer(state="ERROR"),)), INTERVAL)
    assert [one.level for one in found] == [Level.CRITICAL, Level.WARNING]
    assert worst_level(found) is Level.CRITICAL


def test_similar_alerts_are_combined():
    many = tuple(machine(1000 + number, **SILENT) for number in range(57))
    shown, things = group_notices(find_notices(fleet(amphorae=many, orphans=1), INTERVAL))
    assert things == 2
    assert [one.kind for one in shown] == ["amphora", "amphora", "more", "fleet"]
    assert shown[2].text == "55 more amphorae: send no heartbeats"
    shown, things = group_notices(find_notices(fleet(amphorae=many[:3]), INTERVAL))
    assert things == len(shown) == 3
