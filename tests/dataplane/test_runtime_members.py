# SPDX-License-Identifier: Apache-2.0
"""Members, monitors and limits change without a reload, on every HAProxy version."""

from __future__ import annotations

import pytest
from every_haproxy import RuntimeSocket, on_every_haproxy, worker
from http_clients import TIME_LIMIT, answer, ask
from peers import MEMBER, MEMBER6
from wanted import id_of, listener, load_balancer, member, monitor, pool

from amphora_agent.haproxy import features

pytestmark = [pytest.mark.root, on_every_haproxy]


@pytest.fixture
def push(served):
    def pushed(*parts, how="runtime"):
        before = worker(served) if how == "runtime" else None
        found = served.push(load_balancer(*parts))
        if how is not None:
            assert (found.how, bool(found.reason)) == (how, True), found.answer
        if how == "runtime":
            assert worker(served) == before
        return found

    return pushed


def test_changes_use_the_runtime_api_where_possible(served, push, lab):
    push(listener(80), pool("pool", member(served.web())), how=None)
    before = served.amphora.ask_haproxy("show servers state")
    found = features.probe_features(RuntimeSocket(served.amphora))
    if lab.series != "system":
        assert (found.cookies, found.wait_command) == (True, lab.series != "2.8")
    assert found.init_state == (lab.series == "3.2")
    assert served.amphora.ask_haproxy("show servers state").count("\n") == before.count("\n")


@pytest.mark.feature("member.address", "member.protocol_port")
@pytest.mark.parametrize("kept_by", [{}, {"persistence": ("HTTP_COOKIE", None)}], ids=["not persistent", "cookie"])
def test_a_member_changes_its_address(served, push, kept_by):
    """A member changes its address, family and port, and no request fails.

    HAProxy closes idle connections to the former address. A connection with an open request continues and becomes
    idle later: the next change closes it. So the test determines the answering member without other traffic.
    """
    a, b = served.web("a", MEMBER), served.web("b", MEMBER6)

    def wanted(peer):
        place = {"address": peer.address, "protocol_port": peer.port}
        return listener(80), pool("pool", member(a, **place), **kept_by)

    push(*wanted(a), how=None)
    kept = served.client.connect()
    assert ask(kept).member == "a"
    with served.client.load(1) as load:
        for peer in (b, a):
            push(*wanted(peer))
            load.goes_on(2)
    assert load.failures == []
    for peer in (b, a, b):
        push(*wanted(peer))
        assert served.client.fetch().member == peer.name
        assert ask(kept).member == peer.name


@pytest.mark.feature("member.admin_state_up")
def test_a_member_disabled_during_a_request_is_removed(served, push):
    """HAProxy 2.8 keeps a server for connections that become idle later, unless the agent prevents it."""
    a, b = served.web("a", MEMBER), served.web("b", MEMBER6)
    both = pool("pool", member(a), member(b))
    push(listener(80), both, how=None)
    with served.client.load() as load:
        for _ in range(3):
            push(listener(80), pool("pool", member(a), member(b, admin_state_up=False)))
            load.goes_on(2)
            push(listener(80), pool("pool", member(a)))
            push(listener(80), both)
            load.goes_on()
    assert load.failures == []


@pytest.mark.feature("member.monitor_address", "member.monitor_port")
def test_the_monitor_address_and_port_change_at_run_time(served, push):
    web, other = served.web("web"), served.web("other", MEMBER6)
    closed = {"monitor_address": MEMBER, "monitor_port": 1}

    def wanted(**place):
        return listener(80), pool("pool", member(web, **place), monitor=monitor("TCP"))

    push(*wanted(monitor_address=other.address, monitor_port=other.port), how=None)
    served.until_states("pool", {"web": "UP"})
    push(*wanted(**closed))
    served.until_states("pool", {"web": "DOWN"})
    push(*wanted(monitor_address=web.address, monitor_port=web.port))
    served.until_states("pool", {"web": "UP"})


def test_a_new_member_serves_after_its_first_check(served, push, lab):
    """HAProxy 3.1 waits for the check. Earlier versions start the member as up, and retry requests."""
    a, b = served.web("a", MEMBER), served.web("b", MEMBER6)

    def wanted(*members):
        return listener(80), pool("pool", *members, monitor=monitor("TCP", delay=2))

    push(*wanted(member(a)), how=None)
    served.until_states("pool", {"a": "UP"})
    with served.client.load() as load:
        push(*wanted(member(a), member(b, protocol_port=1)))
        served.until_states("pool", {"a": "UP", "b": "DOWN"})
        if lab.series == "3.2":
            (dead,) = [row for (_, name), row in served.statistics().items() if name == id_of("member", "b")]
            assert (dead["lbtot"], dead["econ"]) == ("0", "0"), "a member without a check received requests"
        push(*wanted(member(a)))
        push(*wanted(member(a), member(b)))
        served.until_states("pool", {"a": "UP", "b": "UP"})
        load.goes_on()
    assert load.failures == []


@pytest.mark.feature("healthmonitor.delay", "member.backup")
def test_change_without_a_command_replaces_an_idle_member(served, push):
    """The agent removes and adds the member while another one serves.

    A single or persistent member needs a reload.
    """
    a, b = served.web("a", MEMBER), served.web("b", MEMBER6)

    def wanted(*members, delay=1, **more):
        return listener(80), pool("pool", *members, monitor=monitor("TCP", delay=delay, max_retries_down=5), **more)

    push(*wanted(member(a), member(b)), how=None)
    served.until_states("pool", {"a": "UP", "b": "UP"})
    push(*wanted(member(a, backup=True), member(b)))
    assert {served.client.fetch().member for _ in range(6)} == {"b"}
    push(*wanted(member(a), member(b)))
    assert {served.client.fetch().member for _ in range(12)} == {"a", "b"}
    with served.client.load(1) as load:
        found = push(*wanted(member(a), member(b), delay=2), how=None)
        assert found.how in ("runtime", "reload")  # HAProxy does not remove a member with an open response
        load.goes_on(2)
    assert load.failures == []
    push(*wanted(member(a), delay=2))
    alone = push(*wanted(member(a), delay=3), how="reload")
    assert "no other member could serve" in alone.reason
    sticky = {"persistence": ("SOURCE_IP", None)}
    push(*wanted(member(a), member(b), **sticky), how="reload")
    kept = push(*wanted(member(a, backup=True), member(b), **sticky), how="reload")
    assert "its removal would move its clients" in kept.reason


@pytest.mark.feature("listener.connection_limit")
def test_a_listeners_connection_limit_changes(served, push, lab):
    """The agent reloads a version that would crash, and an unknown version."""
    web = served.web()
    how = None if lab.series == "system" else "runtime"

    def wanted(limit):
        return listener(80, connection_limit=limit), pool("pool", member(web))

    def limit() -> int:
        return int(served.statistics()[id_of("listener", 80), "FRONTEND"]["slim"])

    push(*wanted(-1), how=None)
    most = limit()
    for given, expected in ((1, 1), (3, 3), (-1, most), (1, 1)):
        push(*wanted(given), how=how)
        assert limit() == expected
    first, second = served.client.connect(), served.client.connect()
    assert ask(first).status == 200
    second.sendall(b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n")
    second.settimeout(0.5)
    with pytest.raises(TimeoutError):  # the connection waits: no event reports that nothing happens
        second.recv(1)
    push(*wanted(2), how=how)
    second.settimeout(TIME_LIMIT)
    assert answer(second).status == 200


def test_a_new_member_has_its_cookie(served, push):
    a, b = served.web("a", MEMBER), served.web("b", MEMBER6)
    kept = {"persistence": ("HTTP_COOKIE", None)}
    push(listener(80), pool("pool", member(a), **kept), how=None)
    push(listener(80), pool("pool", member(a), member(b), **kept))
    cookies = {}
    for _ in range(8):
        reply = served.client.fetch()
        cookies[reply.member] = reply.header("Set-Cookie").partition(";")[0]
    assert cookies.keys() == {"a", "b"}
    for name, cookie in cookies.items():
        assert {served.client.fetch(headers=[("Cookie", cookie)]).member for _ in range(4)} == {name}
