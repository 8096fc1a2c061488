# SPDX-License-Identifier: Apache-2.0
"""Several processes use the network backend `neutron` at the same moment, with a real Keystone and a real Neutron."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import methodcaller

import migrated
import pytest
import sqlalchemy as sa
from network_processes import processes
from neutron_requests import groups_of, new_id, ports_on, rules_of_groups, take, vip_port_request

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import vip_claim
from amphora_driver.errors import Conflict
from amphora_driver.maintenance.orphan_cleanup import OrphanCleaner
from amphora_driver.model.network import ListenerRule, VipOptions, VipRequest
from amphora_driver.network import neutron_groups
from amphora_driver.network.neutron_rules import Group
from amphora_driver.store import vip_claims

NUMBER = 3
# VIPs that each process creates while another one cleans up.
VIPS = 3


@pytest.fixture
def started(write_options, deployment):
    """Starts the processes, each with its own connection to the cloud."""
    opened = []

    def start(**options):
        opened.append(processes([write_options(deployment, **options) for _ in range(NUMBER)]))
        return opened[-1].__enter__()

    yield start
    for one in opened:
        one.__exit__(None, None, None)


def allocation(tenant, load_balancer_id, **wanted):
    return methodcaller("allocate_vip", load_balancer_id, tenant.project_id, [VipRequest(**wanted)])


def test_each_object_is_created_once(started, backend, make_backend, tenant, admin, deployment, monkeypatch):
    several = started()
    assert len(several.ids - {os.getpid()}) == NUMBER
    one, request = new_id(), vip_port_request(tenant)
    vips = several.run(*[allocation(tenant, one, subnet_id=tenant.v4.id)] * NUMBER)
    ports = several.run(*[methodcaller("ensure_port", request)] * NUMBER)
    # pytest shortens messages other than texts.
    assert (len(set(vips)), len(set(ports))) == (1, 1), f"{vips}\n{ports}"
    assert {port.id for port in ports_on(admin, tenant)} == {vips[0][0].port_id, ports[0].id}
    # Each process may have created a group, and Neutron may have accepted one rule several times. The next process that
    # reads the groups uses the oldest one and removes its copies of rules. A port keeps its group.
    assert backend.ensure_port(request) == ports[0]
    backend.delete_port(ports[0].id)
    backend.release_load_balancer(one)
    take(backend, tenant)
    found = rules_of_groups(admin, deployment)
    assert {name: numbers[0] for name, numbers in found.items()} == {
        "octavia-amphora-traffic": 4, "octavia-amphora-vips": 2
    }  # fmt: skip
    # Two hours later, the next process that reads the groups deletes the others.
    monkeypatch.setattr(neutron_groups, "_MIN_AGE", 0.0)
    later = make_backend(deployment)
    take(later, tenant)
    used = later.ensure_port(vip_port_request(tenant))
    assert rules_of_groups(admin, deployment) == {"octavia-amphora-traffic": [4], "octavia-amphora-vips": [2]}

    # The processes may still know a group that is deleted now.
    ports = several.run(*(methodcaller("ensure_port", vip_port_request(tenant)) for _ in range(NUMBER)))
    assert len({port.id for port in ports}) == NUMBER
    groups = [admin.get_port(port.id).security_group_ids for port in (used, *ports)]
    assert groups == [groups[0]] * (NUMBER + 1)
    assert rules_of_groups(admin, deployment) == {"octavia-amphora-traffic": [4], "octavia-amphora-vips": [2]}


@pytest.mark.extended
def test_a_group_is_deleted_while_neutron_creates_the_port(backend, cloud, tenant, admin, deployment):
    former = backend._groups.of_deployment(Group.VIPS)
    engine = sa.create_engine(cloud.databases["neutron"])
    waits = sa.text("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
    with ThreadPoolExecutor(1) as threads, engine.connect() as deleting, engine.connect() as observing:
        # Neutron has found the group, and waits for the end of this transaction.
        for table, column in (("securitygrouprules", "security_group_id"), ("securitygroups", "id")):
            deleting.execute(sa.text(f"DELETE FROM {table} WHERE {column} = :id"), {"id": former})
        allocated = threads.submit(take, backend, tenant)
        deadline = time.monotonic() + 60
        while not observing.execute(waits).scalar_one():
            assert time.monotonic() < deadline, "Neutron does not wait"
            observing.rollback()
            # The server renews this table only if no query has read it for a tenth of a second.
            time.sleep(0.2)
        deleting.commit()
        [vip] = allocated.result()
    engine.dispose()
    [group] = groups_of(admin, deployment)
    assert admin.get_port(vip.port_id).security_group_ids == [group.id] != [former]


@pytest.mark.extended
def test_a_group_of_listeners_is_created_once_and_removed(started, make_backend, tenant, admin, deployment):
    several = started(listener_rules=True)
    one = new_id()
    options = VipOptions(listener_rules=(ListenerRule(protocol="tcp", port=80),))
    requests = [vip_port_request(tenant, one, options=options) for _ in range(NUMBER)]
    ports = several.run(*(methodcaller("ensure_port", request) for request in requests))
    # See above for groups and copies of rules. The first call gives all ports the oldest group.
    backend = make_backend(deployment, listener_rules=True)
    for _ in range(2):
        backend.apply_vip_options(one, tenant.project_id, options, [port.id for port in ports])
    group = min(groups_of(admin, deployment), key=lambda one: (one.created_at, one.id))
    assert [admin.get_port(port.id).security_group_ids for port in ports] == [[group.id]] * NUMBER
    web = [rule for rule in group.security_group_rules if rule["port_range_min"] == 80]
    assert sorted(rule["ethertype"] for rule in web) == ["IPv4", "IPv6"]
    several.run(*(methodcaller("delete_port", port.id) for port in ports))
    several.run(*[methodcaller("release_load_balancer", one)] * NUMBER)
    assert (ports_on(admin, tenant), groups_of(admin, deployment)) == ([], [])


def test_load_balancers_do_not_share_a_port_of_the_user(started, backend, tenant, user):
    several = started()
    port = user.create_port(network_id=tenant.network.id)
    ids = [new_id() for _ in range(NUMBER)]
    answers = several.run(*(allocation(tenant, one, port_id=port.id) for one in ids))
    # All of them may get a conflict; then the user repeats the request.
    taken = [one for one in answers if not isinstance(one, Conflict)]
    assert len(taken) <= 1
    if not taken:
        take(backend, tenant, {"port_id": port.id})
    assert len(user.get_port(port.id).tags) == 1
    assert user.get_port(port.id).device_id.startswith("lb-")


class Backends:
    """The catalogue of a controller with one network backend."""

    def __init__(self, network):
        self._network = network

    def computes(self):
        return {}

    def networks(self):
        return {"neutron": self._network}


def clean_up(file, network):
    """Clean up as a controller, until the others have created all VIPs; return the number of rounds."""
    conf = config.load([file])
    database = Database(conf.amp_database.connection)
    cleaner, rounds, created = OrphanCleaner(conf, database, Backends(network)), 0, 0
    while created < VIPS * (NUMBER - 1):
        created = len(database.read(lambda connection: connection.execute(sa.select(vip_claim)).all()))
        cleaner.clean_up()
        rounds += 1
    return rounds


def create(file, project_id, subnet_id, network):
    """Create VIP ports as octavia-api; return the ids of the ports by load balancer."""
    database = Database(config.load([file]).amp_database.connection)
    found = {}
    for _ in range(VIPS):
        one = new_id()
        database.write(partial(vip_claims.record_claim, load_balancer_id=one, network="neutron"))
        (vip,) = network.allocate_vip(one, project_id, [VipRequest(subnet_id=subnet_id)])
        found[one] = vip.port_id
    return found


def test_cleanup_removes_orphans_only_while_others_create(started, write_options, backend, tenant, admin, tmp_path):
    url = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(url)
    groups = {"amp_database": {"connection": url}, "amp_controller": {"orphan_grace": 0}}
    several = started(groups=groups, listing_interval=0)
    file = str(write_options(groups=groups))
    # A stopped controller may have continued after the end of its load balancer.
    take(backend, tenant)
    creating = partial(create, file, tenant.project_id, tenant.v4.id)
    rounds, *created = several.run(partial(clean_up, file), *[creating] * (NUMBER - 1))
    assert rounds > 2
    kept = {port_id for found in created for port_id in found.values()}
    assert {port.id for port in ports_on(admin, tenant)} == kept
    assert backend.owners().load_balancers == {one for found in created for one in found}
