# SPDX-License-Identifier: Apache-2.0
"""Names, marks, request bodies and rules of the network backend `neutron`; nothing is sent."""

import json

import pytest

from amphora_driver.errors import ComputeError, ConfigurationError, Conflict, NetworkError, UnsupportedOption
from amphora_driver.model.network import ListenerRule, VipOptions, VipRequest
from amphora_driver.network import neutron_objects as objects
from amphora_driver.network.interface import PortPurpose, PortRequest
from amphora_driver.network.neutron_rules import (
    Difference,
    Group,
    Rule,
    difference,
    group_rules,
    load_balancer_rules,
    read_rule,
)
from amphora_driver.openstack.errors import ApiError, read_message, translate, translate_compute

LB, AMPHORA = "6f0a2b2e-8d0c-4a6e-9a51-0d2f6a3c1b01", "0b8f7a54-3f1e-4c59-8f5d-7f1f0a9d2c02"
MARK = objects.mark("one")


def port(**values):
    made = {
        "id": "p", "name": f"amphora-vip-{AMPHORA}", "description": MARK, "project_id": "service", "device_id": "",
        "device_owner": "", "network_id": "n", "mac_address": "fa:16:3e:00:00:01", "tags": [],
        "fixed_ips": [{"subnet_id": "v4", "ip_address": "192.0.2.5"}], "allowed_address_pairs": [],
        "security_groups": ["default"], "binding:vnic_type": "normal",
    }  # fmt: skip
    return {**made, **values}


def vip_port(**values):
    made = {"name": f"octavia-lb-{LB}", "device_id": f"lb-{LB}", "device_owner": "Octavia", "project_id": "tenant"}
    return port(**{**made, "security_groups": ["vips"], **values})


@pytest.mark.parametrize(
    ("found", "amphorae", "load_balancers"),
    [
        (port(), {AMPHORA}, set()),
        (port(name=f"amphora-management-{AMPHORA}", device_owner="compute:nova", device_id=LB), {AMPHORA}, set()),
        (vip_port(), set(), {LB}),
        # The name of a VIP port can be changed by its user.
        (vip_port(name="web"), set(), {LB}),
        # A user writes the mark on a port.
        (port(project_id="tenant"), set(), set()),
        (vip_port(security_groups=["default"]), set(), set()),
        (vip_port(security_groups=[]), set(), set()),
        (port(name=f"octavia-lb-vrrp-{AMPHORA}"), set(), set()),
        (port(name=f"amphora-vip-{AMPHORA}-2"), set(), set()),
    ],
)
def test_owners_of_marked_ports(found, amphorae, load_balancers):
    owners = objects.to_owners([found], [], frozenset({"another", "vips"}), "service")
    assert (owners.amphorae, owners.load_balancers) == (amphorae, load_balancers)


@pytest.mark.parametrize(
    ("name", "load_balancers"), [(f"octavia-lb-{LB}", {LB}), (f"octavia-lb-{LB}-2", set()), ("octavia-vips", set())]
)
def test_owners_of_groups(name, load_balancers):
    assert objects.to_owners([], [{"name": name}], frozenset(), "service").load_balancers == load_balancers


@pytest.mark.parametrize(("owner", "users"), [("", True), ("compute:nova", True), ("Octavia", False)])
def test_a_port_of_a_user_has_any_device_owner_but_octavias(owner, users):
    assert objects.is_users_port(port(device_owner=owner, project_id="tenant")) is users


@pytest.mark.parametrize("other", [objects.mark("one-two"), objects.mark("on"), "", "octavia"])
def test_a_port_of_another_deployment_is_foreign(other):
    assert objects.is_amphora_port(port(), MARK, "service")
    assert objects.claims_vip_port(vip_port(), MARK, LB)
    assert not objects.is_amphora_port(port(description=other), MARK, "service")
    assert not objects.claims_vip_port(vip_port(description=other), MARK, LB)
    assert not objects.is_amphora_port(port(), MARK, "another project")


def test_the_mac_address_follows_from_the_owner():
    mac = objects.derive_mac("one", AMPHORA, "network")
    assert mac == objects.derive_mac("one", AMPHORA, "network")
    first = int(mac.split(":")[0], 16)
    assert (len(mac), first & 1, first & 2) == (17, 0, 2)
    assert len({objects.derive_mac(deployment, AMPHORA, net) for deployment in "ab" for net in "cd"} | {mac}) == 5


def test_each_port_of_an_amphora_on_a_network_has_its_own_mac_address():
    made = {
        name: objects.amphora_mac("one", request(**values))
        for name, values in {
            "management": {"purpose": PortPurpose.MANAGEMENT},
            "vip": {"purpose": PortPurpose.VIP},
            "member": {"purpose": PortPurpose.MEMBER},
            "direct": {"vnic_type": "direct"},
        }.items()
    }
    # VIPs and members on one network share one port.
    assert made["vip"] == made["member"]
    assert len(set(made.values())) == 3
    # Running amphorae have a management port with this address.
    assert made["management"] == objects.derive_mac("one", AMPHORA, "n")


def test_tags_are_short_enough_for_each_neutron():
    found = objects.tags("d" * 40, LB, AMPHORA)
    assert len(found) == 3
    assert max(map(len, found)) <= 60


def request(**values):
    made = {"amphora_id": AMPHORA, "network_id": "n", "subnet_ids": ("v4",), "purpose": PortPurpose.VIP}
    return PortRequest(**{**made, **values})


@pytest.mark.parametrize(
    ("found", "wanted", "changes"),
    [
        (port(), request(), {}),
        (port(), request(subnet_ids=("v4", "v6")), {"fixed_ips": [*port()["fixed_ips"], {"subnet_id": "v6"}]}),
        (port(), request(vips=("192.0.2.9",)), {"allowed_address_pairs": [{"ip_address": "192.0.2.9"}]}),
        (
            port(allowed_address_pairs=[{"ip_address": "2001:db8::1/128"}, {"ip_address": "192.0.2.9"}]),
            request(vips=("192.0.2.9", "2001:DB8:0::1")),
            {},
        ),
        (port(), request(vips=("192.0.2.9",), vnic_type="direct"), {}),
    ],
)
def test_an_existing_port_gets_only_what_it_lacks(found, wanted, changes):
    assert objects.completion(found, wanted) == changes


def test_the_body_of_a_port():
    wanted = request(vips=("192.0.2.9",), options=VipOptions(qos_policy_id="q"))
    body = objects.amphora_port_body(wanted, "service", MARK, "fa:00:00:00:00:01", ["g"])
    assert (body["security_groups"], body["qos_policy_id"]) == (["g"], "q")
    assert body["allowed_address_pairs"] == [{"ip_address": "192.0.2.9"}]
    direct = objects.amphora_port_body(request(vnic_type="direct"), "service", MARK, "fa:00:00:00:00:01", [])
    assert (direct["port_security_enabled"], direct["security_groups"]) == (False, [])
    assert not {"allowed_address_pairs", "qos_policy_id"} & set(direct)


def test_neutron_chooses_the_addresses_of_a_port_without_subnets():
    chosen = objects.amphora_port_body(request(subnet_ids=()), "service", MARK, "fa:00:00:00:00:01", [])
    assert "fixed_ips" not in chosen
    assert objects.completion(port(), request(subnet_ids=(), vips=())) == {}


FIXED = [
    {"subnet_id": "v4", "ip_address": "192.0.2.5"},
    {"subnet_id": "v4", "ip_address": "192.0.2.6"},
    {"subnet_id": "v6", "ip_address": "2001:db8::1"},
]


@pytest.mark.parametrize(
    ("wanted", "addresses"),
    [
        ([{"subnet_id": "v6"}, {"subnet_id": "v4"}], ["2001:db8::1", "192.0.2.5"]),
        ([{"subnet_id": "v4"}, {"subnet_id": "v4", "address": "192.0.2.5"}], ["192.0.2.6", "192.0.2.5"]),
        ([{"network_id": "n"}, {"address": "192.0.2.5"}], ["192.0.2.6", "192.0.2.5"]),
        ([{"address": "2001:DB8::0:1"}], ["2001:db8::1"]),
        ([{"subnet_id": "other"}], None),
        ([{"subnet_id": "v6"}, {"subnet_id": "v6"}], None),
    ],
)
def test_addresses_of_a_port_in_the_order_of_the_request(wanted, addresses):
    vips = objects.to_vips(port(fixed_ips=FIXED), [VipRequest(**one) for one in wanted])
    assert (vips and [one.address for one in vips]) == addresses


def stored(rule, number="r"):
    """A rule as Neutron returns it."""
    return {
        "id": number, "security_group_id": "g", "direction": rule.direction, "ethertype": rule.ethertype,
        "protocol": rule.protocol, "port_range_min": rule.port, "port_range_max": rule.port,
        "remote_ip_prefix": rule.cidr, "remote_group_id": "g" if rule.own_group else None,
    }  # fmt: skip


def test_rules_are_compared_not_made_again():
    web = ListenerRule(protocol="tcp", port=80)
    first = load_balancer_rules([web, ListenerRule(protocol="tcp", port=443, cidr="192.0.2.7/24")], {"IPv4"})
    have = [stored(rule, str(number)) for number, rule in enumerate(sorted(first, key=repr))]
    assert difference(have, first) == Difference(missing=(), surplus=(), repeated=())
    second = load_balancer_rules([web, ListenerRule(protocol="udp", port=53)], {"IPv4"})
    found = difference(have, second)
    assert found.missing == (Rule(ethertype="IPv4", protocol="udp", port=53),)
    (gone,) = [one for one in have if one["id"] in found.surplus]
    assert (gone["port_range_min"], gone["remote_ip_prefix"]) == (443, "192.0.2.0/24")


def test_of_equal_rules_each_process_keeps_the_same_one():
    web, other = Rule(ethertype="IPv4", protocol="tcp", port=80), Rule(ethertype="IPv4", protocol="tcp", port=81)
    have = [stored(rule, number) for rule, number in ((web, "b"), (other, "e"), (web, "a"), (other, "d"), (web, "c"))]
    for order in (have, have[::-1]):
        found = difference(order, {web})
        assert (found.missing, sorted(found.surplus), sorted(found.repeated)) == ((), ["d", "e"], ["b", "c"])


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"protocol": "vrrp"}, Rule(ethertype="IPv4", protocol="112")),
        (
            {"protocol": "6", "port_range_min": 80, "port_range_max": 80},
            Rule(ethertype="IPv4", protocol="tcp", port=80),
        ),
        ({"remote_ip_prefix": "0.0.0.0/0"}, Rule(ethertype="IPv4")),
        ({"remote_group_id": "g"}, Rule(ethertype="IPv4", own_group=True)),
        ({"remote_group_id": "other"}, Rule(ethertype="IPv4", other="r")),
        ({"port_range_min": 1, "port_range_max": 9}, Rule(ethertype="IPv4", port=1, other="r")),
    ],
)
def test_spellings_of_neutron(values, rule):
    assert read_rule({**stored(Rule(ethertype="IPv4")), **values}) == rule


def test_a_network_of_a_family_without_vip_opens_nothing():
    rules = load_balancer_rules([ListenerRule(protocol="tcp", port=80, cidr="2001:db8::/32")], {"IPv4"})
    assert not [rule for rule in rules if rule.port == 80]


@pytest.mark.parametrize("group", list(Group))
def test_each_group_of_the_deployment_passes_what_its_amphorae_send(group):
    rules = group_rules(group, 9443)
    assert {rule.ethertype for rule in rules if rule.direction == "egress" and rule.protocol is None} == {
        "IPv4",
        "IPv6",
    }
    ingress = {rule.port for rule in rules if rule.direction == "ingress"}
    expected = {Group.TRAFFIC: {None}, Group.OUTBOUND: set(), Group.VIPS: set(), Group.MANAGEMENT: {9443, None}}
    assert ingress == expected.get(group, {None, 1025, 4789})


@pytest.mark.parametrize(
    ("status", "kind", "error", "final"),
    [
        (400, "InvalidIpForSubnet", UnsupportedOption, True),
        (401, "", ConfigurationError, True),
        (403, "PolicyNotAuthorized", NetworkError, True),
        (404, "PortNotFound", UnsupportedOption, True),
        (409, "IpAddressAlreadyAllocated", Conflict, True),
        (409, "OverQuota", NetworkError, True),
        (412, "", NetworkError, False),
        (500, "HTTPInternalServerError", NetworkError, False),
        (503, "", NetworkError, False),
    ],
)
def test_refusals_of_neutron(status, kind, error, final):
    body = json.dumps({"NeutronError": {"type": kind, "message": "The reason.", "detail": ""}})
    found = translate(ApiError.of("POST", "/ports", status, body), "create a port")
    assert (type(found), found.final) == (error, final)
    assert "The reason" in str(found)


@pytest.mark.parametrize(
    ("status", "body", "error", "final"),
    [
        (400, {"badRequest": {"code": 400, "message": "The reason."}}, ComputeError, True),
        (401, {"error": {"code": 401, "title": "Unauthorized", "message": "The reason."}}, ConfigurationError, True),
        (403, {"forbidden": {"code": 403, "message": "Quota exceeded: The reason"}}, ComputeError, True),
        (403, {"forbidden": {"code": 403, "message": "The reason"}}, ComputeError, True),
        (404, {"itemNotFound": {"code": 404, "message": "The reason"}}, ComputeError, False),
        (406, {"computeFault": {"code": 406, "message": "The reason"}}, ComputeError, True),
        (409, {"conflictingRequest": {"code": 409, "message": "The reason"}}, ComputeError, False),
        (500, {"computeFault": {"code": 500, "message": "The reason"}}, ComputeError, False),
    ],
)
def test_refusals_of_nova(status, body, error, final):
    made = ApiError.of("POST", "/servers", status, json.dumps(body))
    found = translate_compute(made, "boot an amphora")
    assert (type(found), found.final) == (error, final)
    assert "The reason" in str(found)
    assert ("quota" in str(found)) is ("Quota" in str(body))
    assert made.kind == next(iter(body)) or status == 401


def test_a_page_of_glance_is_read_as_text():
    page = (
        "<html>\n <head>\n  <title>403 Forbidden</title>\n </head>\n <body>\n  <h1>403 Forbidden</h1>\n"
        "  You are not authorized &amp; so on.<br /><br />\n\n\n </body>\n</html>"
    )
    assert read_message(page) == ("", "403 Forbidden You are not authorized & so on")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"message": "Text."}', "Text"),
        ("<html>", "<html>"),
        ("[]", "[]"),
        ("", ""),
        ("{}", "{}"),
        ("x" * 9999, "x" * 500),
    ],
)
def test_an_answer_that_is_not_neutrons(body, message):
    assert read_message(body)[1] == message
