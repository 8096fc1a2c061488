# SPDX-License-Identifier: Apache-2.0
"""Commands to the old worker before a reload: removed members get no new requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy import worker_replacement
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.haproxy.runtime_commands import ActionRunner
from amphora_agent.haproxy.runtime_state import ServerState
from amphora_agent.haproxy.worker_replacement import drain_commands, ready_command

UP = ServerState(True, 1, False, False, "192.0.2.1", 80, "-", 0)
MAINT, DRAIN = "set server b/x state maint", "set server b/x state drain"


def wanted(*servers, backend="b"):
    return parse(f"defaults\n\nbackend {backend}\n" + "".join(f"    server {server}\n" for server in servers))


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        pytest.param(("x 192.0.2.1:80", "y 192.0.2.1:80"), [], id="both stay"),
        pytest.param(("y 192.0.2.1:80",), [MAINT], id="removed"),
        pytest.param(("x 192.0.2.1:80 disabled", "y 192.0.2.1:80"), [MAINT], id="disabled"),
        pytest.param(("x 192.0.2.1:80 weight 0", "y 192.0.2.1:80"), [DRAIN], id="without a weight"),
        pytest.param(("x 192.0.2.1:81", "y 192.0.2.1:80"), [MAINT], id="on another port"),
        pytest.param(("x [2001:db8::1]:80", "y 192.0.2.1:80"), [MAINT], id="another address"),
        pytest.param(("z 192.0.2.1:80",), [], id="no other server would remain"),
    ],
)
def test_unwanted_members_get_no_new_requests(servers, expected):
    assert drain_commands(wanted(*servers), {("b", "x"): UP, ("b", "y"): UP}) == expected


@pytest.mark.parametrize(
    "there",
    [UP._replace(up=False), UP._replace(weight=0), UP._replace(maintenance=True), UP._replace(draining=True)],
    ids=["down", "no weight", "disabled", "drained"],
)
def test_a_server_is_drained_only_beside_a_usable_one(there):
    assert drain_commands(wanted("y 192.0.2.1:80"), {("b", "x"): UP, ("b", "y"): there}) == []
    assert drain_commands(wanted("y 192.0.2.1:80"), {("b", "x"): there, ("b", "y"): UP}) == []


def test_addresses_are_compared_without_brackets():
    there = UP._replace(address="2001:db8::1")
    assert drain_commands(wanted("x [2001:db8::1]:80", "y 192.0.2.1:80"), {("b", "x"): there, ("b", "y"): UP}) == []


def test_servers_of_a_removed_listener_are_not_drained():
    assert drain_commands(wanted("y 192.0.2.1:80", backend="c"), {("b", "x"): UP, ("b", "y"): UP}) == []


def test_a_removed_server_can_return():
    assert ready_command(MAINT) == "set server b/x state ready"


@pytest.mark.parametrize(
    ("answers", "asked"),
    [(["", "No such server.", ""], 3), (["", None, ""], 2)],
    ids=["refusal", "no answer"],
)
def test_a_timeout_ends_the_commands_and_a_refusal_does_not(monkeypatch, answers, asked):
    """A silent HAProxy costs ten seconds per command, and no other change runs meanwhile."""
    heard = []

    def ask(order):
        answer = answers[len(heard)]
        heard.append(order)
        if answer is None:
            raise HaproxyError("send a command", "no answer")
        return answer

    given = [f"set server b/{name} state maint" for name in "xyz"]
    monkeypatch.setattr(worker_replacement, "drain_commands", lambda *_: given)
    told = Haproxy._drain_removed_servers(SimpleNamespace(worker=SimpleNamespace(ask=ask)), "", wanted())
    assert heard == told == given[:asked]


def test_the_connections_of_few_and_of_many_servers_are_found():
    """Few servers are searched, many are read line by line. A name may be the beginning of another one."""
    names = [f"s{number}" for number in range(30)]
    head = "# bkname/svname bkid/svid addr port - purge_delay used_cur used_max\n"
    answer = head + "".join(
        f"p:b/{name} 3/{number} 127.0.0.1 80 - 5000 {number} 0\n" for number, name in enumerate(names)
    )
    runner = ActionRunner(SimpleNamespace(ask=lambda _: answer), None, None, Path("/"))
    expected = {name: (("3", str(number)), number) for number, name in enumerate(names)}
    assert runner._usage("p:b", set(names)) == expected
    assert runner._usage("p:b", {"s2", "s29", "other"}) == {name: expected[name] for name in ("s2", "s29")}
