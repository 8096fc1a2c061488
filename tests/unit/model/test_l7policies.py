# SPDX-License-Identifier: Apache-2.0
"""The order of a listener's policies, compared with operations on a plain list as in Octavia."""

import random

import pytest

from amphora_driver.model.enums import L7Action
from amphora_driver.model.l7policy_positions import clear_unused_redirects, insert_at_position, renumber
from amphora_driver.model.loadbalancer import L7Policy

ANYWHERE = 2147483647


def policy(name, position=ANYWHERE, **more):
    return L7Policy(id=name, listener_id="li", action=more.pop("action", L7Action.REJECT), position=position, **more)


def order(policies):
    assert [one.position for one in policies] == list(range(1, len(policies) + 1))
    return "".join(one.id for one in policies)


def line(names):
    return tuple(policy(name, number) for number, name in enumerate(names, start=1))


@pytest.mark.parametrize(
    ("before", "position", "after"),
    [
        ("", ANYWHERE, "n"),
        ("", 1, "n"),
        ("", 7, "n"),
        ("ab", ANYWHERE, "abn"),
        ("ab", 1, "nab"),
        ("ab", 2, "anb"),
        ("ab", 3, "abn"),
        ("ab", 4, "abn"),
    ],
)
def test_a_policy_is_inserted(before, position, after):
    assert order(insert_at_position(line(before), policy("n", position))) == after


@pytest.mark.parametrize(
    ("moved", "position", "after"),
    [("a", 1, "abcd"), ("a", 2, "bacd"), ("a", 4, "bcda"), ("a", 99, "bcda"), ("d", 1, "dabc"), ("c", 2, "acbd")],
)
def test_a_policy_is_moved(moved, position, after):
    assert order(insert_at_position(line("abcd"), policy(moved, position))) == after


def test_a_policy_is_removed():
    assert order(renumber(one for one in line("abcd") if one.id != "b")) == "acd"


def test_the_order_of_reading_does_not_matter():
    assert order(renumber(reversed(line("abcd")))) == "abcd"


def test_random_changes_equal_those_of_a_list():
    source = random.Random(3)
    names: list[str] = []
    policies: tuple[L7Policy, ...] = ()
    for number in range(300):
        wish = source.choice((1, 2, source.randint(1, 12), ANYWHERE))
        if names and source.random() < 0.3:
            gone = source.choice(names)
            names.remove(gone)
            policies = renumber(one for one in policies if one.id != gone)
        elif names and source.random() < 0.5:
            moved = source.choice(names)
            names.remove(moved)
            names.insert(wish - 1, moved)
            policies = insert_at_position(policies, policy(moved, wish))
        else:
            names.insert(wish - 1, f"{number}.")
            policies = insert_at_position(policies, policy(f"{number}.", wish))
        assert order(policies) == "".join(names)


EVERYTHING = {
    "redirect_pool_id": "po",
    "redirect_url": "http://a/",
    "redirect_prefix": "http://b",
    "redirect_http_code": 302,
}


@pytest.mark.parametrize(
    ("action", "kept"),
    [
        (L7Action.REJECT, set()),
        (L7Action.REDIRECT_TO_POOL, {"redirect_pool_id"}),
        (L7Action.REDIRECT_TO_URL, {"redirect_url", "redirect_http_code"}),
        (L7Action.REDIRECT_PREFIX, {"redirect_prefix", "redirect_http_code"}),
    ],
)
def test_a_changed_action_keeps_its_own_fields(action, kept):
    found = clear_unused_redirects(policy("a", action=action, **EVERYTHING))
    assert {name for name in EVERYTHING if getattr(found, name) is not None} == kept
    assert clear_unused_redirects(found) is found
