# SPDX-License-Identifier: Apache-2.0
"""The bundle's strict shape."""

from __future__ import annotations

import copy
import json

import pytest

from amphora_agent.bundle import digest, parse
from amphora_agent.errors import MalformedBundle

GOOD = {
    "format": 1,
    "amphora_id": "0b9d7a52-0000-4000-8000-000000000001",
    "load_balancer_id": "52cf7a52-0000-4000-8000-000000000002",
    "generation": 8,
    "haproxy": "defaults\n",
    "interfaces": [
        {
            "mac": "FA:16:3E:00:00:0B",
            "name": "eth1",
            "mtu": 1500,
            "addresses": ["198.51.100.11/24", "2001:db8::b/64"],
            "vips": ["198.51.100.5/32"],
            "routes": [{"destination": "0.0.0.0/0", "gateway": "198.51.100.1"}],
        }
    ],
}


def changed(path, value):
    document = copy.deepcopy(GOOD)
    place = document
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document).encode()


def test_a_good_one():
    bundle = parse(json.dumps(GOOD).encode())
    assert bundle.generation == 8
    (interface,) = bundle.interfaces
    assert interface.mac == "fa:16:3e:00:00:0b"
    assert str(interface.vips[0]) == "198.51.100.5/32"
    assert parse(changed(["haproxy"], None)).haproxy is None
    assert parse(changed(["interfaces", 0, "routes", 0, "gateway"], None)).interfaces[0].routes[0].gateway is None


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (["format"], 2, "format"),
        (["amphora_id"], "x", "UUID"),
        (["generation"], "8", "generation"),
        (["generation"], True, "generation"),
        (["generation"], -1, "generation"),
        (["generation"], ..., "generation"),
        (["haproxy"], 5, "haproxy"),
        (["haproxy"], "a\0b", "NUL"),
        (["surprise"], 1, "surprise"),
        (["interfaces"], {}, "interfaces"),
        (["interfaces", 0], "eth0", "interface"),
        (["interfaces", 0, "mac"], "fa:16", "MAC"),
        (["interfaces", 0, "name"], "../x", "name"),
        (["interfaces", 0, "name"], "a" * 16, "name"),
        (["interfaces", 0, "name"], "lo", "name"),
        (["interfaces", 0, "mtu"], 20, "mtu"),
        (["interfaces", 0, "addresses"], ["198.51.100.300/24"], "300"),
        (["interfaces", 0, "vips"], ["198.51.100.5/24"], "/32"),
        (["interfaces", 0, "speed"], 1, "speed"),
        (["interfaces", 0, "routes", 0, "gateway"], "2001:db8::1", "families"),
        (["interfaces", 0, "routes", 0, "destination"], "198.51.100.1/24", "host bits"),
        (["interfaces"], GOOD["interfaces"] * 2, "same"),
    ],
)
def test_a_bad_one(path, value, word):
    with pytest.raises(MalformedBundle) as caught:
        parse(changed(path, value))
    assert word in caught.value.happened
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"\xff", b'{"format": 1, "format": 1}', b"[" * 100_000])
def test_no_bundle_at_all(body):
    with pytest.raises(MalformedBundle):
        parse(body)


def test_the_digest():
    assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
