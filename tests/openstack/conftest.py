# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of a worker. Each test has its own networks, load balancers and amphorae."""

import functools
import json
import os
import uuid
from collections import Counter
from contextlib import ExitStack

import prepared_cloud
import pytest
from cloud_user import CloudUser
from provider_stack import ProviderStack
from two_parts import WHOLE_CLOUD
from whole_cloud import whole_cloud

from amphora_driver import config
from amphora_driver.network.neutron import NeutronNetwork


def _uses_whole_cloud(item):
    return item is not None and "provider_stack" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Without workers, tests of the complete cloud are the last ones; `two_parts.py` starts them first in a worker."""
    for item in items:
        if item.nodeid.partition("::")[0].removeprefix("tests/") in WHOLE_CLOUD and not _uses_whole_cloud(item):
            raise pytest.UsageError(f"the complete cloud would end before {item.nodeid}, which does not use it")
    if config.getoption("together") is None:
        items.sort(key=_uses_whole_cloud)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End the complete cloud after its last test, because its services use the processor."""
    answer = yield
    if _uses_whole_cloud(item) and not _uses_whole_cloud(nextitem):
        _whole_cloud.close()
    return answer


_whole_cloud = ExitStack()


@pytest.fixture(scope="session")
def cloud():
    with prepared_cloud.cloud() as started:
        yield started


@pytest.fixture(scope="session")
def admin(cloud):
    """The SDK's network client with the rights of the service account, for checks of the tests."""
    return cloud.connect().network


@pytest.fixture(scope="session")
def user(cloud):
    """The SDK's network client of the user that owns the load balancers."""
    return cloud.connect("demo", "demo").network


@pytest.fixture
def write_options(cloud, tmp_path):
    """Writes configuration files with these options of the network backend, and these groups of options."""

    def write(deployment="one", account="octavia", openstack=None, groups=None, **options):
        file = tmp_path / f"{uuid.uuid4()}.conf"
        found = {
            "amp_openstack": {
                **({"deployment_id": deployment} if deployment else {}),
                **(openstack or cloud.auth(account)),
            },
            # On a busy machine, an answer must not become a delayed allocation.
            "amp_network_neutron": {"allocation_timeout": 300, **options},
            **(groups or {}),
        }
        lines = [
            f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in group.items())
            for name, group in found.items()
        ]
        file.write_text("".join(lines))
        return file

    return write


@pytest.fixture
def make_backend(write_options):
    """Creates backends, each with its own connection and cache, as in separate processes."""
    backends = []

    def make(*words, **options):
        file = write_options(*words, **options)
        backends.append(NeutronNetwork(config.load([str(file)]), None))
        return backends[-1]

    yield make
    for one in backends:
        adapter = one._neutron._service._adapter
        if adapter is not None:
            # An open socket would fail a later test of this process with a ResourceWarning.
            adapter.session.session.close()


@pytest.fixture
def deployment():
    """The id of a deployment of this test only."""
    return uuid.uuid4().hex


@pytest.fixture
def backend(make_backend, deployment):
    return make_backend(deployment)


@pytest.fixture
def shared_backend(make_backend):
    """A backend of a deployment that several tests share, so that its groups are created once."""
    return make_backend("shared")


class Tenant:
    """The user's network with both families."""

    def __init__(self, client, project_id):
        self.project_id = project_id
        self.network = client.create_network(name="front", project_id=project_id)
        wanted = {"network_id": self.network.id, "project_id": project_id}
        self.v4 = client.create_subnet(
            ip_version=4,
            cidr="198.51.100.0/24",
            host_routes=[{"destination": "192.0.2.0/24", "nexthop": "198.51.100.9"}],
            **wanted,
        )
        self.v6 = client.create_subnet(ip_version=6, cidr="2001:db8::/64", **wanted)


@pytest.fixture
def tenant(cloud, admin):
    return Tenant(admin, cloud.projects["demo"])


class Crash(BaseException):
    """Simulates the end of the process; no handler of the code under test catches it."""


class Requests:
    """Counts the requests of a backend, and ends its process after one of them."""

    def __init__(self, backend):
        self.made = []
        self.crash_after = None
        self._service = backend._neutron._service
        self._send = self._service.request
        self._service.request = self._count

    def _count(self, method, path, **more):
        answer = self._send(method, path, **more)
        self.made.append((method, path.split("/")[1]))
        if len(self.made) == self.crash_after:
            raise Crash
        return answer

    def counted(self):
        """Return the requests since the last call, by method and collection."""
        found, self.made = Counter(self.made), []
        return found


@pytest.fixture
def crash():
    return Crash


@pytest.fixture
def watch():
    return Requests


@pytest.fixture(scope="session")
def provider_stack():
    """The complete cloud with Octavia and the provider, for all tests of a worker.

    With AMPHORA_INCUMBENT=1 Octavia's own provider runs too.
    """
    with ExitStack() as opened:
        stack = ProviderStack(opened.enter_context(whole_cloud()), incumbent=os.environ.get("AMPHORA_INCUMBENT") == "1")
        stack.start()
        _whole_cloud.push(opened.pop_all())
    yield stack
    _whole_cloud.close()


@pytest.fixture(scope="session")
def cloud_user(provider_stack):
    return CloudUser(provider_stack)


@pytest.fixture(scope="session")
def topology(cloud_user):
    """Makes a flavor for a topology; return its id."""

    @functools.cache
    def make(name, provider):
        balancers = cloud_user.admin.load_balancer
        data = json.dumps({"loadbalancer_topology": name})
        profile = balancers.create_flavor_profile(name=name, provider_name=provider, flavor_data=data)
        found = balancers.create_flavor(name=f"{provider} {name}", flavor_profile_id=profile.id, is_enabled=True)
        return found.id

    # The cache distinguishes a call with the default from a call with the same value.
    return lambda name, provider="haproxy": make(name, provider)
