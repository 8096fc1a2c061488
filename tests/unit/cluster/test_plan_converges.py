# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to servers, members and controllers, the passes end at the wanted pool, and keep the rules.

Hypothesis draws seeds: a draw for each event costs much more than an event.
"""

import random

from cluster_data import moment
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_simulation import PoolSimulation

from amphora_cluster.plan import NOT_SHOWN, plan


@given(st.integers(0, 2**32))
@settings(max_examples=300)
def test_passes_end_at_the_wanted_pool(seed):
    rng = random.Random(seed)
    world = PoolSimulation(rng)
    for _ in range(rng.randint(1, 40)):
        world.disturb()
        if rng.random() < 0.7:
            world.one_pass(rng.choice(sorted(world.groups)), crash=rng.random() < 0.3)
        world.busy = max(0, world.busy - 1)
        world.now += rng.choice([0.0, 0.5, 5.0, 20.0])
    world.settle()
    world.check_end()


@given(st.integers(0, 2**32))
@settings(max_examples=100)
def test_a_plan_whose_steps_are_applied_has_no_other_steps(seed):
    rng = random.Random(seed)
    world = PoolSimulation(rng)
    for _ in range(rng.randint(1, 40)):
        world.disturb()
    world.busy = 0
    for one, made in world.groups.items():
        first = world.one_pass(one)
        again = plan(made, world.shown(one), world.pool(), world.nodes[one], moment(world.now))
        # A new address serves now, so that the old member is removed, and a drained member follows at once.
        assert all(step.kind.value == "leave" for step in again.steps), (first.steps, again.steps)
        assert world.settle()
        last = plan(made, world.shown(one), world.pool(), world.nodes[one], moment(world.now))
        assert not last.steps
        # The next pass forgets a server that a request named in vain.
        assert last.nodes == tuple(node for node in world.nodes[one] if node.reason != NOT_SHOWN)
