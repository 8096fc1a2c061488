# SPDX-License-Identifier: Apache-2.0
"""Requests of Octavia's worker about ports, partners, rules and settings, as parts of a bundle."""

import uuid
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora_agent import config
from amphora_agent.bundle import AllowedSources, Limits, Partner, Route, Vrrp
from amphora_agent.config import Settings, Target
from amphora_agent.errors import MachineError, RequestRefused, SettingsError
from amphora_agent.octavia_api_v1 import agent_conf, firewall_rules, keepalived, ports, stored_state
from amphora_agent.octavia_api_v1.firewall_rules import Rule
from amphora_agent.paths import Paths

MAC, MAC2 = "fa:16:3e:00:00:0b", "fa:16:3e:00:00:0c"
VIP = {
    "subnet_cidr": "198.51.100.0/24",
    "gateway": "198.51.100.1",
    "mac_address": MAC,
    "mtu": 1450,
    "vrrp_ip": "198.51.100.11",
    "host_routes": [{"destination": "203.0.113.0/24", "nexthop": "198.51.100.2"}],
    "additional_vips": [
        {"ip_address": "2001:db8:1::5", "subnet_cidr": "2001:db8:1::/64", "gateway": None, "host_routes": []}
    ],
    "is_sriov": False,
}
MEMBERS = {
    "mac_address": MAC2.upper(),
    "mtu": 1400,
    "fixed_ips": [
        {
            "ip_address": "192.0.2.7",
            "subnet_cidr": "192.0.2.0/24",
            "gateway": "192.0.2.1",
            "host_routes": [{"destination": "203.0.113.128/25", "nexthop": "192.0.2.9"}],
        }
    ],
}

KEEPALIVED = """
vrrp_script check_script {
    script /var/lib/octavia/vrrp/check_script.sh
    interval 5
}
vrrp_instance 1b0 {  # the only one
    interface eth1
    virtual_router_id 7
    priority 100
    nopreempt
    advert_int 1
    authentication {
        auth_type PASS
        auth_pass secret
    }

    unicast_src_ip 198.51.100.11
    unicast_peer {
        198.51.100.12
    }

    virtual_ipaddress {
        198.51.100.5
    }
    track_script {
        check_script
    }
}
"""


def routes(*pairs):
    return tuple(Route(ip_network(to), None if via is None else ip_address(via)) for to, via in pairs)


def test_the_vip_port_is_translated():
    port = ports.vip_port("198.51.100.5", VIP)
    assert (port.name, port.mac, port.mtu) == ("eth1", MAC, 1450)
    assert port.addresses == (ip_interface("198.51.100.11/24"),)
    assert port.vips == (ip_interface("198.51.100.5/32"), ip_interface("2001:db8:1::5/128"))
    # The amphora has no own address in the second VIP's subnet, so the subnet is on the link.
    assert port.routes == routes(
        ("0.0.0.0/0", "198.51.100.1"), ("203.0.113.0/24", "198.51.100.2"), ("2001:db8:1::/64", None)
    )


@pytest.mark.parametrize(
    ("vip", "changes", "message"),
    [
        ("x", {}, "Invalid VIP"),
        ("198.51.100.5", {"subnet_cidr": "x"}, "Invalid VIP"),
        ("198.51.100.5", {"mac_address": "x"}, "Invalid VIP"),
        ("198.51.100.5", {"vrrp_ip": None}, "Invalid VIP"),
        ("198.51.100.5", {"mtu": "1500"}, "Invalid VIP"),
        ("198.51.100.5", {"additional_vips": [{}]}, "Invalid subnet information"),
    ],
)
def test_an_invalid_vip_port_is_refused(vip, changes, message):
    with pytest.raises(RequestRefused) as refused:
        ports.vip_port(vip, {**VIP, **changes})
    assert (refused.value.status, refused.value.message) == (400, message)


@pytest.mark.parametrize("body", [None, [], "x", {}])
def test_invalid_bodies_are_refused(body):
    with pytest.raises(RequestRefused):
        ports.vip_port("198.51.100.5", body)
    with pytest.raises(RequestRefused):
        ports.member_port(body, ())


def test_a_member_port_gets_the_next_name_and_keeps_it():
    first = ports.member_port(MEMBERS, ())
    assert (first.name, first.mac, first.mtu) == ("eth2", MAC2, 1400)
    assert first.addresses == (ip_interface("192.0.2.7/24"),)
    assert first.routes == routes(("203.0.113.128/25", "192.0.2.9"))  # the gateway is no default route
    plugged = ports.with_port((ports.vip_port("198.51.100.5", VIP),), first)
    assert [each.name for each in plugged] == ["eth1", "eth2"]
    again = ports.member_port({**MEMBERS, "fixed_ips": []}, plugged)
    assert (again.name, again.addresses) == ("eth2", ())
    assert ports.with_port(plugged, again)[1] == again
    assert ports.member_port({**MEMBERS, "mac_address": "fa:16:3e:00:00:0d"}, plugged).name == "eth3"


def test_members_on_the_port_of_the_vips():
    vip = ports.vip_port("198.51.100.5", VIP)
    body = {
        **MEMBERS,
        "mac_address": MAC,
        "vip_net_info": {**{k: VIP[k] for k in ("subnet_cidr", "gateway", "vrrp_ip", "mtu")}, "vip": "198.51.100.5"},
    }
    for shared in (body, {**body, "vip_net_info": None}):
        port = ports.member_port(shared, (vip,))
        assert (port.name, port.vips) == ("eth1", vip.vips)
        assert port.addresses == (ip_interface("198.51.100.11/24"), ip_interface("192.0.2.7/24"))
        assert Route(ip_network("0.0.0.0/0"), ip_address("198.51.100.1")) in port.routes


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["192.0.2.1", "192.0.2.0/24", MAC]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["ip_address", "subnet_cidr", "gateway", "host_routes", "destination", "nexthop"]), inner
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*VIP, "fixed_ips", "vip_net_info"]), JSON))
def test_any_plugged_port_is_an_interface_or_refused(changes):
    for read in (
        lambda: ports.vip_port("198.51.100.5", {**VIP, **changes}),
        lambda: ports.member_port({**MEMBERS, **changes}, ()),
    ):
        with suppress(RequestRefused):
            assert read().name in ("eth1", "eth2")


@given(st.lists(st.sampled_from([*KEEPALIVED.split(), "{", "}", "\n", "#", "!", "é"]), max_size=30))
def test_any_keepalived_upload_is_a_partner_or_refused(words):
    with suppress(RequestRefused):
        keepalived.read(" ".join(words), {"eth1"})
    with suppress(RequestRefused):
        keepalived.read(KEEPALIVED.replace("nopreempt", " ".join(words)), {"eth1"})


# -- keepalived ----------------------------------------------------------------------------------------------


def test_an_amphora_of_a_pair_is_translated():
    assert keepalived.read(KEEPALIVED, {"eth1"}) == Vrrp(
        interface="eth1",
        router_id=7,
        priority=100,
        advert_interval=1.0,
        local=Partner("198-51-100-11", ip_address("198.51.100.11")),
        peers=(Partner("198-51-100-12", ip_address("198.51.100.12")),),
    )


def test_both_amphorae_use_the_same_names():
    other = KEEPALIVED.replace("100.11", "100.X").replace("100.12", "100.11").replace("100.X", "100.12")
    here, there = keepalived.read(KEEPALIVED, {"eth1"}), keepalived.read(other, {"eth1"})
    assert (here.local, here.peers) == (there.peers[0], (there.local,))
    assert keepalived.partner(ip_address("2001:db8::1")).name == "2001-db8--1"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("interface eth1", "interface eth7", "there is no interface 'eth7'"),
        ("interface eth1", "", "interface with one value"),
        ("priority 100", "priority 255", "out of range"),
        ("priority 100", "priority x", "invalid literal"),
        ("advert_int 1", "advert_int 60", "advert_int"),
        ("unicast_src_ip 198.51.100.11", "unicast_src_ip 2001:db8::1", "different families"),
        ("vrrp_instance", "vrrp_sync_group", "there are 0"),
        ("        198.51.100.12\n    }", "        198.51.100.12", "does not end"),
        ("nopreempt", "}", "did not begin"),
    ],
)
def test_invalid_partners_are_refused(old, new, why):
    with pytest.raises(RequestRefused, match=why):
        keepalived.read(KEEPALIVED.replace(old, new, 1), {"eth1"})


# -- rules ---------------------------------------------------------------------------------------------------


def test_rules_close_all_unnamed_ports():
    read = firewall_rules.read(
        [
            {"protocol": "TCP", "cidr": "192.0.2.0/24", "port": 80},
            {"protocol": "TCP", "cidr": "2001:db8::/32", "port": 80},
            {"protocol": "TCP", "cidr": None, "port": 443},
            {"protocol": "TCP", "cidr": "192.0.2.0/24", "port": 443},
            {"protocol": "UDP", "cidr": None, "port": 53},
            {"protocol": "vrrp", "cidr": "198.51.100.12/32", "port": 112},
        ]
    )
    assert firewall_rules.allowed(read, {80, 443, 8080}) == (
        AllowedSources(80, (ip_network("192.0.2.0/24"), ip_network("2001:db8::/32"))),
        AllowedSources(8080, ()),
    )


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        [1],
        [{"protocol": "TCP", "cidr": None}],
        [{"protocol": "ICMP", "cidr": None, "port": 1}],
        [{"protocol": "TCP", "cidr": None, "port": 0}],
        [{"protocol": "TCP", "cidr": "x", "port": 1}],
        [{"protocol": "TCP", "cidr": None, "port": 1, "more": 1}],
    ],
)
def test_invalid_rules_are_refused(document):
    with pytest.raises(RequestRefused) as refused:
        firewall_rules.read(document)
    assert refused.value.message == "Invalid rules information"


# -- settings ------------------------------------------------------------------------------------------------

OWN = uuid.UUID("a0000000-0000-4000-8000-000000000001")
BEFORE = Settings(OWN, "203.0.113.11", 9443, "supervisor", 20, 3.0, (Target("203.0.113.2", 5555),), b"k")
CONF = f"""
[DEFAULT]
debug = True
[health_manager]
controller_ip_port_list = 203.0.113.2:5556, [2001:db8::2]:5557
heartbeat_interval = 7
heartbeat_key = some % text
[amphora_agent]
amphora_id = {OWN}
[controller_worker]
loadbalancer_topology = ACTIVE_STANDBY
"""


def test_settings_are_parsed():
    after = agent_conf.changed(BEFORE, CONF)
    assert after == replace(
        BEFORE,
        targets=(Target("203.0.113.2", 5556), Target("2001:db8::2", 5557)),
        interval=7.0,
        heartbeat_key=b"some % text",
        heartbeat_format="octavia",
        pair=True,
    )
    assert agent_conf.changed(after, "[DEFAULT]\n") == after
    assert not agent_conf.changed(after, "[controller_worker]\nloadbalancer_topology = SINGLE\n").pair


@pytest.mark.parametrize(
    "text",
    [
        "no ini",
        f"[amphora_agent]\namphora_id = {uuid.UUID(int=1)}",
        "[amphora_agent]\namphora_id = x",
        "[health_manager]\nheartbeat_interval = 0",
        "[health_manager]\nheartbeat_interval = x",
        "[health_manager]\ncontroller_ip_port_list = 203.0.113.2",
    ],
)
def test_invalid_settings_are_refused(text):
    with pytest.raises(RequestRefused) as refused:
        agent_conf.changed(BEFORE, text)
    assert refused.value.status == 500


def test_refusals_do_not_contain_the_key():
    with pytest.raises(RequestRefused) as refused:
        agent_conf.changed(BEFORE, "heartbeat_key = topsecret\n")
    assert "topsecret" not in str(refused.value)


# -- stored state ------------------------------------------------------------------------------------------------------


def said(**changes):
    blank = stored_state.blank(OWN)
    port = ports.vip_port("198.51.100.5", VIP)
    wanted = replace(blank.wanted, interfaces=(port,), haproxy="defaults\n", limits=Limits(10, None))
    return replace(blank, wanted=wanted, **changes)


def with_vrrp(found):
    return replace(found, wanted=replace(found.wanted, vrrp=keepalived.read(KEEPALIVED, {"eth1"})))


@pytest.mark.parametrize(
    ("found", "pair", "vips", "vrrp"),
    [
        (said(), False, 2, False),
        (said(), True, 0, False),
        (with_vrrp(said()), True, 0, False),
        # An amphora with a partner takes the VIPs through keepalived only.
        (with_vrrp(said()), False, 0, False),
        (with_vrrp(said(vrrp_started=True)), True, 2, True),
        (with_vrrp(said(vrrp_started=True)), False, 2, True),
    ],
)
def test_vip_holder(found, pair, vips, vrrp):
    made = stored_state.bundle(found, 5, pair=pair)
    assert len(made.interfaces[0].vips) == vips
    assert (made.vrrp is not None) is vrrp
    assert (made.generation, made.load_balancer_id) == (5, uuid.UUID(int=0))


def test_rules_apply_to_the_ports_of_the_bundle():
    assert stored_state.bundle(said(ports=frozenset({80})), 1, pair=False).allowed == ()
    found = said(ports=frozenset({80}), rules=(Rule(443, None),))
    assert stored_state.bundle(found, 1, pair=False).allowed == (AllowedSources(80, ()),)


def test_the_state_is_read_as_written(tmp_path):
    found = with_vrrp(
        said(
            load_balancer_id=str(OWN),
            uploaded="global\n",
            vrrp_started=True,
            ports=frozenset({80, 443}),
            rules=(Rule(80, None), Rule(443, ip_network("192.0.2.0/24"))),
        )
    )
    file = tmp_path / "octavia.json"
    assert stored_state.read(file) is None
    stored_state.write(file, found)
    assert stored_state.read(file) == found
    file.write_text("{")
    with pytest.raises(MachineError):
        stored_state.read(file)


def test_a_lost_state_keeps_the_configuration():
    for found in (said(), with_vrrp(said(vrrp_started=True))):
        served = stored_state.bundle(found, 5, pair=False)
        assert stored_state.bundle(stored_state.recovered(served), 5, pair=False) == served


@pytest.mark.parametrize(
    ("more", "key", "expected"),
    [
        ("", "00" * 32, ("native", bytes(32), False)),
        ("format = octavia", "any text\n", ("octavia", b"any text", False)),
        ("format = octavia\n[octavia]\npair = true", "x", ("octavia", b"x", True)),
    ],
)
def test_settings_are_read_at_boot(tmp_path, more, key, expected):
    paths = Paths(tmp_path)
    paths.etc.mkdir(parents=True)
    conf = f"[agent]\namphora_id = {OWN}\nbind_address = 203.0.113.11\n[heartbeat]\n{more}\n"
    (paths.etc / "agent.conf").write_text(conf)
    (paths.etc / "heartbeat.key").write_text(key)
    found = config.load(paths)
    assert (found.heartbeat_format, found.heartbeat_key, found.pair) == expected
    assert agent_conf.stored(found, paths) == found
    agent_conf.keep(CONF, paths)
    assert agent_conf.stored(found, paths) == agent_conf.changed(found, CONF)
    agent_conf.keep("nonsense", paths)
    assert agent_conf.stored(found, paths) == found


def test_an_unknown_format_is_refused(tmp_path):
    paths = Paths(tmp_path)
    paths.etc.mkdir(parents=True)
    conf = f"[agent]\namphora_id = {OWN}\nbind_address = 203.0.113.11\n[heartbeat]\nformat = x\n"
    (paths.etc / "agent.conf").write_text(conf)
    with pytest.raises(SettingsError, match="format = x"):
        config.load(paths)
