# SPDX-License-Identifier: Apache-2.0
"""The plan of a pool of warm spares."""

import pytest

from amphora_driver.model.amphora import Amphora, AmphoraState
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile.spare_pool_plan import LOOK_PAUSE
from amphora_driver.store import spare_pools
from amphora_driver.store.spare_pools import Spare, SparePoolSpec, SparePoolState

NOW = 1000.0
SPEC = SparePoolSpec(number=2, compute="netns", network="local")


def wanted(number=2, users=1, unfit=None, **more):
    values = {"load_balancer_id": SPEC.id, "generation": 0, "applied": 0}
    sees = {"last_heartbeat_at": NOW - 1, "detection_works": True}
    sees |= {name: more.pop(name) for name in sees if name in more}
    stock = SparePoolState(spec=SPEC, number=number, users=users, unfit=unfit or {}, **sees)
    return step_types.SparePoolView(**{**values, "now": NOW, "stock": stock, **more})


def spare(name, **more):
    values = {"id": name, "load_balancer_id": SPEC.id, "role": "SPARE", "state": AmphoraState.READY, "compute_id": name}
    values |= {"management_address": "203.0.113.9", "confirmed": 0, "plugged": (), "heard_at": NOW - 1}
    return Amphora(**{**values, **more})


def coming(name, **more):
    return spare(name, **{"state": AmphoraState.BOOTING, "heard_at": None, **more})


@pytest.mark.parametrize(
    ("want", "observed", "steps"),
    [
        pytest.param(wanted(), (), ["Record", "Record"], id="no spare"),
        pytest.param(wanted(), (spare("a"),), ["Record"], id="one spare missing"),
        pytest.param(
            wanted(),
            (coming("a", management_address=None), coming("b")),
            ["Boot", "AwaitAgent", "AwaitAgent"],
            id="boots",
        ),
        pytest.param(wanted(absent=frozenset("a")), (coming("a"), spare("b")), ["Await"], id="agent awaited"),
        pytest.param(wanted(), (spare("a"), spare("b")), ["Await"], id="complete"),
        pytest.param(wanted(), (spare("a"), spare("b", heard_at=NOW - 100)), ["QuerySpares"], id="silent: probed"),
        pytest.param(
            wanted(asked=frozenset("b")), (spare("a"), spare("b", heard_at=NOW - 100)), ["Await"], id="silent, answers"
        ),
        pytest.param(
            wanted(asked=frozenset("b"), absent=frozenset("b")),
            (spare("a"), spare("b", heard_at=NOW - 100)),
            ["RetireSpare"],
            id="silent, no answer",
        ),
        pytest.param(
            wanted(asked=frozenset("b"), absent=frozenset("b")),
            (spare("a"), spare("b", heard_at=NOW - 30)),
            ["Await"],
            id="silent for a short time",
        ),
        pytest.param(
            wanted(asked=frozenset("ab"), absent=frozenset("ab")),
            (spare("a", heard_at=NOW - 100), spare("b", heard_at=NOW - 110)),
            ["RetireSpare"],
            id="one replacement at a time",
        ),
        pytest.param(
            wanted(asked=frozenset("ab"), absent=frozenset("ab")),
            (spare("a", heard_at=NOW - 100), coming("b")),
            ["Await"],
            id="next replacement",
        ),
        pytest.param(
            wanted(asked=frozenset("b"), absent=frozenset("b"), detection_works=False),
            (spare("a"), spare("b", heard_at=NOW - 100)),
            ["Await"],
            id="blind",
        ),
        pytest.param(
            wanted(asked=frozenset("ab"), absent=frozenset("ab"), last_heartbeat_at=NOW - 100),
            (spare("a", heard_at=NOW - 100), spare("b", heard_at=NOW - 101)),
            ["Await"],
            id="no heartbeats or clock skew",
        ),
        pytest.param(
            wanted(asked=frozenset("b"), absent=frozenset("b")),
            (spare("a"), spare("b", heard_at=None, booted_at=NOW - 100)),
            ["RetireSpare"],
            id="never sent a heartbeat",
        ),
        pytest.param(
            wanted(attempts=1),
            (coming("a", management_address=None), coming("b"), spare("c", state=AmphoraState.RETIRING)),
            ["AwaitAgent", "AwaitAgent", "Release", "Boot"],
            id="failed job",
        ),
        pytest.param(wanted(unfit={"a": "old image"}), (spare("a"), spare("b")), ["RetireSpare"], id="an old image"),
        pytest.param(
            wanted(unfit={"a": "old image"}),
            (spare("a", booted_at=NOW - 5), spare("b")),
            ["Await"],
            id="current image",
        ),
        pytest.param(wanted(number=1), (spare("a"), spare("b")), ["RetireSpare"], id="too many"),
        pytest.param(
            wanted(), (spare("a", state=AmphoraState.RETIRING), spare("b"), spare("c")), ["Release"], id="leaves"
        ),
        pytest.param(
            wanted(), (spare("a", state=AmphoraState.RETIRING), spare("b")), ["Record"], id="new image booted first"
        ),
        pytest.param(wanted(number=0, users=0), (spare("a"), coming("b")), ["RetireSpare", "RetireSpare"], id="unused"),
        pytest.param(wanted(number=0, users=0), (), ["DeletePool"], id="empty pool"),
        pytest.param(wanted(number=0, users=3), (), ["Await"], id="no spares wanted"),
    ],
)
def test_plan_of_a_pool(want, observed, steps):
    found = planning.plan(want, observed)
    assert [type(step).__name__ for step in found] == steps
    assert all(step.reason for step in found)


def test_booting_spares_are_removed_first():
    found = planning.plan(wanted(number=1), (coming("a"), spare("b")))
    assert [step.amphora_id for step in found] == ["a"]


def test_a_pool_is_checked_periodically():
    (step,) = planning.plan(wanted(), (spare("a"), spare("b")))
    assert step.until == NOW + LOOK_PAUSE


@pytest.mark.parametrize(
    ("image", "expires", "now_wanted", "fit"),
    [
        ("one", NOW + 100, "one", True),
        ("one", NOW + 100, "two", False),
        (None, NOW + 100, "two", True),
        ("one", NOW + 100, None, True),
        ("one", NOW + 49, "one", False),
        ("one", None, "one", True),
    ],
)
def test_which_spares_may_be_taken(image, expires, now_wanted, fit):
    one = Spare(id="a", management_address="x", image=image, expires_at=expires, heard_at=None)
    assert (spare_pools.unfit_reason(one, now_wanted, NOW, 50.0) is None) is fit


def test_the_pool_id_depends_on_what_the_pool_keeps():
    assert SparePoolSpec(number=2, compute="netns", network="local").id == SPEC.id
    assert SparePoolSpec(number=3, compute="netns", network="local").id != SPEC.id
    assert SparePoolSpec(number=2, compute="netns", network="local", image_tag="x").id != SPEC.id
