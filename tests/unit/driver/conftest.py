# SPDX-License-Identifier: Apache-2.0
"""The provider driver on a real SQLite database with the embedded network backend."""

import migrated
import pytest
from cryptography.fernet import Fernet
from octavia_objects import NETWORK, SUBNET, SUBNET6, listener, load_balancer, member, pool

from amphora_driver import config, driver
from amphora_driver.database.engine import Database
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork


@pytest.fixture
def conf(tmp_path, monkeypatch):
    path = tmp_path / "amphora-driver.conf"
    (tmp_path / "encryption.keys").write_bytes(Fernet.generate_key())
    (tmp_path / "encryption.keys").chmod(0o600)
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n"
        f"encryption_key_file = {tmp_path}/encryption.keys\n"
        f"[amp_queue]\nsocket_dir = {tmp_path}/bells\n"
    )
    monkeypatch.setenv(config.FILE_VARIABLE, str(path))
    config.shared.cache_clear()
    driver._shared.cache_clear()
    yield config.shared()
    if driver._shared.cache_info().currsize:
        driver._shared().database.dispose()
    config.shared.cache_clear()
    driver._shared.cache_clear()


@pytest.fixture
def database(conf):
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection)
    network = LocalNetwork(conf, database)
    network.define_network(NETWORK, "vip", "vip")
    for subnet_id, name, cidr, gateway, first, last in (
        (SUBNET, "vip-v4", "198.51.100.0/24", "198.51.100.1", "198.51.100.10", "198.51.100.250"),
        (SUBNET6, "vip-v6", "2001:db8:1::/64", "2001:db8:1::1", "2001:db8:1::10", "2001:db8:1::ffff"),
    ):
        network.define_subnet(
            AddressRange(
                id=subnet_id, network_id=NETWORK, name=name, cidr=cidr, gateway=gateway, first=first, last=last
            )
        )
    yield database
    database.dispose()


@pytest.fixture
def provider(database):
    return driver.AmphoraProviderDriver()


@pytest.fixture
def served(provider):
    """A load balancer with listener, pool and one member."""
    provider.loadbalancer_create(load_balancer())
    provider.listener_create(listener())
    provider.pool_create(pool())
    provider.member_create(member(1))
    return provider
