# SPDX-License-Identifier: Apache-2.0
"""The nodes of Senlin's actions, by the scenarios of its policy's specification (candidates.py).

tests/compat/test_senlin_candidates.py compares generated actions with Senlin's code.
"""

import random

import pytest

from amphora_cluster.candidates import (
    Action,
    ActionName,
    Adjustment,
    Cluster,
    ClusterNode,
    added_after,
    removed_before,
    resize_change,
)


def cluster(number=4, **changes):
    return Cluster(nodes=tuple(ClusterNode(id=f"n{one}") for one in range(number)), **changes)


def removed(name, inputs=None, data=None, *, nodes=None, **changes):
    action = Action(name=name, node_id="node", inputs=inputs or {}, data=data or {})
    return removed_before(action, nodes or cluster(), random.Random(1), **changes)


@pytest.mark.parametrize(
    ("name", "inputs", "data", "number"),
    [
        (ActionName.SCALE_IN, {}, {}, 1),
        (ActionName.SCALE_IN, {"count": 3}, {}, 3),
        (ActionName.SCALE_IN, {"count": 3}, {"deletion": {"count": 2}}, 2),
        (ActionName.SCALE_IN, {"count": 9}, {}, 4),
        (ActionName.SCALE_IN, {}, {"deletion": {}}, 0),
        (ActionName.RESIZE, {"adjustment_type": "EXACT_CAPACITY", "number": 1}, {}, 3),
        (ActionName.RESIZE, {"adjustment_type": "EXACT_CAPACITY", "number": 4}, {}, 0),
        (ActionName.RESIZE, {"adjustment_type": "CHANGE_IN_CAPACITY", "number": 2}, {}, 0),
        (ActionName.RESIZE, {"adjustment_type": "EXACT_CAPACITY", "number": 1}, {"deletion": {"count": 1}}, 1),
        (ActionName.RESIZE, {}, {}, 0),
        (ActionName.SCALE_OUT, {"count": 2}, {}, 0),
        (ActionName.ADD_NODES, {}, {}, 0),
        (ActionName.NODE_CREATE, {}, {}, 0),
        (ActionName.NODE_RECOVER, {}, {}, 0),
    ],
)
def test_numbers_of_random_nodes(name, inputs, data, number):
    chosen = removed(name, inputs, data)
    assert len(set(chosen)) == len(chosen) == number
    assert set(chosen) <= {"n0", "n1", "n2", "n3"}


@pytest.mark.parametrize(
    ("name", "inputs", "data", "expected"),
    [
        (ActionName.SCALE_IN, {}, {"deletion": {"count": 1, "candidates": ["n2"]}}, ("n2",)),
        (ActionName.RESIZE, {}, {"deletion": {"count": 2, "candidates": ["n2", "n0"]}}, ("n2", "n0")),
        (ActionName.DEL_NODES, {"candidates": ["n3", "n1"]}, {}, ("n3", "n1")),
        (ActionName.DEL_NODES, {}, {}, ()),
        (ActionName.NODE_DELETE, {}, {}, ("node",)),
        (ActionName.REPLACE_NODES, {"candidates": {"n3": "new"}}, {}, ("n3",)),
        (ActionName.REPLACE_NODES, {"candidates": {"n3": "new"}}, {"deletion": {"count": 2}}, ("n3",)),
    ],
)
def test_given_candidates(name, inputs, data, expected):
    assert removed(name, inputs, data) == expected


def test_faulty_and_unborn_nodes_are_removed_first():
    nodes = Cluster(
        nodes=(
            ClusterNode(id="good"),
            ClusterNode(id="unborn", born=False),
            ClusterNode(id="faulty", faulty=True, born=False),
        )
    )
    assert removed(ActionName.SCALE_IN, {"count": 2}, nodes=nodes) == ("faulty", "unborn")
    assert removed(ActionName.SCALE_IN, nodes=nodes) == ("faulty",)


def test_deviations_of_the_release():
    assert len(removed(ActionName.SCALE_IN, {"count": 3}, like_release=True)) == 1
    replaced = removed(ActionName.REPLACE_NODES, {"candidates": {"n8": "new", "n9": "newer"}}, like_release=True)
    assert len(replaced) == 1
    assert replaced[0] in {"n0", "n1", "n2", "n3"}


@pytest.mark.parametrize(
    ("name", "inputs", "data", "expected"),
    [
        (ActionName.SCALE_OUT, {}, {"creation": {"count": 2, "nodes": ["a", "b"]}}, ("a", "b")),
        (ActionName.ADD_NODES, {}, {"creation": {"nodes": ["a"]}}, ("a",)),
        (ActionName.RESIZE, {}, {"creation": {"count": 1}}, ()),
        (ActionName.RESIZE, {}, {"deletion": {"count": 1}}, ()),
        (ActionName.NODE_CREATE, {}, {}, ("node",)),
        (ActionName.NODE_RECOVER, {}, {}, ("node",)),
        (ActionName.REPLACE_NODES, {"candidates": {"old": "new"}}, {}, ("new",)),
    ],
)
def test_added_nodes(name, inputs, data, expected):
    assert added_after(Action(name=name, node_id="node", inputs=inputs, data=data)) == expected


@pytest.mark.parametrize(
    ("kind", "number", "limits", "change"),
    [
        (Adjustment.EXACT_CAPACITY, 7, {}, 3),
        (Adjustment.CHANGE_IN_CAPACITY, -1, {}, -1),
        (Adjustment.CHANGE_IN_PERCENTAGE, 50, {}, 2),
        (Adjustment.CHANGE_IN_PERCENTAGE, -50, {}, -2),
        (Adjustment.CHANGE_IN_PERCENTAGE, 10, {}, 1),
        (Adjustment.CHANGE_IN_PERCENTAGE, -10, {}, -1),
        (Adjustment.CHANGE_IN_PERCENTAGE, 40, {}, 1),
        (Adjustment.CHANGE_IN_PERCENTAGE, 10, {"min_step": 3}, 3),
        (Adjustment.CHANGE_IN_PERCENTAGE, -10, {"min_step": 2}, -2),
        (Adjustment.CHANGE_IN_PERCENTAGE, 0, {"min_step": 2}, -2),
        # Without `strict`, the limits bound the capacity.
        (Adjustment.EXACT_CAPACITY, 0, {}, -2),
        (Adjustment.EXACT_CAPACITY, 20, {}, 6),
        (Adjustment.EXACT_CAPACITY, 0, {"min_size": 1}, -3),
        (Adjustment.EXACT_CAPACITY, 20, {"max_size": 15}, 11),
        (Adjustment.EXACT_CAPACITY, 20, {"max_size": -1}, 16),
        (Adjustment.EXACT_CAPACITY, 2000, {"max_size": -1}, 0),
        (Adjustment.EXACT_CAPACITY, 5, {"max_size": 2000}, 0),
        # With `strict`, a capacity beyond a limit is refused.
        (Adjustment.EXACT_CAPACITY, 0, {"strict": True}, 0),
        (Adjustment.EXACT_CAPACITY, 11, {"strict": True}, 0),
        (Adjustment.EXACT_CAPACITY, 10, {"strict": True}, 6),
        (Adjustment.EXACT_CAPACITY, 3, {"strict": True, "min_size": 4}, 0),
        # Limits that contradict each other.
        (Adjustment.EXACT_CAPACITY, 5, {"min_size": 6, "max_size": 5}, 0),
        (Adjustment.EXACT_CAPACITY, 5, {"min_size": 11}, 0),
        (Adjustment.EXACT_CAPACITY, 5, {"max_size": 1}, 0),
        (None, 0, {"min_size": 6}, 2),
        (None, 0, {"max_size": 3}, -1),
    ],
)
def test_resize(kind, number, limits, change):
    inputs = {"adjustment_type": kind.value if kind else None, "number": number, **limits}
    assert resize_change(inputs, cluster(min_size=2, max_size=10)) == change


def test_a_cluster_without_nodes_resizes_from_its_desired_capacity():
    inputs = {"adjustment_type": "CHANGE_IN_CAPACITY", "number": 2}
    assert resize_change(inputs, Cluster(desired_capacity=3)) == 2
