# SPDX-License-Identifier: Apache-2.0
"""Status checks on rows: the result of each check, and the advice in its text."""

from types import SimpleNamespace as Row

import pytest

from amphora_driver.cli import status_checks
from amphora_driver.cli.queries import LoadBalancerSummary
from amphora_driver.cli.status_checks import Result
from amphora_driver.store import circuit_breaker

NOW = 1_000_000.0
OK, WARNING, FAILURE = Result.SUCCESS, Result.WARNING, Result.FAILURE


def process(kind, seen=1.0, version="1", host="one", draining=False, age=500.0):
    times = {"started_at": NOW - age, "seen_at": NOW - seen}
    return Row(kind=kind, version=version, host=host, draining=draining, **times)


ALIVE = [process(kind) for kind in ("controller", "health-manager", "provider-agent")]


@pytest.mark.parametrize(
    ("rows", "results", "words"),
    [
        (ALIVE, [OK, OK, OK, OK], "alive: one (1)"),
        (
            [],
            [FAILURE, FAILURE, FAILURE, OK],
            "none is recorded; a process removes its record when it stops. Start amphora-controller",
        ),
        (ALIVE[1:], [FAILURE, OK, OK, OK], "Start amphora-controller"),
        ([*ALIVE, process("controller", seen=60, host="two")], [WARNING, OK, OK, OK], "two (last sign 1 min 0 s ago)"),
        (
            [*ALIVE[1:], process("controller", seen=60)],
            [FAILURE, OK, OK, OK],
            "the last sign of life was 1 min 0 s ago",
        ),
        ([*ALIVE[1:], process("controller", draining=True)], [FAILURE, OK, OK, OK], "controller resume"),
        ([*ALIVE, process("controller", host="two", draining=True)], [OK, OK, OK, OK], "two (1)"),
        ([*ALIVE, process("health-manager", seen=60), process("health-manager", age=50)], [OK] * 4, "alive: one (1)"),
        (
            [
                *(*ALIVE, process("health-manager", age=50)),
                *(process("health-manager", seen=one, age=one + 50) for one in (60, 120, 180)),
            ],
            [OK, WARNING, OK, OK],
            "replaced in the last 10 min: one (3 times)",
        ),
        ([*ALIVE, process("controller", version="2")], [OK, OK, OK, WARNING], "several are in use: 1, 2"),
    ],
)
def test_the_check_of_processes(rows, results, words):
    found = status_checks.check_processes(rows, NOW, "1")
    assert [one.name for one in found] == ["Controllers", "Health managers", "Provider agents", "Versions"]
    assert [one.result for one in found] == results
    assert words in " ".join(one.details for one in found)


@pytest.mark.parametrize(
    ("offered", "result", "words"),
    [
        (("amphora", "haproxy"), OK, "octavia-api offers haproxy"),
        (("amphora", "octavia"), FAILURE, "only: amphora, octavia. It drops a driver that it cannot load"),
        ((), FAILURE, "only: nothing"),
    ],
)
def test_the_check_of_the_provider(offered, result, words):
    found = status_checks.check_provider("haproxy", offered)
    assert (found.result, words in found.details) == (result, True)


def balancer(name, provisioning="ACTIVE", operating="ONLINE", since=None, pending=None):
    said = Row(provisioning=provisioning, operating=operating, pending=pending)
    return LoadBalancerSummary(work=Row(load_balancer_id=name, op="apply"), status=said, since=since)


@pytest.mark.parametrize(
    ("found", "results", "words"),
    [
        ([], [OK, OK], "none of 0"),
        ([balancer("a"), balancer("b", since=NOW - 5)], [OK, OK], "1 load balancers are being changed"),
        ([balancer("a", "ERROR")], [FAILURE, OK], "1 in ERROR: a. Run: amphoractl loadbalancer show"),
        ([balancer("a", operating="ERROR")], [WARNING, OK], "operating status ERROR: a"),
        ([balancer("a", since=NOW - 700, pending=1)], [OK, FAILURE], "for up to 11 min 40 s: a. Run"),
        ([balancer(str(one), "ERROR") for one in range(7)], [FAILURE, OK], "0, 1, 2, 3, 4 and 2 more"),
    ],
)
def test_the_check_of_load_balancers(found, results, words):
    lines = status_checks.check_load_balancers(found, NOW, 600.0)
    assert [one.result for one in lines] == results
    assert words in " ".join(one.details for one in lines)


@pytest.mark.parametrize(
    ("rows", "result", "words"),
    [
        ([], OK, "none"),
        ([Row(load_balancer_id="a", begun_at=NOW - 9, served_at=None)], WARNING, "1 in progress: load balancers a"),
        ([Row(load_balancer_id="a", begun_at=NOW - 999, served_at=NOW)], WARNING, "1 in progress"),
        ([Row(load_balancer_id="a", begun_at=NOW - 999, served_at=None)], FAILURE, "more than 15 min"),
    ],
)
def test_the_check_of_failovers(rows, result, words):
    found = status_checks.check_failovers(rows, NOW, 900.0)
    assert (found.result, words in found.details) == (result, True)


@pytest.mark.parametrize(
    ("rows", "result", "words"),
    [
        ([], OK, "none"),
        ([Row(id=3, state="running", reason=None)], WARNING, "in progress: 3"),
        ([Row(id=3, state="paused", reason="lb-1 failed")], WARNING, "3: lb-1 failed"),
    ],
)
def test_the_check_of_rotations(rows, result, words):
    found = status_checks.check_rotations(rows)
    assert (found.result, words in found.details) == (result, True)


def breaker(name, state, **more):
    return circuit_breaker.BreakerRow(name=name, state=state, since=NOW, **more)


@pytest.mark.parametrize(
    ("rows", "result", "words"),
    [
        ([], OK, "closed"),
        ([breaker(circuit_breaker.AUTOMATIC, "closed"), breaker(circuit_breaker.SIGHT, "seeing")], OK, "closed"),
        ([breaker(circuit_breaker.AUTOMATIC, "open", silent=9, watched=20)], FAILURE, "9 of 20 amphorae are silent"),
        ([breaker(circuit_breaker.AUTOMATIC, "trial")], FAILURE, "failover status"),
        (
            [breaker(circuit_breaker.OPERATOR, "open", reason="switch")],
            WARNING,
            "switch. Run: amphoractl circuit-breaker close",
        ),
        ([breaker(circuit_breaker.SIGHT, "blind", reason="no route")], WARNING, "blind: no route"),
    ],
)
def test_the_check_of_the_breaker(rows, result, words):
    found = status_checks.check_breaker({row.name: row for row in rows})
    assert (found.result, words in found.details) == (result, True)


@pytest.mark.parametrize(
    ("witnesses", "machines", "result", "words"),
    [
        (["203.0.113.1:22"], 2, OK, "1 are configured"),
        ([], 0, OK, "no amphora exists"),
        ([], 1, WARNING, "Set [amp_failover] witnesses"),
    ],
)
def test_the_check_of_witnesses(witnesses, machines, result, words):
    found = status_checks.check_witnesses(witnesses, [machine()] * machines)
    assert (found.result, words in found.details) == (result, True)


def machine(**more):
    values = {
        "id": "a",
        "state": "ready",
        "silent": None,
        "seen_at": NOW - 1,
        "drift": None,
        "drifts": None,
        "load_balancer_id": "lb",
        "near_limit": None,
        "agent_version": "1",
        "certificate_expires_at": NOW + 500,
        "certificate_issued_at": NOW - 100,
    }
    return Row(**{**values, **more})


@pytest.mark.parametrize(
    ("check", "more", "result", "words"),
    [
        ("silence", {}, OK, "none of 1"),
        ("silence", {"silent": "mute"}, WARNING, "1 of 1: a. Run"),
        ("silence", {"seen_at": NOW - 60}, WARNING, "1 of 1: a"),
        ("silence", {"seen_at": None}, WARNING, "1 of 1: a"),
        ("silence", {"seen_at": None, "state": "booting"}, OK, "none"),
        ("drift", {}, OK, "none of 1"),
        ("drift", {"drift": "routes"}, OK, "none of 1"),
        ("drift", {"drift": "routes", "drifts": True}, WARNING, "1: a: routes. Run: amphoractl loadbalancer diff"),
        ("limits", {}, OK, "none of 1 amphorae"),
        (
            "limits",
            {"near_limit": "cpu,memory"},
            WARNING,
            "a of load balancer lb: CPU, memory. Run",
        ),
        ("agents", {}, OK, "1 in all 1"),
        ("agents", {"agent_version": "0"}, WARNING, "1 of 1 amphorae have another version than 1: 0. Run"),
        ("agents", {"agent_version": None}, WARNING, "unknown"),
        ("agents", {"agent_version": None, "seen_at": None}, OK, "0 amphorae"),
        ("certificates", {}, OK, "the first expires in 8 min 20 s"),
        ("certificates", {"certificate_expires_at": None}, OK, "none"),
        ("certificates", {"certificate_expires_at": NOW - 1}, FAILURE, "1 have expired: a"),
        ("certificates", {"certificate_issued_at": NOW - 5000}, WARNING, "should have been renewed: a"),
        ("certificates", {"certificate_issued_at": None}, OK, "the first"),
    ],
)
def test_the_check_of_amphorae(check, more, result, words):
    asked = {
        "silence": lambda rows: status_checks.check_silent_amphorae(rows, NOW, 7.0),
        "drift": status_checks.check_drift,
        "limits": status_checks.check_limits,
        "agents": lambda rows: status_checks.check_agents(rows, "1"),
        "certificates": lambda rows: status_checks.check_certificates(rows, NOW),
    }
    found = asked[check]([machine(**more)])
    assert (found.result, words in found.details) == (result, True), found.details


@pytest.mark.parametrize(
    ("images", "days", "result", "words"),
    [
        ([], 90, OK, "none has a date"),
        ([None, "agent-0123456789abcdef"], 90, OK, "the age of 2 amphorae's images is not known"),
        # NOW is 1970-01-12.
        (["amphora-1970-01-01"], 11, OK, "the oldest is 11 days old"),
        (
            ["amphora-1970-01-01"],
            10,
            WARNING,
            "1 of 1 amphorae run an image older than 10 days: amphora-1970-01-01 (1)",
        ),
        (["a-1969-12-01-0123456789abcdef", "b-1970-01-11", "b-1970-01-11", "c"], 30, WARNING, "1 of 4 amphorae run"),
        (["a-1969-12-01", "c"], 30, WARNING, "a-1969-12-01 (1); the age of 1 amphorae's images is not known. Build"),
        (["a-1969-12-01"], 0, OK, "the oldest is 42 days old"),
        (["a-1970-13-01", "a-11970-01-011"], 1, OK, "none has a date"),
    ],
)
def test_the_check_of_images(images, days, result, words):
    found = status_checks.check_images([machine(image=image) for image in images], NOW, days)
    assert (found.result, words in found.details) == (result, True), found.details
    assert ("amphoractl rotate --image" in found.details) is (result is WARNING)


def test_the_check_of_unknown_amphorae():
    assert status_checks.check_unknown_amphorae([]).result is OK
    found = status_checks.check_unknown_amphorae([Row(amphora_id="z")])
    assert (found.result, "z. Run: amphoractl unknown-amphora list" in found.details) == (WARNING, True)


@pytest.mark.parametrize(
    ("ends", "result", "words"),
    [
        ({}, OK, "0 certificates"),
        ({"ca": NOW + 40 * 86400}, OK, "the first to expire is ca, in 40 d"),
        ({"ca": NOW + 4 * 86400, "other": NOW + 99 * 86400}, WARNING, "expires soon: ca in 4 d 0 h. Run"),
        ({"ca": NOW - 1, "other": NOW + 9}, FAILURE, "expired: ca. Run: amphoractl ca rotate"),
    ],
)
def test_the_check_of_cas(ends, result, words):
    found = status_checks.check_authorities(ends, NOW)
    assert (found.result, words in found.details) == (result, True), found.details


def resync(outcome=None, asked=1.0):
    return Row(load_balancer_id="a", outcome=outcome, ended_at=NOW if outcome else None, asked_at=NOW - asked)


@pytest.mark.parametrize(
    ("rows", "result", "words"),
    [
        ([], OK, "no difference"),
        ([resync("done"), resync()], OK, "no difference"),
        ([resync("unknown")], WARNING, "a (unknown)"),
        ([resync("unrecorded")], WARNING, "restored from a backup"),
        ([resync(asked=999)], WARNING, "1 load balancers wait for a resync: a"),
    ],
)
def test_the_check_of_resyncs(rows, result, words):
    found = status_checks.check_resyncs(rows, NOW, 600.0)
    assert (found.result, words in found.details) == (result, True)


def test_ages_and_lists_as_text():
    assert [one.word for one in Result] == ["Success", "Warning", "Failure"]
