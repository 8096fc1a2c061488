# SPDX-License-Identifier: Apache-2.0
"""LEAST_CONNECTIONS with nftables, and the flows of each member, through a real agent and its checker."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from dataclasses import replace

import checked_members
import pytest
from amphora_lab import eventually, ip
from datagrams import PORT, Clients, UdpMember, member, members_of, name_of, persistence, virtual_server

from amphora_agent.l4_daemon.checker import _REBALANCE_SECONDS

pytestmark = pytest.mark.root
PLACES = {"l1": "198.51.100.121", "l2": "198.51.100.122", "l3": "198.51.100.123"}
PLACES6 = {"m1": "2001:db8:1::121", "m2": "2001:db8:1::122"}
ALL_MEMBERS = {**PLACES, **PLACES6}
LISTENER = name_of("listener", PORT, "UDP")


@pytest.fixture
def clients(lab):
    with contextlib.ExitStack() as closing:
        for name, address in ALL_MEMBERS.items():
            wide, more = ("64", "nodad") if ":" in address else ("24", "")
            ip(f"-n {lab.network.name('mem')} addr replace {address}/{wide} dev eth0 {more}")
            closing.callback(UdpMember(lab.network.thread("mem"), name, address).close)
        yield closing.enter_context(contextlib.closing(Clients(lab.network.thread("cl"))))
    lab.amphora.push(next(lab.generations), None)


def serve(lab, *names, weights=None, **more):
    some = [member(name, ALL_MEMBERS[name], weight=(weights or {}).get(name, 1)) for name in names]
    made = virtual_server(*some, **{"algorithm": "LEAST_CONNECTIONS", **more})
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=[made])
    assert status == 200, answer


def given(lab):
    """Return the number of flows by member."""
    status, answer = lab.amphora.call("GET", "/v2/diagnostics")
    assert status == 200, answer
    found = answer["virtual servers"]["listeners"][LISTENER]["pool"]["counters"]
    return {name: found[name_of("member", name)] for name in ALL_MEMBERS if name_of("member", name) in found}


def flows_of(lab):
    return {name: one["active_connections"] for name, one in given(lab).items()}


def is_counted(lab, **flows):
    """Wait until the checker has counted all flows and has rebalanced."""
    eventually(lambda: flows_of(lab) == flows, f"the checker counts {flows}")
    time.sleep(2 * _REBALANCE_SECONDS)  # no event reports a rebalance


def test_loaded_member_gets_no_flow_until_others_are_equal(lab, clients):
    serve(lab, "l1")
    held = clients.flows(30)
    assert members_of(held) == {"l1": 30}
    eventually(lambda: flows_of(lab) == {"l1": 30}, "the checker has counted the flows")
    serve(lab, "l1", "l2")
    assert members_of(clients.flows(20)) == {"l2": 20}, "new flows go to the member without flows"
    is_counted(lab, l1=30, l2=20)
    assert members_of(clients.flows(20)) == {"l2": 15, "l1": 5}, "ten flows for l2 alone, then round robin"
    assert members_of(held) == {"l1": 30}, "existing flows stay"


def test_a_returning_member_gets_flows_until_counts_are_equal(lab, clients):
    """Round robin would alternate instead."""
    serve(lab, "l1", "l2", "l3")
    first = clients.flows(30)
    assert members_of(first) == {"l1": 10, "l2": 10, "l3": 10}
    # The removal of l3 ends its flows: l3 returns without flows.
    serve(lab, "l1", "l2")
    assert members_of(first) == {"l1": 15, "l2": 15}
    serve(lab, "l1", "l2", "l3")
    is_counted(lab, l1=15, l2=15, l3=0)
    assert members_of(clients.flows(12)) == {"l3": 12}
    is_counted(lab, l1=15, l2=15, l3=12)
    assert members_of(clients.flows(6)) == {"l3": 4, "l1": 1, "l2": 1}


def test_weights_and_families(lab, clients):
    serve(lab, *ALL_MEMBERS, weights={"l1": 3, "m1": 2})
    assert members_of(clients.flows(25)) == {"l1": 15, "l2": 5, "l3": 5}
    assert members_of(clients.flows(12, "2001:db8:1::20")) == {"m1": 8, "m2": 4}
    is_counted(lab, l1=15, l2=5, l3=5, m1=8, m2=4)
    serve(lab, *ALL_MEMBERS, weights={"l2": 0, "l3": 3, "m1": 1, "m2": 1})
    assert members_of(clients.flows(20)) == {"l3": 20}, "15 for weight 3 equal 5 for weight 1; l1 has 15"
    assert members_of(clients.flows(6, "2001:db8:1::20")) == {"m2": 5, "m1": 1}


def test_each_amphora_of_a_pair_counts_and_persistence_is_refused(lab, clients):
    """Each amphora of a pair has its own flows and counts."""
    serve(lab, "l1")
    assert members_of(clients.flows(10)) == {"l1": 10}
    eventually(lambda: flows_of(lab) == {"l1": 10}, "the checker has counted the flows")
    serve(lab, "l1", "l2")
    assert members_of(clients.flows(10)) == {"l2": 10}
    refused = virtual_server(member("l1", PLACES["l1"]), algorithm="LEAST_CONNECTIONS", persistence=persistence())
    status, answer = lab.amphora.push(next(lab.generations), None, virtual_servers=[refused])
    assert (status, answer["object_id"]) == (422, LISTENER)
    assert "persistence" in answer["error"]["happened"]


def test_flows_of_each_member_are_reported(lab, clients):
    serve(lab, "l1", "l2", algorithm="ROUND_ROBIN")
    some = clients.flows(4)
    asked = b"x" * 72
    back = Counter()
    for flow in some:
        for _ in range(3):
            answer = flow.ask(asked)
            back[answer.member] += 28 + len(f"{answer.member} {answer.seen} {answer.port} ") + len(asked)
    there = {"active_connections": 2, "total_connections": 2, "bytes_in": 6 * 100}
    eventually(lambda: flows_of(lab) == {"l1": 2, "l2": 2}, "the checker has counted the flows")
    assert given(lab) == {name: {**there, "bytes_out": back[name]} for name in ("l1", "l2")}
    serve(lab, "l1", algorithm="ROUND_ROBIN")
    assert given(lab)["l1"]["bytes_in"] == 600, "a change of other members keeps the counters"
    serve(lab, "l1", "l2", algorithm="ROUND_ROBIN")
    assert given(lab)["l2"]["total_connections"] == 0, "a returning member starts at zero"


def test_the_checker_polls_flows_of_least_connections_pools_only(tmp_path):
    place = checked_members.CheckedNetwork(f"lst{os.getpid()}", addresses=1)
    try:
        process = checked_members.Process(place, tmp_path)
        process.start()
        try:
            one = checked_members.server(checked_members.member(1))
            process.serve(one)
            process.serve(replace(one, algorithm="LEAST_CONNECTIONS"))
            eventually(lambda: len(said(tmp_path, "balanced")) >= 2, "the checker polls repeatedly")
            before = len(said(tmp_path, "up"))
            (tmp_path / "unbalanced").touch()
            eventually(lambda: len(said(tmp_path, "up")) > before, "the checker writes all rules after a refusal")
            asked = len(said(tmp_path, "balanced"))
            eventually(lambda: len(said(tmp_path, "balanced")) > asked, "the checker continues")
            process.serve(one)
            at_most = len(said(tmp_path, "balanced"))
            time.sleep(2 * _REBALANCE_SECONDS)  # the checker must not poll in this time
            assert len(said(tmp_path, "balanced")) == at_most
        finally:
            process.close()
    finally:
        place.close()


def said(directory, word):
    """Return the recorded calls of the engine with this word."""
    lines = (directory / "engine.log").read_text(encoding="utf-8").splitlines()
    return [found for found in map(json.loads, lines) if word in found]
