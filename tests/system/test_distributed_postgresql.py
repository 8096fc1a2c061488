# SPDX-License-Identifier: Apache-2.0
"""The provider's database in PostgreSQL, over the life of a load balancer."""

import postgresql
import pytest
from cloud import Cloud
from sandbox_of_a_test import running

from amphora_driver.database import tables
from amphora_driver.database.engine import Database
from sandbox import demo

pytestmark = [pytest.mark.root, pytest.mark.extended]


@pytest.fixture(scope="module")
def cloud():
    if postgresql.missing():
        pytest.skip(postgresql.missing())
    with (
        postgresql.server("provider") as (provider,),
        running(store_url=provider) as (_, settings),
    ):
        connection = demo.connect(settings)
        database = Database(settings.database_url)
        cloud = Cloud(settings, connection, database)
        yield cloud
        cloud.clean()
        database.dispose()
        connection.close()


def test_a_load_balancer_is_created_changed_and_deleted(cloud):
    balancer = cloud.served(
        "elephant", ("member1",), monitor={"type": "TCP", "delay": 1, "timeout": 1, "max_retries": 1}
    )
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 2}
    cloud.balancers.create_member(cloud.pool_of(balancer), **cloud.member("member2"))
    cloud.active(balancer.id)
    cloud.online(balancer.id)
    cloud.balanced(balancer.vip_address, {"member1": 1, "member2": 1})
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)

    def rows():
        names = (tables.job, tables.amphora, tables.desired_object, tables.object_status, tables.local_port)
        found = {}
        for table in names:
            mine = (
                table.select() if table is not tables.local_port else table.select().where(table.c.owner.like("lb-%"))
            )
            found[table.name] = len(cloud.database.read(lambda c, mine=mine: c.execute(mine).all()))
        return found

    cloud.until(lambda: not any(rows().values()), "all rows are deleted")
