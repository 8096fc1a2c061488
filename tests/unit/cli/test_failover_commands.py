# SPDX-License-Identifier: Apache-2.0
"""Commands for fail-overs, the circuit breaker and unknown amphorae."""

import json
import time

import migrated
import pytest

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty
from amphora_driver.database.tables_fleet import failover, failover_event, silent_amphora, unknown_amphora
from amphora_driver.store import circuit_breaker


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    made = Database(url)
    yield made
    made.dispose()


@pytest.fixture
def shown(amphoractl, tmp_path, database):
    """Return a function that runs a command; it returns JSON, or a table (`human`)."""
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = {database.url}\n")

    def run(*words, human=False):
        status, out, err = amphoractl(path, *words, *([] if human else ["-f", "json"]))
        assert status == 0, err
        return out if human else json.loads(out)

    run.path = path
    return run


def put(database, table, **values):
    database.write(lambda c: c.execute(table.insert().values(**values)))


def sees(database, **automatic):
    rows = [
        circuit_breaker.BreakerRow(
            name=circuit_breaker.SIGHT, state=circuit_breaker.SEEING, since=time.time(), watched=20, silent=1
        )
    ]
    if automatic:
        rows.append(circuit_breaker.BreakerRow(name=circuit_breaker.AUTOMATIC, since=time.time(), **automatic))
    database.write(lambda c: [circuit_breaker.write_breaker_row(c, row) for row in rows])


def detects(database):
    put(database, duty, name="detection", owner="controller-1", epoch=1, leased_until=time.time() + 1000)


@pytest.fixture
def replaced(database):
    common = {
        "load_balancer_id": "lb",
        "amphora_id": "a",
        "cause": "silent",
        "reason": "not heard",
        "silent_since": 990.0,
    }
    put(database, failover, id=1, begun_at=1000.0, served_at=1004.5, ended_at=1010.0, outcome="done", **common)
    put(database, failover, id=2, begun_at=2000.0, **common)
    put(database, failover_event, failover_id=1, at=1000.0, word="begun", amphora_id="a", detail="not heard")
    put(database, failover_event, failover_id=1, at=1004.5, word="handed_over", amphora_id="b")
    put(database, failover_event, failover_id=1, at=999.5, word="found", amphora_id="a", detail="heard last")


@pytest.mark.usefixtures("replaced")
def test_the_list_starts_with_the_newest_failover(shown):
    rows = shown("failover", "list")
    assert [row["ID"] for row in rows] == [2, 1]
    assert rows[1] == {
        "ID": 1,
        "Cause": "silent",
        "Load balancer": "lb",
        "Amphora": "a",
        "Began": "1970-01-01T00:16:40+00:00",
        "Served after": 4.5,
        "Ended": "1970-01-01T00:16:50+00:00",
        "Outcome": "done",
    }
    assert (rows[0]["Served after"], rows[0]["Ended"]) == (None, None)
    assert [row["ID"] for row in shown("failover", "list", "--open")] == [2]
    assert [row["ID"] for row in shown("failover", "list", "--limit", "1")] == [2]
    assert shown("failover", "list", "--loadbalancer", "another") == []


@pytest.mark.usefixtures("replaced")
def test_a_failover_shows_its_events_in_order(shown):
    found = shown("failover", "show", "1")
    assert [one["event"] for one in found["Time line"]] == ["found", "begun", "handed_over"]
    assert found["Heard last"] == "1970-01-01T00:16:30+00:00"
    words = shown("failover", "show", "1", human=True)
    assert "+5.00 s handed over b" in words
    assert "+0.50 s begun a: not heard" in words


def test_an_unknown_failover_is_reported(amphoractl, shown):
    status, _, err = amphoractl(shown.path, "failover", "show", "99")
    assert status == 1
    assert "no fail-over has this number" in err


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ({}, "", "nothing: the control plane is blind (it has not read any heartbeat yet)"),
        ({"state": "closed"}, "", "fail-over of silent amphorae"),
        ({"state": "closed"}, "[amp_failover]\nautomatic = false\n", "nothing: [amp_failover] automatic is off"),
        ({"state": "open", "reason": "9 of 20"}, "", "nothing: the breaker is open (9 of 20)"),
        ({"state": "trial", "reason": "9 of 20"}, "", "one fail-over at a time, for a trial (9 of 20)"),
    ],
)
def test_the_permitted_failovers_are_shown(shown, database, rows, options, words):
    with shown.path.open("a") as file:
        file.write(options)
    detects(database)
    if rows:
        sees(database, **rows)
    assert shown("failover", "status")["Allowed now"] == words


def test_without_a_detector_no_failover_is_permitted(shown, database):
    sees(database, state="closed")
    found = shown("failover", "status")
    assert found["Allowed now"].startswith("nothing: no controller detects silent amphorae")
    assert found["Detector"] is None


def test_silent_amphorae_with_verdicts(shown, database):
    detects(database)
    sees(database, state="open", reason="many", trial_at=time.time() + 600)
    verdict = "its agent does not answer (timed out); it waits: the breaker is open"
    put(
        database,
        silent_amphora,
        amphora_id="a",
        load_balancer_id="lb",
        kind="never_spoke",
        since=1000.0,
        verdict=verdict,
    )
    found = shown("failover", "status")
    assert (found["Circuit breaker"], found["Reason"], found["Watched"]) == ("open", "many", 20)
    assert found["Next trial"] is not None
    (one,) = found["Silent"]
    assert (one["amphora"], one["kind"], one["verdict"]) == ("a", "never_spoke", verdict)
    assert "a of lb: never spoke since 1970-01-01 00:16:40 UTC; its agent" in shown("failover", "status", human=True)


def test_the_breaker_is_held_open_and_closed(shown, database):
    detects(database)
    sees(database, state="open", reason="many")
    assert "held open" in shown("circuit-breaker", "open", "--reason", "switches are replaced", human=True)
    found = shown("failover", "status")
    assert found["Circuit breaker"] == "held open"
    assert found["Allowed now"].startswith("nothing: the breaker is held open by ")
    assert found["Allowed now"].endswith("switches are replaced")
    shown("circuit-breaker", "open", human=True)
    shown("circuit-breaker", "close", human=True)
    shown("circuit-breaker", "close", human=True)
    found = shown("failover", "status")
    assert (found["Circuit breaker"], found["Allowed now"]) == ("closed", "fail-over of silent amphorae")
    assert found["Reason"].startswith("closed by ")


def test_unknown_amphorae_are_listed(shown, database):
    assert shown("unknown-amphora", "list") == []
    put(
        database,
        unknown_amphora,
        amphora_id="z",
        address="203.0.113.9",
        first_at=1.0,
        last_at=time.time() - 5,
        verdict="only reported",
    )
    (row,) = shown("unknown-amphora", "list")
    assert (row["Amphora"], row["Address"], row["Verdict"]) == ("z", "203.0.113.9", "only reported")
    assert 4 <= row["Last heard"] <= 600
