# SPDX-License-Identifier: Apache-2.0
"""A restored backup, a full disk and an expired certificate, repaired as docs/how-to describes.

The databases and the amphorae have separate disks, so that each can be filled.
"""

import re
import shutil
import sqlite3
import subprocess
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from cloud import Cloud
from sandbox_of_a_test import running
from test_operators import House

from amphora_driver.certificates.ca import Authority
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora
from amphora_driver.secret import Secret
from sandbox import demo

pytestmark = [pytest.mark.root, pytest.mark.lasts(400)]
DAY = 86400.0
OPTIONS = {
    "amp_failover": {"automatic": "false"},
    # An orphan is recorded before its removal.
    "amp_controller": {"retry_first": "0.2", "retry_most": "2", "orphan_grace": "20", "housekeeping_interval": "1"},
    "amp_octavia": {"audit_after": "3600"},
}
# The programs that have a database open.
OCTAVIAS = ("octavia-api", "octavia-driver-agent")
OURS = (*OCTAVIAS, "network-api", "amphora-controller", "amphora-health-manager")


@contextmanager
def disk(folder, megabytes):
    """Mount a separate disk at a folder inside the block."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(folder):
    """Fill the disk of this folder inside the block."""
    file = Path(folder, "filler")
    try:
        with file.open("wb", buffering=0) as opened:
            _fill(opened)
            for database in Path(folder).glob("*.sqlite"):
                # The space that SQLite's log would reuse is filled too.
                with closing(sqlite3.connect(database, timeout=5)) as connection, suppress(sqlite3.Error):
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            _fill(opened)
        yield
    finally:
        file.unlink()


def _fill(opened):
    for size in (1 << 16, 1 << 12, 1):
        try:
            while opened.write(b"x" * size):
                pass
        except OSError:
            continue


@pytest.fixture(scope="module")
def store():
    with tempfile.TemporaryDirectory(prefix="adw-") as folder, disk(folder, 12):
        yield Path(folder)


@pytest.fixture(scope="module")
def house(store):
    with running(options=OPTIONS, store_url=f"sqlite:///{store}/driver.sqlite") as (stack, settings):
        connection, database = demo.connect(settings), Database(settings.database_url)
        cloud = Cloud(settings, connection, database)
        try:
            with disk(settings.amphorae, 64):
                yield House(stack, settings, cloud)
                cloud.clean()
                cloud.until(lambda: not list(settings.amphorae.iterdir()), "no amphora is left")
        finally:
            database.dispose()
            connection.close()


@pytest.fixture
def balancer(house):
    """A serving load balancer whose statuses are all reported to Octavia."""
    made = house.cloud.served("kept")
    house.cloud.online(made.id)
    quiet(house)
    yield made
    house.cloud.clean()


def quiet(house):
    house.cloud.until(lambda: house.ctl.json("job", "list") == [], "nothing is pending")


@contextmanager
def stopped(house, names):
    """Stop these programs inside the block."""
    for name in names:
        house.stack.supervision.stop(name)
    try:
        yield
    finally:
        # Only these: `up` would also restart the recorded machines.
        programs = [one for one in house.stack.programs() if one.name in names]
        for one in programs:
            house.stack.supervision.start(one)
        for one in programs:
            house.stack.supervision.wait_ready(one, 60)


def backed_up(house, file):
    """Return an online backup of a database."""
    copy = Path(house.settings.state, f"{file.name}.backup")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def restored(house, names, file, copy):
    house.cloud.database.dispose()
    with stopped(house, names):
        for one in (*file.parent.glob(f"{file.name}-*"), file):
            one.unlink()
        shutil.copy2(copy, file)
        if names is OURS:
            house.ctl.run("database", "status")


def weight(house, balancer, number):
    """Change a member as a user."""
    pool = house.cloud.pool_of(balancer)
    member = next(iter(house.cloud.balancers.members(pool)))
    house.cloud.balancers.update_member(member, pool, weight=number)


def served(house, balancer):
    house.cloud.until(
        lambda: set(house.cloud.answers(balancer.vip_address, 6)) == {"member1", "member2"}, "it is served"
    )


def changes(house, balancer, number):
    """Assert that a change is accepted and served."""
    weight(house, balancer, number)
    house.cloud.active(balancer.id)
    quiet(house)
    served(house, balancer)


def since_the_backup(house, balancer, back_up):
    """Change, delete and create after a backup; return backup, deleted and new load balancer."""
    cloud = house.cloud
    deleted = cloud.load_balancer("deleted")
    quiet(house)
    copy = back_up()
    changes(house, balancer, 5)
    cloud.balancers.delete_load_balancer(deleted.id, cascade=True)
    cloud.gone(deleted.id)
    made = cloud.served("made")
    cloud.online(made.id)
    quiet(house)
    return copy, deleted, made


def test_octavias_database_was_restored(house, balancer):
    ctl, cloud = house.ctl, house.cloud
    file = Path(sa.make_url(house.settings.octavia_database_url).database)
    copy, deleted, made = since_the_backup(house, balancer, lambda: backed_up(house, file))
    restored(house, OCTAVIAS, file, copy)
    assert {one.name for one in cloud.balancers.load_balancers()} == {"kept", "deleted"}
    found = house.resync("--all")
    assert found[balancer.id][0] == "done"
    assert "weight" in found[balancer.id][1]
    assert found[made.id][0] == "unknown"
    assert house.resync(deleted.id)[deleted.id][0] == "unrecorded"
    ctl.run("loadbalancer", "resync")
    ctl.run("status", "check", "--problems")
    assert ctl.check()[0]["Octavia's records"] == "Warning"
    assert set(cloud.answers(made.vip_address, 4)) <= {"member1", "member2"}, "it is served meanwhile"
    found = house.resync(made.id, deleted.id, "--remove-unknown")
    assert {one for one, _ in found.values()} == {"removed"}
    cloud.gone(deleted.id)
    cloud.until(lambda: not cloud.amphorae(made), "its amphora is gone")
    cloud.active(balancer.id)
    changes(house, balancer, 7)
    quiet(house)


@pytest.mark.extended
def test_our_database_was_restored(house, balancer, store):
    ctl, cloud = house.ctl, house.cloud
    file = store / "driver.sqlite"
    copy, deleted, made = since_the_backup(house, balancer, lambda: backed_up(house, file))
    (lost,) = cloud.amphorae(made)
    restored(house, OURS, file, copy)
    found = house.resync("--all")
    assert (found[balancer.id][0], found[deleted.id][0]) == ("done", "unknown")
    known = [one.id for one in cloud.balancers.load_balancers()]
    assert set(known) == {balancer.id, made.id}
    assert house.resync(*known)[made.id][0] == "unrecorded"
    ctl.run("loadbalancer", "resync")
    cloud.until(
        lambda: lost in {one["Amphora"] for one in ctl.json("unknown-amphora", "list")}, "its amphora is a zombie"
    )
    ctl.run("unknown-amphora", "list")
    ctl.run("status", "check", "--problems")
    found = house.resync(made.id, deleted.id, "--remove-unknown")
    assert {one for one, _ in found.values()} == {"removed"}
    cloud.gone(made.id)
    cloud.until(lambda: lost not in {path.name for path in house.settings.amphorae.iterdir()}, "an orphan, and removed")
    cloud.active(balancer.id)
    changes(house, balancer, 7)
    again = cloud.served("made")
    served(house, again)
    quiet(house)


def test_an_amphoras_disk_is_full(house, balancer):
    ctl, cloud = house.ctl, house.cloud
    (one,) = cloud.amphorae(balancer)
    with full(house.settings.amphorae):
        weight(house, balancer, 9)
        cloud.until(lambda: "space" in str(ctl.json("job", "list")), "it is said why")
        ctl.run("job", "list", "--fit-width")
        ctl.run("loadbalancer", "show", balancer.id[:8])
        served(house, balancer)
        status, told, _ = ctl.program("amphora", "diagnose", one[:8])
        assert status in {0, 2}, told
    assert ctl.run("loadbalancer", "repair", balancer.id[:8])[0] == 0
    cloud.until(lambda: cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE", "ACTIVE")
    quiet(house)
    changes(house, balancer, 11)
    assert cloud.amphorae(balancer) == {one}, "nothing was replaced"


def test_the_databases_disk_is_full(house, balancer, store):
    ctl, cloud = house.ctl, house.cloud
    before = cloud.amphorae(balancer)
    with full(store):
        pool = cloud.pool_of(balancer)
        member = next(iter(cloud.balancers.members(pool)))
        path = cloud.url(f"pools/{pool.id}/members/{member.id}")
        answer = cloud.balancers.put(path, json={"member": {"name": "x" * 250}})
        assert answer.status_code == 500, answer.text
        # A tenant gets a reference only; the log has it with the database's message.
        reference = re.search(r"tell the operator this reference: ([0-9a-f]{8})", answer.text).group(1)
        assert "disk" not in answer.text
        log = (house.settings.log / "octavia-api.log").read_text()
        assert f"(reference {reference})" in log
        assert "Could not write to the database: database or disk is full" in log
        ctl.run("status", "check", "--problems")
        served(house, balancer)
    cloud.active(balancer.id)
    quiet(house)
    changes(house, balancer, 13)
    assert cloud.amphorae(balancer) == before, "nothing was replaced"


def test_a_certificate_has_expired(house, balancer):
    """The amphora's certificate expired, for example because the controllers were stopped for long."""
    ctl, cloud = house.ctl, house.cloud
    (one,) = cloud.amphorae(balancer)
    etc = house.settings.etc
    authority = Authority((etc / "amphora_ca.pem").read_bytes(), Secret((etc / "amphora_ca.key").read_bytes()))
    with stopped(house, ("amphora-controller",)):
        short = authority.issue_server(one, 2 / DAY)
        place = house.settings.amphorae / one / "etc" / "server.pem"
        new = place.with_name("test.new")
        new.write_bytes(short.bundle().reveal())
        new.replace(place)
        mine = amphora.update().where(amphora.c.id == one)
        times = {"certificate_issued_at": short.expires_at - 7 * DAY, "certificate_expires_at": short.expires_at}
        cloud.database.write(lambda c: c.execute(mine.values(**times)))
        cloud.until(lambda: ctl.check()[0]["Certificates"] == "Failure", "it is said")
        ctl.run("status", "check", "--problems")
        ctl.run("certificate", "list", "--fit-width")
        status, _, errors = ctl.program("amphora", "diagnose", one[:8])
        assert status == 2
        assert "did not answer" in errors
        served(house, balancer)
    cloud.until(lambda: ctl.check()[0]["Certificates"] == "Success", "it was given another one")
    ctl.run("certificate", "list", "--fit-width")
    (found,) = [each for each in ctl.json("certificate", "list") if each["Amphora"] == one]
    assert (found["State"], found["Days left"]) == ("fine", 7.0)
    changes(house, balancer, 3)
    assert cloud.amphorae(balancer) == {one}
