# SPDX-License-Identifier: Apache-2.0
"""The embedded network backend allocates addresses: one port each, all or none, and the same after a retry."""

import multiprocessing
import uuid

import pytest

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.errors import Conflict, UnsupportedOption
from amphora_driver.model.network import FixedAddress, VipRequest
from amphora_driver.network.interface import management_port
from amphora_driver.network.local import LocalNetwork, vip_owner


def lb():
    return str(uuid.uuid4())


def take(network, *wanted, load_balancer_id=None):
    return network.allocate_vip(load_balancer_id or lb(), "project", [VipRequest(**one) for one in wanted])


class TestVip:
    def test_any_address_of_the_subnet_is_allocated(self, network):
        (vip,) = take(network, {"subnet_id": "v4"})
        assert (vip.address, vip.subnet_id, vip.network_id) == ("198.51.100.10", "v4", "net")
        assert network.port(vip.port_id).mtu == 1450

    def test_the_lowest_free_address_is_allocated(self, network):
        balancers = [lb() for _ in range(3)]
        for one in balancers:
            take(network, {"subnet_id": "v4"}, load_balancer_id=one)
        network.release_load_balancer(balancers[1])
        assert take(network, {"subnet_id": "v4"})[0].address == "198.51.100.11"

    def test_a_requested_address_outside_the_pool_is_allocated(self, network):
        assert take(network, {"subnet_id": "v4", "address": "198.51.100.5"})[0].address == "198.51.100.5"

    def test_both_families_are_on_one_port_in_request_order(self, network):
        first, second = take(network, {"subnet_id": "v6"}, {"subnet_id": "v4"})
        assert (first.address, second.address) == ("2001:db8::2", "198.51.100.10")
        assert first.port_id == second.port_id

    def test_two_load_balancers_on_one_subnet_have_different_addresses(self, network):
        vips = take(network, {"subnet_id": "v4"}, {"subnet_id": "v4"})
        assert len({vip.address for vip in vips}) == 2

    def test_a_request_by_network_prefers_ipv4(self, network):
        assert take(network, {"network_id": "net"})[0].subnet_id == "v4"

    def test_a_request_by_network_and_address_finds_the_subnet(self, network):
        (vip,) = take(network, {"network_id": "net", "address": "2001:DB8:0:0::0F"})
        assert (vip.subnet_id, vip.address) == ("v6", "2001:db8::f")

    def test_a_retry_returns_the_same_addresses(self, network):
        one = lb()
        wanted = ({"subnet_id": "v4"}, {"subnet_id": "v6"})
        assert take(network, *wanted, load_balancer_id=one) == take(network, *wanted, load_balancer_id=one)
        assert len(network.all_ports()) == 1

    def test_released_addresses_are_free_and_release_can_be_repeated(self, network):
        one = lb()
        take(network, {"subnet_id": "v4", "address": "198.51.100.7"}, load_balancer_id=one)
        network.release_load_balancer(one)
        network.release_load_balancer(one)
        assert network.all_ports() == ()
        assert take(network, {"subnet_id": "v4", "address": "198.51.100.7"})


REFUSED = [
    (
        {"subnet_id": "v4", "address": "198.51.100.300"},
        UnsupportedOption,
        "198.51.100.300 is not an IPv4 or IPv6 address",
    ),
    ({"subnet_id": "v4", "address": "192.0.2.9"}, UnsupportedOption, "192.0.2.9 lies outside of subnet v4"),
    ({"subnet_id": "v4", "address": "2001:db8::9"}, UnsupportedOption, "2001:db8::9 lies outside of subnet v4"),
    ({"subnet_id": "v6", "address": "fe80::1%eth0"}, UnsupportedOption, "has a scope"),
    ({"subnet_id": "v4", "address": "198.51.100.255"}, UnsupportedOption, "the network's own address"),
    ({"subnet_id": "v4", "address": "198.51.100.0"}, UnsupportedOption, "the network's own address"),
    ({"subnet_id": "v4", "address": "198.51.100.1"}, Conflict, "198.51.100.1 is the gateway of subnet v4"),
    ({"subnet_id": "nowhere"}, UnsupportedOption, "subnet nowhere does not exist"),
    ({"network_id": "nowhere"}, UnsupportedOption, "network nowhere does not exist"),
    ({"network_id": "other", "subnet_id": "v4"}, UnsupportedOption, "is not a subnet of network other"),
    ({"network_id": "net", "address": "192.0.2.9"}, UnsupportedOption, "has no subnet that contains 192.0.2.9"),
    ({"port_id": "nowhere"}, UnsupportedOption, "port nowhere does not exist"),
    ({"subnet_id": "mgmt4"}, UnsupportedOption, "the management network is for the amphorae's agents only"),
    ({}, UnsupportedOption, "the request has no subnet, network or port"),
]


@pytest.mark.parametrize(("wanted", "error", "words"), REFUSED)
def test_a_refusal_has_a_reason_and_leaves_no_rows(network, wanted, error, words):
    with pytest.raises(error) as raised:
        take(network, wanted)
    assert words in str(raised.value)
    assert str(raised.value).startswith("Could not allocate a VIP for load balancer ")
    assert network.all_ports() == ()


def test_an_allocated_address_is_refused(network):
    take(network, {"subnet_id": "v4", "address": "198.51.100.7"})
    with pytest.raises(Conflict, match=r"198\.51\.100\.7 of subnet v4 .* is in use"):
        take(network, {"subnet_id": "v4", "address": "198.51.100.7"})


def test_the_same_address_twice_in_one_request_is_refused(network):
    with pytest.raises(Conflict, match="in use"):
        take(network, *({"subnet_id": "v6", "address": "2001:db8::7"},) * 2)
    assert network.all_ports() == ()


def test_subnets_of_two_networks_are_refused(network):
    with pytest.raises(UnsupportedOption, match="must be on one network"):
        take(network, {"subnet_id": "v4"}, {"subnet_id": "tiny"})


def test_an_exhausted_subnet_keeps_gateway_and_broadcast_free(network):
    got = [take(network, {"subnet_id": "tiny"})[0].address for _ in range(3)]
    assert got == ["192.0.2.2", "192.0.2.3", "192.0.2.4"]
    with pytest.raises(Conflict, match=r"every address of subnet tiny .* is in use"):
        take(network, {"subnet_id": "tiny"})


def test_members_on_the_management_network_are_refused(network):
    assert network.subnet("mgmt4").network_id == "management"
    with pytest.raises(UnsupportedOption, match="the management network is for the amphorae's agents only"):
        network.subnet("mgmt4", "project")


class TestOwnPort:
    def test_a_port_of_the_user_is_used_and_not_changed(self, network):
        port, one = network.create_port("net"), lb()
        for _ in range(2):
            (vip,) = take(network, {"port_id": port.id}, load_balancer_id=one)
            assert (vip.port_id, vip.address) == (port.id, port.addresses[0].address)
        network.release_load_balancer(one)
        assert network.port(port.id) == port
        assert take(network, {"port_id": port.id})

    def test_the_requested_address_of_a_port_is_used(self, network):
        port = network.create_port("net")
        both = take(network, {"port_id": port.id, "subnet_id": "v6"}, {"subnet_id": "v4"})
        assert [vip.subnet_id for vip in both] == ["v6", "v4"]

    def test_no_address_of_a_port_is_used_for_two_vips(self, network):
        addresses = ["198.51.100.77", "198.51.100.78"]
        port = network.create_port("net", [FixedAddress(subnet_id="v4", address=one) for one in addresses])
        both = take(network, {"port_id": port.id}, {"subnet_id": "v4", "address": addresses[0]})
        assert [vip.address for vip in both] == addresses[::-1]
        with pytest.raises(UnsupportedOption, match="not an address"):
            take(network, *({"port_id": network.create_port("other").id},) * 2)

    def test_an_address_that_the_port_does_not_have_is_refused(self, network):
        port = network.create_port("net", [FixedAddress(subnet_id="v4", address="198.51.100.77")])
        with pytest.raises(UnsupportedOption, match=r"has 198\.51\.100\.77, not 198\.51\.100\.78"):
            take(network, {"port_id": port.id, "address": "198.51.100.78"})

    def test_a_port_in_use_is_refused(self, network):
        port = network.create_port("net")
        take(network, {"port_id": port.id})
        with pytest.raises(Conflict, match="is in use by lb-"):
            take(network, {"port_id": port.id})
        with pytest.raises(Conflict, match=r"the port is in use by lb-"):
            network.remove_user_port(port.id)

    def test_port_of_an_amphora_is_refused_as_vip_port(self, network):
        port = network.ensure_port(management_port("amphora", "net", ["v4"]))
        with pytest.raises(Conflict, match="in use by amphora"):
            take(network, {"port_id": port.id})

    def test_a_port_of_the_user_is_never_deleted(self, network):
        port = network.create_port("net")
        network.delete_port(port.id)
        assert network.port(port.id) == port
        network.remove_user_port(port.id)
        network.remove_user_port(port.id)
        assert network.port(port.id) is None


class TestPort:
    def test_an_incomplete_port_is_found_and_completed(self, network):
        port = network.ensure_port(management_port("a", "net", ["v4"]))
        assert network.ensure_port(management_port("a", "net", ["v4"])) == port
        more = network.ensure_port(management_port("a", "net", ["v4", "v6"]))
        assert (more.id, more.mac, more.addresses[0]) == (port.id, port.mac, port.addresses[0])
        assert [one.subnet_id for one in more.addresses] == ["v4", "v6"]

    def test_an_amphora_has_one_port_on_each_network(self, network):
        made = {
            network.ensure_port(management_port("a", "net", ["v4"])).id,
            network.ensure_port(management_port("a", "other", ["tiny"])).id,
        }
        assert {port.id for port in network.ports("a")} == made
        assert network.ports("b") == ()

    def test_a_subnet_of_another_network_is_refused(self, network):
        with pytest.raises(UnsupportedOption, match="is not a subnet of network other"):
            network.ensure_port(management_port("a", "other", ["v4"]))

    def test_deletion_of_a_port_can_be_repeated(self, network):
        port = network.ensure_port(management_port("a", "net", ["v4"]))
        network.delete_port(port.id)
        network.delete_port(port.id)
        assert network.ports("a") == ()

    def test_an_address_keeps_its_mac(self, network):
        port = network.ensure_port(management_port("a", "net", ["v4"]))
        network.delete_port(port.id)
        again = network.ensure_port(management_port("b", "net", ["v4"]))
        assert (again.mac, again.addresses) == (port.mac, port.addresses)

    def test_macs_differ_and_are_local_unicast(self, network):
        macs = [network.ensure_port(management_port(f"a{number}", "net", ["v4"])).mac for number in range(50)]
        assert len(set(macs)) == 50
        assert all(int(mac[:2], 16) & 0b11 == 0b10 for mac in macs)

    def test_the_fixed_port_is_described(self, network):
        wanted = [FixedAddress(subnet_id="v4", address="198.51.100.2")]
        assert network.fixed_port("client", "net", wanted) == network.fixed_port("client", "net", wanted)


def test_the_subnet_is_described(network):
    found = network.subnet("v4")
    assert (found.cidr, found.gateway, found.network_id) == ("198.51.100.0/24", "198.51.100.1", "net")
    with pytest.raises(UnsupportedOption, match="subnet nowhere does not exist"):
        network.subnet("nowhere")


def _take_many(url, folder, number):
    database = Database(url)
    network = LocalNetwork(config.load([f"{folder}/test.conf"]), database)
    for _ in range(number):
        take(network, {"subnet_id": "v4"})
    database.dispose()


def _at_once(database, work, *args):
    """The results of three concurrent processes.

    They are forks, because a spawned process imports everything again. SQLite needs all connections closed during a
    fork.
    """
    database.dispose()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_two_processes_never_allocate_the_same_address(network, database, url, tmp_path):
    assert _at_once(database, _take_many, url, tmp_path, 20) == [0, 0, 0]
    addresses = [port.addresses[0].address for port in network.all_ports()]
    assert len(addresses) == len(set(addresses)) == 60


def test_two_processes_allocate_one_vip_for_one_load_balancer(network, database, url, tmp_path):
    one = lb()
    assert _at_once(database, _take_for, url, tmp_path, one) == [0, 0, 0]
    assert len(network.ports(vip_owner(one))) == len(network.all_ports()) == 1


def _take_for(url, folder, load_balancer_id):
    database = Database(url)
    network = LocalNetwork(config.load([f"{folder}/test.conf"]), database)
    take(network, {"subnet_id": "v4"}, load_balancer_id=load_balancer_id)
    database.dispose()
