# SPDX-License-Identifier: Apache-2.0
"""A deleted object is removed from Octavia, from the provider's database and from the machine."""

import openstack
import pytest
import sqlalchemy as sa

from amphora_driver.database import tables
from amphora_driver.host import namespaces

pytestmark = pytest.mark.root


def test_children_are_deleted_before_the_load_balancer(cloud, database):
    balancer = cloud.served("piecemeal", ("member1",))
    with pytest.raises(openstack.exceptions.BadRequestException):
        cloud.balancers.delete_load_balancer(balancer.id)
    cloud.balancers.delete_pool(cloud.pool_of(balancer))
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 2) == {"503": 2}
    cloud.balancers.delete_listener(cloud.listener_of(balancer))
    cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 2) == {"ConnectionRefusedError": 2}
    cloud.balancers.delete_load_balancer(balancer.id)
    cloud.gone(balancer.id)
    assert_nothing_left(cloud, database, balancer)


def test_a_cascading_delete_removes_all_objects(cloud, database):
    monitor = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1}
    balancer = cloud.served("cascade", ("member1", "member2", "member3"), monitor=monitor)
    listener, pool = cloud.listener_of(balancer), cloud.pool_of(balancer)
    amphorae = cloud.amphorae(balancer)
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)
    for fetch, object_id in ((cloud.balancers.get_listener, listener.id), (cloud.balancers.get_pool, pool.id)):
        with pytest.raises(openstack.exceptions.NotFoundException):
            fetch(object_id)
    quota = cloud.balancers.get_quota("sandbox")
    assert quota is not None
    assert_nothing_left(cloud, database, balancer)
    for amphora_id in amphorae:
        assert not [name for name in namespaces.names(f"{cloud.settings.prefix}-") if amphora_id[:8] in name]
        assert not (cloud.settings.amphorae / amphora_id).exists()


def assert_nothing_left(cloud, database, balancer):
    def left():
        found = {}
        for table in (
            tables.job,
            tables.desired_object,
            tables.object_status,
            tables.amphora,
            tables.request,
            tables.listener_statistics,
        ):
            query = sa.select(sa.func.count()).select_from(table).where(table.c.load_balancer_id == balancer.id)
            found[table.name] = database.read(lambda connection, query=query: connection.execute(query).scalar())
        owner = f"lb-{balancer.id}"
        query = sa.select(sa.func.count()).select_from(tables.local_port).where(tables.local_port.c.owner == owner)
        found["ports"] = database.read(lambda connection: connection.execute(query).scalar())
        return {name: count for name, count in found.items() if count}

    cloud.until(lambda: not left(), f"all rows of {balancer.name} are deleted")
