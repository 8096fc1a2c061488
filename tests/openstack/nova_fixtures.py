# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the backend `nova`: a pytest plugin that the test modules name.

Invariant: each test has a deployment of its own, and its servers are removed at its end.
"""

import uuid

import pytest
from nova_boots import SECONDS
from whole_cloud import FLAVOR

from amphora_driver import config
from amphora_driver.compute.nova import NovaCompute
from amphora_driver.network.neutron import NeutronNetwork


@pytest.fixture(scope="module")
def nova_cloud(provider_stack):
    """The services of the cloud. The provider of `provider_stack` is another deployment in the same project."""
    return provider_stack.cloud


@pytest.fixture(scope="module")
def nova_admin(nova_cloud):
    """The SDK's client with the rights of the service account: what the tests see."""
    return nova_cloud.connect()


@pytest.fixture(scope="module")
def management(nova_admin):
    """A management network with both families."""
    network = nova_admin.network.create_network(name="nova-management")
    for version, cidr in ((4, "203.0.114.0/24"), (6, "2001:db8:114::/64")):
        nova_admin.network.create_subnet(network_id=network.id, ip_version=version, cidr=cidr, gateway_ip=None)
    return network


@pytest.fixture(scope="module")
def front(nova_admin):
    """The network of a user, with one subnet."""
    network = nova_admin.network.create_network(name="nova-front")
    return nova_admin.network.create_subnet(network_id=network.id, ip_version=4, cidr="198.51.101.0/24")


@pytest.fixture(scope="module")
def make_image(nova_admin):
    """Uploads images; removes them at the end."""
    made = []

    def make(tag, client=nova_admin, **more):
        made.append(
            (client, client.image.create_image(
                name=tag, data=b"no guest reads it", disk_format="raw", container_format="bare", tags=[tag],
                allow_duplicates=True, **more,
            ))
        )  # fmt: skip
        return made[-1][1].id

    yield make
    for client, image in made:
        client.image.delete_image(image)


@pytest.fixture(scope="module")
def image(make_image):
    return make_image("nova-test")


@pytest.fixture
def make_nova(nova_cloud, management, image, tmp_path):
    """Makes backends as their processes would: each with its own connection and cache."""
    backends = []

    def make(deployment, *, openstack=None, **options):
        groups = {
            "amp_openstack": {"deployment_id": deployment, **nova_cloud.auth(), **(openstack or {})},
            "amp_compute_nova": {
                "image_owner": nova_cloud.projects["service"],
                "image_tag": "nova-test",
                "management_networks": management.id,
                "flavor": FLAVOR,
                "deletion_timeout": SECONDS,
                **options,
            },
        }
        file = tmp_path / f"{uuid.uuid4()}.conf"
        file.write_text(
            "".join(
                f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in group.items())
                for name, group in groups.items()
            )
        )
        conf = config.load([str(file)])
        backends.append(NovaCompute(conf, NeutronNetwork(conf, None)))
        return backends[-1]

    yield make
    for one in backends:
        for amphora_id in one.machines() if one._nova._service._adapter is not None else ():
            one.destroy(amphora_id)
        services = one._nova._service, one._profiles._images._service, one._network._neutron._service
        for service in services:
            if service._adapter is not None:
                # An unclosed socket would fail a later test of this process with a ResourceWarning.
                service._adapter.session.session.close()


@pytest.fixture
def deployment():
    """The id of a deployment of this test only."""
    return uuid.uuid4().hex


@pytest.fixture
def nova(make_nova, deployment):
    return make_nova(deployment)
