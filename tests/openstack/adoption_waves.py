# SPDX-License-Identifier: Apache-2.0
"""Adoptions and reverts of several load balancers, while the controller is killed at random steps."""

from __future__ import annotations

import time

ENDS = {"done", "reverted", "refused"}
FORWARD = ["lock", "prepare", "take", "cut", "commit", "report", "keep"]
"""The steps in which an operator can request a revert."""
_POLL_SECONDS = 0.01
# The probability of a kill after a load balancer has reached a step, and the maximum delay of the kill. The steps
# `take` and `cut` last less than a second.
_KILL_SHARE, _KILL_SECONDS = 0.12, 0.3


class Wave:
    """Load balancers that are adopted together.

    Args:
        incumbent: the stack.
        dice: the source of random numbers.
        ids: the load balancers.
        reverted: those of them for which an operator requests a revert, at a random step.

    Attributes:
        kills: the steps of all load balancers at each kill.
    """

    def __init__(self, incumbent, dice, ids, reverted):
        self._incumbent, self._dice, self._ids = incumbent, dice, ids
        self._reverts = {one: dice.choice(FORWARD) for one in reverted}
        self.kills = []

    def run(self, seconds):
        """Adopt the load balancers, and return when each has ended."""
        self._incumbent.adopt(*self._ids, "--remove-after", "20", "--max-in-progress", "2")
        deadline, before = time.monotonic() + seconds, {}
        while True:
            steps, paused = self._steps()
            if set(steps.values()) <= ENDS:
                return
            assert time.monotonic() < deadline, [self._incumbent.step(one) for one in self._ids]
            for one in self._ids:
                if steps[one] != before.get(one):
                    self._reach(one, steps[one])
            if paused:
                # A failure has paused the load balancers that wait.
                self._incumbent.adopt("resume")
            before = steps
            time.sleep(_POLL_SECONDS)

    def killed_in(self, balancer_id):
        """The steps of a load balancer at the kills, without those before its start and after its end."""
        return [steps[balancer_id] for steps in self.kills if steps[balancer_id] not in {"waiting", *ENDS}]

    def _steps(self):
        steps, paused = self._incumbent.steps()
        return {one: steps[one] for one in self._ids}, paused

    def _reach(self, balancer_id, step):
        """Perhaps request a revert of the load balancer, and perhaps kill the controller."""
        wanted = self._reverts.get(balancer_id)
        if wanted and step in FORWARD[FORWARD.index(wanted) :]:
            del self._reverts[balancer_id]
            try:
                self._incumbent.adopt("revert", balancer_id)
            except AssertionError:
                # Since the poll, the way back may have begun after a failure.
                if self._steps()[0][balancer_id] in FORWARD:
                    raise
        if step != "waiting" and self._dice.random() < _KILL_SHARE:
            time.sleep(self._dice.uniform(0, _KILL_SECONDS))
            self.kills.append(self._steps()[0])
            self._incumbent.stack.restart("amphora-controller")
