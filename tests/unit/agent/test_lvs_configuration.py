# SPDX-License-Identifier: Apache-2.0
"""What keepalived and IPVS are given for virtual servers: what follows from a bundle, and what never stands in it."""

from __future__ import annotations

import re
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from uuid import UUID

import pytest

from amphora_agent.bundle import Bundle, Partner, Vrrp
from amphora_agent.errors import ConfigurationRefused
from amphora_agent.keepalived.ipvs_config import Sync, has_any, render, sync_of
from amphora_agent.l4.model import Member, Persistence, VirtualServer
from amphora_agent.l4_ipvs import nft_rules, track_files
from amphora_agent.l4_ipvs.engine import LONGEST_PERSISTENCE, LvsEngine
from amphora_agent.l4_nftables import ruleset

VIP, SECOND, VIP6 = ip_address("198.51.100.5"), ip_address("198.51.100.6"), ip_address("2001:db8::5")
TRACKS = Path("/run/lvs")
LISTENER = str(UUID(int=99))
OWN_WORDS = re.compile(r'[\w.:/"-]+')


def member(number: int, weight: int = 1, *, backup: bool = False, enabled: bool = True, host: str = "") -> Member:
    return Member(str(UUID(int=number)), ip_address(host or f"10.0.0.{number}"), 53, weight, backup, enabled)


def member6(number: int) -> Member:
    return member(number, host=f"2001:db8:2::{number}")


def listener(*members: Member, addresses=(VIP, VIP6), **more) -> VirtualServer:
    kept = {"connection_limit": None, "algorithm": "ROUND_ROBIN", "persistence": None, "client_address": "hidden"}
    return VirtualServer(
        **{"id": LISTENER, "protocol": "UDP", "port": 53, "pool_id": None, "monitor": None, **kept, **more},
        addresses=addresses,
        members=members,
    )


def blocks(text: str, kind: str) -> list[str]:
    """The heads of blocks of a kind."""
    return [line.strip().removesuffix(" {") for line in text.splitlines() if line.strip().startswith(f"{kind} ")]


def test_each_vip_is_a_virtual_server_with_the_members_of_its_family():
    text = render([listener(member(1), member6(2), addresses=(VIP, SECOND, VIP6))], TRACKS)
    assert blocks(text, "virtual_server") == [f"virtual_server {vip} 53" for vip in (VIP, SECOND, VIP6)]
    assert blocks(text, "real_server") == ["real_server 10.0.0.1 53"] * 2 + ["real_server 2001:db8:2::2 53"]
    assert text.count("lvs_method NAT") == text.count("protocol UDP") == 3
    assert "virtual_server_group" not in text


@pytest.mark.parametrize(
    ("algorithm", "lines"),
    [
        ("ROUND_ROBIN", ["lvs_sched wrr"]),
        ("LEAST_CONNECTIONS", ["lvs_sched wlc"]),
        ("SOURCE_IP", ["lvs_sched mh"]),
        ("SOURCE_IP_PORT", ["lvs_sched mh", "mh-port"]),
    ],
)
def test_algorithms(algorithm, lines):
    text = render([listener(member(1), addresses=(VIP,), algorithm=algorithm, protocol="SCTP")], TRACKS)
    found = [line.strip() for line in text.splitlines()]
    begin = found.index(f"virtual_server {VIP} 53 {{") + 1
    assert found[begin : begin + len(lines) + 2] == [*lines, "lvs_method NAT", "protocol SCTP"]


def test_how_much_of_an_address_is_the_client_goes_by_family():
    text = render([listener(member(1), member6(2), persistence=Persistence(360, 20, 64))], TRACKS)
    assert text.count("persistence_timeout 360") == 2
    assert re.findall(r"persistence_granularity (\S+)", text) == ["255.255.240.0", "64"]


@pytest.mark.parametrize(
    ("server", "has"),
    [
        (listener(), False),
        (listener(member(1, enabled=False)), False),
        (listener(member6(1), addresses=(VIP,)), False),
        (listener(member(1, weight=0)), True),
        (listener(member(1, backup=True)), True),
    ],
)
def test_who_has_nobody_is_left_to_the_kernel(server, has):
    assert has_any([server]) is has
    assert ("virtual_server" in render([server], TRACKS)) is has


def test_a_weight_or_a_state_is_none_of_its_business():
    one, other = listener(member(1), member(2)), listener(member(1, 7), member(2, 0, backup=True))
    assert render([one], TRACKS) == render([other], TRACKS)


def test_the_order_of_listeners_and_members_makes_no_difference():
    one, other = listener(member(1), member(2)), replace(listener(member(3)), id=str(UUID(int=98)), port=54)
    swapped = replace(one, members=one.members[::-1], addresses=one.addresses[::-1])
    assert render([one, other], TRACKS) == render([other, swapped], TRACKS)


def test_partners_tell_each_other_in_a_group_of_their_own():
    def bundle(number: int, local: str) -> Bundle:
        vrrp = Vrrp("eth1", 7, 100, 1.0, Partner("a", ip_address(local)), ())
        return Bundle(
            UUID(int=1), UUID(int=number), 1, None, (), {}, None, (), vrrp=vrrp, virtual_servers=(listener(member(1)),)
        )

    first, second, sixth = (
        sync_of(bundle(*each)) for each in ((1, "198.51.100.9"), (2, "198.51.100.9"), (1, "fd00::9"))
    )
    assert first == sync_of(bundle(1, "198.51.100.10"))
    assert first.group != second.group
    assert (first.group.is_multicast, sixth.group.is_multicast, sixth.group.version) == (True, True, 6)
    line = f"lvs_sync_daemon eth1 id 7 port 8848 group {first.group}"
    assert line in render([listener(member(1))], TRACKS, first)
    assert "lvs_sync_daemon" not in render([listener(member(1))], TRACKS)
    assert sync_of(replace(bundle(1, "198.51.100.9"), virtual_servers=())) is None
    assert sync_of(replace(bundle(1, "198.51.100.9"), vrrp=None)) is None


def test_an_interface_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no interface"):
        render([listener(member(1))], TRACKS, Sync("eth1 id 9 }\nvrrp_script x {", 7, ip_address("239.192.0.1")))


def test_no_line_has_anything_but_words():
    text = render([listener(member(1), member6(2), persistence=Persistence(5, 32, 128))], TRACKS)
    for line in text.splitlines():
        if not line.startswith("#"):
            assert all(
                OWN_WORDS.fullmatch(word) or word in "{}" for word in line.split() if not line.startswith("    #")
            )
    assert not {"notify_up", "quorum_up", "MISC_CHECK", "vrrp_instance"} & set(text.split())


@pytest.mark.parametrize(
    ("members", "down", "weights"),
    [
        ([member(1, 3), member(2, 0)], (), {1: 3, 2: 0}),
        ([member(1), member(2)], (1,), {1: None, 2: 1}),
        ([member(1), member(2, backup=True)], (), {1: 1, 2: 0}),
        ([member(1), member(2, 5, backup=True)], (1,), {1: None, 2: 5}),
        ([member(1, 0), member(2, 5, backup=True)], (), {1: 0, 2: 5}),
        ([member(1, enabled=False), member(2)], (), {1: None, 2: 1}),
        ([member(1), member6(2), member(3, backup=True)], (1,), {1: None, 2: 1, 3: 1}),
        ([member(1), member(2)], (1, 2), {1: None, 2: None}),
    ],
)
def test_what_the_files_say(members, down, weights):
    server = listener(*members)
    up = {(LISTENER, str(UUID(int=number))): False for number in down}
    assert track_files.weights(server, up) == {str(UUID(int=number)): weight for number, weight in weights.items()}
    contents = track_files.contents([server], up)
    for number, weight in weights.items():
        name = str(UUID(int=number))
        said = tuple(contents[track_files.name(LISTENER, name, what)] for what in ("down", "weight"))
        assert said == (("1\n", "-1\n") if weight is None else ("0\n", f"{weight - 1}\n"))


def test_nobody_comes_in_with_a_weight_of_before():
    order = list(track_files.contents([listener(member(1), member(2))], {(LISTENER, str(UUID(int=2))): False}))
    assert [name.split(".")[2] for name in order] == ["weight", "down", "down", "weight"]


def test_limits_and_hidden_addresses_are_rules():
    limited = listener(member(1), connection_limit=5)
    kept = replace(listener(client_address="preserved"), id=str(UUID(int=98)), port=54, protocol="SCTP")
    table = nft_rules.table_of([limited, kept])
    assert table.counters == {f"refused-{LISTENER}"}
    assert table.chains[f"limited-{LISTENER}"].rules == (f"ct count over 5 goto refused-{LISTENER}",)
    assert table.maps["limits-4"].elements == {"198.51.100.5 . 17 . 53": f"goto limited-{LISTENER}"}
    assert table.maps["hidden-6"].elements == {"2001:db8::5 . 17 . 53": ""}
    assert "132" not in ruleset.exchange(ruleset.EMPTY, table)


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (listener(persistence=Persistence(LONGEST_PERSISTENCE + 1, 32, 128)), "2678400 seconds at most"),
        (listener(persistence=Persistence(5, 0, 128)), "granularity"),
        (listener(persistence=Persistence(5, 32, 0)), "granularity"),
        (listener(member(1), member(2, host="10.0.0.1")), "same address and port"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(server, words, tmp_path):
    with pytest.raises(ConfigurationRefused, match=words) as caught:
        LvsEngine(str(tmp_path)).check([server])
    assert caught.value.object_id == LISTENER


def test_what_can_be_had_is_not(tmp_path):
    twice = listener(member(1), member(2, host="10.0.0.1", enabled=False), persistence=Persistence(5, 1, 1))
    LvsEngine(str(tmp_path)).check([twice, replace(twice, id=str(UUID(int=98)), algorithm="LEAST_CONNECTIONS")])
    assert not list(tmp_path.iterdir())
