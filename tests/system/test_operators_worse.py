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
from test_operators import OperatorLab

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
def lab(store):
    with running(options=OPTIONS, store_url=f"sqlite:///{store}/driver.sqlite") as (stack, settings):
        connection, database = demo.connect(settings), Database(settings.database_url)
        cloud = Cloud(settings, connection, database)
        try:
            with disk(settings.amphorae, 64):
                yield OperatorLab(stack, settings, cloud)
                cloud.clean()
                cloud.until(lambda: not list(settings.amphorae.iterdir()), "no amphora is left")
        finally:
            database.dispose()
            connection.close()


@pytest.fixture
def balancer(lab):
    """A serving load balancer whose statuses are all reported to Octavia."""
    made = lab.cloud.served("kept")
    lab.cloud.online(made.id)
    quiet(lab)
    yield made
    lab.cloud.clean()


def quiet(lab):
    lab.cloud.until(lambda: lab.ctl.json("job", "list") == [], "no job is pending")


@contextmanager
def stopped(lab, names):
    """Stop these programs inside the block."""
    for name in names:
        lab.stack.supervision.stop(name)
    try:
        yield
    finally:
        # Only these: `up` would also restart the recorded machines.
        programs = [one for one in lab.stack.programs() if one.name in names]
        for one in programs:
            lab.stack.supervision.start(one)
        for one in programs:
            lab.stack.supervision.wait_ready(one, 60)


def backed_up(lab, file):
    """Return an online backup of a database."""
    copy = Path(lab.settings.state, f"{file.name}.backup")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def restored(lab, names, file, copy):
    lab.cloud.database.dispose()
    with stopped(lab, names):
        for one in (*file.parent.glob(f"{file.name}-*"), file):
            one.unlink()
        shutil.copy2(copy, file)
        if names is OURS:
            lab.ctl.run("database", "status")


def weight(lab, balancer, number):
    """Change a member as a user."""
    pool = lab.cloud.pool_of(balancer)
    member = next(iter(lab.cloud.balancers.members(pool)))
    lab.cloud.balancers.update_member(member, pool, weight=number)


def served(lab, balancer):
    lab.cloud.until(
        lambda: set(lab.cloud.answers(balancer.vip_address, 6)) == {"member1", "member2"}, "both members serve"
    )


def changes(lab, balancer, number):
    """Assert that a change is accepted and served."""
    weight(lab, balancer, number)
    lab.cloud.active(balancer.id)
    quiet(lab)
    served(lab, balancer)


def since_the_backup(lab, balancer, back_up):
    """Change, delete and create after a backup; return backup, deleted and new load balancer."""
    cloud = lab.cloud
    deleted = cloud.load_balancer("deleted")
    quiet(lab)
    copy = back_up()
    changes(lab, balancer, 5)
    cloud.balancers.delete_load_balancer(deleted.id, cascade=True)
    cloud.gone(deleted.id)
    made = cloud.served("made")
    cloud.online(made.id)
    quiet(lab)
    return copy, deleted, made


def test_octavias_database_was_restored(lab, balancer):
    ctl, cloud = lab.ctl, lab.cloud
    file = Path(sa.make_url(lab.settings.octavia_database_url).database)
    copy, deleted, made = since_the_backup(lab, balancer, lambda: backed_up(lab, file))
    restored(lab, OCTAVIAS, file, copy)
    assert {one.name for one in cloud.balancers.load_balancers()} == {"kept", "deleted"}
    found = lab.resync("--all")
    assert found[balancer.id][0] == "done"
    assert "weight" in found[balancer.id][1]
    assert found[made.id][0] == "unknown"
    assert lab.resync(deleted.id)[deleted.id][0] == "unrecorded"
    ctl.run("loadbalancer", "resync")
    ctl.run("status", "check", "--problems")
    assert ctl.check()[0]["Octavia's records"] == "Warning"
    assert set(cloud.answers(made.vip_address, 4)) <= {"member1", "member2"}, "both members serve meanwhile"
    found = lab.resync(made.id, deleted.id, "--remove-unknown")
    assert {one for one, _ in found.values()} == {"removed"}
    cloud.gone(deleted.id)
    cloud.until(lambda: not cloud.amphorae(made), "the amphora is deleted")
    cloud.active(balancer.id)
    changes(lab, balancer, 7)
    quiet(lab)


@pytest.mark.extended
def test_our_database_was_restored(lab, balancer, store):
    ctl, cloud = lab.ctl, lab.cloud
    file = store / "driver.sqlite"
    copy, deleted, made = since_the_backup(lab, balancer, lambda: backed_up(lab, file))
    (lost,) = cloud.amphorae(made)
    restored(lab, OURS, file, copy)
    found = lab.resync("--all")
    assert (found[balancer.id][0], found[deleted.id][0]) == ("done", "unknown")
    known = [one.id for one in cloud.balancers.load_balancers()]
    assert set(known) == {balancer.id, made.id}
    assert lab.resync(*known)[made.id][0] == "unrecorded"
    ctl.run("loadbalancer", "resync")
    cloud.until(
        lambda: lost in {one["Amphora"] for one in ctl.json("unknown-amphora", "list")},
        "the amphora is listed as unknown",
    )
    ctl.run("unknown-amphora", "list")
    ctl.run("status", "check", "--problems")
    found = lab.resync(made.id, deleted.id, "--remove-unknown")
    assert {one for one, _ in found.values()} == {"removed"}
    cloud.gone(made.id)
    cloud.until(lambda: lost not in {path.name for path in lab.settings.amphorae.iterdir()}, "the orphan is removed")
    cloud.active(balancer.id)
    changes(lab, balancer, 7)
    again = cloud.served("made")
    served(lab, again)
    quiet(lab)


def test_an_amphoras_disk_is_full(lab, balancer):
    ctl, cloud = lab.ctl, lab.cloud
    (one,) = cloud.amphorae(balancer)
    with full(lab.settings.amphorae):
        weight(lab, balancer, 9)
        cloud.until(lambda: "space" in str(ctl.json("job", "list")), "the job shows the reason")
        ctl.run("job", "list", "--fit-width")
        ctl.run("loadbalancer", "show", balancer.id[:8])
        served(lab, balancer)
        status, told, _ = ctl.program("amphora", "diagnose", one[:8])
        assert status in {0, 2}, told
    assert ctl.run("loadbalancer", "repair", balancer.id[:8])[0] == 0
    cloud.until(
        lambda: cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE",
        "the load balancer is ACTIVE",
    )
    quiet(lab)
    changes(lab, balancer, 11)
    assert cloud.amphorae(balancer) == {one}, "no amphora is replaced"


def test_the_databases_disk_is_full(lab, balancer, store):
    ctl, cloud = lab.ctl, lab.cloud
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
        log = (lab.settings.log / "octavia-api.log").read_text()
        assert f"(reference {reference})" in log
        assert "Could not write to the database: database or disk is full" in log
        ctl.run("status", "check", "--problems")
        served(lab, balancer)
    cloud.active(balancer.id)
    quiet(lab)
    changes(lab, balancer, 13)
    assert cloud.amphorae(balancer) == before, "no amphora is replaced"


def test_a_certificate_has_expired(lab, balancer):
    """The amphora's certificate expired, for example because the controllers were stopped for long."""
    ctl, cloud = lab.ctl, lab.cloud
    (one,) = cloud.amphorae(balancer)
    etc = lab.settings.etc
    authority = Authority((etc / "amphora_ca.pem").read_bytes(), Secret((etc / "amphora_ca.key").read_bytes()))
    with stopped(lab, ("amphora-controller",)):
        short = authority.issue_server(one, 2 / DAY)
        place = lab.settings.amphorae / one / "etc" / "server.pem"
        new = place.with_name("test.new")
        new.write_bytes(short.bundle().reveal())
        new.replace(place)
        mine = amphora.update().where(amphora.c.id == one)
        times = {"certificate_issued_at": short.expires_at - 7 * DAY, "certificate_expires_at": short.expires_at}
        cloud.database.write(lambda c: c.execute(mine.values(**times)))
        cloud.until(lambda: ctl.check()[0]["Certificates"] == "Failure", "the check reports the certificate")
        ctl.run("status", "check", "--problems")
        ctl.run("certificate", "list", "--fit-width")
        status, _, errors = ctl.program("amphora", "diagnose", one[:8])
        assert status == 2
        assert "did not answer" in errors
        served(lab, balancer)
    cloud.until(lambda: ctl.check()[0]["Certificates"] == "Success", "the certificate is renewed")
    ctl.run("certificate", "list", "--fit-width")
    (found,) = [each for each in ctl.json("certificate", "list") if each["Amphora"] == one]
    assert (found["State"], found["Days left"]) == ("fine", 7.0)
    changes(lab, balancer, 3)
    assert cloud.amphorae(balancer) == {one}
