# SPDX-License-Identifier: Apache-2.0
"""Verification after a change of servers: the changed servers and their number."""

from __future__ import annotations

import pytest

from amphora_agent.haproxy.config_check import read_timeout
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.runtime_state import PartialState, find_partial_difference, select_servers

HEAD = "1\n# be_id be_name srv_id srv_name srv_addr\n"


def line(name, weight=1, admin=0, backend="b"):
    return f"4 {backend} 7 {name} 192.0.2.1 2 {admin} {weight} 1 5 1 0 0 0 0 0 0 - 80 - 0 0 - 0 0\n"


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_servers_are_found_by_their_names(many):
    answer = HEAD + line("a") + line("ab", weight=3) + line("b") + "\n"
    names = {"ab", "none", *(f"n{n}" for n in range(30 * many))}
    count, found = select_servers(answer, "b", names)
    assert count == 3
    assert {key: state.weight for key, state in found.items()} == {("b", "ab"): 3}


def test_an_empty_backend_has_no_servers():
    assert select_servers(HEAD + "\n", "b", {"a"}) == (0, {})


TEXT = "frontend f\n    bind 127.0.0.1:80\nbackend b\n    server a 192.0.2.1:80\n    server c 192.0.2.1:80\n"


@pytest.mark.parametrize(
    ("rows", "touched", "why"),
    [
        ([line("a"), line("c")], [("b", "a")], ""),
        ([line("a", weight=9), line("c")], [("b", "a")], "weight"),
        ([line("a", admin=1), line("c")], [("b", "a")], "maintenance"),
        ([line("a")], [("b", "a")], "1 members, not 2"),
        ([line("a"), line("x")], [("b", "c")], "member c of b"),
        ([line("a"), line("c"), line("gone")], [("b", "gone")], "3 members"),
    ],
)
def test_a_difference_is_named(rows, touched, why):
    count, servers = select_servers(HEAD + "".join(rows), "b", {name for _, name in touched})
    said = find_partial_difference(parse(TEXT), touched, PartialState({"f": 0}, {"b"}, {"b": count}, servers))
    assert (why in said) if why else not said


@pytest.mark.parametrize(
    ("listeners", "backends", "why"), [({}, {"b"}, "listener f"), ({"f": 0}, set(), "b"), ({"f": 0}, {"b", "x"}, "x")]
)
def test_proxies_are_verified_too(listeners, backends, why):
    assert why in find_partial_difference(parse(TEXT), [], PartialState(listeners, backends, {}, {}))


def test_the_time_limit_grows_with_the_number_of_servers():
    assert read_timeout(parse(TEXT)) < read_timeout(
        parse(TEXT + "".join(f"    server s{n} 192.0.2.1:80\n" for n in range(99)))
    )
