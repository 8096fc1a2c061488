# SPDX-License-Identifier: Apache-2.0
"""The control plane after SIGKILL at each kill point: the successor completes accepted work once and leaves no orphan.

A run without kills finds the points of each operation of the table (`operations`), so the list of points is always
current. A new point or step without an operation in the table fails the first test.
"""

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from deployment import Deployment
from killed_forks import limited
from operations import BEGINNINGS, OPERATIONS
from runs import Run

from amphora_driver.failpoints import Moment, Point
from amphora_driver.reconcile.steps import Step
from amphora_driver.store.ca_records import CaKind

# octavia_lib leaves the socket of a refused connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Points that do not exist, with the reason.
NO_POINT = {
    **{f"Await-{one.value}": "a job ends with this step and does nothing for it" for one in Moment},
    **{f"{step}-done": "the step asks agents and writes nothing" for step in ("AskVips", "AskHolder", "AskSpares")},
}
# At these points database and fake cloud are as at the previous point.
NOTHING_NEW = (Point.BARRIER_NEXT, Point.FINISHING, Point.FLUSHING)
# The longest test takes about five seconds of processor time on an idle machine.
_MOST_SECONDS = 60
AUTHORITY_MOMENTS = (Moment.BEFORE, Moment.MARKED)


@pytest.fixture(scope="module")
def deployment():
    # Each run copies and closes the database: on a disk the test would mostly wait.
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder, pytest.MonkeyPatch.context() as patch:
        made = Deployment(Path(folder), patch)
        try:
            yield made
        finally:
            made.end()


@pytest.fixture(autouse=True)
def processor_time():
    """A loop without end fails only its own test."""
    with limited(_MOST_SECONDS):
        yield


def _prepare(deployment, name):
    if not deployment.knows(name):
        beginning = BEGINNINGS[name]
        _prepare(deployment, beginning.beginning)
        Run(deployment, beginning).undisturbed()
        deployment.keep(name)


@pytest.fixture(scope="module")
def passed(deployment):
    """A function that returns the points of an operation, by its place in the table."""

    @cache
    def points(number):
        _prepare(deployment, OPERATIONS[number].beginning)
        return Run(deployment, OPERATIONS[number]).undisturbed()

    return points


def _reached(passed, numbers):
    """For each point the largest number of visits in one of these operations."""
    found = Counter()
    for number in numbers:
        found |= passed(number).all
    return found


def every_point():
    """Every point of the control plane."""
    kinds = [f"{step.__struct_config__.tag}-{moment.value}" for step in Step.__subclasses__() for moment in Moment]
    kinds += [f"Authority-{kind.value}-{moment.value}" for kind in CaKind for moment in AUTHORITY_MOMENTS]
    return {point.value for point in Point} | set(kinds) - NO_POINT.keys()


def test_every_point_is_reached_by_an_operation(passed):
    assert set(_reached(passed, range(len(OPERATIONS)))) == every_point()


_TABLE = pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=[one.name for one in OPERATIONS])


@_TABLE
def test_a_kill_at_each_point(deployment, passed, number):
    """One process is killed once at each point that no earlier operation of the table has.

    A step may write several times and may repeat: a process is killed before each of these writes. Each request has
    its own transaction, so the API process is killed in each of them.
    """
    before = _reached(passed, range(number))
    for point in (Point.INTENT_WRITTEN, Point.INTENT_COMMITTED):
        before.pop(point.value, None)
    for point, times in passed(number).all.items():
        last = times if point.endswith(Moment.DONE.value) else 1
        for visit in range(before[point] + 1, last + 1):
            Run(deployment, OPERATIONS[number]).kill_once(point, passed(number), visit)


@pytest.mark.extended
@_TABLE
def test_a_kill_at_every_point_in_turn(deployment, passed, number):
    """One run kills processes at all points of the operation, each at a later point than the one before.

    After a kill the successor may take other steps. The test arms the unreached points once more.
    """
    left = Counter({point: 1 for point in passed(number).after if not _as_before(point)})
    left.update({point: times - 1 for point, times in passed(number).after.items() if point.endswith("-marked")})
    while left:
        met = Run(deployment, OPERATIONS[number]).kill_repeatedly(left)
        assert met, f"no process came to one of {sorted(left)}"
        left = Counter(dict.fromkeys(left.keys() - met.keys(), 1))


def _as_before(point):
    """Whether no process writes between the previous point and this one: one kill of each kind is enough."""
    return point.endswith(Moment.BEFORE.value) or point in {one.value for one in NOTHING_NEW}
