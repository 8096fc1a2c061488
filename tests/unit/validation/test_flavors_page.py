# SPDX-License-Identifier: Apache-2.0
"""docs/reference/flavors.md describes every key as schema and configuration do; the test compares the entries."""

import json
import re
from pathlib import Path

import pytest
from deployments import CLOUD, LOCAL, deployment

from amphora_driver import config
from amphora_driver.validation import availability_zones, flavors

PAGE = Path(__file__).parents[3] / "docs/reference/flavors.md"
# Defaults of keys without an option of the same name in [amp_haproxy].
FALLS_BACK = {
    "loadbalancer_topology": "[amp_controller] loadbalancer_topology",
    "compute_driver": "[amp_compute] driver",
    "network_driver": "[amp_network] driver",
    "admin_log_targets": "[amp_logs] admin_targets",
    "tenant_log_targets": "[amp_logs] tenant_targets",
    "warm_spares": f"[amp_spares] number ({config.GROUPS['amp_spares'][0].default})",
    "vrrp_advert_interval": f"[amp_vrrp] advert_interval ({config.GROUPS['amp_vrrp'][0].default})",
}


def values(schema):
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema["type"] in ("integer", "number"):
        return f"{schema['minimum']} to {schema['maximum']}"
    return {"boolean": "`true`, `false`", "array": "list of texts", "string": "text"}[schema["type"]]


def default(key):
    options = {option.name: option for option in config.GROUPS["amp_haproxy"]}
    if key in options:
        shown = options[key].default
        return f"[amp_haproxy] {key}" + ("" if shown is None else f" ({str(shown).lower()})")
    return FALLS_BACK.get(key, "")


def entries(schema):
    for key, one in schema.properties.items():
        falls_back = f"; default: {default(key)}" if default(key) else ""
        yield f"`{key}` ({values(one)}{falls_back}) : {one['description']}"


@pytest.mark.parametrize("module", [flavors, availability_zones])
def test_every_key_has_its_entry(module):
    text = PAGE.read_text(encoding="utf-8")
    written = [" ".join(one.split()) for one in text.split("\n\n")]
    missing = [row for row in entries(module.SCHEMA) if row not in written]
    assert missing == [], "\n".join(missing)


def test_the_page_has_no_superfluous_entry():
    written = re.findall(r"^`(\w+)` \(.*\n: ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert written == [*flavors.SCHEMA.properties, *availability_zones.SCHEMA.properties]


def test_the_examples_are_accepted():
    text = PAGE.read_text(encoding="utf-8")
    everywhere = {"topologies": ("SINGLE", "ACTIVE_STANDBY"), "default_compute": "netns"}
    here = deployment(CLOUD, network=(LOCAL,), **everywhere)
    for module, option in ((flavors, "--flavor-data"), (availability_zones, "--availability-zone-data")):
        found = re.findall(rf"{option} '(.+?)'", text, re.DOTALL)
        assert found
        for one in found:
            module.validate_metadata(json.loads(one), here)


def test_the_flavor_for_kubernetes_is_accepted():
    text = (PAGE.parents[1] / "how-to/kubernetes.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"--flavor-data \\\s+'(.+?)'", text, re.DOTALL)
    assert len(flavors.validate_metadata(json.loads(found), deployment())) == 4


def test_every_default_of_a_flavor_is_an_option_with_the_same_limits():
    options = {option.name: option for option in config.GROUPS["amp_haproxy"]}
    for key, option in options.items():
        schema = flavors.SCHEMA.properties[key]
        if schema["type"] == "integer":
            assert (option.type.min, option.type.max) == (schema["minimum"], schema["maximum"]), key
        if "enum" in schema:
            assert list(option.type.choices) == schema["enum"], key


def test_the_vrrp_interval_has_the_same_limits_in_flavor_and_configuration():
    schema, option = flavors.SCHEMA.properties["vrrp_advert_interval"], config.GROUPS["amp_vrrp"][0]
    assert (option.type.min, option.type.max) == (schema["minimum"], schema["maximum"])
