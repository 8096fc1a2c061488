# SPDX-License-Identifier: Apache-2.0
"""Flavors and availability zones: values are stored with the load balancer, and a refusal leaves no rows."""

import copy

import pytest
import sqlalchemy as sa
from installed import package
from octavia_lib.api.drivers import data_models, exceptions
from octavia_objects import LB, LISTENER, NETWORK, SUBNET, listener, load_balancer, pool

from amphora_driver import config, driver, installation
from amphora_driver.database import tables
from amphora_driver.model.enums import Topology
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.plugins import NETWORK as NETWORKS
from amphora_driver.store import desired_objects

SOURCE = """
    from amphora_driver.network.local import LocalNetwork


    class Elsewhere(LocalNetwork):
        pass
"""


@pytest.fixture
def reconfigured(conf, monkeypatch, tmp_path):
    """Restarts octavia-api with more options."""
    path = tmp_path / "amphora-driver.conf"
    before = path.read_text()

    def restart(text):
        path.write_text(before + text)
        driver._shared().database.dispose()
        config.shared.cache_clear()
        driver._shared.cache_clear()
        return driver.AmphoraProviderDriver()

    return restart


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A second network backend is installed."""
    monkeypatch.syspath_prepend(tmp_path)
    installation.read_entry_points.cache_clear()
    package(tmp_path, "network_elsewhere", SOURCE, {NETWORKS: {"elsewhere": "Elsewhere"}})
    yield
    installation.read_entry_points.cache_clear()


def work(database):
    row = database.read(lambda connection: connection.execute(sa.select(tables.job)).one())
    return row.topology, row.compute, row.network


def profile(database):
    return database.read(lambda connection: desired_objects.load_tree(connection, LB)).profile


def ports(database):
    return database.read(lambda connection: connection.execute(sa.select(tables.local_port.c.owner)).scalars().all())


def take_vip(provider):
    return provider.create_vip_port(LB, "demo", {"vip_subnet_id": SUBNET}, [])


def test_the_profile_is_stored_with_the_load_balancer(provider, database):
    flavor = {"timeout_tunnel": 60000, "compute_flavor": "m1"}
    zone = {"compute_zone": "z", "valid_vip_networks": [NETWORK]}
    before = copy.deepcopy((flavor, zone))
    provider.loadbalancer_create(load_balancer(flavor=flavor, availability_zone=zone))
    assert profile(database) == Profile(
        topology=Topology.SINGLE,
        compute="netns",
        network="local",
        compute_flavor="m1",
        compute_zone="z",
        timeout_tunnel=60000,
    )
    assert work(database) == ("SINGLE", "netns", "local")
    assert (flavor, zone) == before


@pytest.mark.parametrize(
    ("flavor", "zone", "word"),
    [
        ({"loadbalancer_topology": "ACTIVE_ACTIVE"}, {}, "loadbalancer_topology"),
        ({"process_connection_limit": 1, "connection_limit": 2}, {}, "process_connection_limit"),
        ({}, {"volume_zone": "ssd"}, "volume_zone"),
        ({}, {"valid_vip_networks": ["another"]}, "valid_vip_networks"),
    ],
)
def test_a_refused_load_balancer_leaves_no_row_and_no_address(provider, database, flavor, zone, word):
    take_vip(provider)
    assert ports(database) == [f"lb-{LB}"]
    with pytest.raises(exceptions.UnsupportedOptionError) as refusal:
        provider.loadbalancer_create(load_balancer(flavor=flavor, availability_zone=zone))
    assert word in refusal.value.user_fault_string
    assert ports(database) == []
    assert database.read(lambda connection: connection.execute(sa.select(tables.job)).all()) == []


def test_an_availability_zone_restricts_every_vip(provider, database):
    more = [{"ip_address": "198.51.100.11", "network_id": "another", "port_id": "p", "subnet_id": SUBNET}]
    with pytest.raises(exceptions.UnsupportedOptionError, match="another"):
        provider.loadbalancer_create(
            load_balancer(availability_zone={"valid_vip_networks": [NETWORK]}, additional_vips=more)
        )


def test_a_load_balancer_keeps_the_values_of_its_creation(provider, database, reconfigured):
    provider.loadbalancer_create(load_balancer(flavor={"timeout_tunnel": 60000}))
    chosen = profile(database)
    provider = reconfigured("[amp_controller]\nloadbalancer_topology = ACTIVE_STANDBY\n")
    provider.loadbalancer_update(load_balancer(), load_balancer(name="renamed"))
    assert database.read(lambda connection: desired_objects.load_tree(connection, LB)).name == "renamed"
    assert profile(database) == chosen
    assert work(database) == ("SINGLE", "netns", "local")


@pytest.mark.usefixtures("elsewhere")
def test_vips_keep_their_network_backend_after_a_change_of_the_default(provider, database, reconfigured):
    take_vip(provider)
    provider = reconfigured("[amp_network]\ndriver = elsewhere\nenabled_drivers = local\n")
    with pytest.raises(exceptions.UnsupportedOptionError, match="backend local has allocated"):
        provider.loadbalancer_create(load_balancer(flavor={"network_driver": "elsewhere"}))
    assert ports(database) == [], "the backend of the allocation releases the VIP"
    take_vip(provider)
    provider.loadbalancer_create(load_balancer())
    assert work(database)[2] == "local"


@pytest.mark.usefixtures("elsewhere")
def test_a_new_load_balancer_takes_its_vip_from_the_new_default(provider, database, reconfigured):
    provider = reconfigured("[amp_network]\ndriver = elsewhere\nenabled_drivers = local\n")
    take_vip(provider)
    provider.loadbalancer_create(load_balancer(flavor={"network_driver": "elsewhere"}))
    assert work(database) == ("SINGLE", "netns", "elsewhere")


def tls(**more):
    return listener(protocol="TERMINATED_HTTPS", default_tls_container_ref="ref", **more)


OLD_LISTENER = tls(tls_versions=["TLSv1.2"])
OLD_POOL = pool(listener_id=data_models.Unset, tls_enabled=True, tls_versions=["TLSv1.1", "TLSv1.2"])


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.listener_create(OLD_LISTENER),
        lambda one: one.pool_create(OLD_POOL),
        lambda one: (
            one.listener_create(tls(tls_versions=["TLSv1.2", "TLSv1.3"])),
            one.listener_update(OLD_LISTENER, data_models.Listener(listener_id=LISTENER, tls_versions=["TLSv1.2"])),
        ),
    ],
    ids=["listener", "pool", "update"],
)
def test_tls_older_than_the_flavor_allows_is_refused(provider, database, reconfigured, call):
    provider.loadbalancer_create(load_balancer(flavor={"tls_minimum_version": "TLSv1.3"}))
    with pytest.raises(exceptions.UnsupportedOptionError, match=r"TLSv1\.2.*the oldest allowed version is TLSv1\.3"):
        call(provider)


def test_tls_older_than_the_configuration_allows_is_refused(provider, database, reconfigured):
    provider.loadbalancer_create(load_balancer())
    provider = reconfigured("[amp_haproxy]\ntls_minimum_version = TLSv1.3\n")
    with pytest.raises(exceptions.UnsupportedOptionError, match=r"the oldest allowed version is TLSv1\.3"):
        provider.listener_create(OLD_LISTENER)
    provider = reconfigured("")
    provider.listener_create(OLD_LISTENER)


def test_a_fully_populated_load_balancer_is_validated_as_a_whole(provider, database):
    whole = load_balancer(flavor={"tls_minimum_version": "TLSv1.3"}, listeners=[OLD_LISTENER])
    with pytest.raises(exceptions.UnsupportedOptionError, match=r"the oldest allowed version is TLSv1\.3"):
        provider.loadbalancer_create(whole)


def test_the_metadata_listing_is_that_of_the_deployment(provider):
    assert "amp_image_tag" not in provider.get_supported_flavor_metadata()
    assert set(provider.get_supported_availability_zone_metadata()) == {
        "compute_zone",
        "compute_zones",
        "valid_vip_networks",
    }
    provider.validate_flavor({"compute_driver": "netns"})
    provider.validate_availability_zone({"valid_vip_networks": [NETWORK]})


def test_a_backend_that_cannot_be_loaded_is_an_operator_error(provider, reconfigured):
    provider = reconfigured("[amp_network]\ndriver = nosuch\n")
    with pytest.raises(exceptions.DriverError) as failure:
        take_vip(provider)
    assert "nosuch" in failure.value.operator_fault_string
    assert "nosuch" not in failure.value.user_fault_string
    reference = failure.value.user_fault_string.rpartition(" ")[2]
    assert f"(reference {reference})" in failure.value.operator_fault_string
