# SPDX-License-Identifier: Apache-2.0
"""The difference between two configurations: runtime updates and reloads."""

from __future__ import annotations

import pytest

from amphora_agent.haproxy.config_diff import MAX_REPLACED, Reload, Runtime, Unchanged, compare_configurations
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.features import Features
from amphora_agent.haproxy.runtime_actions import (
    AddServer,
    ComputeCookies,
    LoadFile,
    RemoveServer,
    ReplaceServer,
    SetAddress,
    SetCheck,
    SetFrontendMaxconn,
    SetMaintenance,
    SetServerMaxconn,
    SetWeight,
    UnloadFile,
)
from amphora_agent.haproxy.tls_diff import TlsChanges
from amphora_agent.haproxy.worker_replacement import NO_STATES, compose_states

ONE = "server a 192.0.2.1:80 weight 1 check inter 5s"
TWO = "server b 192.0.2.2:80 weight 2"
COOKIE = ("cookie C insert dynamic",)


def configuration(*lines, defaults=("mode http",), frontend="bind 198.51.100.5:80", name="p:l"):
    body = "".join(f"    {line}\n" for line in lines)
    return parse(
        "defaults\n"
        + "".join(f"    {line}\n" for line in defaults)
        + f"frontend l\n    {frontend}\nbackend {name}\n{body}"
    )


def test_equal_configurations_need_no_change():
    assert compare_configurations(configuration(ONE), configuration("# why", ONE + "   # because")) == Unchanged()


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ([ONE], [ONE, TWO], [AddServer]),
        ([ONE, TWO], [ONE], [RemoveServer]),
        ([ONE], [TWO], [AddServer, RemoveServer]),
        ([ONE], [ONE.replace("weight 1", "weight 0")], [SetWeight]),
        ([ONE], [ONE.replace("weight 1 ", "")], []),
        ([ONE], [ONE + " disabled"], [SetMaintenance]),
        ([ONE + " disabled"], [ONE.replace("weight 1", "weight 7")], [SetWeight, SetMaintenance]),
        ([ONE, TWO], [TWO, ONE], []),
        (
            ["balance source", "hash-type consistent", ONE],
            ["balance source", "hash-type consistent", TWO],
            [AddServer, RemoveServer],
        ),
        (
            ["balance source", "hash-type consistent", ONE + " id 7"],
            ["balance source", "hash-type consistent", ONE + " id 7", TWO + " id 8"],
            [AddServer],
        ),
        (["balance random(2)", ONE], ["balance random(2)", ONE, TWO], [AddServer]),
        (["balance source", ONE, TWO], ["balance source", ONE], [RemoveServer]),
        ([ONE], [ONE.replace(":80", ":81")], [SetAddress]),
        ([ONE], [ONE.replace("192.0.2.1", "[2001:db8::1]")], [SetAddress]),
        ([ONE + " addr 192.0.2.8 port 80"], [ONE + " addr 192.0.2.9 port 80"], [SetCheck]),
        ([ONE + " port 80"], [ONE + " port 81"], [SetCheck]),
        ([ONE], [ONE + " maxconn 7"], [SetServerMaxconn]),
        ([ONE, TWO], [ONE.replace("5s", "6s"), TWO], [ReplaceServer]),
        ([ONE, TWO], [ONE + " backup", TWO], [ReplaceServer]),
        ([ONE, TWO], [ONE + " addr 192.0.2.8", TWO], [ReplaceServer]),
        ([ONE + " port 80", TWO], [ONE, TWO], [ReplaceServer]),
        ([ONE + " disabled"], [ONE.replace("5s", "6s")], [ReplaceServer]),
        ([ONE, TWO], [ONE + " ssl ca-file /ca.pem", TWO], [ReplaceServer]),
    ],
)
def test_changes_of_servers_are_runtime_updates(old, new, kinds):
    verdict = compare_configurations(configuration(*old), configuration(*new))
    if not kinds and old[0].split()[1] == new[0].split()[1]:
        assert verdict == Unchanged()
        return
    assert isinstance(verdict, Runtime)
    assert [type(action) for action in verdict.actions] == kinds
    assert verdict.reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (configuration(ONE), configuration(ONE, name="q:l"), "backend q:l added; backend p:l removed"),
        (configuration(ONE), configuration(ONE, frontend="bind 198.51.100.5:81"), "'bind 198.51.100.5:81' is new"),
        (configuration(ONE, "fullconn 1"), configuration(ONE), "'fullconn 1' was removed"),
        (configuration("a x", "b"), configuration("b", "a x"), "the order of its lines"),
        (configuration(ONE), configuration(ONE.replace("5s", "6s")), "no other member could serve meanwhile"),
        (configuration(ONE), configuration(ONE.replace("192.0.2.1", "a.example")), "its address is a.example:80"),
        (configuration("stick on src", ONE, TWO), configuration("stick on src", ONE + " backup", TWO), "its clients"),
        (
            configuration(*COOKIE, "dynamic-cookie-key k", ONE, TWO),
            configuration(*COOKIE, "dynamic-cookie-key k", ONE + " backup", TWO),
            "its clients",
        ),
        (configuration(ONE, TWO), configuration(ONE + " cookie b", TWO), "its keywords differ; 'cookie' cannot"),
        (
            configuration(*(f"server s{n} 192.0.2.1:{n}" for n in range(1, MAX_REPLACED + 2))),
            configuration(*(f"server s{n} 192.0.2.1:{n} check" for n in range(1, MAX_REPLACED + 2))),
            f"the keywords of {MAX_REPLACED + 1} members differ",
        ),
        (configuration(ONE), configuration(ONE, TWO + " cookie b"), "'cookie' cannot"),
        (configuration(ONE), configuration(ONE, TWO + ' sni "str(\\"x\\")"'), "quoting"),
        (configuration(ONE), configuration(ONE, TWO + " sni 'str(\"a b\")'"), "quoting"),
        (configuration(ONE), configuration(ONE, TWO + " sni 'str(a;b)'"), "quoting"),
        (configuration(ONE), configuration(ONE, TWO + " sni 'str(a\\\\b)'"), "quoting"),
        (configuration(ONE), configuration(ONE, TWO + " no-check-ssl"), "'no-check-ssl' cannot"),
        (configuration("balance source", ONE), configuration("balance source", ONE, TWO), "balancing method"),
        (
            configuration("balance static-rr", ONE),
            configuration("balance static-rr", ONE.replace("t 1", "t 2")),
            "weights are fixed",
        ),
        (configuration("cookie C insert dynamic", ONE), configuration("cookie C insert dynamic", ONE, TWO), "dynamic"),
        (
            configuration(*COOKIE, "dynamic-cookie-key 'a b'", ONE),
            configuration(*COOKIE, "dynamic-cookie-key 'a b'", ONE, TWO),
            "dynamic",
        ),
        (
            configuration(*COOKIE, "dynamic-cookie-key k", ONE),
            configuration(
                *COOKIE, "dynamic-cookie-key k", ONE, *(f"server s{n} 192.0.2.9:{n}" for n in range(1, 2000))
            ),
            "computes the cookies of 2000 members",
        ),
        (
            configuration(ONE, defaults=["default-server inter 1s"]),
            configuration(ONE, TWO, defaults=["default-server inter 1s"]),
            "default-server",
        ),
        (
            configuration(ONE, defaults=["balance uri"]),
            configuration(ONE, TWO, defaults=["balance uri"]),
            "balancing method",
        ),
    ],
)
def test_other_changes_need_a_reload(old, new, reason):
    verdict = compare_configurations(old, new)
    assert isinstance(verdict, Reload)
    assert reason in verdict.reason


def test_servers_are_enabled_before_others_are_disabled():
    old = configuration("server a 192.0.2.1:80 weight 0", "server b 192.0.2.2:80", "server c 192.0.2.3:80")
    new = configuration("server b 192.0.2.2:80 disabled", "server c 192.0.2.3:80 weight 0", "server a 192.0.2.1:80")
    assert compare_configurations(old, new).actions == (
        SetWeight("p:l", "a", 1),
        SetMaintenance("p:l", "b", True),
        SetWeight("p:l", "c", 0),
    )


def test_a_dynamic_cookie_is_computed_before_a_new_server_has_requests():
    old = configuration(*COOKIE, "dynamic-cookie-key k", ONE)
    new = configuration(*COOKIE, "dynamic-cookie-key k", TWO, "server c 192.0.2.3:80 disabled")
    verdict = compare_configurations(old, new)
    assert isinstance(verdict, Runtime)
    added = [action for action in verdict.actions if isinstance(action, AddServer)]
    assert [(action.server.name, action.awaits_cookie) for action in added] == [("b", True), ("c", False)]
    assert verdict.actions[2] == ComputeCookies("p:l", "k", ("b",))
    assert [type(action) for action in verdict.actions[3:]] == [RemoveServer]


@pytest.mark.parametrize(
    ("before", "after", "awaits_check"),
    [
        ([ONE], [ONE, TWO + " check"], True),
        ([ONE], [ONE, TWO], False),
        ([ONE], [TWO + " check"], False),
        ([ONE + " disabled"], [ONE + " disabled", TWO + " check"], False),
        ([ONE], [ONE, TWO + " check disabled"], False),
    ],
)
def test_new_member_waits_for_its_first_check(before, after, awaits_check):
    for features in (Features(cookies=True, init_state=True), Features()):
        verdict = compare_configurations(configuration(*before), configuration(*after), features=features)
        added = [action.awaits_check for action in verdict.actions if isinstance(action, AddServer)]
        assert added == [awaits_check and features.init_state]


def test_an_unchanged_server_needs_no_command():
    lines = (*COOKIE, "dynamic-cookie-key k")
    many = [f"server s{n} 192.0.2.9:{n}" for n in range(1, 2000)]
    verdict = compare_configurations(
        configuration(*lines), configuration(*lines, *many), features=Features(cookies=True)
    )
    assert isinstance(verdict, Runtime)
    assert {type(action) for action in verdict.actions} == {AddServer}
    assert not any(action.awaits_cookie for action in verdict.actions)
    own = configuration("cookie C", ONE), configuration("cookie C", ONE, TWO + " cookie b")
    assert isinstance(compare_configurations(*own), Reload)
    assert isinstance(compare_configurations(*own, features=Features(cookies=True)), Runtime)


def test_serving_members_during_a_replacement():
    off, none, spare, new = (f"server {name} 192.0.2.7:80" for name in ("off", "none", "spare", "new"))
    old = configuration(ONE, TWO, off + " disabled", none + " weight 0", spare + " backup")
    wanted = configuration(ONE + " fall 2", TWO, off + " disabled", none + " weight 0", spare + " backup", new)
    (action,) = (action for action in compare_configurations(old, wanted).actions if isinstance(action, ReplaceServer))
    assert (action.server.name, action.others, action.idle) == ("a", {"b"}, False)


def test_a_member_is_changed_by_one_command_for_each_of_its_values():
    old = configuration(ONE + " addr 192.0.2.8 port 1 maxconn 5", TWO)
    new = configuration("server a [2001:db8::9]:81 check inter 5s port 2 addr 192.0.2.9 weight 4", TWO)
    verdict = compare_configurations(old, new)
    assert verdict.actions == (
        SetAddress("p:l", "a", "2001:db8::9", 81),
        SetCheck("p:l", "a", "192.0.2.9", 2),
        SetServerMaxconn("p:l", "a", 0),
        SetWeight("p:l", "a", 4),
    )


@pytest.mark.parametrize(
    ("old", "new", "maxconn"),
    [("maxconn 5", "maxconn 6", 6), ("maxconn 5", "# none", None), ("# none", "maxconn 6", 6)],
)
def test_the_connection_limit_of_a_listener_is_a_runtime_update(old, new, maxconn):
    texts = [configuration(frontend=f"bind 198.51.100.5:80\n    {line}") for line in (old, new)]
    verdict = compare_configurations(*texts, features=Features(limits=True))
    assert verdict.actions == (SetFrontendMaxconn("l", maxconn),)
    assert compare_configurations(*texts) == Reload(verdict.reason)
    assert verdict.reason


@pytest.mark.parametrize("odd", ["maxconn 5k", "maxconn 1\n    maxconn 2", "maxconn"])
def test_an_invalid_connection_limit_is_not_set(odd):
    old, new = (configuration(frontend=f"bind 198.51.100.5:80\n    {line}") for line in ("maxconn 1", odd))
    assert isinstance(compare_configurations(old, new, features=Features(limits=True)), Reload)


def test_files_are_added_before_servers_and_removed_after_them():
    files = TlsChanges((LoadFile("ca-file", "a"),), (UnloadFile("ca-file", "b"),), ("because",))
    verdict = compare_configurations(configuration(ONE), configuration(TWO), files=files)
    assert [type(action) for action in verdict.actions] == [LoadFile, AddServer, RemoveServer, UnloadFile]
    assert verdict.reason.startswith("because; ")
    assert compare_configurations(configuration(ONE), configuration(ONE), files=TlsChanges(reasons=("x",))) == Runtime(
        (), "x"
    )
    stuck = TlsChanges((), (), ("because",), ("cannot",))
    assert compare_configurations(configuration(ONE), configuration(TWO), files=stuck) == Reload("cannot")
    assert compare_configurations(configuration(ONE), configuration(ONE), ["elsewhere"], stuck) == Reload(
        "elsewhere; because"
    )


def test_insignificant_quotes_need_no_reload():
    verdict = compare_configurations(configuration(ONE), configuration(ONE, TWO + " sni 'str(x)' check-sni \"x\""))
    assert isinstance(verdict, Runtime)
    assert verdict.actions[0].server.keywords[2:] == ("sni", "str(x)", "check-sni", "x")


def test_reasons_stay_short():
    verdict = compare_configurations(
        configuration(), configuration(*(f"server s{n} 192.0.2.1:{n}" for n in range(1, 60)))
    )
    assert isinstance(verdict, Runtime)
    assert verdict.reason.endswith("and 56 more")


def state(name, *, port=80, operational=0, admin=0, weights="9 9", address="192.0.2.1"):
    return f"3 p:l 1 {name} {address} {operational} {admin} {weights} 1 8 2 0 6 0 0 0 - {port} - 0 0 - - 0"


@pytest.mark.parametrize(
    ("line", "server", "expected"),
    [
        (state("a"), ONE, state("a", weights="1 1")),
        (state("a", admin=1), ONE, state("a", weights="1 1")),
        (state("a"), ONE + " disabled", state("a", admin=5, weights="1 1")),
        (state("a", port=81), ONE, None),
        (state("a", address="192.0.2.9"), ONE, None),
        (state("b"), ONE, None),
        (state("b", address="192.0.2.2"), TWO, None),
        ("rubbish", ONE, None),
    ],
)
def test_the_next_worker_gets_only_the_results_of_checks(line, server, expected):
    rewritten = compose_states(f"1\n# head\n{line}\n\n", configuration(server))
    assert rewritten == "1\n# head\n" + (f"{expected}\n" if expected else "")
    assert compose_states("2\n# another version\n", configuration(server)) == NO_STATES
