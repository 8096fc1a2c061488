# SPDX-License-Identifier: Apache-2.0
"""Runs of one operation: without a kill, with one kill, and with a kill at each point in turn.

Invariant: each run begins with the same rows and ends with the same checks (`_end`, `_lost`, `leftovers`).
"""

from collections import Counter

import msgspec
from deployment import LEASE, TIME_LIMIT
from leftovers import everything, undone, waited_for
from unit.driver.octavia_objects import LB

from amphora_driver import driver
from amphora_driver.database.tables import job


class Passed(msgspec.Struct, frozen=True):
    """The visits of an operation to each point: in the API process, and then in the control plane."""

    asking: dict[str, int]
    after: dict[str, int]

    @property
    def all(self):
        return self.asking | self.after


class Operation(msgspec.Struct, kw_only=True):
    """A request or an event, and what the control plane does because of it.

    Attributes:
        name: in a few words.
        beginning: the name of the state before it.
        request: a user's request; None where no user asks.
        happens: a function of the deployment that takes the place of a request.
        duties: the duties of the control plane that this operation needs.
        machines: the number of machines that the control plane makes.
        amphorae: the number of amphorae at the end.
        replaced: the number of amphorae that the control plane replaces, each once.
        deletes: the ids of the objects that the request deletes.
        until: a function of the deployment; the operation goes on until the function returns true.
        check: a function of the deployment with further assertions for the end.
    """

    name: str
    beginning: str
    request: object = None
    happens: object = None
    duties: tuple[str, ...] = ()
    machines: int = 0
    amphorae: int = 1
    replaced: int = 0
    deletes: set[str] = set()
    until: object = lambda deployment: True
    check: object = lambda deployment: None


class Run:
    """One operation in one deployment."""

    def __init__(self, deployment, operation):
        self._deployment, self._operation = deployment, operation

    # --- three kinds of runs ------------------------------------------------------------------------------------------

    def undisturbed(self):
        """No process is killed; returns the visited points."""
        self._begin()
        with self._deployment.points.recorded() as asking:
            self._ask()
            asked = dict(asking)
        self._accept()
        with self._deployment.points.recorded() as after:
            self._end()
        return Passed(asking=asked, after=dict(after))

    def kill_once(self, point, passed, visit=1):
        """One process is killed at its given visit to a point; the successor completes its work."""
        self._begin()
        self._deployment.points.arm([point], visit)
        asking = point in passed.asking
        if not asking:
            self._ask()
            self._accept()
        killed_at = self._deployment.run_in_fork(self._ask if asking else self._rounds)
        assert killed_at == point, f"{self._operation.name}: no process has come to {point} {visit} times"
        if asking:
            self._lost()
        else:
            self._outlive()
            self._end()

    def kill_repeatedly(self, times):
        """Kill processes one after the other, each at the first armed point; returns the number of kills at each point.

        Args:
            times: the number of kills that the test wants at each point.
        """
        met = Counter()
        self._begin()
        self._ask()
        self._accept()
        while left := Counter(times) - met:
            self._deployment.points.arm(left)
            killed_at = self._deployment.run_in_fork(self._rounds)
            if killed_at is None:
                break
            met[killed_at] += 1
            self._outlive()
        self._end()
        return met

    # --- parts of a run -----------------------------------------------------------------------------------------------

    def _begin(self):
        self._deployment.begin(self._operation.beginning)
        self._machines = self._deployment.cloud.machines_made
        self._former = self._deployment.amphorae()
        # Operating statuses change without a request.
        self._before = self._deployment.octavia.rows()[:2]

    def _ask(self):
        if self._operation.request is not None:
            self._operation.request.call(driver.AmphoraProviderDriver())
        else:
            self._operation.happens(self._deployment)

    def _accept(self):
        """Octavia has the driver's answer, and has not committed its own transaction yet."""
        if self._operation.request is not None:
            (generation,) = self._deployment.scalars(job.c.generation, job.c.load_balancer_id == LB)
            self._deployment.octavia.request(self._operation.request.change(self._deployment), generation)

    def _rounds(self):
        """A fork works until it knows no more work."""
        plane = self._deployment.plane(*self._operation.duties)
        end, calm = self._deployment.clock.ahead + TIME_LIMIT, 0
        while calm < 2 and self._deployment.clock.ahead < end:
            plane.round()
            calm = 0 if self._left() else calm + 1
            self._deployment.clock.advance(plane.pause())

    def _go_on(self, left=None):
        """The successor works until no work and no leftovers remain; no point is armed.

        Args:
            left: takes the place of `_left`.
        """
        self._deployment.points.disarm()
        plane = self._deployment.plane(*self._operation.duties)
        end = self._deployment.clock.ahead + TIME_LIMIT
        while True:
            plane.round()
            found = waited_for(self._deployment) or (left or self._left)() or everything(self._deployment)
            if not found:
                return
            assert self._deployment.clock.ahead < end, f"{self._operation.name}: {found}"
            self._deployment.clock.advance(plane.pause())

    def _left(self):
        """The work that a fork knows: a fork does not see the transactions of Octavia."""
        return undone(self._deployment) or ([] if self._operation.until(self._deployment) else ["what follows"])

    def _outlive(self):
        """The leases of the killed process end after the length of one lease at the latest."""
        now = self._deployment.database.now()
        held = self._deployment.scalars(job.c.leased_until, job.c.owner.is_not(None))
        assert all(until <= now + LEASE for until in held), "the remaining time of a lease is longer than a lease"
        if held:
            self._deployment.clock.advance(LEASE + 0.01)

    def _lost(self):
        """The API process was killed, so Octavia has rolled back: at the end Octavia's rows are as before."""
        self._go_on(list)
        gone = {one for one, said in self._deployment.octavia.told if said == "DELETED"}
        # The control plane completes a recorded deletion, because Octavia does not report rolled-back deletions.
        assert gone in (set(), self._operation.deletes), (
            f"{self._operation.name}: Octavia was told that {gone} are deleted"
        )
        assert gone or self._deployment.octavia.rows()[:2] == self._before, (
            f"{self._operation.name}: the lost request has changed Octavia"
        )

    def _end(self):
        """The control plane ends the operation; assert that it did each step once."""
        self._go_on()
        operation, deployment = self._operation, self._deployment
        assert {said for _, said in deployment.octavia.told} <= {"ACTIVE", "DELETED"}, (
            f"{operation.name}: {deployment.octavia.told}"
        )
        made = deployment.cloud.machines_made - self._machines
        assert made == operation.machines, f"{operation.name}: {made} machines were made"
        there = deployment.amphorae()
        assert len(there) == operation.amphorae, f"{operation.name}: there are {there}"
        found = deployment.replacements()
        assert len(found) == operation.replaced, f"{operation.name}: replaced: {found}"
        assert all(one.outcome == "done" for one in found), f"{operation.name}: replaced: {found}"
        assert {one.amphora_id for one in found} == self._former - there or not operation.amphorae
        operation.check(deployment)
