# SPDX-License-Identifier: Apache-2.0
"""The last confirmed generation is served after a crash, full disk or power cut during a change."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress

import pytest
from amphora_lab import MAC, VIP, Amphora, alive, eventually
from configuration_text import listener, text
from faults import agents, answered, arm, fill, haproxy_pids, held_at, push_quietly, small_disk
from test_file_sets import files, presented, secure, shown

from amphora_agent.failpoints import Point

pytestmark = pytest.mark.root
ALWAYS = [
    Point.TAKEN,
    Point.FILES,
    Point.CHECKING,
    Point.RESERVED,
    Point.MARKED,
    Point.CHECKED,
    Point.SWITCHED,
    Point.LOADED,
    Point.CONFIRMED,
    Point.FINISHED,
    Point.TIDIED,
]
# The new generation is confirmed at these points.
AFTER = {Point.CONFIRMED, Point.FINISHED, Point.TIDIED}
BY_RUNTIME = [*ALWAYS, Point.EARLY]
BY_RELOAD = [*ALWAYS, Point.HANDED_OVER, Point.RELOADING]


def served(amphora) -> tuple[str, int]:
    """Return members and fullconn of the running HAProxy, which identify its generation."""
    rows = [line.split(",") for line in amphora.ask_haproxy("show stat -1 6 -1").splitlines() if "amphora:" not in line]
    members = sorted(row[1] for row in rows if len(row) > 6 and row[1] not in ("svname", "BACKEND"))
    full = next(int(row[6]) for row in rows if len(row) > 6 and row[1] == "BACKEND")
    return ",".join(members), full


def on_disk(amphora) -> tuple[str, int]:
    content = (amphora.var / "haproxy.cfg").read_text()
    members = sorted(re.findall(r"^ +server (\S+)", content, re.MULTILINE))
    found = re.search(r"fullconn (\d+)", content)
    return ",".join(m for m in members if m != "responder"), int(found[1]) if found else 0


def wanted(generation: int, number: int, members) -> str:
    return text(listener(members, extra=f"    fullconn {number}\n"))


def settled(amphora, generation) -> bool:
    """Return whether this generation is confirmed, and is the only one served and stored."""
    with suppress(OSError, StopIteration, KeyError):
        return (
            amphora.call("GET", "/v2/bundle")[1]["generation"] == generation
            and not (amphora.var / "unfinished").exists()
            and served(amphora) == on_disk(amphora)
        )
    return False


@pytest.mark.parametrize("by", ["runtime", "reload"])
def test_the_agent_is_killed_at_each_point_of_a_change(amphora, by):
    """After each kill the confirmed generation is served, and another change works."""
    both, number = [["m1"], ["m1", "m2"]], 100
    assert amphora.push(1, wanted(1, number, both[0]))[0] == 200
    current = 0
    expected = served(amphora)
    for generation, point in enumerate(BY_RUNTIME if by == "runtime" else BY_RELOAD, start=2):
        armed = arm(amphora, point)
        current, number = (1 - current, number) if by == "runtime" else (current, number + 1)
        before = agents(amphora)
        push_quietly(amphora, generation, wanted(generation, number, both[current]))
        assert not armed.exists(), f"{point} was not reached"
        eventually(lambda before=before: not alive(before[-1]), "the agent has ended")
        eventually(amphora.answers, "the restarted agent answers")
        known = amphora.call("GET", "/v2/bundle")[1]["generation"]
        assert known == (generation if point in AFTER else generation - 1), point
        eventually(lambda known=known: settled(amphora, known), f"generation {known} is served after {point}")
        if known != generation:
            assert served(amphora) == expected, point
        assert answered(amphora) in ("m1", "m2")
        status, answer = amphora.push(generation, wanted(generation, number, both[current]))
        assert status == 200, (point, answer)
        expected = served(amphora)
        assert settled(amphora, generation)
        assert expected[1] == number
    left = {file.name for file in amphora.var.iterdir() if not file.name.startswith(".")}
    text = json.loads((amphora.var / "confirmed.json").read_text())["text"]
    assert left == {"haproxy.cfg", "machine.cfg", "confirmed.json", text, "totals.json", "epoch", "callers.json"}
    assert (amphora.var / text).samefile(amphora.var / "haproxy.cfg")


@pytest.mark.parametrize("victim", ["master", "worker", "both"])
def test_haproxy_is_killed_at_each_point_of_a_change(amphora, victim):
    """HAProxy is killed while the change is suspended: the new or the former generation is served."""
    number = 100
    assert amphora.push(1, wanted(1, number, ["m1"]))[0] == 200
    generation = 1
    for point in (Point.CHECKING, Point.EARLY, Point.SWITCHED, Point.HANDED_OVER, Point.RELOADING, Point.LOADED):
        generation += 1
        if point is Point.EARLY:
            members = ["m1", "m2"]
        else:
            members, number = ["m1"], number + 1
        with held_at(amphora, point, amphora.bundle(generation, wanted(generation, number, members))) as answer:
            master, worker = haproxy_pids(amphora)
            victims = {"master": [master], "worker": [worker], "both": [worker, master]}[victim]
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda victims=victims: not any(alive(pid) for pid in victims), "HAProxy has ended")
        status, said = answer.result(60)
        known = amphora.call("GET", "/v2/bundle")[1]["generation"]
        assert known == (generation if status == 200 else generation - 1), (point, said)
        eventually(
            lambda known=known: settled(amphora, known), f"generation {known} is served after {point}: {said}", 30
        )
        eventually(lambda: answered(amphora) is not None, "a member answers")
        if status != 200:
            assert amphora.push(generation, wanted(generation, number, members))[0] == 200


@pytest.fixture
def small(network, authority, tmp_path):
    """An amphora with a small separate disk."""
    network.plug()
    made = Amphora(network, tmp_path, authority)
    try:
        with small_disk(made, 256):
            made.start()
            eventually(made.answers, "the agent answers")
            yield made
    finally:
        network.unplug()


@pytest.mark.parametrize("by", ["runtime", "reload"])
def test_a_full_disk_at_each_point_of_a_change(small, network, by):
    """The agent refuses the change before its first step, and completes it after that step."""
    both, current, number = [["m1"], ["m1", "m2"]], 0, 100
    assert small.push(1, wanted(1, number, both[0]))[0] == 200
    assert small.push(2, wanted(2, number, both[0]))[0] == 200  # the agent checks interfaces with two pushes
    generation = 2
    for point in [p for p in (BY_RUNTIME if by == "runtime" else BY_RELOAD) if p not in AFTER]:
        generation += 1
        current, number = (1 - current, number) if by == "runtime" else (current, number + 1)
        before = served(small)
        with held_at(small, point, small.bundle(generation, wanted(generation, number, both[current]))) as answer:
            filler = fill(small)
        status, said = answer.result(60)
        untouched = point in (Point.TAKEN, Point.FILES, Point.CHECKING)
        assert status == (500 if untouched else 200), (point, said)
        if untouched:
            assert "No space left" in said["error"]["happened"]
            assert served(small) == before
            assert settled(small, generation - 1)
            filler.unlink()
            assert small.push(generation, wanted(generation, number, both[current]))[0] == 200
        assert settled(small, generation), point
        assert served(small)[1] == number
        filler.unlink(missing_ok=True)


def test_a_full_disk_prevents_neither_service_after_a_reboot_nor_heartbeats(small, network):
    assert small.push(1, wanted(1, 100, ["m1"]))[0] == 200
    assert small.push(2, wanted(2, 101, ["m1", "m2"]))[0] == 200
    filler = fill(small)
    status, said = small.push(3, wanted(3, 102, ["m1"]))
    assert (status, "No space left" in said["error"]["happened"]) == (500, True)
    epoch = int((small.var / "epoch").read_text())
    small.power_off()
    network.unplug()
    network.plug()
    small.start()
    eventually(lambda: answered(small) is not None, "the last confirmed generation is served")
    eventually(lambda: settled(small, 2), "only generation 2 is served and stored")
    assert served(small)[1] == 101
    eventually(lambda: int((small.var / "epoch").read_text() or 0) > epoch, "heartbeats are sent, under a newer epoch")
    filler.unlink()
    assert small.push(3, wanted(3, 102, ["m1"]))[0] == 200


@pytest.mark.parametrize("point", [Point.MARKED, Point.SWITCHED, Point.RELOADING, Point.LOADED, Point.CONFIRMED])
def test_a_power_cut_at_any_point_with_a_full_disk(small, network, point):
    """Checks the order of writes, not fsync: a file system in memory loses nothing in a power cut."""
    assert small.push(1, wanted(1, 100, ["m1"]))[0] == 200
    with held_at(small, point, small.bundle(2, wanted(2, 101, ["m1", "m2"]))) as answer:
        fill(small)
        small.power_off()
        network.unplug()
        (small.points / point.value).unlink()
        assert answer.exception(60) is not None
    network.plug()
    small.start()
    eventually(lambda: answered(small) is not None, "a member answers")
    generation = 2 if point is Point.CONFIRMED else 1
    eventually(lambda: settled(small, generation), f"generation {generation} is served")
    assert served(small)[1] == 99 + generation
    (small.var / "filler").unlink()
    assert small.push(2, wanted(2, 101, ["m1", "m2"]))[0] == 200
    assert small.push(3, wanted(3, 102, ["m1"]))[0] == 200


def test_the_agent_is_killed_between_two_certificates(amphora, tenant, network):
    """After a reboot the agent waits for a push, because keys are in memory only."""
    old, new = tenant.issue("www.example.com"), tenant.issue("www.example.com", number=1)
    assert amphora.push(1, secure(), files(old))[0] == 200
    for generation, point in enumerate((Point.FILES, Point.SWITCHED, Point.RELOADING, Point.LOADED), start=2):
        arm(amphora, point)
        push_quietly(amphora, generation, secure(extra=f"    fullconn {generation}\n"), files(new))
        eventually(amphora.answers, "the restarted agent answers")
        eventually(lambda: not (amphora.var / "unfinished").exists(), "the rollback is finished")
        eventually(lambda: shown(amphora) == old.der, "the former certificate is presented")
        assert amphora.call("GET", "/v2/bundle")[1]["generation"] == generation - 1
        assert amphora.push(generation, secure(), files(old))[0] == 200
    arm(amphora, Point.LOADED)
    push_quietly(amphora, 6, secure(), files(new))
    amphora.power_off()
    network.unplug()
    network.plug()
    amphora.start()
    eventually(amphora.answers, "the agent answers")
    assert amphora.call("GET", "/v2/bundle")[1]["generation"] == 0
    assert answered(amphora) is None
    assert amphora.push(6, secure(), files(new))[0] == 200
    assert presented(amphora) == new.der


def test_a_failed_change_is_rolled_back_without_a_push(amphora):
    """HAProxy is killed during a reload that cannot succeed."""
    assert amphora.push(1, wanted(1, 100, ["m1"]))[0] == 200
    squat = f"import socket; s = socket.create_server(('{VIP}', 8080)); print('bound', flush=True); s.accept()"
    amphora.supervisor(op="start", name="squatter", argv=["python3", "-c", squat], inner=True, restart=False)
    eventually(lambda: "bound" in amphora.supervisor(op="log", name="squatter")["lines"], "the port is in use")
    second = text(listener(["m1"], extra="    fullconn 101\n", port=8080))
    with held_at(amphora, Point.RELOADING, amphora.bundle(2, second)) as answer:
        master, _ = haproxy_pids(amphora)
        os.kill(master, signal.SIGKILL)
        eventually(lambda: not alive(master), "the master has ended")
    status, said = answer.result(90)
    assert status == 500, said
    eventually(lambda: settled(amphora, 1), "the first generation is served again", 30)
    assert served(amphora)[1] == 100
    eventually(lambda: answered(amphora) == "m1", "member m1 answers")
    assert MAC in str(amphora.call("GET", "/v2/diagnostics")[1]["interfaces"])
