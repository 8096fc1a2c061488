# SPDX-License-Identifier: Apache-2.0
"""The trees in memory have a limit, and the statuses do not depend on it."""

import pytest
from test_status_writer import HealthManager

from amphora_driver.health.recent_trees import RecentTrees
from amphora_driver.model.enums import Operating, PoolProtocol
from amphora_driver.model.loadbalancer import LoadBalancer, Pool, Vip


def tree(name, pools=3):
    vip = Vip(address="192.0.2.1", subnet_id="s", network_id="n", port_id="p")
    of = {"loadbalancer_id": name, "protocol": PoolProtocol.HTTP}
    made = tuple(Pool(id=f"{name}-{one}", **of) for one in range(pools))
    return LoadBalancer(id=name, project_id="p", name=name, vip=vip, pools=made)


def test_the_number_of_objects_is_limited():
    trees = RecentTrees(most=10)
    for number in range(100):
        trees.put(tree(f"lb{number}"))
        assert len(trees) <= 10
    assert trees.get("lb97") is None
    assert trees.get("lb99").id == "lb99"


def test_the_trees_that_were_not_used_are_dropped():
    trees = RecentTrees(most=8)
    trees.put(tree("a"))
    trees.put(tree("b"))
    trees.get("a")
    trees.put(tree("c"))
    assert [name for name in "abc" if trees.get(name)] == ["a", "c"]


def test_one_large_tree_is_kept_alone():
    trees = RecentTrees(most=5)
    trees.put(tree("small"))
    trees.put(tree("large", pools=50))
    assert trees.get("large") is not None
    assert trees.get("small") is None
    trees.put(tree("small"))
    assert (trees.get("large"), len(trees)) == (None, 4)


def test_a_replaced_tree_counts_once():
    trees = RecentTrees(most=100)
    for _ in range(5):
        trees.put(tree("a"))
    assert len(trees) == 4
    trees.forget("a")
    trees.forget("a")
    assert len(trees) == 0


@pytest.mark.parametrize("most", [1, 1000])
def test_a_dropped_tree_is_read_again_for_a_changed_status(database, most):
    fleet = HealthManager(database)
    fleet.writer._trees = RecentTrees(most)
    for name in "123":
        fleet.load_balancer(name)
        fleet.say(f"am{name}", name)
    fleet.flush()
    for word, expected in (("DOWN", Operating.ERROR), ("UP", Operating.ONLINE)):
        fleet.say("am1", "1", word=word)
        fleet.flush()
        assert fleet.operating()["me1"] == expected.value
