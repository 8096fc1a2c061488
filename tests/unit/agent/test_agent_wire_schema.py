# SPDX-License-Identifier: Apache-2.0
"""The agent's parser of bundles and the JSON schema of the wire format accept and refuse the same documents."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from test_agent_bundle import GOOD

from amphora_agent.bundle import parse
from amphora_agent.errors import MalformedBundle

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/reference/wire.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
ID = "0b9d7a52-0000-4000-8000-00000000000"
MEMBER = {"id": f"{ID}3", "address": "192.0.2.3", "port": 53, "weight": 1, "backup": False, "enabled": True}
HTTP = {"method": "GET", "path": "/", "codes": ["200", "300-303"], "host": "www.example.com", "version": "1.1"}
SERVER = {
    "id": f"{ID}4",
    "protocol": "UDP",
    "port": 53,
    "addresses": ["198.51.100.5"],
    "connection_limit": 10,
    "pool_id": f"{ID}5",
    "algorithm": "ROUND_ROBIN",
    "persistence": {"timeout": 60, "prefix_v4": 32, "prefix_v6": 128},
    "client_address": "hidden",
    "monitor": {"id": f"{ID}6", "type": "HTTP", "interval": 5, "timeout": 3, "rise": 2, "fall": 3, **HTTP},
    "members": [{**MEMBER, "check_address": "192.0.2.4", "check_port": 80}],
    "log_format": "%ci",
}
WHOLE = {**GOOD, "virtual_servers": [SERVER]}
WHOLE["allowed"] = [*GOOD["allowed"], {"port": 53, "networks": ["192.0.2.0/24"], "protocol": "udp"}]
CONDITIONAL = {"interface", "interfaces", "method", "version", "path", "codes", "type", "haproxy"}
WRONG_TYPES = (None, True, 1.5, -1, "", 5, [], {}, [[]])


def accepts(document):
    try:
        parse(json.dumps(document).encode())
    except MalformedBundle:
        return False
    return True


def places(value, path=()):
    """Every place in a document, with its value."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def with_change(path, change):
    """A copy of the whole document in which `change(container, key)` was called."""
    document = {"": copy.deepcopy(WHOLE)}
    container, key = document, ""
    for step in path:
        container, key = container[key], step
    change(container, key)
    return document[""]


PLACES = [one for one in places(WHOLE) if one[0]]
OBJECTS = [path for path, value in places(WHOLE) if isinstance(value, dict) and path[-1:] != ("pings",)]
named = "/".join


def test_the_schema_is_valid_and_both_accept_the_whole_document():
    Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(WHOLE)
    assert accepts(WHOLE)


@pytest.mark.parametrize("path", [path for path, _ in PLACES], ids=lambda path: named(map(str, path)))
def test_both_require_the_same_keys(path):
    if isinstance(path[-1], int) or "pings" in path:
        return
    document = with_change(path, lambda container, key: container.pop(key))
    assert VALIDATOR.is_valid(document) == accepts(document)


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: named(map(str, path)) or "bundle")
def test_both_refuse_an_unknown_key(path):
    document = with_change(path, lambda container, key: container[key].update(surprise=1))
    assert not VALIDATOR.is_valid(document)
    assert not accepts(document)


@pytest.mark.parametrize("path", [path for path, _ in PLACES], ids=lambda path: named(map(str, path)))
def test_the_schema_accepts_what_the_agent_accepts_and_both_refuse_wrong_types(path):
    for value in WRONG_TYPES:
        document = with_change(path, lambda container, key, value=value: container.__setitem__(key, value))
        valid, accepted = VALIDATOR.is_valid(document), accepts(document)
        assert valid or not accepted, value
        # A JSON schema has no conditions between keys: existing names, HTTP keys of an HTTP monitor, address families.
        if valid and not accepted:
            assert path[-1] in CONDITIONAL, value
