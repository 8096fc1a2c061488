# SPDX-License-Identifier: Apache-2.0
"""Networks in a bundle: permitted sources of ports, and interfaces."""

from __future__ import annotations

import json
import uuid

import pytest
from msgspec.structs import replace

from amphora_agent.bundle import parse
from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.enums import ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Profile, Vip
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.render.bundle import Served, allowed, bundle, interfaces
from amphora_driver.render.haproxy import render

LB = "1b000000-0000-4000-8000-000000000001"


def listener(number, *cidrs, **more):
    return Listener(
        id=f"11500000-0000-4000-8000-{number:012}",
        loadbalancer_id=LB,
        protocol=ListenerProtocol.HTTP,
        protocol_port=more.pop("port", 80 + number),
        allowed_cidrs=cidrs or None,
        **more,
    )


def tree(*listeners, **more):
    vip = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
    return LoadBalancer(id=LB, project_id="demo", vip=vip, listeners=listeners, **more)


def ports_and_networks(wanted):
    """Return ports and networks of the document that the agent reads."""
    rendered = render(wanted)
    body = bundle(wanted, 1, str(uuid.UUID(int=1)), (), Served(text=rendered.text))
    assert [{"port": one.port, "networks": [*map(str, one.networks)]} for one in parse(body).allowed] == [
        *json.loads(body)["allowed"]
    ]
    return {one["port"]: one["networks"] for one in json.loads(body)["allowed"]}


@pytest.mark.parametrize(
    ("listeners", "wanted"),
    [
        ((), {}),
        ((listener(1),), {}),
        ((listener(1, "192.0.2.0/24"), listener(2)), {81: ["192.0.2.0/24"]}),
        # The API accepts host bits, single addresses, upper case, duplicates and both address families.
        (
            (listener(1, "192.0.2.9/24", "192.0.2.0/24", "198.51.100.1", "2001:DB8:0::1/32", "::ffff:127.0.0.1"),),
            {81: ["192.0.2.0/24", "198.51.100.1/32", "2001:db8::/32", "::ffff:7f00:1/128"]},
        ),
        # Not served: a disabled listener, one with unreadable sources, and a second listener on the same port.
        ((listener(1, "192.0.2.0/24", admin_state_up=False),), {}),
        ((listener(1, "192.0.2.0/33"), listener(2, "192.0.2.0/32")), {82: ["192.0.2.0/32"]}),
        ((listener(1, "192.0.2.1/32"), listener(2, "192.0.2.2/32", port=81)), {81: ["192.0.2.1/32"]}),
        ((listener(1), listener(2, "192.0.2.2/32", port=81)), {}),
    ],
)
def test_permitted_sources_of_a_port(listeners, wanted):
    assert ports_and_networks(tree(*listeners)) == wanted


def test_a_load_balancer_without_listeners_opens_no_peer_port():
    assert ports_and_networks(tree(listener(1, "192.0.2.0/24"), admin_state_up=False)) == {}
    assert allowed(tree(listener(1, "192.0.2.0/24")), Served(text=None)) == ()


def plugged(network, mac):
    port = Port(
        id=f"port-{network}",
        network_id=network,
        mac=mac,
        mtu=1450,
        addresses=(FixedAddress(subnet_id=f"sub-{network}", address="192.0.2.3"),),
    )
    subnet = Subnet(id=f"sub-{network}", network_id=network, cidr="192.0.2.0/24", gateway="192.0.2.1")
    return AttachedPort(port=port, subnets=(subnet,))


def test_an_interface_keeps_its_name_when_other_networks_change():
    vips, first, second = (plugged(n, f"fa:16:3e:00:00:0{k}") for k, n in enumerate(("n", "a", "z")))
    before = {one.mac: one.name for one in interfaces(tree(), (vips, second))}
    after = {one.mac: one.name for one in interfaces(tree(), (second, first, vips))}
    assert before.items() <= after.items()
    assert after["fa:16:3e:00:00:00"] == "eth1"
    assert len({*after.values()}) == 3
    renamed = replace(first, port=replace(first.port, mac="fa:16:3e:00:00:0f"))
    assert interfaces(tree(), (renamed,))[0].name == "mfa163e00000f"


def test_the_default_route_uses_the_vip_network():
    made = interfaces(tree(), (plugged("a", "fa:16:3e:00:00:01"), plugged("n", "fa:16:3e:00:00:00")))
    assert [[route.destination for route in one.routes] for one in made] == [["0.0.0.0/0"], []]
    assert [one.vips for one in made] == [("198.51.100.5/32",), ()]


def pool(number, *members):
    """A pool with a member for each pair of address and type."""
    return Pool(
        id=f"p{number}",
        loadbalancer_id=LB,
        protocol=PoolProtocol.HTTP,
        members=tuple(
            Member(id=f"{number}{address}", pool_id=f"p{number}", address=address, protocol_port=80, vnic_type=kind)
            for address, kind in members
        ),
    )


SIDE_BY_SIDE = (
    pool(1, ("192.0.2.9", "normal"), ("192.0.2.10", "direct"), ("203.0.113.7", "direct"), ("192.0.2.11", None)),
    # Another pool may request another type for the same host, and an address that no amphora can use.
    pool(2, ("192.0.2.11", "direct"), ("192.0.2.10", "normal"), ("bad", "normal"), ("2001:db8::1", "direct")),
)


@pytest.mark.parametrize("network", ["a", "n"])
def test_two_ports_on_a_network_have_a_route_to_each_member(network):
    wanted = tree(pools=SIDE_BY_SIDE, profile=Profile(allow_member_sriov=True))
    ordinary = plugged(network, "fa:16:3e:00:00:02")
    through_sr_iov = replace(plugged(network, "fa:16:3e:00:00:01"), sr_iov=True)
    first, second = interfaces(wanted, (through_sr_iov, ordinary))
    assert (first.mac, second.mac) == ("fa:16:3e:00:00:02", "fa:16:3e:00:00:01")
    # The member behind a router, 203.0.113.7, has no route of its own.
    on_link = [[one.destination for one in made.routes if one.gateway is None] for made in (first, second)]
    assert on_link == [["192.0.2.9/32"], ["192.0.2.10/32", "192.0.2.11/32"]]
    # Only the ordinary port of the VIP's network has VIPs and the default route.
    of_vips = network == "n"
    assert (first.name == "eth1", bool(first.vips), second.name, second.vips) == (of_vips, of_vips, "mfa163e000001", ())
    gateways = [[one.destination for one in made.routes if one.gateway is not None] for made in (first, second)]
    assert gateways == [["0.0.0.0/0"] * of_vips, []]


def test_a_single_port_needs_no_route_to_members():
    wanted = tree(pools=SIDE_BY_SIDE, profile=Profile(allow_member_sriov=True))
    vips, members = plugged("n", "fa:16:3e:00:00:00"), replace(plugged("a", "fa:16:3e:00:00:01"), sr_iov=True)
    assert [one.destination for made in interfaces(wanted, (vips, members)) for one in made.routes] == ["0.0.0.0/0"]
