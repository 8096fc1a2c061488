# SPDX-License-Identifier: Apache-2.0
"""Bundles of the controller have the format of the JSON schema; all types have the schema's keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args, get_type_hints

import cases
import msgspec
import pytest
from jsonschema import Draft202012Validator
from test_golden_udp import CASE

from amphora_agent import bundle as agent
from amphora_agent import log_settings as agent_logs
from amphora_agent import runtime_settings as agent_settings
from amphora_agent.l4 import model as agent_l4
from amphora_driver.agent import responses
from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.render import agent_settings as driver_settings
from amphora_driver.render import bundle as driver
from amphora_driver.render import udp
from amphora_driver.render.haproxy import render
from amphora_driver.secret import Secret

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/wire.schema.json").read_text())
DEFINITIONS = SCHEMA["$defs"]
VALIDATOR = Draft202012Validator(SCHEMA)
CASES = {**cases.CASES, "virtual": CASE}
PEERS = [driver.BundlePartner(name=name, address=f"198.51.100.1{name}") for name in "12"]
SHARED = {
    "bundle": (driver.Bundle, agent.Bundle),
    "limits": (driver.BundleLimits, agent.Limits),
    "interface": (driver.BundleInterface, agent.Interface),
    "route": (driver.BundleRoute, agent.Route),
    "allowed": (driver.BundleAllowed, agent.AllowedSources),
    "vrrp": (driver.BundleVrrp, agent.Vrrp),
    "peer": (driver.BundlePartner, agent.Partner),
    "virtual_server": (udp.VirtualServer, agent_l4.VirtualServer),
    "persistence": (udp.VirtualPersistence, agent_l4.Persistence),
    "monitor": (udp.VirtualMonitor, agent_l4.Monitor),
    "member": (udp.VirtualMember, agent_l4.Member),
    "settings": (driver_settings.AgentSettings, agent_settings.RuntimeSettings),
    "log_settings": (driver_settings.LogSettings, agent_logs.LogSettings),
    "log_target": (driver_settings.LogTarget, agent_logs.LogTarget),
    "heartbeat_settings": (driver_settings.HeartbeatSettings, agent_settings.HeartbeatSettings),
}
ANSWERS = {
    "applied": responses.Applied,
    "bundle_state": responses.BundleState,
    "info": responses.Info,
    "vrrp_state": responses.Vrrp,
    "renewed": responses.Renewed,
    "settings_state": responses.SettingsState,
    "log_lines": responses.LogLines,
}


def encoded(tree, *, paired=False):
    """Return the bundle of a load balancer with one port on the network of its VIP."""
    rendered = render(tree, shared_tickets=True)
    virtual = udp.virtual_servers(tree)
    files = tuple(driver.BundleFile(name=one.name, content=Secret(b"content")) for one in rendered.files)
    pings = dict(rendered.pings)
    served = driver.Served(text=rendered.text, files=files, pings=pings, virtual=virtual.servers)
    fixed = FixedAddress(subnet_id="s", address="198.51.100.11")
    port = Port(id="p", network_id=tree.vip.network_id, mac="fa:16:3e:00:00:01", mtu=1500, addresses=(fixed,))
    subnet = Subnet(id="s", network_id=tree.vip.network_id, cidr="198.51.100.0/24", gateway="198.51.100.1")
    vrrp = driver.BundleVrrp(
        interface="eth1", router_id=1, priority=100, advert_interval=1.0, local=PEERS[0], peers=(PEERS[1],)
    )
    plugged = [AttachedPort(port=port, subnets=(subnet,))]
    amphora_id = "0b9d7a52-0000-4000-8000-000000000001"
    return driver.bundle(tree, 3, amphora_id, plugged, served, vrrp if paired else None)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_rendered_bundle_is_valid_and_the_agent_accepts_it(name, paired):
    body = encoded(CASES[name], paired=paired)
    VALIDATOR.validate(json.loads(body))
    assert agent.parse(body).generation == 3


@pytest.mark.parametrize("name", SHARED)
def test_controller_agent_and_schema_have_the_same_keys(name):
    ours, theirs = SHARED[name]
    keys = {*DEFINITIONS[name]["properties"]}
    assert {*ours.__struct_fields__} == keys
    assert {*theirs.__dataclass_fields__} | ({"format"} if name == "bundle" else set()) == keys


@pytest.mark.parametrize("name", ANSWERS)
def test_the_controller_reads_only_keys_of_the_schema(name):
    fields = {one.encode_name: one for one in msgspec.structs.fields(ANSWERS[name])}
    assert fields.keys() <= DEFINITIONS[name]["properties"].keys()
    needed = {key for key, one in fields.items() if one.required}
    assert needed <= {*DEFINITIONS[name]["required"]}


@pytest.mark.parametrize(
    ("targets", "interval", "audit"),
    [
        ([], 3.0, 30.0),
        (["192.0.2.10:9879"], 3, 600),
        ([" '[2001:DB8::10]:9879' ", "2001:db8:0::11:80", "192.0.2.10:0065535"], 0.1, 1e9),
        (["192.0.2.10:9879", "192.0.2.10:9879"], 1 / 3, 1e-7),
    ],
)
def test_controller_and_agent_compute_the_same_digest_of_valid_settings(targets, interval, audit):
    made = driver_settings.render_agent_settings(targets, interval, audit)
    schema = {"$ref": "#/$defs/settings", "$defs": DEFINITIONS}
    Draft202012Validator(schema).validate(json.loads(made.encode()))
    assert agent_settings.parse(made.encode()).digest == made.digest


TARGETS = [driver_settings.LogTarget(f"{kind}://192.0.2.9:601") for kind in ("udp", "tcp", "tls")]
HTTPS = driver_settings.LogTarget("https://[2001:DB8:0::9]:8443/a?b=c", Secret(b"Bearer secret"))
SHOWN = Secret(b"-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n")
IDENTIFIED = [
    driver_settings.LogTarget(f"{kind}://192.0.2.9:602", client_certificate=SHOWN) for kind in ("tls", "https")
]


@pytest.mark.parametrize(
    ("admin", "tenant", "ids"),
    [
        (TARGETS, [], {}),
        (IDENTIFIED, [HTTPS, *IDENTIFIED], {}),
        ([], [HTTPS], {"project_id": "p", "load_balancer_id": "0b9d7a52-0000-4000-8000-000000000001"}),
        (TARGETS, [HTTPS, *TARGETS], {"project_id": "p 100% \"'"}),
    ],
)
def test_controller_and_agent_compute_the_same_digest_of_log_targets(admin, tenant, ids):
    logs = driver_settings.render_log_settings(admin, tenant, "pem", 65536, **ids)
    made = driver_settings.render_agent_settings(["192.0.2.10:9879"], 3, 30, logs)
    schema = {"$ref": "#/$defs/settings", "$defs": DEFINITIONS}
    Draft202012Validator(schema).validate(json.loads(made.encode()))
    assert agent_settings.parse(made.encode()).digest == made.digest
    assert made.digest != driver_settings.render_agent_settings(["192.0.2.10:9879"], 3, 30).digest


def test_all_definitions_are_compared():
    inner = {"file", "error"}  # the agent stores a digest beside a file; an error is a text for the controller
    assert {*DEFINITIONS} == {*SHARED, *ANSWERS, *inner}
    hints = get_type_hints(driver.Bundle)
    assert get_args(hints["files"])[0] is driver.BundleFile
    assert {*driver.BundleFile.__struct_fields__} == {*DEFINITIONS["file"]["properties"]}
