# SPDX-License-Identifier: Apache-2.0
"""Concurrent pushes: the newest one is applied, none is lost, and none waits for a superseded one."""

from __future__ import annotations

import random
import re

import pytest
from amphora_lab import Client, eventually
from configuration_text import MEMBER_IDS, listener, text
from faults import apart, held_at

from amphora_agent.failpoints import Point

pytestmark = pytest.mark.root


def wanted(amphora, generation, members=("m1",), extra="", **keywords):
    """Return a bundle whose text contains its generation, so that each needs a reload."""
    extra += f"    fullconn {generation}\n"
    return amphora.bundle(generation, text(listener(members, extra=extra, **keywords)))


def changes(amphora):
    return amphora.call("GET", "/v2/info")[1]["changes"]


def generation_on_disk(amphora) -> int:
    return int(re.search(r"fullconn (\d+)", (amphora.var / "haproxy.cfg").read_text())[1])


def generation_in_memory(amphora) -> int:
    rows = [line.split(",") for line in amphora.ask_haproxy("show stat -1 2 -1").splitlines() if "amphora" not in line]
    return next(int(row[6]) for row in rows if len(row) > 6 and row[1] == "BACKEND")


@pytest.fixture
def serving(amphora):
    assert amphora.call("PUT", "/v2/bundle", wanted(amphora, 1))[0] == 200
    return amphora


@pytest.mark.parametrize("order", [(3, 4, 5), (5, 4, 3), (4, 5, 3)])
def test_only_the_newest_waiting_push_is_applied(serving, order):
    before = changes(serving)["reload"]["count"]
    with Client(serving.network) as client, apart(serving) as push:
        with held_at(serving, Point.RELOADING, wanted(serving, 2)) as second:
            answers = {}
            for place, generation in enumerate(order, start=1):
                answers[generation] = push(wanted(serving, generation, ["m1", "m2"]))
                eventually(lambda place=place: changes(serving)["waiting"] == place, f"{place} pushes wait")
        # The pushes during a reload are applied after it.
        assert second.result(30)[1]["generation"] == 2
        for generation in order:
            status, answer = answers[generation].result(30)
            assert (status, answer["generation"], answer["how"]) == (200, 5, "reload"), generation
            assert answer["loaded"]["members"] == 2
        client.hears("m2")
    assert client.failures == []
    found = changes(serving)
    assert found["reload"]["count"] == before + 2
    assert found["reload"]["reason"]
    assert generation_on_disk(serving) == generation_in_memory(serving) == 5
    assert serving.call("GET", "/v2/bundle")[1]["generation"] == 5
    status, answer = serving.call("PUT", "/v2/bundle", wanted(serving, 4, ["m1", "m2"]))
    assert (status, answer["generation"]) == (409, 5)


def test_the_next_newest_push_is_applied_if_the_newest_is_invalid(serving):
    with apart(serving) as push:
        with held_at(serving, Point.CHECKING, wanted(serving, 2)):
            three, four = push(wanted(serving, 3)), push(wanted(serving, 4))
            five = push(wanted(serving, 5, ["m1", "m2"], m2="chek"))
            elsewhere = push({**wanted(serving, 6), "load_balancer_id": serving.id})
            eventually(lambda: changes(serving)["waiting"] == 4, "four pushes wait")
            # The agent refuses a foreign or malformed bundle without a wait.
            assert push({**wanted(serving, 9), "amphora_id": serving.load_balancer_id}).result(10)[0] == 409
            assert push({}).result(10)[0] == 400
        assert elsewhere.result(30)[0] == 409
        status, answer = five.result(30)
        assert (status, answer["object_id"]) == (422, MEMBER_IDS["m2"])
        assert [future.result(30)[1]["generation"] for future in (three, four)] == [4, 4]
    assert generation_on_disk(serving) == generation_in_memory(serving) == 4


def test_many_concurrent_pushes_end_with_the_newest_without_failed_requests(serving):
    generations = list(range(2, 14))
    random.Random(5).shuffle(generations)
    with Client(serving.network) as client, apart(serving) as push:
        futures = {n: push(wanted(serving, n, ["m1", "m2"][: 1 + n % 2])) for n in generations}
        for generation, future in futures.items():
            status, answer = future.result(60)
            assert status in (200, 409), answer
            assert answer["generation"] >= generation
        client.hears("m1")
    assert client.failures == []
    assert generation_on_disk(serving) == generation_in_memory(serving) == 13
    assert serving.call("GET", "/v2/bundle")[1]["generation"] == 13


def test_stick_tables_survive_reloads_in_immediate_succession(amphora):
    """Two pushes always wait, so that reloads follow each other immediately."""
    sticky = "    stick-table type ip size 1k expire 1h peers amphora\n    stick on src\n"
    clients = [f"192.0.2.{n}" for n in range(1, 31)]
    assert amphora.call("PUT", "/v2/bundle", wanted(amphora, 1, extra=sticky))[0] == 200
    table = next(line.split()[2].rstrip(",") for line in amphora.ask_haproxy("show table").splitlines())
    for address in clients:
        amphora.ask_haproxy(f"set table {table} key {address} data.server_id 1")
    with apart(amphora) as push:
        for first in range(2, 12, 2):
            futures = [push(wanted(amphora, n, extra=sticky)) for n in (first, first + 1)]
            assert [future.result(60)[0] for future in futures] in ([200, 200], [409, 200])
            assert futures[1].result()[1]["how"] == "reload"
    eventually(lambda: generation_in_memory(amphora) == 11, "the last generation is served")
    answer = eventually(
        lambda: (a := amphora.ask_haproxy(f"show table {table}")) and "used:30" in a and a, "the table has all entries"
    )
    assert all(f"key={address} " in answer for address in clients)
