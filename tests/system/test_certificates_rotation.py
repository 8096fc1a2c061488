# SPDX-License-Identifier: Apache-2.0
"""Rotations of certificates and authorities under client load, user changes and controller crashes.

No client request fails. In each phase of a rotation, a controller is killed at the phase change, and a user's change
becomes ACTIVE. At the end, the old credentials are refused.
"""

import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kill_lab
import pytest
import sqlalchemy as sa
from kill_lab import ContinuousClient, in_step

from amphora_driver import config
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.ca import Authority
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.database.tables import amphora
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AgentError, AgentUntrusted
from amphora_driver.host import namespaces
from amphora_driver.secret import Secret
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import CaKind, CaState

pytestmark = [pytest.mark.root, pytest.mark.extended]

DAY = 86400.0


@pytest.fixture(scope="module")
def lab():
    with kill_lab.lab() as made:
        yield made


@pytest.fixture(scope="module")
def client(lab):
    balancer = lab.cloud.served("steady", ("member1", "member2"))
    with ContinuousClient(lab.cloud, balancer.vip_address) as client:
        client.balancer = balancer
        yield client
    assert client.failed == []
    assert client.answered > 100


def amphoractl(lab, *words):
    """Return the JSON output of a command."""
    done = subprocess.run(
        [Path(sys.executable).with_name("amphoractl"), *words, "-f", "json"],
        env={**os.environ, config.FILE_VARIABLE: str(lab.settings.driver_configuration)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def row_of(lab, amphora_id):
    return lab.database.read(lambda c: c.execute(sa.select(amphora).where(amphora.c.id == amphora_id)).one())


def only(lab, balancer):
    (found,) = lab.cloud.amphorae(balancer)
    return found


def change(lab, amphora_id, **values):
    lab.database.write(lambda c: c.execute(amphora.update().where(amphora.c.id == amphora_id).values(**values)))


def ask(lab, amphora_id, *, by_files):
    """Call an amphora with the certificates from files or from the database."""
    address = row_of(lab, amphora_id).management_address
    conf = config.load([str(lab.settings.driver_configuration)])
    vault = Vault.load(conf.amp_database.encryption_key_file)

    def go():
        client = AgentClient(conf, None if by_files else TrustStore(conf, lab.database, vault))
        try:
            return client.info(amphora_id, address)
        finally:
            client.close()

    return namespaces.run_inside(namespaces.path(lab.settings.control), go)


def changed(lab, balancer, weight):
    """Apply a user's change; wait until it is served."""
    cloud = lab.cloud
    pool = cloud.pool_of(balancer)
    member = next(iter(cloud.balancers.members(pool)))
    cloud.balancers.update_member(member, pool, weight=weight)
    cloud.active(balancer.id)


def renewed(lab, amphora_id, before):
    """Wait until the amphora has a new certificate, and its row records it."""

    def new():
        row = row_of(lab, amphora_id)
        return row.certificate_issued_at > before and row

    return lab.cloud.until(new, "the certificate is renewed")


def test_a_certificate_is_renewed_in_time_despite_controller_crashes(lab, client):
    amphora_id, issued_at = only(lab, client.balancer), lab.database.now() - 6 * DAY
    first = row_of(lab, amphora_id)
    assert first.trusts.startswith("files-")
    assert first.certificate_expires_at - first.certificate_issued_at == pytest.approx(7 * DAY, abs=60)
    lab.arm(*in_step("RenewCertificate"))
    change(lab, amphora_id, certificate_issued_at=issued_at, certificate_expires_at=issued_at + 7 * DAY)
    lab.reached()
    row = renewed(lab, amphora_id, issued_at)
    lab.settled()
    assert only(lab, client.balancer) == amphora_id, "no amphora is replaced"
    said = ask(lab, amphora_id, by_files=True).certificate_expires_at.timestamp()
    assert said == pytest.approx(row.certificate_expires_at, abs=1)
    (found,) = [one for one in amphoractl(lab, "certificate", "list") if one["Amphora"] == amphora_id]
    assert (found["State"], found["Days left"]) == ("fine", 7.0)
    changed(lab, client.balancer, 5)


def test_an_amphora_with_an_expired_certificate_is_enrolled_again(lab, client):
    """The expired certificate (after a long power-off, for example) is refused and replaced."""
    amphora_id, etc = only(lab, client.balancer), lab.settings.etc
    ago = lab.database.now() - 30 * DAY
    authority = Authority((etc / "amphora_ca.pem").read_bytes(), Secret((etc / "amphora_ca.key").read_bytes()))
    soon = authority.issue_server(amphora_id, 2 / DAY)
    place = lab.settings.amphorae / amphora_id / "etc" / "server.pem"
    new = place.with_name("test.new")
    new.write_bytes(soon.bundle().reveal())
    lab.cloud.until(lambda: lab.database.now() > soon.expires_at + 1, "the certificate has expired")
    new.replace(place)
    with pytest.raises(AgentUntrusted, match="expired"):
        ask(lab, amphora_id, by_files=True)
    change(lab, amphora_id, certificate_issued_at=ago, certificate_expires_at=soon.expires_at)
    renewed(lab, amphora_id, ago)
    assert ask(lab, amphora_id, by_files=True).certificate_expires_at > dt.datetime.now(dt.timezone.utc)
    changed(lab, client.balancer, 6)
    assert only(lab, client.balancer) == amphora_id


def phase_of(lab, kind):
    """Return the phase of a rotation; None after its end."""
    found = {one.state for one in lab.database.read(ca_records.list_cas) if one.kind is kind}
    return next((state for state in (CaState.NEXT, CaState.FORMER, CaState.LEAVING) if state in found), None)


@pytest.mark.parametrize("kind", [CaKind.CONTROLLER, CaKind.AMPHORA])
def test_a_ca_is_rotated_despite_controller_crashes(lab, client, kind):
    cloud, balancer = lab.cloud, client.balancer
    amphora_id = only(lab, balancer)
    ask(lab, amphora_id, by_files=kind is CaKind.CONTROLLER)
    looks, moved = f"Authority-{kind.value}-before", f"Authority-{kind.value}-marked"
    lab.hold(looks)
    lab.hold(moved)
    begun = amphoractl(lab, "ca", "rotate", "--kind", kind.value)
    assert begun["State"] == "next"
    booted = cloud.balancers.create_load_balancer(name=f"meanwhile-{kind.value}", vip_subnet_id=balancer.vip_subnet_id)
    assert phase_of(lab, kind) is CaState.NEXT
    changed(lab, balancer, 10)
    lab.arm(looks)
    cloud.until(lambda: looks not in lab.armed(), "the process is killed while it reads")
    for number, phase in enumerate((CaState.FORMER, CaState.LEAVING, None), start=11):
        # The process is suspended after the step and then killed: only the step is recorded.
        lab.held(moved)
        assert phase_of(lab, kind) is phase
        listed = amphoractl(lab, "ca", "list")
        states = {one["State"] for one in listed if one["Kind"] == kind.value}
        assert states == {"current"} if phase is None else {"current", phase.value}
        changed(lab, balancer, number)
        lab.arm(moved)
        cloud.until(lambda: moved not in lab.armed(), "the process is killed after the step")
        if phase is not None:
            lab.hold(moved)
    assert lab.armed() == set(), "a process is killed at every point"
    cloud.active(booted.id)
    lab.settled()
    assert only(lab, balancer) == amphora_id, "no amphora is replaced"
    (now,) = [one for one in lab.database.read(ca_records.list_cas) if one.kind is kind]
    assert (now.id, now.state) == (begun["ID"], CaState.CURRENT)
    for each in (amphora_id, *cloud.amphorae(booted)):
        row = row_of(lab, each)
        if kind is CaKind.CONTROLLER:
            assert row.trusts.split("/")[0] == str(now.id)
        else:
            assert row.certificate_authority == now.id
        with pytest.raises(AgentError):
            ask(lab, each, by_files=True)
        ask(lab, each, by_files=False)
    changed(lab, balancer, 3)


def test_a_rotation_after_both_cas_were_rotated_needs_no_files(lab, client):
    """After the rotation of both authorities, no process needs the remaining files."""
    etc, cloud = lab.settings.etc, lab.cloud
    if len([one for one in lab.database.read(ca_records.list_cas) if one.state is CaState.CURRENT]) < 2:
        pytest.skip("this test needs the rotations of the tests before it")
    away = etc / "away"
    away.mkdir()
    names = ("amphora_ca.pem", "amphora_ca.key", "controller_ca.pem", "controller.pem")
    for name in names:
        shutil.move(etc / name, away / name)
    process = lab.stack.supervision.running("amphora-controller")
    for one in (process, *process.children()):
        one.signal(signal.SIGKILL)
    assert process.wait(10)
    lab.stack.supervision.start(next(one for one in lab.stack.programs() if one.name == "amphora-controller"))
    changed(lab, client.balancer, 4)
    made = cloud.served("without-files", ("member1",))
    assert cloud.answers(made.vip_address, 2) == {"member1": 2}
    first = amphoractl(lab, "ca", "list", "--all")
    assert amphoractl(lab, "ca", "rotate", "--kind", "amphora")["ID"] == max(one["ID"] for one in first) + 1
    cloud.until(lambda: phase_of(lab, CaKind.AMPHORA) is None, "the next rotation has ended")
    changed(lab, client.balancer, 7)
    keys = lab.database.read(lambda c: ca_records.list_cas(c, gone=True))
    assert [one.sealed_key is None for one in keys] == [one.state is CaState.GONE for one in keys], (
        "keys of former CAs are erased"
    )
    for name in names:
        shutil.move(away / name, etc / name)
