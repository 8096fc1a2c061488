# SPDX-License-Identifier: Apache-2.0
"""Counters, samples and datagrams."""

from __future__ import annotations

import json
import logging
import secrets
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora_agent.config import load
from amphora_agent.errors import SettingsError
from amphora_agent.paths import Paths
from amphora_agent.stats.codec import LARGEST, datagrams, decode, encode
from amphora_agent.stats.collect import Counters, parse
from amphora_agent.stats.sender import next_epoch
from amphora_agent.stats.totals import Totals

AMPHORA = uuid.UUID("0b9d7a52-0000-4000-8000-000000000001")
KEY = bytes(range(32))


def counted(number):
    return {"l": Counters(number, number, 0, number)}


def test_totals_add_up_over_workers():
    totals = Totals()
    totals.read("1", counted(10))
    totals.read("2", counted(3))  # the old one still serves
    totals.read("1", counted(12))
    assert totals.visible("l").total_connections == 15
    totals.keep({"2"})
    assert totals.visible("l").total_connections == 15
    totals = Totals.restored(json.loads(json.dumps(totals.document())))
    totals.read("2", counted(4))
    assert totals.visible("l").total_connections == 16
    totals.read("2", counted(1))  # somebody cleared the counters
    assert totals.visible("l").total_connections == 17
    assert totals.visible("another") == Counters()
    totals.keep(())
    assert totals.visible("l").total_connections == 17


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.sampled_from("abc"), st.integers(0, 50)),
            st.tuples(st.just("keep"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("restore"), st.just(""), st.just(0)),
        )
    )
)
def test_totals_never_fall(events):
    totals, last = Totals(), 0
    for event, worker, number in events:
        if event == "read":
            totals.read(worker, counted(number))
        elif event == "keep":
            totals.keep({worker})
        else:
            totals = Totals.restored(json.loads(json.dumps(totals.document())))
        visible = totals.visible("l").bytes_in
        assert visible >= last
        last = visible


ANSWER = """Name: HAProxy
Pid: 17
Stopping: {stopping}
Jobs: 4
Unstoppable Jobs: 1

# pxname,svname,qcur,qmax,scur,smax,slim,stot,bin,bout,dreq,dresp,ereq,econ,eresp,wretr,wredis,status,weight,x,
lis,FRONTEND,,,2,3,100,40,1000,2000,0,0,5,,,,,OPEN,,,
amphora:metrics,responder,0,0,0,0,,7,8,9,,0,,0,0,0,0,no check,1,,
amphora:metrics,BACKEND,0,0,0,0,10,7,8,9,0,0,,0,0,0,0,UP,1,,
p:lis,m1,0,0,0,0,,7,8,9,,0,,0,0,0,0,UP 1/3,1,,
p:lis,BACKEND,0,0,0,0,10,7,8,9,0,0,,0,0,0,0,UP,1,,

"""


def test_a_sample():
    sample = parse(ANSWER.format(stopping=1))
    assert (sample.pid, sample.stopping, sample.other_jobs) == (17, True, 2)
    assert sample.listeners["lis"].status == "OPEN"
    assert sample.listeners["lis"].active_connections == 2
    assert sample.listeners["lis"].counters == Counters(1000, 2000, 5, 40)
    assert sample.pools == {"p:lis": "UP"}
    assert sample.members == {"p:lis": {"m1": "UP 1/3"}}
    assert parse("") is None
    assert parse("Unknown command\n") is None


def document(members):
    return {
        "generation": 3,
        "listeners": {"l": {"status": "OPEN"}},
        "pools": {"p:l": {"status": "UP", "members": members}, "q:l": {"status": "DOWN", "members": {}}},
    }


def test_one_datagram():
    (datagram,) = datagrams(AMPHORA, KEY, 7, 1, document({"m": "UP"}))
    heartbeat = decode(datagram, KEY)
    assert (heartbeat.amphora_id, heartbeat.epoch, heartbeat.sequence) == (AMPHORA, 7, 1)
    assert heartbeat.document == document({"m": "UP"})


def test_many_datagrams_say_together_what_one_would():
    members = {secrets.token_hex(16): secrets.token_hex(8) for _ in range(5000)}
    parts = list(datagrams(AMPHORA, KEY, 7, 41, document(members)))
    assert len(parts) > 2
    assert max(map(len, parts)) <= LARGEST
    opened = [decode(part, KEY) for part in parts]
    assert [heartbeat.sequence for heartbeat in opened] == list(range(41, 41 + len(parts)))
    seen: dict[str, str] = {}
    for heartbeat in opened:
        assert heartbeat.document["generation"] == 3
        for name, pool in heartbeat.document["pools"].items():
            assert pool["status"] == ("UP" if name == "p:l" else "DOWN")
            assert not seen.keys() & pool["members"].keys()
            seen |= pool["members"]
    assert seen == members
    assert sum("l" in heartbeat.document["listeners"] for heartbeat in opened) == 1
    assert sum("q:l" in heartbeat.document["pools"] for heartbeat in opened) == 1


@pytest.mark.parametrize("place", [0, 5, 22, 30, 40, -1])
def test_a_changed_datagram_is_refused(place):
    datagram = bytearray(encode(AMPHORA, KEY, 7, 1, document({})))
    datagram[place] ^= 1
    with pytest.raises(ValueError, match=r"another key|not a heartbeat"):
        decode(bytes(datagram), KEY)
    with pytest.raises(ValueError, match="not a heartbeat"):
        decode(b"AHB1", KEY)


def test_epochs_grow_even_if_the_clock_does_not(tmp_path):
    paths = Paths(tmp_path)
    paths.var.mkdir(parents=True)
    first = next_epoch(paths)
    paths.epoch.write_text(str(first + 10**18))
    assert next_epoch(paths) == first + 10**18 + 1


CONF = """[agent]
amphora_id = 0b9d7a52-0000-4000-8000-000000000001
bind_address = {bind}
services = supervisor
log_level = {level}
[heartbeat]
targets = {targets}
"""


def settings(
    tmp_path, bind="203.0.113.11", targets="203.0.113.2:5555, [2001:db8::1]:5555", key="00" * 32, level="INFO"
):
    paths = Paths(tmp_path)
    paths.etc.mkdir(parents=True, exist_ok=True)
    (paths.etc / "agent.conf").write_text(CONF.format(bind=bind, targets=targets, level=level))
    (paths.etc / "heartbeat.key").write_text(key + "\n")
    return load(paths)


def test_settings(tmp_path):
    found = settings(tmp_path)
    assert (found.bind, found.interval, found.services) == ("203.0.113.11:9443", 3.0, "supervisor")
    assert found.log_level == logging.INFO
    assert [str(target) for target in found.targets] == ["203.0.113.2:5555", "[2001:db8::1]:5555"]
    assert "heartbeat_key" not in repr(found)
    assert settings(tmp_path, bind="2001:db8::b").bind == "[2001:db8::b]:9443"


@pytest.mark.parametrize(
    "wrong",
    [
        {"bind": "somewhere"},
        {"targets": "203.0.113.2"},
        {"targets": "host:1"},
        {"key": "00"},
        {"key": "xx"},
        {"level": "all"},
    ],
)
def test_wrong_settings(tmp_path, wrong):
    with pytest.raises(SettingsError):
        settings(tmp_path, **wrong)
