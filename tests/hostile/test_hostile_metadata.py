# SPDX-License-Identifier: Apache-2.0
"""Each key and value of flavors and availability zones is refused by name or valid."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from corpus import STRINGS
from outcomes import shown

from amphora_driver import validation
from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import Topology
from amphora_driver.validation import availability_zones, flavors
from amphora_driver.validation.backend_capabilities import Backend, Deployment

SCHEMAS = {module: Path(validation.__file__).with_name(name) for module, name in (
    (flavors, "flavor.json"), (availability_zones, "availability_zone.json")
)}  # fmt: skip
KEYS = [
    (module, key, schema)
    for module, file in SCHEMAS.items()
    for key, schema in json.loads(file.read_text())["properties"].items()
]
COMPUTE = Backend(name="here", supports=frozenset(flavors.COMPUTE_KEYS + availability_zones.COMPUTE_KEYS))
DEPLOYMENT = Deployment(
    topologies=("SINGLE",),
    compute={"here": COMPUTE},
    network={"here": Backend(name="here", supports=frozenset(flavors.NETWORK_KEYS))},
    default_topology=Topology.SINGLE,
    default_compute="here",
    default_network="here",
)


@pytest.mark.parametrize("module", SCHEMAS, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("text", STRINGS, ids=ascii)
def test_an_unknown_key_is_refused(module, text):
    with pytest.raises(UnsupportedOption) as caught:
        module.validate_metadata({text: "x"}, DEPLOYMENT)
    shown(caught.value)


@pytest.mark.parametrize(("module", "key", "schema"), KEYS, ids=lambda part: part if isinstance(part, str) else "")
def test_an_invalid_value_is_refused_by_the_name_of_its_key(module, key, schema):
    taken, refused = [], []
    for text in STRINGS:
        for value in (text, [text]):
            try:
                found = module.validate_metadata({key: value}, DEPLOYMENT)
            except UnsupportedOption as error:
                refused.append(error)
            else:
                assert found[key] == value
                taken.append(value)
    for error in refused:
        assert key in str(error)
        shown(error)
    if "enum" in schema or schema["type"] not in ("string", "array"):
        assert set(map(str, taken)) <= set(schema.get("enum", ()))
    if key in ("tls_ciphers", "log_format"):
        # HAProxy's configuration contains these two keys: one line each, for any value.
        assert taken
        assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for text in taken for letter in text)
