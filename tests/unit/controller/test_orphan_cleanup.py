# SPDX-License-Identifier: Apache-2.0
"""Orphan cleanup: an orphan is recorded, and removed after the grace period; an owned object never is."""

import time
import uuid

import migrated
import pytest
import sqlalchemy as sa

from amphora_driver import config
from amphora_driver.compute.interface import BootRequest
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora_heartbeat, job, orphan
from amphora_driver.errors import ComputeError
from amphora_driver.host import namespaces
from amphora_driver.maintenance import orphan_cleanup
from amphora_driver.maintenance.orphan_cleanup import OrphanCleaner
from amphora_driver.model.network import FixedAddress, VipRequest
from amphora_driver.network.bridges import Switch
from amphora_driver.network.interface import management_port
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork
from amphora_driver.plugins import Catalogue
from amphora_driver.store import amphorae, vip_claims

LOST, OWNED = str(uuid.uuid4()), str(uuid.uuid4())


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n[amp_controller]\norphan_grace = 900\n"
        f"[amp_compute_netns]\ndirectory = {tmp_path}/amphorae\nprefix = sw{uuid.uuid4().hex[:4]}\n"
        f"agent_python = /bin/false\n[amp_network_local]\nswitch = sw{uuid.uuid4().hex[:8]}\n"
    )
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
    for number, name in enumerate(("management", "vip")):
        network.define_network(name, name, f"br-{name}")
        network.define_subnet(
            AddressRange(
                id=f"{name}-subnet",
                network_id=name,
                name=f"{name}-subnet",
                cidr=f"198.51.{100 + number}.0/24",
                gateway=None,
                first=f"198.51.{100 + number}.10",
                last=f"198.51.{100 + number}.250",
            )
        )
    return network


@pytest.fixture
def catalogue(conf, database):
    return Catalogue(conf, database)


@pytest.fixture
def cleaner(conf, database, catalogue, network):
    return OrphanCleaner(conf, database, catalogue)


def noted(database):
    return database.read(lambda c: {row.id for row in c.execute(sa.select(orphan))})


def time_passes(database):
    database.write(lambda c: c.execute(orphan.update().values(found_at=time.time() - 3600)))


def own(database):
    """A load balancer with one amphora, recorded in the database."""
    database.write(lambda c: c.execute(job.insert().values(load_balancer_id="mine", op="apply", generation=1)))
    database.write(lambda c: amphorae.insert_amphora(c, OWNED, "mine", "STANDALONE", b"key"))


def test_orphaned_ports_and_vips(database, network, cleaner):
    own(database)
    database.write(lambda c: vip_claims.record_claim(c, "claimed", "local"))
    for owner in (LOST, OWNED):
        network.ensure_port(management_port(owner, "vip", ["vip-subnet"]))
    for load_balancer in ("lost", "mine", "claimed"):
        network.allocate_vip(load_balancer, "demo", [VipRequest(subnet_id="vip-subnet")])
    assert cleaner.clean_up() == 0, "a new orphan may belong to a running step"
    assert noted(database) == {LOST, "lost"}
    time_passes(database)
    assert cleaner.clean_up() == 2
    assert network.owners().amphorae == {OWNED}
    assert network.owners().load_balancers == {"mine", "claimed"}
    assert cleaner.clean_up() == 0
    assert noted(database) == set()


@pytest.mark.parametrize("kind", ["network", "compute"])
def test_a_backend_is_listed_once_per_interval(catalogue, cleaner, monkeypatch, kind):
    backend = catalogue.network(None) if kind == "network" else catalogue.compute(None, None)
    name = "owners" if kind == "network" else "machines"
    lists = []
    real = getattr(backend, name)
    monkeypatch.setattr(backend, name, lambda: lists.append(1) or real())
    cleaner.clean_up()
    assert len(lists) == 1, "one list of a network backend serves ports and VIPs"
    monkeypatch.setattr(backend, "listing_interval", 3600.0, raising=False)
    cleaner.clean_up()
    assert len(lists) == 1
    monkeypatch.setattr(backend, "listing_interval", 0.0, raising=False)
    cleaner.clean_up()
    assert len(lists) == 2


def test_a_failed_list_of_machines_is_repeated_by_the_next_run(catalogue, cleaner, monkeypatch):
    backend = catalogue.compute(None, None)
    lists = []

    def fail():
        lists.append(1)
        raise ComputeError("list amphorae", "no answer")

    monkeypatch.setattr(backend, "machines", fail)
    monkeypatch.setattr(backend, "listing_interval", 3600.0, raising=False)
    cleaner.clean_up()
    cleaner.clean_up()
    assert len(lists) == 2


def test_objects_of_users_and_hosts_are_never_touched(database, network, cleaner):
    brought = network.create_port("vip", [FixedAddress(subnet_id="vip-subnet", address="198.51.101.77")])
    used = network.create_port("vip", [FixedAddress(subnet_id="vip-subnet", address="198.51.101.78")])
    network.allocate_vip("lost", "demo", [VipRequest(port_id=used.id)])
    host = network.fixed_port("client", "vip", [FixedAddress(subnet_id="vip-subnet", address="198.51.101.79")])
    cleaner.clean_up()
    time_passes(database)
    assert cleaner.clean_up() == 1
    assert {one.id for one in network.all_ports()} == {brought.id, used.id, host.id}
    assert network.owner(used.id) == f"user-{used.id}", "the address is returned to its user"


def test_an_orphan_with_a_new_owner_is_forgotten(database, network, cleaner):
    network.ensure_port(management_port(OWNED, "vip", ["vip-subnet"]))
    cleaner.clean_up()
    assert noted(database) == {OWNED}
    own(database)
    time_passes(database)
    assert cleaner.clean_up() == 0
    assert noted(database) == set()


def test_a_clock_jump_removes_no_orphan(conf, database, network, cleaner, monkeypatch):
    own(database)
    network.ensure_port(management_port(LOST, "vip", ["vip-subnet"]))
    network.ensure_port(management_port(OWNED, "vip", ["vip-subnet"]))
    cleaner.clean_up()
    time_passes(database)
    monkeypatch.setattr(database, "seconds_since_clock_jump", lambda: conf.amp_controller.orphan_grace - 1)
    assert cleaner.clean_up() == 0
    assert noted(database) == {LOST}
    monkeypatch.setattr(database, "seconds_since_clock_jump", lambda: conf.amp_controller.orphan_grace)
    assert cleaner.clean_up() == 1


@pytest.mark.parametrize("count", [2, 3, 10])
def test_implausible_number_of_orphans_is_not_removed(database, network, cleaner, caplog, count):
    for _ in range(count):
        network.ensure_port(management_port(str(uuid.uuid4()), "vip", ["vip-subnet"]))
    cleaner.clean_up()
    time_passes(database)
    assert cleaner.clean_up() == 0
    assert len(network.all_ports()) == count
    assert (
        f"{count} of {count} objects (kind: ports) of backend local without an owner, and removes no object"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("due", "there", "believed"),
    [(1, 1, True), (2, 2, False), (1, 2, True), (2, 3, True), (3, 4, False), (3, 29, False), (3, 30, True),
     (10, 10, False), (10, 99, False), (10, 100, True), (11, 100, False)],
)  # fmt: skip
def test_the_number_of_orphans_that_is_plausible(due, there, believed):
    assert orphan_cleanup._is_plausible(due, there) is believed


def test_an_unavailable_backend_delays_no_other_backend(database, network, cleaner, catalogue, monkeypatch):
    def away():
        raise ComputeError("list amphorae", "no answer")

    monkeypatch.setattr(catalogue.compute(None, None), "machines", away)
    network.ensure_port(management_port(LOST, "vip", ["vip-subnet"]))
    cleaner.clean_up()
    time_passes(database)
    assert cleaner.clean_up() == 1


def test_rows_written_during_an_amphoras_release_make_no_orphan(database, cleaner):
    own(database)
    rows = [{"amphora_id": one, "seen_at": 0.0, "generation": 0, "epoch": 0, "sequence": 0} for one in (LOST, OWNED)]
    database.write(lambda c: c.execute(amphora_heartbeat.insert(), rows))
    cleaner.clean_up()
    assert database.read(lambda c: c.execute(sa.select(amphora_heartbeat.c.amphora_id)).scalars().all()) == [OWNED]


@pytest.mark.root
def test_machine_of_a_deleted_amphora_is_removed(conf, database, network, catalogue, cleaner):
    """The load balancer is deleted while a suspended controller is about to order the machine."""
    switch = Switch(conf.amp_network_local.switch, conf.amp_compute_netns.management_network)
    try:
        switch.ensure(network.networks(), network.subnets())
        compute = catalogue.compute(None, None)
        own(database)
        for one in (LOST, OWNED):
            compute.boot(BootRequest(amphora_id=one, load_balancer_id="mine", files={}))
        assert namespaces.exists(compute.namespace(LOST))
        assert compute.machines() == {LOST, OWNED}
        cleaner.clean_up()
        time_passes(database)
        # The machine's management port is removed with the machine.
        assert cleaner.clean_up() == 1
        assert compute.machines() == {OWNED}
        assert not namespaces.exists(compute.namespace(LOST))
        assert namespaces.exists(compute.namespace(OWNED))
        assert network.owners().amphorae == {OWNED}
        compute.destroy(OWNED)
    finally:
        namespaces.remove(conf.amp_network_local.switch)
