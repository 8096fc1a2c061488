# SPDX-License-Identifier: Apache-2.0
"""Abridged checks of large pools: HAProxy checks changed servers only, with a full check's result."""

from __future__ import annotations

from pathlib import Path

import pytest
from under_load import Prepared, quick_members
from wanted import listener, load_balancer, member, pool

pytestmark = pytest.mark.root


def read_by_haproxy(served) -> str:
    return Path(f"/proc/{served.amphora.init()}/root/run/amphora-agent/haproxy.cfg.abridged").read_text()


def test_an_invalid_member_of_many_is_named(served):
    members = quick_members("many", 80, 200)
    prepared = Prepared(served, load_balancer(listener(80), pool("pool", *map(member, members))))
    prepared.push()
    prepared.state[members[70].id] = (3, False)
    assert prepared.push().how == "runtime"
    lines = [line.split()[:2] for line in read_by_haproxy(served).split("\n")]
    assert [line[1] for line in lines if line[:1] == ["server"] and line[1] in prepared.state] == [members[70].id]

    wrong = members[41]
    place = f"server {wrong.id} {wrong.address}:{wrong.port}"
    line = next(n for n, each in enumerate(prepared.text().split("\n"), start=1) if place in each)
    prepared.marks[f"{place} weight 1"] = f"{place} weight 999"
    error = prepared.refused()
    assert error["object_id"] == wrong.id
    assert error["happened"].startswith(f"line {line}: ")

    prepared.marks.clear()
    prepared.push()
    weights = {name: row["weight"] for (_, name), row in served.statistics().items() if name in prepared.state}
    assert weights == {each.id: "3" if each is members[70] else "1" for each in members}
