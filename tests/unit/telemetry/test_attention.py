# SPDX-License-Identifier: Apache-2.0
"""What needs an operator, and what does not."""

import msgspec
import pytest
from some_fleet import INTERVAL, NOW, PROCESSES, balancer, fleet, identifier, machine, process

from amphora_driver.telemetry.alerts import Level, gathered, notices, worst
from amphora_driver.telemetry.fleet_snapshot import Authority, Breaker, Failover, Outbox, Pool, Rotation, Sight, Zombie

GOING = Failover(
    id=1,
    load_balancer_id=identifier(1),
    amphora_id=identifier(1001),
    cause="silent",
    reason=None,
    asked_by=None,
    silent_since=NOW - 9,
    begun_at=NOW - 2,
    served_at=None,
    ended_at=None,
    outcome=None,
)
ROTATION = Rotation(
    id=4, state="paused", max_unavailable=1, asked_by=None, created_at=NOW, ended_at=None, reason="the new one is deaf"
)
AUTHORITY = Authority(id=1, kind="amphora", state="current", expires_at=NOW + 3600)
ZOMBIE = Zombie(amphora_id=identifier(9), address="192.0.2.9", first_at=NOW - 5, last_at=NOW, verdict=None)
SILENT = {"silence": "silent", "silent_since": NOW - 9}


def said(**more):
    return [(one.level, one.text) for one in notices(fleet(**more), INTERVAL)]


def test_a_fleet_that_is_well():
    assert said() == []
    assert worst(()) is Level.WELL
    assert said(amphorae=(machine(), machine(1002, holds_vip=None, state="booting", heard_at=None, confirmed=0))) == []


@pytest.mark.parametrize(
    ("level", "text", "more"),
    [
        (Level.TROUBLE, "breaker is open: 9 of 10", {"breaker": Breaker(state="open", silent=9, watched=10)}),
        (Level.WATCH, "one fail-over through", {"breaker": Breaker(state="trial")}),
        (
            Level.WATCH,
            "held open by an operator: switches; no",
            {"breaker": Breaker(state="open", held=True, reason="switches")},
        ),
        (
            Level.WATCH,
            "blind: nobody is replaced unasked (no route)",
            {"sight": Sight(state="blind", reason="no route")},
        ),
        (Level.TROUBLE, "no controller runs", {"processes": PROCESSES[1:]}),
        (Level.TROUBLE, "no health manager runs", {"processes": (PROCESSES[0], PROCESSES[2])}),
        (Level.TROUBLE, "no provider agent runs", {"processes": PROCESSES[:2]}),
        (
            Level.WATCH,
            "has said nothing more",
            {"processes": (*PROCESSES, process("controller", name="old", seen_at=NOW - 99))},
        ),
        (
            Level.TROUBLE,
            "every controller is draining",
            {"processes": (process("controller", draining=True), *PROCESSES[1:])},
        ),
        (Level.WATCH, "rotation 4 is paused: the new one is deaf", {"rotations": (ROTATION,)}),
        (Level.TROUBLE, "authority of amphoras ends", {"authorities": (AUTHORITY,)}),
        (
            Level.WATCH,
            "authority of amphoras ends",
            {"authorities": (msgspec.structs.replace(AUTHORITY, expires_at=NOW + 86400 * 9),)},
        ),
        (Level.WATCH, "192.0.2.9 sends heartbeats as", {"zombies": (ZOMBIE,)}),
        (Level.WATCH, "quota", {"pools": (Pool(id="p", wanted=1, booted=0, ready=0, error="quota"),)}),
        (Level.WATCH, "belong to nobody", {"orphans": 2}),
        (Level.WATCH, "wait for Octavia", {"outbox": Outbox(waiting=3, oldest=NOW - 60)}),
        (Level.WATCH, "no controller takes it up", {"balancers": (balancer(due=True, due_at=NOW - 60),)}),
        (Level.TROUBLE, "no controller takes it up", {"balancers": (balancer(due=True, due_at=NOW - 600),)}),
        (
            Level.TROUBLE,
            "is in ERROR: quota",
            {"balancers": (balancer(state="ERROR", error="quota", operating="ERROR"),)},
        ),
        (Level.WATCH, "failed 2 times, is tried again: no", {"balancers": (balancer(attempts=2, error="no"),)}),
        (Level.WATCH, "a user waits for generation 5", {"balancers": (balancer(accepted_at=NOW - 60),)}),
        (Level.TROUBLE, "a user waits for generation 5", {"balancers": (balancer(accepted_at=NOW - 600),)}),
        (Level.WATCH, "serves nobody: all down", {"balancers": (balancer(operating="ERROR", reason="all down"),)}),
        (
            Level.TROUBLE,
            "2 amphorae say that they have the VIPs",
            {
                "balancers": (balancer(holders=(identifier(1001), identifier(1002))),),
                "amphorae": (machine(holds_vip=True), machine(1002, holds_vip=True)),
            },
        ),
        (
            Level.TROUBLE,
            "no amphora says that it has the VIPs",
            {"amphorae": (machine(holds_vip=False), machine(1002, holds_vip=False))},
        ),
        (Level.TROUBLE, "is silent", {"amphorae": (machine(**SILENT),)}),
        (Level.WATCH, "is silent", {"amphorae": (machine(**SILENT),), "failovers": (GOING,)}),
        (Level.TROUBLE, "never spoke: why", {"amphorae": (machine(silence="never_spoke", verdict="why"),)}),
        (Level.WATCH, "was not heard for ten intervals", {"amphorae": (machine(heard_at=NOW - 99),)}),
        (Level.WATCH, "differs from what is wanted: nft", {"amphorae": (machine(drift="nft", drifts=True),)}),
        (Level.TROUBLE, "its certificate has expired", {"amphorae": (machine(certificate_expires_at=NOW - 1),)}),
        (
            Level.WATCH,
            "was not renewed",
            {"amphorae": (machine(certificate_issued_at=NOW - 900, certificate_expires_at=NOW + 100),)},
        ),
    ],
)
def test_what_needs_attention(level, text, more):
    (found,) = said(**more)
    assert found[0] is level
    assert text in found[1]


def test_the_automatic_has_it_in_hand():
    """Nothing of this is anybody's business."""
    young = {"due": True, "due_at": NOW - 2, "accepted_at": NOW - 2, "state": "PENDING_UPDATE", "applied": 4}
    assert said(balancers=(balancer(**young),)) == []
    assert said(balancers=(balancer(due=True, due_at=NOW + 600),)) == []
    assert said(balancers=(balancer(due=True, due_at=NOW - 600, owner="somebody"),)) == []
    going = (machine(holds_vip=True), machine(1002, holds_vip=True, state="retiring"))
    assert said(balancers=(balancer(holders=(identifier(1001), identifier(1002))),), amphorae=going) == []


def test_the_worst_comes_first():
    found = notices(fleet(orphans=1, balancers=(balancer(state="ERROR"),)), INTERVAL)
    assert [one.level for one in found] == [Level.TROUBLE, Level.WATCH]
    assert worst(found) is Level.TROUBLE


def test_many_alike_are_one_thing():
    many = tuple(machine(1000 + number, **SILENT) for number in range(57))
    shown, things = gathered(notices(fleet(amphorae=many, orphans=1), INTERVAL))
    assert things == 2
    assert [one.kind for one in shown] == ["amphora", "amphora", "more", "fleet"]
    assert shown[2].text == "55 more amphorae: not heard"
    shown, things = gathered(notices(fleet(amphorae=many[:3]), INTERVAL))
    assert things == len(shown) == 3
