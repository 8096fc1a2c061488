# SPDX-License-Identifier: Apache-2.0
"""Security groups and QoS policies become nftables rules of the virtual switch."""

import pytest

from amphora_driver.errors import NetworkError
from amphora_driver.network import port_security_rules
from amphora_driver.network.port_security_rules import ProtectedVips, QosPolicy, Rule, SecurityGroup

WEB = SecurityGroup(id="g1", name="web", rules=(Rule(protocol="tcp", first_port=80, last_port=81),))
HERE = SecurityGroup(id="g2", name="here", rules=(Rule(remote="192.0.2.0/24"), Rule(protocol="icmpv6")))


def guarded(**more):
    values = {"load_balancer_id": "lb", "addresses": ("198.51.100.10", "2001:db8::10"), "interfaces": ("p1", "p2")}
    return ProtectedVips(**{**values, **more})


def rules(*of):
    """The lines of the table that accept, drop or limit packets."""
    lines = [line.strip() for line in port_security_rules.render_ruleset(of).splitlines()]
    return [line for line in lines if line.endswith((" accept", " drop")) or " jump " in line]


def test_ports_without_groups_need_no_table():
    assert port_security_rules.render_ruleset(()) == "table bridge amphora_vips\ndelete table bridge amphora_vips\n"


def test_a_client_is_accepted_if_one_group_permits_it():
    found = rules(guarded(groups=(WEB, HERE)))
    asked = [line for line in found if "daddr" in line and "destination-unreachable" not in line]
    assert asked == [
        "ip daddr 198.51.100.10 tcp dport 80-81 accept",
        "ip daddr 198.51.100.10 ip saddr 192.0.2.0/24 accept",
        "ip daddr 198.51.100.10 meta l4proto ipv6-icmp accept",
        "ip daddr 198.51.100.10 drop",
        "ip6 daddr 2001:db8::10 tcp dport 80-81 accept",
        "ip6 daddr 2001:db8::10 meta l4proto ipv6-icmp accept",
        "ip6 daddr 2001:db8::10 drop",
    ]
    assert [line for line in found if "jump" in line] == 2 * ['oifname { "p1", "p2" } jump vip0']


@pytest.mark.parametrize("protocol", ["udp", "sctp"])
def test_ports_outside_haproxy_are_not_filtered(protocol):
    group = SecurityGroup(id="g", name="names", rules=(Rule(protocol=protocol, first_port=53, last_port=53),))
    port_security_rules.validate_group(group)
    found = rules(guarded(addresses=("198.51.100.10",), groups=(group,)))
    assert f"ip daddr 198.51.100.10 {protocol} dport 53-53 accept" in found


def test_group_without_rules_permits_no_client():
    found = rules(guarded(addresses=("198.51.100.10",), groups=(SecurityGroup(id="g", name="none"),)))
    assert [line for line in found if line.startswith("ip ")] == [
        "ip daddr 198.51.100.10 icmp type destination-unreachable accept",
        "ip daddr 198.51.100.10 drop",
    ]


def test_without_groups_all_clients_are_permitted():
    assert rules(guarded(policy=QosPolicy(id="q", name="none"))) == []


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"egress_kbps": 8000}, ['iifname "p{}" limit rate over 1000000 bytes/second burst 800000 bytes drop']),
        ({"ingress_kbps": 8}, ['oifname "p{}" limit rate over 1000 bytes/second burst 262144 bytes drop']),
    ],
)
def test_every_port_has_its_own_limit(policy, expected):
    found = rules(guarded(policy=QosPolicy(id="q", name="slow", **policy)))
    assert found == [line.format(number) for number in (1, 2) for line in expected]


@pytest.mark.parametrize(
    "rule",
    [
        {"protocol": "ospf"},
        {"protocol": "tcp", "first_port": 0, "last_port": 1},
        {"protocol": "tcp", "first_port": 5, "last_port": 4},
        {"protocol": "udp", "first_port": 5},
        {"first_port": 1, "last_port": 2},
        {"protocol": "icmp", "first_port": 1, "last_port": 2},
        {"remote": "everywhere"},
    ],
)
def test_an_invalid_rule_is_refused(rule):
    with pytest.raises(NetworkError, match="define security group odd"):
        port_security_rules.validate_group(SecurityGroup(id="g", name="odd", rules=(Rule(**rule),)))
