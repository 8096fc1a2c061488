# SPDX-License-Identifier: Apache-2.0
"""`amphoractl` lists certificates and CAs, and rotates a CA."""

import json
import time

import migrated
import pytest
from cryptography.fernet import Fernet

from amphora_driver.certificates.ca import create_authority, fingerprint
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import CaState

DAY = 86400.0


@pytest.fixture
def place(tmp_path):
    """A configuration with the files of both CAs, and an empty database."""
    keys = tmp_path / "keys"
    keys.write_bytes(Fernet.generate_key())
    keys.chmod(0o600)
    for name in ("amphora", "controller"):
        (tmp_path / f"{name}.pem").write_bytes(create_authority(name, 10)[0])
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{tmp_path}/db.sqlite\nencryption_key_file = {keys}\n"
        f"[amp_certificates]\nca_certificate = {tmp_path}/amphora.pem\nclient_ca = {tmp_path}/controller.pem\n"
    )
    migrated.write(f"sqlite:///{tmp_path}/db.sqlite")
    return path


@pytest.fixture
def database(place):
    made = Database(f"sqlite:///{place.parent}/db.sqlite")
    yield made
    made.dispose()


def record(database, number, age, **more):
    now = time.time()
    row = {
        "id": f"a{number}",
        "load_balancer_id": f"lb{number % 2}",
        "role": "STANDALONE",
        "state": "ready",
        "heartbeat_key": b"",
        "created_at": 0.0,
        "ready_at": 1.0,
        "confirmed": 1,
        "management_address": "203.0.113.1",
        "certificate_issued_at": now - age * DAY,
        "certificate_expires_at": now + (7 - age) * DAY,
        "trusts": "files-x/y",
        **more,
    }
    database.write(lambda c: c.execute(amphora.insert().values(**row)))


def answer(amphoractl, place, *words):
    status, out, err = amphoractl(place, *words, "-f", "json")
    assert status == 0, err
    return json.loads(out)


def test_certificates_of_amphorae(amphoractl, place, database):
    for number, age in enumerate((0, 4, 6.5, 8)):
        record(database, number, age)
    found = answer(amphoractl, place, "certificate", "list")
    assert [(one["Amphora"], one["State"], one["Days left"]) for one in found] == [
        ("a3", "expired", -1.0),
        ("a2", "overdue", 0.5),
        ("a1", "due", 3.0),
        ("a0", "fine", 7.0),
    ]
    assert found[0]["Why"] == "its certificate has expired"
    assert found[0]["Expires"].endswith("+00:00")
    late = answer(amphoractl, place, "certificate", "list", "--state", "overdue", "--state", "expired")
    assert [one["Amphora"] for one in late] == ["a3", "a2"]
    assert len(answer(amphoractl, place, "certificate", "list", "--loadbalancer", "lb1")) == 2


def test_a_ca_is_rotated_with_one_command(amphoractl, place, database):
    record(database, 0, 0)
    files = answer(amphoractl, place, "ca", "list")
    assert [(one["ID"], one["Kind"], one["State"], one["Amphorae"]) for one in files] == [
        (None, "amphora", "current", 1),
        (None, "controller", "current", 1),
    ]
    assert files[0]["Fingerprint"] == fingerprint((place.parent / "amphora.pem").read_bytes())
    assert files[0]["Days left"] == 10.0
    made = answer(amphoractl, place, "ca", "rotate", "--kind", "controller", "--days", "100")
    assert (made["Kind"], made["State"]) == ("controller", "next")
    _, old, new = answer(amphoractl, place, "ca", "list")
    assert (old["State"], new["State"], new["ID"], new["Fingerprint"]) == (
        *("current", "next", made["ID"]),
        made["Fingerprint"],
    )
    assert (old["Amphorae"], new["Amphorae"], new["Days left"]) == (1, 0, 100.0)
    assert (old["Waits for"], new["Waits for"]) == ("", "every amphora must trust the new one")
    assert new["Waiting amphorae"] == ["a0"]
    status, _, err = amphoractl(place, "ca", "rotate", "--kind", "controller")
    assert status == 1
    assert "has not ended" in err
    keys = [one.sealed_key for one in database.read(ca_records.list_cas)]
    assert keys[0] is None, "the key of the CA from a file stays in its file"
    assert keys[1].startswith(b"gAAAA"), "the key is sealed"


def test_after_a_rotation_the_ca_files_are_not_needed(amphoractl, place, database):
    answer(amphoractl, place, "ca", "rotate", "--kind", "amphora")
    old, new = database.read(ca_records.list_cas)
    database.write(lambda c: ca_records.change_ca_states(c, {old: CaState.GONE, new: CaState.CURRENT}, 1.0))
    (place.parent / "amphora.pem").unlink()
    assert answer(amphoractl, place, "ca", "rotate", "--kind", "amphora")["ID"] == new.id + 1
    found = [one for one in answer(amphoractl, place, "ca", "list", "--all") if one["Kind"] == "amphora"]
    assert [one["State"] for one in found] == ["gone", "current", "next"]


def test_unreadable_files_are_an_error(amphoractl, place):
    (place.parent / "controller.pem").unlink()
    found = answer(amphoractl, place, "ca", "list")
    assert "cannot be read" in found[1]["Waits for"]
    status, _, err = amphoractl(place, "ca", "rotate", "--kind", "controller")
    assert status == 1
    assert "client_ca" in err


def test_no_output_shows_a_key(amphoractl, place):
    shown = "".join(
        amphoractl(place, *words, "-f", form)[1]
        for form in ("json", "table", "yaml")
        for words in (("ca", "list"), ("certificate", "list"))
    )
    assert "PRIVATE KEY" not in shown
