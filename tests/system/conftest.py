# SPDX-License-Identifier: Apache-2.0
"""One sandbox for all modules of a pytest worker.

Modules with other settings use `sandbox_of_a_test.running`. A worker has one sandbox at a time: `running` ends the
common sandbox, and the next module that needs it starts a new one.
"""

import json
from contextlib import contextmanager

import pytest
import sandbox_of_a_test
from cloud import Cloud

from amphora_driver.database.engine import Database
from sandbox import demo


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
def stack(sandbox):
    return sandbox[0]


@pytest.fixture(scope="module")
def database(settings):
    database = Database(settings.database_url)
    yield database
    database.dispose()


@pytest.fixture(scope="module")
def connection(settings):
    connection = demo.connect(settings)
    yield connection
    connection.close()


@pytest.fixture
def cloud(settings, connection, database):
    """The sandbox from a user's view, without load balancers before and after the test."""
    cloud = Cloud(settings, connection, database)
    yield cloud
    cloud.clean()


@pytest.fixture
def flavor(cloud):
    """Creates flavors; deletes them after the test."""
    made = []

    def make(name, data):
        profile = cloud.balancers.create_flavor_profile(
            name=name, provider_name="haproxy", flavor_data=json.dumps(data)
        )
        made.append(lambda: cloud.balancers.delete_flavor_profile(profile))
        found = cloud.balancers.create_flavor(name=name, flavor_profile_id=profile.id, is_enabled=True)
        made.append(lambda: cloud.balancers.delete_flavor(found))
        return found

    yield make
    cloud.clean()
    for undo in reversed(made):
        undo()


@pytest.fixture
def member_process(stack):
    """Ends a member's server for the length of a with block."""

    @contextmanager
    def stopped(name):
        stack.supervision.stop(name)
        try:
            yield
        finally:
            stack.up()

    return stopped
