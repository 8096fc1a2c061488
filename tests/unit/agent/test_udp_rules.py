# SPDX-License-Identifier: Apache-2.0
"""Slots and marks of members, and the nft commands of a change."""

from __future__ import annotations

import ipaddress
import uuid
from collections import Counter
from dataclasses import replace

import pytest

from amphora_agent.apply.udp_update import describe_change
from amphora_agent.l4 import eligible_members
from amphora_agent.l4.model import Member, Persistence, VirtualServer
from amphora_agent.l4_nftables import conntrack_marks, least_connections, maglev, ruleset

VIP, VIP6 = map(ipaddress.ip_address, ("198.51.100.5", "2001:db8:1::5"))


def member(number, version=4, **more):
    address = ipaddress.ip_address((0xC0000200 if version == 4 else 0x20010DB8 << 96) + number)
    made = Member(str(uuid.UUID(int=number)), address, 53, weight=1, backup=False, enabled=True)
    return replace(made, **more)


def server(*members, number=1, **more):
    made = VirtualServer(
        id=str(uuid.UUID(int=number << 96)),
        protocol="UDP",
        port=52 + number,
        addresses=(VIP, VIP6),
        connection_limit=None,
        pool_id=None,
        algorithm="ROUND_ROBIN",
        persistence=None,
        client_address="hidden",
        monitor=None,
        members=members,
    )
    return replace(made, **more)


# -- members--------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "down", "serving", "kept"),
    [
        ([member(1), member(2)], (), [1, 2], [1, 2]),
        ([member(1), member(2)], (1,), [2], [2]),
        ([member(1), member(2)], (1, 2), [], []),
        ([member(1, weight=0), member(2)], (), [2], [1, 2]),
        ([member(1, weight=0)], (), [], [1]),
        ([member(1, weight=0)], (1,), [], []),
        ([member(1, enabled=False), member(2)], (), [2], [2]),
        ([member(1), member(2, backup=True)], (), [1], [1, 2]),
        ([member(1), member(2, backup=True)], (1,), [2], [2]),
        ([member(1, weight=0), member(2, backup=True)], (), [2], [1, 2]),
        ([member(1, enabled=False), member(2, backup=True), member(3, backup=True)], (2,), [3], [3]),
        # A member of another family neither replaces a member nor has precedence.
        ([member(1, 6), member(2, backup=True)], (), [2], [1, 2]),
        ([], (), [], []),
    ],
)
def test_serving_and_retaining_members(members, down, serving, kept):
    one = server(*members)
    up = {(one.id, str(uuid.UUID(int=number))): False for number in down}
    assert [uuid.UUID(each.id).int for each in eligible_members.serving_members(one, up, 4)] == serving
    assert [uuid.UUID(each.id).int for each in eligible_members.retained_members(one, up)] == kept


# -- slots ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 64, 256])
def test_each_member_has_its_share_of_the_table(count):
    members = [(number * 7919, 1 + number % 3) for number in range(1, count + 1)]
    table = maglev.hash_table(members)
    found, total = Counter(table), sum(weight for _, weight in members)
    assert len(table) == maglev.table_size(count)
    for member_, weight in members:
        fair = len(table) * weight / total
        assert abs(found[member_] - fair) <= 2, (member_, found[member_], fair)
    assert table == maglev.hash_table(members[::-1]), "in any order of the list"


@pytest.mark.parametrize(("first", "then"), [(3, 2), (10, 9), (50, 49), (50, 40)])
def test_a_change_moves_few_other_flows(first, then):
    members = [(number * 104729, 1) for number in range(1, first + 1)]
    before, after = maglev.hash_table(members), maglev.hash_table(members[:then])
    stay = {one for one, _ in members[:then]}
    moved = sum(a != b for a, b in zip(before, after, strict=True) if a in stay)
    # Ten of fifty members leave, and a tenth of the other slots moves. A table without a stable order would move nearly
    # all.
    assert moved < len(before) * 0.1


def test_small_weights_have_a_slot_beside_large_ones():
    assert Counter(maglev.hash_table([(1, 256), (2, 1)]))[2] >= 1
    assert Counter(maglev.hash_table([(number, 256 if number else 1) for number in range(200)]))[0] >= 1


def test_turns_are_spread_in_proportion_to_weights():
    assert maglev.turn_table([(1, 2), (2, 1), (3, 1)]) == [1, 2, 3, 1]
    assert maglev.turn_table([(7, 100)]) == [7]
    assert maglev.turn_table([]) == maglev.hash_table([]) == []
    assert Counter(maglev.turn_table([(1, 256), (2, 255)])) == {1: 256, 2: 255}
    many = maglev.turn_table([(number, 1 + number % 256) for number in range(600)])
    assert len(many) < 5000
    assert set(many) == set(range(600))


# -- marks ----------------------------------------------------------------------------------------------------------


def test_marks_are_stable_and_freed_marks_are_reused_late():
    one, two = server(member(1), member(2)), server(member(1), number=2)
    first = conntrack_marks.assign_marks(conntrack_marks.NO_MARKS, [one, two])
    assert len({*first.servers.values(), *first.whole}) == 5
    second = conntrack_marks.assign_marks(
        first, [replace(one, members=(member(2), member(3))), server(member(4), number=3)]
    )
    place = {number: member(number).place for number in range(1, 5)}
    assert second.servers[one.id] == first.servers[one.id]
    assert second.members[one.id][place[2]] == first.members[one.id][place[2]]
    assert second.members[one.id][place[3]] not in first.members[one.id].values()
    assert second.servers[str(uuid.UUID(int=3 << 96))] not in first.servers.values()
    third = conntrack_marks.assign_marks(second, [replace(one, members=(member(2), member(3), member(5)))])
    assert third.members[one.id][member(5).place] == first.members[one.id][place[1]], "free again"


# -- rules ----------------------------------------------------------------------------------------------------------


def table(*servers, up=None, paired=False, before=conntrack_marks.NO_MARKS):
    return ruleset.build_table(servers, up or {}, conntrack_marks.assign_marks(before, servers), paired=paired)


def by(one, version=4, **more):
    """The rules that choose a slot."""
    rules = table(one, **more).chains[f"serve-{one.id}"].rules
    (rule,) = [each for each in rules if f"map @slots-{one.id}-{version}" in each]
    return rule.partition("ct mark set ")[2].partition(" map ")[0]


@pytest.mark.parametrize(
    ("more", "paired", "wanted"),
    [
        ({}, False, "numgen inc mod 2"),
        ({}, True, "jhash ip saddr . th sport mod 1021 seed 0x1"),
        ({"algorithm": "SOURCE_IP"}, False, "jhash ip saddr mod 1021 seed 0x1"),
        ({"algorithm": "SOURCE_IP_PORT"}, False, "jhash ip saddr . th sport mod 1021 seed 0x1"),
        ({"persistence": Persistence(9, 32, 128)}, False, "jhash ip saddr & 255.255.255.255 mod 1021 seed 0x1"),
        ({"persistence": Persistence(9, 24, 64)}, False, "jhash ip saddr & 255.255.255.0 mod 1021 seed 0x1"),
        ({"persistence": Persistence(9, 0, 0)}, False, "jhash ip saddr mod 1 seed 0x1"),
        (
            {"persistence": Persistence(9, 24, 64), "algorithm": "SOURCE_IP_PORT"},
            True,
            "jhash ip saddr & 255.255.255.0 mod 1021 seed 0x1",
        ),
    ],
)
def test_slots_belong_to_members(more, paired, wanted):
    assert by(server(member(1), member(2), **more), paired=paired) == wanted


def test_address_families_are_separate():
    one = server(member(1), member(2, 6), persistence=Persistence(9, 24, 64))
    made = table(one)
    slots = [set(made.maps[f"slots-{one.id}-{version}"].elements.values()) for version in (4, 6)]
    targets = [made.maps[f"targets-{version}"].elements for version in (4, 6)]
    assert [set(each) for each in targets] == slots
    assert [list(each.values()) for each in targets] == [["192.0.2.1 . 53"], ["2001:db8::2 . 53"]]
    assert by(one, 6) == "jhash ip6 saddr & ffff:ffff:ffff:ffff:: mod 1021 seed 0x1"
    only4 = server(member(1), member(2, 6), addresses=(VIP,))
    assert f"slots-{only4.id}-6" not in table(only4).maps


def test_only_different_rules_are_replaced():
    one = server(member(1), member(2), algorithm="SOURCE_IP", connection_limit=9)
    other = server(member(1), number=2)
    given = conntrack_marks.assign_marks(conntrack_marks.NO_MARKS, [one, other])
    before = ruleset.build_table([one, other], {}, given, paired=False)
    assert ruleset.diff_commands(before, before) == ""
    again = replace(one, members=(member(1),))
    after = ruleset.build_table([again, other], {}, conntrack_marks.assign_marks(given, [again, other]), paired=False)
    commands = ruleset.diff_commands(before, after).splitlines()
    assert commands[0] == "add table inet amphora_virtual"
    sets = {"targets-4", f"slots-{one.id}-4", *ruleset.MEMBER_COUNTERS}
    assert {line.split()[4] for line in commands[1:] if "element" in line} == sets
    assert all(other.id not in line for line in commands)
    # Counters and rate limits of the other rules stay.
    assert not [line for line in commands if "counter" in line or "chain" in line or "rule" in line]
    gone = ruleset.diff_commands(after, ruleset.build_table([other], {}, given, paired=False)).splitlines()
    deleted = [line for line in gone if line.startswith("delete") and one.id in line]
    assert {line.split()[1] for line in deleted} == {"chain", "map", "counter"}
    words = ("delete element", "delete chain", "delete map", "delete counter")
    order = [next(n for n, line in enumerate(gone) if word in line) for word in words]
    assert order == sorted(order), "the rule that jumps there is deleted first"


def test_unknown_rules_are_rewritten_without_counters():
    one = server(member(1))
    present = {"mine": "chain", "theirs": "set", f"flows-{one.id}": "counter", "arriving": "chain", "in": "map"}
    commands = ruleset.rebuild_commands(present, table(one)).splitlines()
    assert commands[0] == "flush table inet amphora_virtual"
    assert "delete chain inet amphora_virtual mine" in commands
    assert "delete set inet amphora_virtual theirs" in commands
    assert not [line for line in commands if "counter" in line.split()[:2] and f"flows-{one.id}" in line]
    assert ruleset.rebuild_commands({}, table(one)) == ruleset.diff_commands(ruleset.EMPTY, table(one))


# -- least connections -------------------------------------------------------------------------------------------------


def chosen(members, expected=0):
    """The choice of the kernel's scheduler, for one flow after the other."""
    has, found = {member_: flows for member_, _, flows in members}, []
    for _ in range(max(least_connections.MIN_TURNS, expected)):
        best = min(members, key=lambda one: (has[one[0]] + 1) / one[1])[0]
        has[best] += 1
        found.append(best)
    return found


@pytest.mark.parametrize(
    "members",
    [
        [(1, 1, 0)],
        [(1, 1, 0), (2, 1, 0)],
        [(1, 1, 30), (2, 1, 0), (3, 1, 7)],
        [(1, 3, 0), (2, 1, 0), (3, 2, 5)],
        [(1, 256, 1000), (2, 1, 1)],
    ],
)
def test_each_turn_counts_the_flows_before_it(members):
    found = least_connections.plan_turns(members, 0)
    assert found == chosen(members)
    assert least_connections.plan_turns(members, 90)[: len(found)] == found
    assert len(least_connections.plan_turns(members, 90)) >= 180
    assert least_connections.plan_turns([], 5) == []


@pytest.mark.parametrize("expected", [300, 5000, 10**6])
def test_many_expected_flows_are_shared_by_weight(expected):
    members = [(1, 1, expected), (2, 1, 0), (3, 2, expected // 2)]
    found = Counter(least_connections.plan_turns(members, expected))
    # All members reach one level: 2.5 times the expected number, in four parts of weight.
    level = 2.5 * expected / 4 if 2.5 * expected / 4 > expected else 1.5 * expected / 3
    assert 1 not in found, "the member has more than all others will have"
    parts = {2: level / expected, 3: (2 * level - expected // 2) / expected}
    for member_, part in parts.items():
        assert abs(found[member_] / sum(found.values()) - part) < 0.02
    assert sum(found.values()) <= 2 * least_connections.MAX_TURNS


def test_turns_restart_after_a_count_of_flows():
    one = server(member(1), member(2), algorithm="LEAST_CONNECTIONS")
    given = conntrack_marks.assign_marks(conntrack_marks.NO_MARKS, [one])
    first, second = (given.members[one.id][each.place] for each in one.members)
    loads = least_connections.Loads({int(first, 16): 3}, {}, {one.id: 0}, 7)
    for paired in (False, True):
        made = ruleset.build_table([one], {}, given, paired=paired, loads=loads)
        slots = made.maps[f"slots-{one.id}-4"].elements
        assert [slots[f"{n}"] for n in range(5)] == [*(second,) * 3, first, second]
        rule = next(line for line in made.chains[f"serve-{one.id}"].rules if "numgen" in line)
        assert rule.endswith('-4 comment "7"')
        later = ruleset.build_table([one], {}, given, paired=paired, loads=replace(loads, number=8))
        assert "flush chain" in ruleset.diff_commands(made, later)
        assert "element" not in ruleset.diff_commands(made, later)
    kept = replace(one, persistence=Persistence(9, 24, 64))
    assert by(kept).startswith("jhash ip saddr")


# -- descriptions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ([], [], ""),
        ([server(member(1))], [server(member(1))], ""),
        ([], [server()], f"UDP listener {server().id} added"),
        ([server(protocol="SCTP")], [], f"SCTP listener {server().id} removed"),
        ([server()], [server(member(1))], f"UDP listener {server().id}: member {member(1).id} added"),
        (
            [server(member(1), member(2))],
            [server(member(1, weight=0))],
            f"UDP listener {server().id}: member {member(2).id} removed, and 1 more",
        ),
        (
            [server(member(1))],
            [server(member(1, weight=0, enabled=False))],
            f"UDP listener {server().id}: member {member(1).id}: weight 1 -> 0, enabled True -> False",
        ),
        ([server()], [server(algorithm="SOURCE_IP")], f"UDP listener {server().id}: algorithm changed"),
        (
            [server(member(1), member(2))],
            [server(member(2), member(1))],
            f"UDP listener {server().id}: members in another order",
        ),
    ],
)
def test_changes_are_reported_by_name(before, after, wanted):
    assert describe_change(before, after) == wanted
