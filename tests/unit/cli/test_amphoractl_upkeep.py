# SPDX-License-Identifier: Apache-2.0
"""Commands for pending work, history, the schema and encryption keys."""

import json
import time

import migrated
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.schema_check import Phase
from amphora_driver.database.tables import amphora, duty, job, object_status, request, secret
from amphora_driver.database.tables_fleet import failover, failover_event, process, resync
from amphora_driver.database.vault import Vault
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.secret import Secret
from amphora_driver.store import sealed_secrets
from amphora_driver.store.amphorae import key_location

LB = "52cf0000-0000-4000-8000-000000000001"


@pytest.fixture
def place(tmp_path):
    """A configuration whose database does not exist yet."""
    path = tmp_path / "amphora-driver.conf"
    keys = tmp_path / "keys"
    keys.write_bytes(Fernet.generate_key())
    keys.chmod(0o600)
    path.write_text(f"[amp_database]\nconnection = sqlite:///{tmp_path}/db.sqlite\nencryption_key_file = {keys}\n")
    return path


@pytest.fixture
def database(place):
    url = f"sqlite:///{place.parent}/db.sqlite"
    migrated.write(url)
    made = Database(url)
    yield made
    made.dispose()


def put(database, table, *rows):
    database.write(lambda connection: connection.execute(table.insert(), list(rows)))


def answer(amphoractl, place, *words):
    status, out, _err = amphoractl(place, *words, "-f", "json")
    assert status == 0
    return json.loads(out)


# --- jobs and history ----------------------------------------------------------------------------------------------


def row(number, **more):
    return {
        "load_balancer_id": f"lb-{number}",
        "project_id": "p",
        "topology": "SINGLE",
        "op": "apply",
        "generation": 3,
        "committed": 3,
        "applied": 3,
        "dirty": False,
        "owner": None,
        "epoch": 4,
        "leased_until": None,
        "due_at": 0.0,
        "attempts": 0,
        "error": None,
        "read_back": False,
        **more,
    }


def test_pending_jobs_are_listed_with_their_cause(amphoractl, place, database):
    now = time.time()
    put(
        database,
        job,
        row("done"),
        row("uncommitted", committed=2, dirty=True),
        row("incomplete", read_back=True),
        row("owned", dirty=True, owner="controller-1", leased_until=now + 60, applied=2),
        row("orphaned", dirty=True, owner="controller-2", leased_until=now - 60, applied=2),
        row("failing", dirty=True, applied=2, attempts=3, due_at=now + 40, error="no answer"),
        row("fresh", dirty=True, applied=2),
        row("unsaid"),
    )
    put(
        database,
        request,
        {
            "load_balancer_id": "lb-failing",
            "generation": 3,
            "action": "member_create",
            "object_id": "m",
            "accepted_at": now - 100,
            "applied_at": None,
        },
    )
    put(
        database,
        object_status,
        {"object_id": "m", "kind": "members", "load_balancer_id": "lb-unsaid", "version": 2, "reported": 1},
    )
    put(
        database,
        object_status,
        {
            "object_id": "n",
            "kind": "members",
            "load_balancer_id": "lb-failing",
            "pending": 3,
            "version": 1,
            "reported": 1,
        },
    )
    found = {one["Load balancer"].removeprefix("lb-"): one for one in answer(amphoractl, place, "job", "list")}
    assert {name: one["Waits for"] for name, one in found.items()} == {
        "uncommitted": "Octavia's commit",
        "incomplete": "reading back from Octavia",
        "owned": "the controller at work",
        "orphaned": "a controller",
        "failing": "its next attempt",
        "fresh": "a controller",
        "unsaid": "Octavia to be told",
    }
    failing = found["failing"]
    assert 30 < failing.pop("Due in") <= 40
    assert 100 <= failing.pop("Pending since") < 200
    assert failing == {
        "Load balancer": "lb-failing",
        "Op": "apply",
        "Wanted": 3,
        "Applied": 2,
        "Waits for": "its next attempt",
        "Objects pending": 1,
        "To report": 0,
        "Owner": None,
        "Epoch": 4,
        "Attempts": 3,
        "Error": "no answer",
    }
    assert "no answer" in amphoractl(place, "job", "list", "--max-width", "0")[1]


def test_the_history_contains_calls_failovers_and_resyncs(amphoractl, place, database):
    """The newest entry is first; deleted load balancers are included."""
    common = {"load_balancer_id": LB, "object_id": LB}
    begun, over = {"accepted_at": 1000.0, "applied_at": 1002.5}, {"accepted_at": 1100.0, "applied_at": 1101.0}
    put(
        database,
        request,
        {**common, "generation": 1, "action": "create loadbalancer", **begun, "outcome": None},
        {**common, "generation": 2, "action": "delete loadbalancer", **over, "outcome": "no such interface"},
    )
    waiting = {"generation": 3, "action": "create member", "accepted_at": 1200.0}
    put(database, request, {**common, **waiting})
    why = {"cause": "silent", "silent_since": 1030.0, "begun_at": 1040.0}
    put(database, failover, {"id": 5, "load_balancer_id": LB, "amphora_id": "a", **why})
    put(
        database,
        failover_event,
        {"failover_id": 5, "at": 1040.0, "word": "begun", "amphora_id": "a", "detail": "not heard for 10 s"},
        {"failover_id": 5, "at": 1041.5, "word": "handed_over", "amphora_id": "a", "detail": None},
    )
    put(
        database,
        resync,
        {"load_balancer_id": LB, "asked_at": 1300.0, "asked_by": "root@here", "ended_at": 1301.0, "outcome": "done"},
    )
    found = answer(amphoractl, place, "loadbalancer", "history", LB[:6])
    assert [(one["What"], one["Event"]) for one in found] == [
        ("resync", "ended"),
        ("resync", "asked for"),
        ("request", "create member"),
        ("request", "applied: delete loadbalancer"),
        ("request", "delete loadbalancer"),
        ("fail-over", "handed over"),
        ("fail-over", "begun"),
        ("request", "applied: create loadbalancer"),
        ("request", "create loadbalancer"),
    ]
    assert found[2]["Detail"] == "not applied yet"
    assert found[5] == {
        "At": "1970-01-01T00:17:21.500000+00:00",
        "What": "fail-over",
        "Event": "handed over",
        "Number": 5,
        "Object": "a",
        "Seconds": 1.5,
        "Detail": None,
    }
    assert found[6]["Detail"] == "silent, 10.0 s after its last heartbeat: not heard for 10 s"
    assert (found[7]["Seconds"], found[3]["Detail"]) == (2.5, "no such interface")
    limited = answer(amphoractl, place, "loadbalancer", "history", LB, "--limit", "3")
    assert limited == found[:3]


# --- the schema ----------------------------------------------------------------------------------------------------

NONE = {"Contract migrations": ""}


def test_an_upgrade_creates_a_database(amphoractl, place, caplog):
    assert amphoractl(place, "database", "status")[0] == 1
    assert "amphoractl database upgrade" in caplog.text
    newest = schema_check.known_revisions()[-1]
    assert answer(amphoractl, place, "database", "upgrade") == {"Before": "", "After": newest, **NONE}
    assert answer(amphoractl, place, "database", "upgrade") == {"Before": newest, "After": newest, **NONE}
    assert answer(amphoractl, place, "database", "status") == {
        "Schema": newest,
        "Wanted": newest,
        "Fits": True,
        **NONE,
        "Reason": "",
        "What to do": "",
    }


def test_another_schema_is_reported_and_refused(amphoractl, place, database, caplog):
    database.write(lambda connection: connection.execute(sa.text("DROP TABLE alembic_version")))
    shown = answer(amphoractl, place, "database", "status")
    assert (shown["Schema"], shown["Fits"]) == ("", False)
    assert "amphoractl database upgrade" in shown["What to do"]
    assert amphoractl(place, "job", "list")[0] == 1
    assert "the database has no schema" in caplog.text


@pytest.mark.parametrize("how", ["duty", "lease", "sign of life"])
def test_contract_migrations_are_refused_while_older_processes_run(
    amphoractl, place, database, monkeypatch, caplog, how
):
    now, name = time.time(), "host:7:abc"
    if how == "duty":
        put(database, duty, {"name": "housekeeping", "owner": name, "epoch": 1, "leased_until": now + 30})
    elif how == "lease":
        put(database, job, row("owned", owner=name, leased_until=now + 10, dirty=True))
    else:
        said = {"kind": "controller", "host": "host", "version": "1", "started_at": now, "seen_at": now - 2}
        put(database, process, {"name": name, "beat": 1, "jobs": 0, "draining": False, **said})
    # A version with one more contract migration; the processes do not know it.
    later = f"{int(schema_check.known_revisions()[-1]) + 1:04}"
    newer = dict.fromkeys(schema_check.known_revisions(), Phase.EXPAND) | {later: Phase.CONTRACT}
    monkeypatch.setattr(schema_check, "_migrations", lambda _: newer)
    monkeypatch.setattr(migrate, "upgrade", lambda *_, contract: migrate.Upgrade(before="here", after=f"{contract}"))
    assert answer(amphoractl, place, "database", "status")["Contract migrations"] == later
    assert answer(amphoractl, place, "database", "upgrade")["After"] == "False", "processes do not stop this upgrade"
    assert amphoractl(place, "database", "upgrade", "--contract")[0] == 1
    assert name in caplog.text
    assert answer(amphoractl, place, "database", "upgrade", "--contract", "--force")["After"] == "True"
    past = {"duty": duty.update().values(leased_until=0.0), "lease": job.update().values(leased_until=now - 1)}
    gone = past.get(how, process.update().values(seen_at=now - 60))
    database.write(lambda connection: connection.execute(gone))
    assert answer(amphoractl, place, "database", "upgrade", "--contract")["After"] == "True"


# --- keys ----------------------------------------------------------------------------------------------------------


BOUND = {"Misplaced": 0}


def test_encryption_keys_are_rotated(amphoractl, place, database):
    keys = place.parent / "keys"
    old, new = keys.read_bytes(), Fernet.generate_key()
    vault = Vault([old])
    put(
        database,
        secret,
        {
            "object_id": "o",
            "purpose": "certificate",
            "ref": "r",
            "load_balancer_id": LB,
            "sealed": vault.seal(
                Secret(b"canary"), sealed_secrets.secret_location(SecretName("o", Purpose.CERTIFICATE, "r"))
            ),
        },
    )
    put(
        database,
        amphora,
        {
            "id": "a",
            "load_balancer_id": LB,
            "role": "single",
            "state": "ready",
            "created_at": 0.0,
            "heartbeat_key": vault.seal(Secret(b"canary"), key_location("a")),
        },
    )
    keys.write_bytes(new + b"\n" + old)
    shown = answer(amphoractl, place, "secrets", "status")
    first, second = Vault([new, old]).fingerprints
    columns = ("secret.sealed", "amphora.heartbeat_key")
    assert {one["Column"] for one in shown} >= set(columns)
    assert [one for one in shown if one["Column"] in columns] == [
        {"Column": column, "Line": line, "Key": key, "Use": use, "Secrets": number, **BOUND}
        for column in columns
        for line, key, use, number in ((1, first, "seals and opens", 0), (2, second, "opens", 1))
    ]
    done = answer(amphoractl, place, "secrets", "reencrypt")
    assert done == {"Key": first, "Reencrypted": 2, "Left with other keys": 0, "Fit no key": 0, **BOUND}
    after = answer(amphoractl, place, "secrets", "status")
    assert [one["Secrets"] for one in after if one["Column"] in columns] == [1, 0, 1, 0]
    keys.write_bytes(Fernet.generate_key())
    lost = answer(amphoractl, place, "secrets", "status")
    assert [(one["Line"], one["Use"], one["Secrets"]) for one in lost if one["Secrets"]] == [
        (None, "not in the file", 1)
    ] * 2


def test_a_copied_secret_is_counted(amphoractl, place, database):
    machine = {"load_balancer_id": LB, "role": "single", "state": "ready", "created_at": 0.0}
    copied = Vault([(place.parent / "keys").read_bytes()]).seal(Secret(b"canary"), key_location("another"))
    put(database, amphora, {"id": "b", **machine, "heartbeat_key": copied})
    done = answer(amphoractl, place, "secrets", "reencrypt")
    assert (done["Reencrypted"], done["Misplaced"]) == (0, 1)
    (shown,) = [one for one in answer(amphoractl, place, "secrets", "status") if one["Secrets"]]
    assert (shown["Secrets"], shown["Misplaced"]) == (1, 1)


@pytest.mark.parametrize("form", ["json", "yaml", "table", "value"])
def test_no_output_format_shows_a_key(amphoractl, place, database, form):
    key = (place.parent / "keys").read_bytes().decode()
    put(
        database,
        amphora,
        {
            "id": "a",
            "load_balancer_id": LB,
            "role": "single",
            "state": "ready",
            "created_at": 0.0,
            "heartbeat_key": Vault([key.encode()]).seal(Secret(b"canary"), key_location("a")),
        },
    )
    for command in ("status", "reencrypt"):
        status, out, err = amphoractl(place, "secrets", command, "-f", form)
        assert status == 0
        assert not [word for word in (key, "canary", "gAAAA") if word in out + err]


def test_a_world_readable_key_file_is_refused(amphoractl, place, database, caplog):
    (place.parent / "keys").chmod(0o644)
    assert amphoractl(place, "secrets", "status")[0] == 1
    assert "chmod o-rwx" in caplog.text
