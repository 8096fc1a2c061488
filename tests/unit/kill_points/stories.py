# SPDX-License-Identifier: Apache-2.0
"""Operations, told to their end: undisturbed, with one death, and with a death at every point in turn."""

from collections import Counter

import msgspec
from estate import LEASE, PATIENCE
from leftovers import everything, undone, waited_for
from unit.driver.octavia_objects import LB

from amphora_driver import driver
from amphora_driver.store.tables import work


class Passed(msgspec.Struct, frozen=True):
    """The points by which an operation comes, and how often: while it is asked for, and after that."""

    asking: dict[str, int]
    after: dict[str, int]

    @property
    def all(self):
        return self.asking | self.after


class Operation(msgspec.Struct, kw_only=True):
    """Something that is asked for, and all that follows from it.

    Attributes:
        name: in a few words.
        beginning: the state it begins with, by its name (`beginnings`).
        request: of a user; None where no user asks.
        happens: what happens instead, with the estate as its argument; in a process of its own.
        duties: of the control plane, beside what it does always.
        machines: how many it makes.
        amphorae: how many there are in the end.
        replaced: how many amphorae are replaced, each once.
        deletes: the ids of what the request deletes.
        until: says that something has begun or ended of which `undone` knows nothing; with the estate as its argument.
        check: more that has to be so in the end, with the estate as its argument.
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
    until: object = lambda estate: True
    check: object = lambda estate: None


class Story:
    """One operation in one estate."""

    def __init__(self, estate, operation):
        self._estate, self._operation = estate, operation

    # --- three ways to tell it --------------------------------------------------------------------------------------

    def undisturbed(self):
        """Nothing dies; returns the points by which it comes."""
        self._begin()
        with self._estate.points.recorded() as asking:
            self._ask()
            asked = dict(asking)
        self._accept()
        with self._estate.points.recorded() as after:
            self._end()
        return Passed(asking=asked, after=dict(after))

    def dies_once(self, point, passed, visit=1):
        """One process dies when it comes to a point for this number of times; its successor ends what it has begun."""
        self._begin()
        self._estate.points.arm([point], visit)
        if point in passed.asking:
            died = self._estate.dies(self._ask)
            self._lost()
        else:
            self._ask()
            self._accept()
            died = self._estate.dies(self._rounds)
            self._outlive()
            self._end()
        assert died == point, f"{self._operation.name}: {point} is not reached {visit} times"

    def dies_again_and_again(self, times):
        """Processes that work on it die, each further on than the one before; returns how often one died at each point.

        Args:
            times: how often a process is to die at each point.
        """
        met = Counter()
        self._begin()
        self._ask()
        self._accept()
        while left := Counter(times) - met:
            self._estate.points.arm(left)
            died = self._estate.dies(self._rounds)
            if died is None:
                break
            met[died] += 1
            self._outlive()
        self._end()
        return met

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _begin(self):
        self._estate.begin(self._operation.beginning)
        self._machines = self._estate.world.machines_made
        self._former = self._estate.amphorae()
        # What amphorae are said to be like may change by itself.
        self._before = self._estate.octavia.rows()[:2]

    def _ask(self):
        if self._operation.request is not None:
            self._operation.request.call(driver.AmphoraProviderDriver())
        else:
            self._operation.happens(self._estate)

    def _accept(self):
        """Octavia has the driver's answer; its transaction goes on for as long as it likes."""
        if self._operation.request is not None:
            (generation,) = self._estate.scalars(work.c.generation, work.c.load_balancer_id == LB)
            self._estate.octavia.request(self._operation.request.change(self._estate), generation)

    def _rounds(self):
        """What a fork does: all that it knows to be left to do."""
        plane = self._estate.plane(*self._operation.duties)
        end, calm = self._estate.clock.ahead + PATIENCE, 0
        while calm < 2 and self._estate.clock.ahead < end:
            plane.round()
            calm = 0 if self._left() else calm + 1
            self._estate.clock.advance(plane.pause())

    def _go_on(self, left=None):
        """Until nothing is left to do, as `left` says too; no process dies any more."""
        self._estate.points.disarm()
        plane = self._estate.plane(*self._operation.duties)
        end = self._estate.clock.ahead + PATIENCE
        while True:
            plane.round()
            found = waited_for(self._estate) or (left or self._left)() or everything(self._estate)
            if not found:
                return
            assert self._estate.clock.ahead < end, f"{self._operation.name}: {found}"
            self._estate.clock.advance(plane.pause())

    def _left(self):
        """What a fork can know to be left to do."""
        return undone(self._estate) or ([] if self._operation.until(self._estate) else ["what follows"])

    def _outlive(self):
        """What the dead owned is free after a lease, and not later."""
        now = self._estate.database.now()
        held = self._estate.scalars(work.c.leased_until, work.c.owner.is_not(None))
        assert all(until <= now + LEASE for until in held), "a lease lasts longer than a lease"
        if held:
            self._estate.clock.advance(LEASE + 0.01)

    def _lost(self):
        """The API has died: Octavia rolls back, and in the end everything is as before."""
        self._go_on(list)
        gone = {one for one, said in self._estate.octavia.told if said == "DELETED"}
        # A deletion that was recorded is carried out: nothing in Octavia tells that it was rolled back.
        assert gone in (set(), self._operation.deletes), f"{self._operation.name}: {gone} are gone"
        assert gone or self._estate.octavia.rows()[:2] == self._before, f"{self._operation.name}: something came of it"

    def _end(self):
        """The last processes live; what was accepted is done, once."""
        self._go_on()
        operation, estate = self._operation, self._estate
        assert {said for _, said in estate.octavia.told} <= {"ACTIVE", "DELETED"}, f"{operation.name}: told"
        made = estate.world.machines_made - self._machines
        assert made == operation.machines, f"{operation.name}: {made} machines were made"
        there = estate.amphorae()
        assert len(there) == operation.amphorae, f"{operation.name}: there are {there}"
        found = estate.replacements()
        assert len(found) == operation.replaced, f"{operation.name}: replaced: {found}"
        assert all(one.outcome == "done" for one in found), f"{operation.name}: replaced: {found}"
        assert {one.amphora_id for one in found} == self._former - there or not operation.amphorae
        operation.check(estate)
