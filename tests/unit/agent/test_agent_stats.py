# SPDX-License-Identifier: Apache-2.0
"""Counters, samples and datagrams."""

from __future__ import annotations

import json
import logging
import secrets
import uuid
import zlib
from types import SimpleNamespace

import pytest
from agent_heartbeats import decode
from hypothesis import given
from hypothesis import strategies as st

from amphora_agent.config import load
from amphora_agent.errors import SettingsError
from amphora_agent.paths import Paths
from amphora_agent.stats import former_workers, heartbeat_codec
from amphora_agent.stats.former_workers import COUNTED
from amphora_agent.stats.haproxy_stats import NONE, Counters, key, parse
from amphora_agent.stats.heartbeat_codec import LARGEST, datagrams, encode
from amphora_agent.stats.heartbeat_sender import next_epoch
from amphora_agent.stats.monotonic_counters import MOST_ABSENT, MonotonicCounters

AMPHORA = uuid.UUID("0b9d7a52-0000-4000-8000-000000000001")
KEY = bytes(range(32))


ROW = key("l")


def counted(number):
    return {ROW: tuple(number + place for place in range(len(COUNTED)))}


def first(totals, row=ROW):
    return totals.total(row)[0]


def again(totals):
    return MonotonicCounters.restored(json.loads(totals.text()))


def test_totals_are_summed_over_workers():
    totals = MonotonicCounters()
    totals.read("1", counted(10))
    totals.read("2", counted(3))  # the old worker still serves
    totals.read("1", counted(12))
    assert first(totals) == 15
    assert totals.total(ROW, without="1")[0] == 3
    totals.settle_others({"2"})
    assert first(totals) == 15
    totals = again(totals)
    totals.read("2", counted(4))
    assert first(totals) == 16
    totals.read("2", counted(1))  # an operator cleared the counters
    assert first(totals) == 17
    assert totals.total("another") == NONE
    totals.settle_others(())
    assert first(totals) == 17
    assert totals.total(ROW)[1] == 17 + 3 * 1  # every column of the last reading of each worker


def test_a_row_that_returns_in_the_same_worker_is_summed():
    totals = MonotonicCounters()
    totals.read("1", counted(10))
    before = totals.settlements
    totals.read("1", {})
    assert first(totals) == 10
    assert totals.settlements == before + 1
    totals.read("1", counted(25))
    assert first(totals) == 35


def test_a_deleted_row_that_returns_before_the_next_reading_is_summed():
    totals = MonotonicCounters()
    totals.read("1", counted(10))
    totals.read("2", counted(3))  # the old worker still serves
    totals.settle("1", ROW)
    assert first(totals) == 13
    totals.settle("1", ROW)
    totals.settle("", ROW)
    assert first(totals) == 13
    totals.read("1", counted(25))  # more than before the deletion
    assert first(totals) == 38


def test_rows_of_former_listeners_expire():
    totals = MonotonicCounters()
    for number in range(MOST_ABSENT + 500):
        totals.read("1", {f"p,{number}": counted(1)[ROW], ROW: counted(number)[ROW]})
        totals.settle_others({"1"})
    assert len(totals.document()["settled"]) <= MOST_ABSENT + 1
    assert first(totals, f"p,{MOST_ABSENT + 400}") == 1
    assert first(totals, "p,3") == 0


@pytest.mark.parametrize("rows", [0, 1, 500, 1234])
def test_the_text_is_the_document_as_json(rows):
    totals = MonotonicCounters()
    totals.read("1:7", {f'"{number}': counted(number)[ROW] for number in range(rows)})
    totals.settle_others(())
    totals.read("2:7", {f"p,{number}": counted(number)[ROW] for number in range(rows)})
    assert totals.text() == json.dumps(totals.document(), separators=(",", ":"))


def test_columns_are_matched_by_name():
    totals = MonotonicCounters()
    totals.read("1", counted(10))
    document = json.loads(json.dumps(totals.document()))
    document["columns"] = [*document["columns"][1:], "unheard-of"]
    totals = MonotonicCounters.restored(document)
    assert totals.total(ROW)[:3] == (0, 10, 11)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.sampled_from("abc"), st.integers(0, 50)),
            st.tuples(st.just("keep"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("lose"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("restore"), st.just(""), st.just(0)),
        )
    )
)
def test_totals_never_decrease(events):
    totals, last = MonotonicCounters(), NONE
    for event, worker, number in events:
        if event == "read":
            totals.read(worker, counted(number))
        elif event == "lose":
            totals.read(worker, {})
        elif event == "keep":
            totals.settle_others({worker})
        else:
            totals = again(totals)
        visible = totals.total(ROW)
        assert all(new >= old for new, old in zip(visible, last, strict=True))
        last = visible


def test_sums_of_earlier_workers_are_stored_in_a_file():
    rows = {"l,FRONTEND": counted(7)[ROW], "p:l,m": NONE, "p:l,n": counted(1)[ROW]}
    found = former_workers.read(former_workers.compose(17, rows))
    assert (found.present, tuple(found.columns)) == (17, COUNTED)
    assert {row for row in found.sums if row} == {"l,FRONTEND", "p:l,n"}
    assert found.sums["l,FRONTEND"] == [str(count) for count in rows["l,FRONTEND"]]
    assert former_workers.read("") is None
    assert former_workers.read("something\nelse\n") is None


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


def test_a_sample_is_parsed():
    sample = parse(ANSWER.format(stopping=1))
    assert (sample.pid, sample.stopping, sample.other_jobs) == (17, True, 2)
    assert sample.listeners["lis"].status == "OPEN"
    assert sample.listeners["lis"].active_connections == 2
    assert Counters.of(sample.counts[key("lis")]) == Counters(1000, 2000, 5, 40)
    assert dict(zip(COUNTED, sample.counts["p:lis,m1"], strict=True)) == dict.fromkeys(COUNTED, 0) | {
        "stot": 7,
        "bin": 8,
        "bout": 9,
    }
    assert sample.counts.keys() == {"lis,FRONTEND", "p:lis,m1", "p:lis,BACKEND"}
    assert sample.pools == {"p:lis": "UP"}
    assert sample.members == {"p:lis": {"m1": "UP 1/3"}}
    assert parse("") is None
    assert parse("Unknown command\n") is None


def test_a_worker_that_begins_to_stop_during_its_answer_is_stopping():
    """The worker reports its listeners as stopped, after it reported that it stays."""
    begun = ANSWER.format(stopping=0).replace("OPEN", "STOP") + ANSWER.format(stopping=1).partition("# pxname")[0]
    assert parse(begun).stopping
    assert not parse(ANSWER.format(stopping=0) + ANSWER.format(stopping=0).partition("# pxname")[0]).stopping


def document(members):
    return {
        "generation": 3,
        "listeners": {"l": {"status": "OPEN"}},
        "pools": {"p:l": {"status": "UP", "members": members}, "q:l": {"status": "DOWN", "members": {}}},
    }


def test_a_report_fits_one_datagram():
    (datagram,) = datagrams(AMPHORA, KEY, 7, 1, document({"m": "UP"}))
    heartbeat = decode(datagram, KEY)
    assert (heartbeat.amphora_id, heartbeat.epoch, heartbeat.sequence) == (AMPHORA, 7, 1)
    assert heartbeat.document == document({"m": "UP"})


def test_several_datagrams_have_the_content_of_one():
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


def test_each_part_of_a_large_report_is_compressed_once(monkeypatch):
    compressed = []

    def compress(text, level):
        compressed.append(text)
        return zlib.compress(text, level)

    monkeypatch.setattr(heartbeat_codec, "zlib", SimpleNamespace(**{**vars(zlib), "compress": compress}))
    members = {str(uuid.uuid4()): "no check" for _ in range(10_000)}
    parts = list(datagrams(AMPHORA, KEY, 7, 1, document(members)))
    assert max(map(len, parts)) <= LARGEST
    assert len(compressed) == len(parts) <= 6


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


def test_settings_are_parsed(tmp_path):
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
def test_wrong_settings_are_refused(tmp_path, wrong):
    with pytest.raises(SettingsError):
        settings(tmp_path, **wrong)
