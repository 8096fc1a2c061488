# SPDX-License-Identifier: Apache-2.0
"""Our candidates are those of Senlin 16.0.0's load-balancing policy, for generated actions of each kind."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from senlin_process import Senlin

from amphora_cluster.candidates import Action, ActionName, Adjustment, Cluster, ClusterNode, added_after, removed_before

pytestmark = pytest.mark.extended

# Senlin checks a policy before or after these actions.
BEFORE = ("CLUSTER_DEL_NODES", "CLUSTER_SCALE_IN", "CLUSTER_RESIZE", "NODE_DELETE", "CLUSTER_REPLACE_NODES")
AFTER = (
    "CLUSTER_ADD_NODES",
    "CLUSTER_SCALE_OUT",
    "CLUSTER_RESIZE",
    "NODE_CREATE",
    "NODE_RECOVER",
    "CLUSTER_REPLACE_NODES",
)


@pytest.fixture(scope="module")
def senlin(tmp_path_factory):
    made = Senlin(tmp_path_factory.mktemp("senlin"))
    yield made
    made.close()


def described_nodes(most):
    return st.lists(
        st.fixed_dictionaries(
            {
                "status": st.sampled_from(["ACTIVE", "ACTIVE", "ERROR", "WARNING", "CREATING"]),
                "tainted": st.sampled_from([False, False, False, True]),
                "born": st.sampled_from([True, True, False]),
            }
        ),
        max_size=most,
    ).map(lambda found: [{"id": f"n{number}", **node} for number, node in enumerate(found)])


ids = st.lists(st.sampled_from([f"n{number}" for number in range(9)]), unique=True, max_size=4)
sizes = st.none() | st.integers(-1, 8)
resizes = st.fixed_dictionaries(
    {"adjustment_type": st.sampled_from([None, *(one.value for one in Adjustment)]), "number": st.integers(-150, 150)}
)
small_resizes = st.fixed_dictionaries(
    {"adjustment_type": st.sampled_from([one.value for one in Adjustment]), "number": st.integers(-8, 8)}
)
limits = st.fixed_dictionaries(
    {},
    optional={"min_size": sizes, "max_size": sizes, "min_step": st.none() | st.integers(0, 5), "strict": st.booleans()},
)
deletions = st.fixed_dictionaries({}, optional={"count": st.integers(0, 9), "candidates": ids})


@st.composite
def described_actions(draw, names):
    """An action as both sides get it: the name, the entity with its nodes, the inputs and the data."""
    name = draw(st.sampled_from(names))
    inputs, data = {}, {}
    if name == "CLUSTER_DEL_NODES":
        inputs = draw(st.fixed_dictionaries({}, optional={"candidates": ids}))
    elif name == "CLUSTER_REPLACE_NODES":
        replaced = st.dictionaries(st.sampled_from(["n0", "n1", "n2"]), st.sampled_from(["m0", "m1"]))
        inputs = {"candidates": draw(replaced)}
    elif name == "CLUSTER_RESIZE":
        inputs = {**draw(resizes | small_resizes), **draw(limits)}
    elif name in {"CLUSTER_SCALE_IN", "CLUSTER_SCALE_OUT"}:
        inputs = draw(st.fixed_dictionaries({}, optional={"count": st.integers(1, 5)}))
    if draw(st.booleans()):
        data["deletion"] = draw(deletions)
    if draw(st.booleans()):
        data["creation"] = draw(st.fixed_dictionaries({"count": st.integers(0, 4)}, optional={"nodes": ids}))
    entity = {
        "id": "entity",
        "desired_capacity": draw(st.integers(0, 8)),
        "min_size": draw(st.integers(0, 4)),
        "max_size": draw(st.integers(-1, 8)),
    }
    return {"action": name, "entity": entity, "nodes": draw(described_nodes(8)), "inputs": inputs, "data": data}


def ours(described):
    """The same action in our terms."""
    entity = described["entity"]
    nodes = tuple(
        ClusterNode(
            id=node["id"],
            faulty=node["status"] in {"ERROR", "WARNING"} or node["tainted"],
            born=node["born"],
        )
        for node in described["nodes"]
    )
    cluster = Cluster(
        nodes=nodes,
        desired_capacity=entity["desired_capacity"],
        min_size=entity["min_size"],
        max_size=entity["max_size"],
    )
    action = Action(
        name=ActionName(described["action"]), node_id=entity["id"], inputs=described["inputs"], data=described["data"]
    )
    return action, cluster


def deviates(described):
    """Whether Senlin 16.0.0 deviates from the specification of its policy for this action."""
    return "deletion" not in described["data"] and (
        described["action"] == "CLUSTER_REPLACE_NODES"
        or (described["action"] == "CLUSTER_SCALE_IN" and described["inputs"].get("count", 1) != 1)
    )


@given(described_actions(BEFORE), st.integers(0, 2**32))
@settings(max_examples=800)
def test_removed_before(senlin, described, seed):
    expected = tuple(senlin("choices.delete", seed, described))
    action, cluster = ours(described)
    assert removed_before(action, cluster, random.Random(seed), like_release=True) == expected
    if not deviates(described):
        assert removed_before(action, cluster, random.Random(seed)) == expected


@given(described_actions(AFTER))
@settings(max_examples=200)
def test_added_after(senlin, described):
    assert added_after(ours(described)[0]) == tuple(senlin("choices.post", described))
