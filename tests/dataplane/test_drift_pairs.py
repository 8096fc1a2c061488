# SPDX-License-Identifier: Apache-2.0
"""Drift on one amphora of a pair is repaired without a move of the VIPs."""

import os
import signal
from pathlib import Path

import pytest
from amphora_lab import eventually
from pair_lab import MEDIUM, PLACES, Node, Pair, plain
from stalls import Stalls

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def booted(pair_network, authority, tmp_path_factory):
    """A pair whose agents audit continuously, in place of the common pair."""
    before, Node.audit = Node.audit, 0.2
    made = Pair(pair_network, tmp_path_factory.mktemp("audited"), authority)
    made.stalls = Stalls()
    try:
        for place in PLACES[:2]:
            made.boot(place)
        made.web()
        made.mend()
        made.advert = MEDIUM
        made.push(plain(made))
        made.calm()
        yield made
    finally:
        Node.audit = before
        made.stalls.close()
        made.close()


def drift(node):
    return node.call("GET", "/v2/info")[1]["drift"]


def mended(node, word, do):
    before = drift(node)["counts"].get(word, 0)
    do()

    def ask():
        found = drift(node)
        return found["counts"].get(word, 0) > before and not found["unrepaired"] and found["last"]["repaired"]

    eventually(ask, f"the drift of {word} is repaired")


@pytest.mark.parametrize("which", ["holder", "standby"])
def test_an_edited_file_of_keepalived_is_restored(booted, which):
    holder = booted.holder
    node = holder if which == "holder" else booted.standby
    file = Path(f"/proc/{node.init()}/root/run/amphora-agent/keepalived.conf")
    right = file.read_text(encoding="ascii")

    def edit():
        file.write_text(f"{right}# by hand\n", encoding="ascii")

    with booted.poll() as polling:
        mended(node, "keepalived", edit)
    assert file.read_text(encoding="ascii") == right
    assert booted.holder is holder
    assert polling.outage < 1.0


@pytest.mark.extended
def test_routes_and_rules_of_the_holder_are_repaired_and_the_vips_stay(booted):
    holder = booted.holder
    with booted.poll():
        mended(holder, "route", lambda: holder.inside("ip", "route", "flush", "table", "1"))
        mended(holder, "rule", lambda: holder.inside("ip", "rule", "del", "pref", "100"))
        mended(holder, "firewall", lambda: holder.inside("nft", "flush", "ruleset"))
    assert booted.holder is holder


def test_vips_that_move_are_no_drift(booted):
    """keepalived adds and removes the VIPs, so their absence is no drift."""
    first, second = booted.holder, booted.standby
    before = {node: drift(node)["counts"] for node in (first, second)}
    keepalived = first.processes("keepalived")
    os.kill(keepalived[0], signal.SIGTERM)
    eventually(second.holds, "the other node has the VIPs")
    eventually(first.is_well, "keepalived is started again")
    for node in (first, second):
        looks = drift(node)["checks"]
        eventually(lambda node=node, looks=looks: drift(node)["checks"] >= looks + 3, "the agent audits")
        assert drift(node)["counts"] == before[node]
