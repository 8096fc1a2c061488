# SPDX-License-Identifier: Apache-2.0
"""Abridged and omitted checks: HAProxy checks new lines only, with the result of a full check."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from under_load import Prepared, quick_members
from wanted import listener, load_balancer, member, pool

from amphora_agent.haproxy import config_check, config_diff
from amphora_agent.haproxy.config_file import Document
from amphora_agent.haproxy.config_parser import parse

pytestmark = pytest.mark.root
MACHINE = "global\n    stats socket /dev/null\ndefaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n"
OTHER = (
    "    balance source",
    "    use-server s1 if TRUE",
    "    acl up srv_is_up(b/s2)",
    "    option httpchk",
    "    # words",
)


def last_checked(served) -> Path:
    """Return the file of the last abridged check; each check writes it."""
    return Path(f"/proc/{served.amphora.init()}/root/run/amphora-agent/haproxy.cfg.abridged")


def test_an_invalid_member_of_many_is_named(served):
    members = quick_members("many", 80, 200)
    prepared = Prepared(served, load_balancer(listener(80), pool("pool", *map(member, members))))
    new = members[70]
    prepared.state[new.id] = None
    prepared.push()
    prepared.state[new.id] = (3, False)
    assert prepared.push().how == "runtime"
    lines = [line.split()[:2] for line in last_checked(served).read_text().split("\n")]
    assert [line[1] for line in lines if line[:1] == ["server"] and line[1] in prepared.state] == [new.id]

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
    assert weights == {each.id: "3" if each is new else "1" for each in members}


def test_only_a_new_member_has_a_check(served):
    members = quick_members("many", 80, 200)
    prepared = Prepared(served, load_balancer(listener(80), pool("pool", *map(member, members))))
    prepared.push()
    checked = []
    for state in ((7, False), (7, True), (1, False), None, (1, False)):
        before = last_checked(served).stat().st_mtime_ns if last_checked(served).exists() else 0
        prepared.state[members[5].id] = state
        assert prepared.push().how == "runtime"
        checked.append(last_checked(served).exists() and last_checked(served).stat().st_mtime_ns != before)
    assert checked == [False, False, False, False, True]


def test_a_change_without_a_check_restores_the_part_of_the_machine(served):
    """HAProxy reads this file at a start, so a start after the change would fail without it."""
    member1 = quick_members("one", 1, 300)[0]
    prepared = Prepared(served, load_balancer(listener(80), pool("pool", member(member1))))
    prepared.push()
    machine = served.amphora.var / "machine.cfg"
    content = machine.read_text()
    machine.unlink()
    prepared.state[member1.id] = (7, False)
    assert prepared.push().how == "runtime"
    assert machine.read_text() == content


def test_haproxy_accepts_each_change_that_has_no_check(tmp_path):
    """Random changes of a configuration that HAProxy accepts, decided by the agent and checked by HAProxy."""
    chance = random.Random(23)
    needed, accepted = [], []
    while len(accepted) < 30:
        old = [line for n in range(6) for line in _lines(chance, n)]
        new = [_changed(chance, line) for line in old if chance.random() < 0.8 or "server" not in line]
        before, after = (Document("", "backend b\n" + "\n".join(lines) + "\n") for lines in (old, new))
        wanted = parse(after.text)
        decision = config_diff.compare_configurations(parse(before.text), wanted)
        if isinstance(decision, config_diff.Runtime) and _accepts(tmp_path, before.text):
            if config_check.is_needed(before, after, wanted, decision.actions):
                needed.append(after.text)
            else:
                accepted.append(_accepts(tmp_path, after.text))
    assert all(accepted)
    assert not all(_accepts(tmp_path, text) for text in needed[:10]), "a check finds an error"


def _lines(chance, number):
    if chance.random() < 0.2:
        yield chance.choice(OTHER)
    words = [f"    server s{number} 192.0.2.1:{8000 + number}"]
    words += [f"weight {chance.randrange(1, 256)}"] if chance.random() < 0.5 else []
    words += [word for word in ("check", "disabled", "backup") if chance.random() < 0.2]
    words += ["track b/s2"] if chance.random() < 0.1 else []
    yield " ".join(words)


def _changed(chance, line):
    if not line.startswith("    server") or chance.random() < 0.4:
        return line
    likely = (line.replace(" disabled", ""), line + " disabled", line + f" weight {chance.randrange(257)}")
    if chance.random() < 0.9:
        return chance.choice(likely)
    return chance.choice((line.replace(" weight", " weight x weight"), line + " weight 10000 weight 2"))


def _accepts(folder, text) -> bool:
    file = folder / "text.cfg"
    file.write_text(MACHINE + text)
    return subprocess.run(["haproxy", "-c", "-f", str(file)], capture_output=True, check=False).returncode == 0
