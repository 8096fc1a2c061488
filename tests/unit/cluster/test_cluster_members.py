# SPDX-License-Identifier: Apache-2.0
"""Addresses, weights and the choice of servers (addresses.py, members.py, candidates.py)."""

import random

import pytest
from cluster_data import address, group, member, pool, server

from amphora_cluster.addresses import canonical, choose_address
from amphora_cluster.candidates import choose
from amphora_cluster.members import relate, weight_of
from amphora_cluster.model import Address, Criterion, MemberTemplate, Weight, WeightKind

SIX = Address(ip="2001:db8::1", family=6, subnet_id="six")


@pytest.mark.parametrize(
    ("family", "subnet", "addresses", "expected"),
    [
        (4, None, (SIX, address(1), address(2)), address(1)),
        (4, "b", (address(1, "a"), address(2, "b")), address(2, "b")),
        (6, None, (address(1), SIX), SIX),
        (6, "six", (address(1, "six"), SIX), SIX),
        (4, None, (), "The server has no fixed IPv4 address."),
        (6, None, (address(1),), "The server has no fixed IPv6 address."),
        (4, "b", (address(1, "a"),), "The server has no fixed IPv4 address in subnet b."),
        (4, "b", (address(1, None),), "The server has no fixed IPv4 address in subnet b."),
    ],
)
def test_address(family, subnet, addresses, expected):
    template = MemberTemplate(ports=(80,), family=family, subnet_id=subnet)
    assert choose_address(server(addresses=addresses), template) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("2001:DB8:0:0::1", "2001:db8::1"), ("192.0.2.1", "192.0.2.1"), ("not an address", "not an address")],
)
def test_spelling(given, expected):
    assert canonical(given) == expected


@pytest.mark.parametrize(
    ("weight", "changes", "expected"),
    [
        (Weight(number=5), {}, 5),
        (Weight(number=300), {}, 256),
        (Weight(number=-1), {}, 0),
        (Weight(kind=WeightKind.VCPUS, number=3), {"vcpus": 8}, 8),
        (Weight(kind=WeightKind.VCPUS, number=3), {}, 3),
        (Weight(kind=WeightKind.VCPUS), {"vcpus": 512}, 256),
        (Weight(kind=WeightKind.METADATA, key="w"), {"metadata": {"w": "7"}}, 7),
        (Weight(kind=WeightKind.METADATA, key="w"), {"metadata": {"w": " 0 "}}, 0),
        (Weight(kind=WeightKind.METADATA, key="w"), {"metadata": {"w": "257"}}, 256),
        (Weight(kind=WeightKind.METADATA, key="w", number=2), {"metadata": {"w": "many"}}, 2),
        (Weight(kind=WeightKind.METADATA, key="w", number=2), {"metadata": {"w": "-4"}}, 2),
        (Weight(kind=WeightKind.METADATA, key="w", number=2), {"metadata": {"w": "1" * 5000}}, 2),
        (Weight(kind=WeightKind.METADATA, key="w", number=2), {"metadata": {"w": ""}}, 2),
        (Weight(kind=WeightKind.METADATA, key="w", number=2), {}, 2),
    ],
)
def test_weight(weight, changes, expected):
    assert weight_of(server(**changes), weight) == expected


def test_members_belong_to_servers_by_address_then_by_name():
    members = pool(
        member("renamed by a user", 1),
        member("s2", 9),
        member("s2:80", 8, id="with port"),
        member("ghost", 7),
        member("s1", 6, tags=("other",)),
    )
    related = relate(group(), (server("s1", 1), server("s2", 2)), members)
    assert {one: [each.address for each in found.own] for one, found in related.items()} == {
        "s1": ["192.0.2.1"],
        "s2": ["192.0.2.9", "192.0.2.8"],
        "ghost": ["192.0.2.7"],
    }


SERVERS = [server(f"s{number}", number, created_at=float(created)) for number, created in ((1, 30), (2, 10), (3, 20))]


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (Criterion.OLDEST, ("s2", "s3", "s1")),
        (Criterion.YOUNGEST, ("s1", "s3", "s2")),
        (Criterion.LEAST_LOADED, ("s1", "s2", "s3")),
    ],
)
def test_choice(criterion, expected):
    load = {"s1": 4, "s2": 9}
    for count in (0, 1, 2, 3, 9):
        assert choose(SERVERS, count, criterion, random.Random(1), load) == expected[:count]
    assert choose(SERVERS, -1, criterion, random.Random(1), load) == ()
    assert choose(SERVERS, 2, criterion, random.Random(1), load, ("s2", "unknown")) == (
        "s2",
        next(one for one in expected if one != "s2"),
    )
    assert choose(SERVERS, 1, criterion, random.Random(1), load, ("s1", "s2")) == ("s1",)


def test_random_choice_takes_each_server():
    seen = {choose(SERVERS, 1, Criterion.RANDOM, random.Random(seed), {}) for seed in range(50)}
    assert seen == {("s1",), ("s2",), ("s3",)}
    assert sorted(choose(SERVERS, 3, Criterion.RANDOM, random.Random(1), {})) == ["s1", "s2", "s3"]
