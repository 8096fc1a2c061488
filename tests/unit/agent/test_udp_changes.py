# SPDX-License-Identifier: Apache-2.0
"""A change of one UDP member among many: its request, its rules, and the turns of the other members."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from test_udp_rules import member, server

from amphora_agent.l4 import edits, model
from amphora_agent.l4_nftables import conntrack_marks, maglev, ruleset, table_listing, turns


def members(count, first=1):
    return tuple(member(number) for number in range(first, first + count))


def steps(count):
    """The states of one more member: it is added, gets another weight, is disabled, enabled, and removed."""
    rest, last = members(count), member(count + 1)
    heavy = replace(last, weight=7)
    return [(*rest, last), (*rest, heavy), (*rest, replace(heavy, enabled=False)), (*rest, heavy), rest[1:], rest]


def changed_elements(count, **more):
    """Return the greatest number of elements that a step changes in the kernel."""
    one = server(*members(count), **more)
    marks = conntrack_marks.assign_marks(conntrack_marks.NO_MARKS, [one])
    before = ruleset.build_table([one], {}, marks, paired=False)
    found = []
    for each in steps(count):
        wanted = replace(one, members=each)
        marks = conntrack_marks.assign_marks(marks, [wanted])
        after = ruleset.build_table([wanted], {}, marks, paired=False, former=before)
        assert ruleset.build_table([wanted], {}, marks, paired=False, former=after) == after
        lines = [line for line in ruleset.diff_commands(before, after).splitlines() if " element " in line]
        found.append(sum(line.count(",") + 1 for line in lines))
        before = after
    return max(found)


def test_changed_elements_do_not_depend_on_the_number_of_members():
    """Seven turns of the heavy member, each with a displaced turn, and four sets; each is deleted and added."""
    assert changed_elements(2000) <= 2 * (7 * 2 + 4)
    assert changed_elements(5000) <= 2 * (7 * 2 + 4)


@pytest.mark.parametrize("seed", range(5))
def test_each_member_has_its_turns_after_many_changes(seed):
    chosen = random.Random(seed)
    weights = {f"m{number}": chosen.choice((1, 1, 1, 2, 5)) for number in range(400)}
    planned = turns.plan_turns([], weights)
    for number in range(100):
        if number % 3:
            weights[chosen.choice(list(weights))] = chosen.randint(1, 9)
        else:
            del weights[chosen.choice(list(weights))]
            weights[f"n{number}"] = chosen.randint(1, 9)
        former, planned = planned, turns.plan_turns(planned, weights)
        assert Counter(planned) == dict(zip(weights, maglev.turn_counts(list(weights.values())), strict=True))
        different = sum(a != b for a, b in zip(former, planned, strict=False)) + abs(len(former) - len(planned))
        assert different <= 4 * 9 + 2


def test_new_turns_are_spread():
    weights = {f"m{number}": 1 for number in range(1000)}
    planned = turns.plan_turns(turns.plan_turns([], weights), {**weights, "new": 10})
    places = [number for number, one in enumerate(planned) if one == "new"]
    assert len(places) == 10
    assert min(b - a for a, b in itertools.pairwise(places)) >= 90


@pytest.mark.parametrize("seed", range(30))
def test_a_request_with_differences_is_the_complete_state(seed):
    chosen = random.Random(seed)
    before = [server(*members(20), number=number) for number in (1, 2)]
    after = []
    for one in [*before, server(*members(3), number=3)][chosen.randint(0, 1) :]:
        found = [each for each in one.members if chosen.random() > 0.1]
        found = [replace(each, weight=9) if chosen.random() < 0.1 else each for each in found]
        for each in members(chosen.randint(0, 3), first=100):
            found.insert(chosen.randint(0, len(found)), each)
        if chosen.random() < 0.3:
            chosen.shuffle(found)
        after.append(replace(one, members=tuple(found), port=one.port + chosen.choice((0, 10))))
    document = json.loads(json.dumps(edits.change_document(before, after)))
    assert edits.apply_change(before, document) == tuple(after)


def test_one_changed_member_of_many_is_one_document():
    one = server(*members(2000))
    other = replace(one, members=(*one.members[:900], replace(one.members[900], weight=7), *one.members[901:]))
    assert len(json.dumps(edits.change_document([one], [other]))) < 2000
    with pytest.raises(ValueError, match="do not belong"):
        edits.apply_change([replace(one, members=one.members[:1999])], edits.change_document([one], [other]))


def test_known_members_are_not_parsed_again():
    one = server(*members(3), member(4, 6, check_address=member(5).address, check_port=9, weight=0))
    document = model.to_document([one])
    assert json.loads(model.to_json([one])) == document
    (again,) = model.parse(json.loads(json.dumps(document)), [one])
    assert all(a is b for a, b in zip(again.members, one.members, strict=True))
    assert model.parse(document, [replace(one, members=members(4, first=2))]) == (one,)


@pytest.mark.parametrize(
    ("key", "value"), [("weight", True), ("weight", 1.0), ("port", 53.0), ("enabled", 1), ("check_port", 1.5)]
)
def test_a_wrong_value_of_a_known_member_is_refused(key, value):
    one = server(member(1))
    document = model.to_document([one])
    document[0]["members"][0][key] = value
    with pytest.raises(TypeError):
        model.parse(document, [one])


def test_a_listing_is_compared_by_its_elements():
    one = server(member(1), member(2, 6))
    marks = conntrack_marks.assign_marks(conntrack_marks.NO_MARKS, [one])
    table = ruleset.build_table([one], {}, marks, paired=False)
    blocks = []
    for name, each in table.maps.items():
        texts = [f"{key} : {value}" if value else f"{key} counter" for key, value in each.elements.items()]
        lines = ",\n\t\t\t     ".join(texts)
        elements = f"\t\telements = {{ {lines} }}\n" if texts else ""
        blocks.append(f"\t{each.word} {name} {{\n\t\t{each.kind}\n{elements}\t}}\n")
    listed = f"table inet amphora_virtual {{\n{''.join(blocks)}}}\n"
    assert table_listing.has_elements(listed, table)
    assert not table_listing.has_elements(listed.replace("192.0.2.1 . 53", "192.0.2.9 . 53"), table)
    assert not table_listing.has_elements(listed.replace("\tset hidden", "\tset other"), table)
    assert not table_listing.has_elements("", table)
