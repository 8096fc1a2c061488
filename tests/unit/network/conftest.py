# SPDX-License-Identifier: Apache-2.0
"""Networks in a database for each test."""

import migrated
import pytest

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork


def subnet(name, network_id, cidr, gateway, first, last):
    return AddressRange(id=name, network_id=network_id, name=name, cidr=cidr, gateway=gateway, first=first, last=last)


def define(network):
    network.define_network("management", "management", "br-mgmt")
    network.define_network("net", "net", "br-net", 1450)
    network.define_network("other", "other", "br-other")
    for values in (
        ("mgmt4", "management", "203.0.113.0/24", None, "203.0.113.10", "203.0.113.20"),
        ("v4", "net", "198.51.100.0/24", "198.51.100.1", "198.51.100.10", "198.51.100.250"),
        ("v6", "net", "2001:db8::/64", "2001:db8::1", "2001:db8::1", "2001:db8::ffff"),
        ("tiny", "other", "192.0.2.0/29", "192.0.2.1", "192.0.2.1", "192.0.2.4"),
    ):
        network.define_subnet(subnet(*values))


@pytest.fixture
def url(tmp_path):
    url = f"sqlite:///{tmp_path / 'test.sqlite'}"
    migrated.write(url)
    return url


@pytest.fixture
def database(url):
    made = Database(url)
    yield made
    made.dispose()


@pytest.fixture
def network(database, tmp_path):
    file = tmp_path / "test.conf"
    file.write_text("")
    network = LocalNetwork(config.load([str(file)]), database)
    define(network)
    return network
