# SPDX-License-Identifier: Apache-2.0
"""Commands for image rotations and controllers, with a real database."""

import json
import socket
import time

import migrated
import pytest

from amphora_driver.cli import rotation
from amphora_driver.compute.interface import Location
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job
from amphora_driver.queue.jobs import acquire_duty
from amphora_driver.store import rotations
from amphora_driver.store.process_registry import ProcessKind, ProcessRegistration
from amphora_driver.store.rotations import ItemState

NAMES = ("0a000000-0000-4000-8000-000000000001", "0b000000-0000-4000-8000-000000000002")
HOST = socket.gethostname()


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    database = Database(url, durable=False)
    database.write(_fill)
    (tmp_path / "amphora-driver.conf").write_text(f"[amp_database]\nconnection = {url}\n")
    yield database
    database.dispose()


def _fill(connection):
    for name in NAMES:
        connection.execute(job.insert().values(load_balancer_id=name, op="apply", generation=1, topology="SINGLE"))
        values = {"role": "STANDALONE", "state": "ready", "heartbeat_key": b"", "created_at": time.time() - 100}
        connection.execute(amphora.insert().values(id=f"{name[:-1]}9", load_balancer_id=name, image="old", **values))


@pytest.fixture
def run(tmp_path, database, amphoractl):
    """Return a function that runs a command line and returns its JSON output, if any."""

    def run(*words, fails=False):
        status, out, err = amphoractl(tmp_path / "amphora-driver.conf", *words)
        assert (status != 0) is fails, err
        return err if fails else json.loads(out) if "json" in words else out

    return run


def test_a_complete_rotation(run, database):
    assert run("rotate", "--image", "new", "--dry-run", "-f", "json") == {"Load balancers": 2, "Amphorae": 2}
    assert run("rotation", "list", "-f", "json") == []
    assert "no rotation is recorded" in run("rotation", "show", fails=True)
    made = run("rotate", "--image", "new", "--max-unavailable", "2", "-f", "json")
    assert (made["State"], made["Wanted"], made["Load balancers"]) == ("running", "--image new", {"waiting": 2})
    assert made["Asked by"].endswith(f"@{HOST}")
    assert "is not finished; only one can be open" in run("rotate", "--all", fails=True)

    number = str(made["ID"])
    database.write(_one_done_one_running)
    shown = run("rotation", "show", "-f", "json")
    assert shown["Current"] == NAMES[1]
    assert shown["Seconds each"] == pytest.approx(10.0, abs=5)
    assert 0 < shown["Expected to end in"] < 20
    listed = run("rotation", "item", "list", number, "-f", "json")
    assert [(one["Place"], one["State"], one["Amphorae"]) for one in listed] == [(1, "done", 1), (2, "running", 1)]
    assert len(run("rotation", "item", "list", "--state", "done", "-f", "json")) == 1

    run("rotation", "pause", number)
    assert "paused by" in run("rotation", "show", number, "-f", "json")["Reason"]
    assert run("rotation", "show", number, "-f", "json")["Expected to end in"] is None
    run("rotation", "resume", number)
    assert "it is running" in run("rotation", "resume", number, fails=True)
    run("rotation", "abort", number)
    (row,) = run("rotation", "list", "-f", "json")
    assert (row["State"], row["Done"], row["Load balancers"], row["Ended"]) == ("aborted", 1, 2, None)
    assert "aborted" in run("rotation", "list")


def _one_done_one_running(connection):
    found = rotations.get_active_rotation(connection)
    first, second = rotations.list_items(connection, found.id)
    rotations.begin_item(connection, found.id, first, "ONLINE")
    rotations.begin_item(connection, found.id, second, "ONLINE")
    rotations.finish_item(connection, found.id, first, ItemState.DONE, None)
    connection.execute(rotations.rotation_item.update().values(begun_at=time.time() - 10.0))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--all", "--loadbalancer", NAMES[1][:2]), f"--all --loadbalancer {NAMES[1]}"),
        (("--older-than", "50", "--topology", "SINGLE"), "--older-than 50 --topology SINGLE"),
    ],
)
def test_the_selection_options(run, words, wanted):
    assert run("rotate", *words, "-f", "json")["Wanted"] == wanted


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--image", "old"), "the selection contains no amphora to replace"),
        (("--all", "--loadbalancer", "ff"), "nothing is recorded under this id"),
        (("--left-of", "7"), "there is no such rotation"),
        (("--all", "--project", "nobody"), "the selection contains no amphora to replace"),
    ],
)
def test_a_refused_rotation_states_the_cause(run, words, error):
    assert error in run("rotate", *words, fails=True)


@pytest.mark.parametrize("words", [(), ("--all", "--image", "x"), ("--all", "--max-unavailable", "0")])
def test_contradictory_arguments_are_refused(run, words):
    with pytest.raises(SystemExit):
        run("rotate", *words)


def test_controllers_are_listed_and_drained(run, database):
    one = ProcessRegistration(database, "here:1:aa", ProcessKind.CONTROLLER)
    one.heartbeat(jobs=3)
    ProcessRegistration(database, "here:2:bb", ProcessKind.HEALTH_MANAGER).heartbeat()
    acquire_duty(database, "housekeeping", "here:1:aa", 60)
    (row,) = run("controller", "list", "-f", "json")
    assert (row["Name"], row["Host"], row["Jobs"], row["Duties"], row["Draining"]) == (
        "here:1:aa",
        HOST,
        3,
        ["housekeeping"],
        False,
    )
    assert len(run("controller", "list", "--all", "-f", "json")) == 2

    run("controller", "drain", "here:1:aa")
    assert one.heartbeat() is True
    assert run("controller", "list", "-f", "json")[0]["Draining"] is True
    run("controller", "resume", "here:1:aa")
    assert one.heartbeat() is False
    assert "no controller has this name" in run("controller", "drain", "here:2:bb", fails=True)

    run("controller", "drain", "--host", HOST)
    assert one.heartbeat() is True
    assert f"its host {HOST} is drained" in run("controller", "resume", "here:1:aa", fails=True)
    run("controller", "resume", "--host", HOST)
    assert one.heartbeat() is False


class LocatingCompute:
    """A compute backend whose hypervisors have a name and a digest, as in Nova."""

    def locations(self):
        first, second = (f"{name[:-1]}9" for name in NAMES)
        return {first: Location(host="digest of compute1", zone="az1"), second: Location(host="other", zone="az2")}

    def host_names(self, name):
        return frozenset({name, f"digest of {name}"})


@pytest.mark.parametrize("words", [("--host", "compute1"), ("--zone", "az1")])
def test_an_evacuation_asks_the_compute_backends(run, database, monkeypatch, words):
    monkeypatch.setattr(rotation.Catalogue, "computes", lambda _self: {"nova": LocatingCompute()})
    assert run("rotate", *words, "--dry-run", "-f", "json") == {"Load balancers": 1, "Amphorae": 1}
    made = run("rotate", *words, "-f", "json")
    assert (made["Wanted"], made["Load balancers"]) == (" ".join(words), {"waiting": 1})
    (item,) = run("rotation", "item", "list", str(made["ID"]), "-f", "json")
    assert item["Load balancer"] == NAMES[0]


def test_an_evacuation_of_an_unused_location_is_refused(run, monkeypatch):
    monkeypatch.setattr(rotation.Catalogue, "computes", lambda _self: {"nova": LocatingCompute()})
    assert "no amphora to replace" in run("rotate", "--host", "compute9", fails=True)
