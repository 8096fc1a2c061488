# SPDX-License-Identifier: Apache-2.0
"""The bundle parser: accepted and refused documents."""

from __future__ import annotations

import copy
import hashlib
import json

import pytest

from amphora_agent.apply import confirmed_bundle
from amphora_agent.bundle import MAX_FILE_BYTES, MAX_FILES, MAX_FILES_BYTES, Limits, digest, parse, parse_stored
from amphora_agent.errors import MachineError, MalformedBundle

OWNER = "6005052a-3a34-59e3-815f-5cebba3097eb"
SCOPED = "fe80::1%x }\nflush ruleset"
PEM = f"tls/{OWNER}/default.pem"
GOOD = {
    "format": 1,
    "amphora_id": "0b9d7a52-0000-4000-8000-000000000001",
    "load_balancer_id": "52cf7a52-0000-4000-8000-000000000002",
    "generation": 8,
    "haproxy": "defaults\n",
    "files": [{"name": PEM, "content": "s3cret"}, {"name": f"tls/{OWNER}/certificates.list", "content": f"{PEM}\n"}],
    "pings": {"0b9d7a52-0000-4000-8000-000000000009": "2001:db8::9"},
    "limits": {"connections": 2000, "threads": None, "drain": 60, "workers": None},
    "allowed": [{"port": 80, "networks": ["192.0.2.0/24", "2001:db8::/32"]}],
    "vrrp": {
        "interface": "eth1",
        "router_id": 1,
        "priority": 254,
        "advert_interval": 0.3,
        "local": {"name": "a", "address": "198.51.100.11"},
        "peers": [{"name": "b", "address": "198.51.100.12"}],
    },
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


def test_a_valid_bundle_is_accepted():
    bundle = parse(json.dumps(GOOD).encode())
    assert bundle.generation == 8
    (interface,) = bundle.interfaces
    assert interface.mac == "fa:16:3e:00:00:0b"
    assert str(interface.vips[0]) == "198.51.100.5/32"
    assert [(file.name, file.object_id) for file in bundle.files] == [
        (f"tls/{OWNER}/certificates.list", OWNER),
        (PEM, OWNER),
    ]
    assert bundle.files[1].content == "s3cret"
    assert bundle.files[1].sha256 == hashlib.sha256(b"s3cret").hexdigest()
    assert {member: str(address) for member, address in bundle.pings.items()} == GOOD["pings"]
    assert bundle.limits == Limits(2000, None, 60)
    assert [str(network) for network in bundle.allowed[0].networks] == ["192.0.2.0/24", "2001:db8::/32"]
    assert bundle.vrrp is not None
    assert (bundle.vrrp.advert_interval, str(bundle.vrrp.peers[0].address)) == (0.3, "198.51.100.12")
    assert parse(changed(["vrrp"], None)).vrrp is None
    assert "s3cret" not in repr(bundle)
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
        (["haproxy"], "\ud800", "surrogate"),
        (["files"], ..., "files"),
        (["files"], {}, "files"),
        (["files"], GOOD["files"] * 2, "two files"),
        (["files"], [{"name": f"tls/{OWNER}/{n}", "content": ""} for n in range(MAX_FILES + 1)], "more than"),
        (["files", 0], {"name": PEM}, "content"),
        (["files", 0, "content"], 5, "content"),
        (["files", 0, "content"], "s3cret\0", "NUL"),
        (["files", 0, "content"], "s3cret\ud800", "surrogate"),
        (["files", 0, "content"], "x" * (MAX_FILE_BYTES + 1), "at most"),
        (["files", 0, "sha256"], "x", "sha256"),
        (
            ["files"],
            [
                {"name": f"tls/{OWNER}/{n}", "content": "x" * MAX_FILE_BYTES}
                for n in range(MAX_FILES_BYTES // MAX_FILE_BYTES)
            ]
            + GOOD["files"],
            "together",
        ),
        (["pings"], [], "pings"),
        (["pings"], {"m": "192.0.2.1"}, "UUID"),
        (["pings"], {OWNER.upper(): "192.0.2.1"}, "member"),
        (["pings"], {OWNER: "example.com"}, "example.com"),
        (["limits"], None, "limits"),
        (["limits", "connections"], 0, "connections"),
        (["limits", "threads"], "2", "threads"),
        (["limits", "memory"], 2, "memory"),
        (["limits", "drain"], 0, "drain"),
        (["limits", "workers"], ..., "workers"),
        (["allowed"], None, "allowed"),
        (["allowed", 0, "port"], 0, "port"),
        (["allowed", 0, "networks"], ["192.0.2.1/24"], "host bits"),
        (["allowed"], GOOD["allowed"] * 2, "twice"),
        (["vrrp"], ..., "vrrp"),
        (["vrrp", "interface"], "eth2", "eth2"),
        (["vrrp", "router_id"], 256, "router_id"),
        (["vrrp", "priority"], 255, "priority"),
        (["vrrp", "advert_interval"], 0.01, "advert_interval"),
        (["vrrp", "advert_interval"], True, "advert_interval"),
        (["vrrp", "advert_interval"], float("nan"), "advert_interval"),
        (["vrrp", "local", "name"], "a b", "partner"),
        (["vrrp", "local", "name"], "b", "same name"),
        (["vrrp", "peers", 0, "address"], "2001:db8::1", "families"),
        (["vrrp", "password"], "x", "password"),
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
        # The standard library accepts any text after the "%".
        (["pings"], {OWNER: SCOPED}, "scope"),
        (["allowed", 0, "networks"], [f"{SCOPED}/128"], "scope"),
        (["vrrp", "local", "address"], SCOPED, "scope"),
        (["interfaces", 0, "addresses"], [f"{SCOPED}/64"], "scope"),
        (["interfaces", 0, "vips"], [f"{SCOPED}/128"], "scope"),
        (["interfaces", 0, "routes", 0, "destination"], f"{SCOPED}/128", "scope"),
        (["interfaces", 0, "routes", 0, "gateway"], SCOPED, "scope"),
    ],
)
def test_an_invalid_bundle_is_refused(path, value, word):
    with pytest.raises(MalformedBundle) as caught:
        parse(changed(path, value))
    assert word in caught.value.happened
    assert caught.value.status == 400
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/shadow",
        f"tls/{OWNER}/..",
        f"tls/{OWNER}/.hidden",
        f"tls/{OWNER}/../x",
        f"tls/../{OWNER}/x",
        f"tls/{OWNER}/a/b",
        f"tls/{OWNER}/",
        f"tls/{OWNER}",
        f"tls/{OWNER.upper()}/x",
        f"tls/{OWNER}/X",
        f"tls/{OWNER}/a b",
        f"tls/{OWNER}/a\n",
        f"tls/{OWNER}/é",
        f"tls/{OWNER}/" + "a" * 101,
        f"TLS/{OWNER}/x",
        f"./tls/{OWNER}/x",
        "tls/s3cret/x",
    ],
)
def test_an_invalid_name_is_refused(name):
    with pytest.raises(MalformedBundle, match="tls/<object id>/<name>") as caught:
        parse(changed(["files", 0, "name"], name))
    assert "s3cret" not in str(caught.value)


def test_the_stored_bundle_has_no_secrets_and_compares_equal(tmp_path):
    bundle = parse(json.dumps(GOOD).encode())
    file = tmp_path / "confirmed.json"
    serving = tmp_path / "haproxy.cfg"
    serving.write_text(bundle.haproxy)
    draft = confirmed_bundle.Draft(file, confirmed_bundle.confirmed_now(bundle, digest(b"body")))
    draft.reserve(serving)
    draft.confirm()
    assert "s3cret" not in file.read_text()
    found = confirmed_bundle.read(file, tmp_path / "haproxy.cfg")
    assert found.bundle == bundle
    assert found.digest == digest(b"body")
    assert all(one.content is None for one in found.bundle.files)
    assert found.bundle != parse(changed(["files", 0, "content"], "another"))
    assert found.bundle != parse(changed(["limits", "threads"], 2))
    for broken in ("{", "{}", file.read_text().replace('"sha256": "', '"sha256": "x')):
        file.write_text(broken)
        with pytest.raises(MachineError):
            confirmed_bundle.read(file, tmp_path / "haproxy.cfg")
    assert confirmed_bundle.read(tmp_path / "nothing", tmp_path / "haproxy.cfg") is None


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"\xff", b'{"format": 1, "format": 1}', b"[" * 100_000])
def test_a_document_that_is_no_bundle_is_refused(body):
    with pytest.raises(MalformedBundle):
        parse(body)


def test_the_digest_covers_the_content():
    assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


SERVER = {
    "id": "0b9d7a52-0000-4000-8000-00000000000a",
    "protocol": "UDP",
    "port": 53,
    "addresses": ["198.51.100.5"],
    "connection_limit": None,
    "pool_id": None,
    "algorithm": "ROUND_ROBIN",
    "persistence": None,
    "client_address": "hidden",
    "monitor": None,
    "members": [],
}

MEMBER = {
    "id": "0b9d7a52-0000-4000-8000-000000000011",
    "address": "192.0.2.9",
    "port": 53,
    "weight": 1,
    "backup": False,
    "enabled": True,
    "check_address": None,
    "check_port": None,
}


def test_an_empty_list_of_virtual_servers_is_omitted():
    """The digest of a bundle from an older agent stays the same."""
    bundle = parse(json.dumps(GOOD).encode())
    assert bundle.virtual_servers == ()
    assert "virtual_servers" not in bundle.to_document()
    assert bundle.to_document()["allowed"] == GOOD["allowed"]
    assert parse_stored(bundle.without_contents().to_document()) == bundle
    assert parse(changed(["virtual_servers"], [])) == bundle


def test_virtual_servers_and_their_ports_are_parsed():
    allowed = [*GOOD["allowed"], {"port": 80, "networks": [], "protocol": "udp"}]
    document = {**GOOD, "virtual_servers": [SERVER], "allowed": allowed}
    bundle = parse(json.dumps(document).encode())
    (server,) = bundle.virtual_servers
    assert (server.protocol, server.port) == ("UDP", 53)
    assert [one.protocol for one in bundle.allowed] == ["tcp", "udp"]
    stored = bundle.without_contents().to_document()
    assert stored["virtual_servers"] == [SERVER]
    assert stored["allowed"] == allowed
    assert parse_stored(json.loads(json.dumps(stored))) == bundle


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["virtual_servers"], {}, "virtual_servers"),
        (["virtual_servers"], [SERVER, SERVER], "the same id"),
        (["virtual_servers"], [{**SERVER, "port": 0}], "port"),
        (["virtual_servers"], [{**SERVER, "surprise": 1}], "surprise"),
        (["virtual_servers"], [{**SERVER, "addresses": [SCOPED]}], "scope"),
        (["virtual_servers"], [{**SERVER, "members": [{**MEMBER, "address": SCOPED}]}], "scope"),
        (["virtual_servers"], [{**SERVER, "members": [{**MEMBER, "check_address": SCOPED}]}], "scope"),
        (["allowed"], [{"port": 80, "networks": [], "protocol": "icmp"}], "icmp"),
        (["allowed"], [{"port": 80, "networks": [], "protocol": "udp"}] * 2, "twice"),
        (["allowed"], [{"port": 80, "networks": [], "more": 1}], "more"),
    ],
)
def test_errors_in_udp_listeners_are_named(path, value, said):
    with pytest.raises(MalformedBundle, match=said):
        parse(changed(path, value))
