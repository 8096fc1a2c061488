# SPDX-License-Identifier: Apache-2.0
"""Cluster membership with the real Octavia API of the sandbox that tests/system uses, and two providers."""

import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

import pytest
import sandbox_of_a_test
from cloud import Cloud
from other_provider import OtherProvider

from amphora_cluster.cloud import session
from amphora_cluster.cloud.octavia import OctaviaPools
from amphora_cluster.cloud.options import CloudSettings
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.model import Group, MemberTemplate, Selector, SelectorKind
from amphora_driver.database.engine import Database
from sandbox import demo, topology

PROJECT = "sandbox"


@pytest.fixture(scope="session")
def common_sandbox():
    with sandbox_of_a_test.common() as common:
        yield common


@pytest.fixture(scope="module")
def sandbox(common_sandbox):
    with common_sandbox.used() as started:
        yield started


@pytest.fixture(scope="module")
def settings(sandbox):
    return sandbox[1]


@pytest.fixture(scope="module")
def cloud_of_module(settings):
    database = Database(settings.database_url)
    connection = demo.connect(settings)
    yield Cloud(settings, connection, database)
    connection.close()
    database.dispose()


@pytest.fixture
def cloud(cloud_of_module):
    """The sandbox from a user's view, without load balancers before and after the test."""
    yield cloud_of_module
    cloud_of_module.clean()


@pytest.fixture
def other_provider(settings, cloud):
    """Reports the statuses of Octavia's provider `noop_driver`."""
    with OtherProvider(settings, cloud.balancers) as provider:
        yield provider
        provider.remove_all()


@pytest.fixture
def make_connection(settings):
    """Makes connections to Octavia as the service does; closes them after the test."""

    def make(**endpoints):
        return CloudConnection(
            CloudSettings(without_keystone=True, endpoints={"octavia": settings.endpoint, **endpoints}), None, PROJECT
        )

    yield make
    session.close_http_sessions()


@pytest.fixture
def pools(make_connection):
    return OctaviaPools(make_connection())


@pytest.fixture
def make_group():
    """Makes the definition of a group for the pool of a load balancer."""

    def make(balancer, pool, name="group", **more):
        member = {"ports": (8080,), "subnet_id": topology.MEMBER_SUBNET, **more.pop("member", {})}
        values = {"selector": Selector(kind=SelectorKind.LIST), **more}
        return Group(
            id=str(uuid.uuid4()),
            name=name,
            project_id=PROJECT,
            load_balancer_id=balancer.id,
            pool_id=pool.id,
            member=MemberTemplate(**member),
            **values,
        )

    return make
