# SPDX-License-Identifier: Apache-2.0
"""Housekeeping: releases addresses of load balancers that were never created, and moves TLS ticket keys on."""

import threading
import time

import migrated
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from amphora_driver import config, metrics
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, notification, secret, vip_claim
from amphora_driver.database.vault import Vault
from amphora_driver.errors import Conflict
from amphora_driver.maintenance import notification_purge
from amphora_driver.maintenance.housekeeping import Housekeeping
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.model.network import VipRequest
from amphora_driver.model.secret_refs import ticket_secret_name
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork
from amphora_driver.notifications import outbox
from amphora_driver.plugins import Catalogue
from amphora_driver.reconcile.tls_tickets import create_ticket_state, ticket_keys
from amphora_driver.store import sealed_secrets, vip_claims
from amphora_driver.store.generations import start_ticket_rotation
from amphora_driver.store.requests import RequestRecorder
from amphora_driver.store.sealed_secrets import SealedSecret

VAULT = Vault([Fernet.generate_key()])
PLACE = sealed_secrets.secret_location(ticket_secret_name("lb"))
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
WISH = [VipRequest(subnet_id="s1", address="198.51.100.77")]


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n")
    return config.load([str(path)])


@pytest.fixture
def database(conf):
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection)
    yield database
    database.dispose()


@pytest.fixture
def network(conf, database):
    network = LocalNetwork(conf, database)
    network.define_network("n1", "vip", "vip")
    network.define_subnet(
        AddressRange(
            id="s1",
            network_id="n1",
            name="vip-v4",
            cidr="198.51.100.0/24",
            gateway=None,
            first="198.51.100.10",
            last="198.51.100.250",
        )
    )
    return network


def claim(database, network, load_balancer_id, age, backend="local"):
    database.write(lambda connection: vip_claims.record_claim(connection, load_balancer_id, backend))
    network.allocate_vip(load_balancer_id, "demo", WISH)
    database.write(lambda connection: connection.execute(vip_claim.update().values(claimed_at=time.time() - age)))


def left(database):
    return database.read(lambda connection: connection.execute(sa.select(vip_claim)).all())


def test_a_claim_without_a_load_balancer_is_released(conf, database, network):
    claim(database, network, "lb-never", 3600)
    Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT).release_unused_vips()
    assert network.allocate_vip("lb-other", "demo", WISH)[0].address == "198.51.100.77"
    assert left(database) == []


def test_a_recent_claim_is_kept(conf, database, network):
    claim(database, network, "lb-soon", 1)
    Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT).release_unused_vips()
    with pytest.raises(Conflict):
        network.allocate_vip("lb-other", "demo", WISH)
    assert len(left(database)) == 1


def test_a_clock_jump_releases_no_claim(conf, database, network, monkeypatch):
    claim(database, network, "lb-soon", 3600)
    housekeeping = Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT)
    monkeypatch.setattr(database, "seconds_since_clock_jump", lambda: conf.amp_controller.forget_vip_after - 1)
    housekeeping.release_unused_vips()
    assert len(left(database)) == 1
    monkeypatch.setattr(database, "seconds_since_clock_jump", lambda: conf.amp_controller.forget_vip_after)
    housekeeping.release_unused_vips()
    assert left(database) == []


def test_a_created_load_balancer_keeps_its_vips(conf, database, network):
    claim(database, network, "lb-here", 3600)
    database.write(lambda c: c.execute(job.insert().values(load_balancer_id="lb-here", op="apply", generation=1)))
    Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT).release_unused_vips()
    with pytest.raises(Conflict):
        network.allocate_vip("lb-other", "demo", WISH)
    assert left(database) == []


def test_an_unavailable_backend_delays_only_its_own_claims(conf, database, network):
    claim(database, network, "lb-never", 3600)
    database.write(lambda connection: vip_claims.record_claim(connection, "lb-elsewhere", "elsewhere"))
    database.write(lambda connection: connection.execute(vip_claim.update().values(claimed_at=0.0)))
    Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT).release_unused_vips()
    assert network.allocate_vip("lb-other", "demo", WISH)[0].address == "198.51.100.77"
    assert [row.load_balancer_id for row in left(database)] == ["lb-elsewhere"]


def test_a_claim_is_released_by_its_own_backend(database):
    def note(backend):
        return database.write(lambda connection: vip_claims.record_claim(connection, "lb", backend))

    assert [note("local"), note("elsewhere")] == ["local", "local"]
    assert database.read(lambda connection: vip_claims.network_of_claim(connection, "lb")) == "local"
    assert database.read(lambda connection: vip_claims.network_of_claim(connection, "unknown")) is None


SETTLED = {"op": "apply", "generation": 3, "committed": 3, "applied": 3, "dirty": False}


def served_with_tickets(database, content, name="lb"):
    """A load balancer that serves its latest generation, and whose ticket keys are due."""
    database.write(lambda c: c.execute(job.insert().values(load_balancer_id=name, **SETTLED)))
    database.write(
        lambda c: sealed_secrets.replace_secrets(c, name, {ticket_secret_name(name): SealedSecret(content=content)})
    )
    database.write(lambda c: start_ticket_rotation(c, name, time.time() - 1))


def state(database, name="lb"):
    found = database.read(lambda c: sealed_secrets.load_secrets(c, name))[ticket_secret_name(name)].content
    return VAULT.open(found, sealed_secrets.secret_location(ticket_secret_name(name)))


def lines(kept):
    return ticket_keys(kept).reveal().splitlines()


def test_the_former_ticket_key_state_is_overwritten(conf, database):
    served_with_tickets(database, VAULT.seal(create_ticket_state(), PLACE))
    housekeeping = Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT)
    states = [state(database)]
    for _ in range(4):
        assert housekeeping.rotate_ticket_keys() == 1
        database.write(lambda c: c.execute(job.update().values(**SETTLED, tickets_due=1.0)))
        states.append(state(database))
        assert lines(states[-1])[:2] == lines(states[-2])[1:], "sessions of the former period can be resumed"
    rows = database.read(lambda c: c.execute(sa.select(secret.c.sealed)).scalars().all())
    assert [VAULT.open(one, PLACE) for one in rows] == states[-1:], "no other state is stored"
    assert not set(lines(states[0])) & set(lines(states[-1]))


def test_an_undecryptable_ticket_key_state_is_left_to_the_push(conf, database):
    lost = Vault([Fernet.generate_key()]).seal(create_ticket_state(), PLACE)
    served_with_tickets(database, lost)
    assert Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT).rotate_ticket_keys() == 1
    assert database.read(lambda c: c.execute(sa.select(secret.c.sealed)).scalar_one()) == lost
    assert database.read(lambda c: c.execute(sa.select(job.c.dirty)).scalar_one())


def test_ticket_keys_move_on_with_each_period(conf, database):
    served_with_tickets(database, VAULT.seal(create_ticket_state(), PLACE))
    housekeeping = Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT)
    assert housekeeping.rotate_ticket_keys() == 1
    assert housekeeping.rotate_ticket_keys() == 0
    row = database.read(lambda c: c.execute(sa.select(job)).one())
    assert (row.tickets, row.generation, row.dirty) == (2, 4, True)
    assert row.tickets_due == pytest.approx(time.time() + 43200, abs=600)


@pytest.fixture
def record_requests(database):
    """Records requests as octavia-api does with the option on; the controller has it off."""
    recorder = RequestRecorder(database, lambda node: None, announce=outbox.announce)

    def record(*names):
        for one in names:
            tree = LoadBalancer(id=one, project_id="demo", vip=VIP)
            recorder.create_load_balancer(tree, read_back=False)

    return record


def notifications(database):
    rows = database.read(lambda c: c.execute(sa.select(notification).order_by(notification.c.id)).all())
    return [row.load_balancer_id for row in rows]


def dropped():
    return metrics.OURS.notifications.labels("dropped")._value.get()


def test_notifications_are_bounded_while_the_controller_sends_none(
    conf, database, record_requests, monkeypatch, caplog
):
    record_requests("due", "gone", "first", "second", "third")
    database.write(lambda connection: outbox.release(connection, {"due": 1}))
    database.write(lambda c: c.execute(job.delete().where(job.c.load_balancer_id == "gone")))
    housekeeping = Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT)
    housekeeping.purge_notifications()
    assert notifications(database) == ["due", "first", "second", "third"], "no request can end for the other one"
    before = dropped()
    monkeypatch.setattr(notification_purge, "MOST_WAITING", 2)
    housekeeping.purge_notifications()
    assert notifications(database) == ["due", "second", "third"]
    assert "Set [amp_notifications] enabled to the same value" in caplog.text
    age = conf.amp_notifications.max_age + 1
    database.write(lambda c: c.execute(notification.update().values(ready_at=notification.c.ready_at - age)))
    housekeeping.purge_notifications()
    assert notifications(database) == ["second", "third"], "the due one is too old"
    assert dropped() - before == 2


def test_the_sender_purges_notifications_while_they_are_on(conf, database, record_requests):
    record_requests("gone")
    database.write(lambda c: c.execute(job.delete()))
    conf.set_override("enabled", True, "amp_notifications")
    Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT).purge_notifications()
    assert notifications(database) == ["gone"]


def test_a_round_of_housekeeping_purges_notifications(conf, database, record_requests):
    record_requests("gone")
    database.write(lambda c: c.execute(job.delete()))
    conf.set_override("housekeeping_interval", 0.1, "amp_controller")
    stopping = threading.Event()
    run = Housekeeping(conf, database, Catalogue(conf, database), "me", VAULT).run
    thread = threading.Thread(target=run, args=(stopping, threading.Event()))
    thread.start()
    deadline = time.monotonic() + 30
    while notifications(database) and time.monotonic() < deadline:
        stopping.wait(0.05)
    stopping.set()
    thread.join(30)
    assert notifications(database) == []
