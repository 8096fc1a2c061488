# SPDX-License-Identifier: Apache-2.0
"""Whatever point a process dies at: what was accepted is done once, and nothing is left of what was not.

Each operation of the table (`operations`) is told undisturbed first, which says by which points it comes. So no list of
points can be old, and a new point, step or moment by which no operation comes is a failure.
"""

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from estate import Estate
from operations import BEGINNINGS, OPERATIONS
from stories import Story

from amphora_driver.controller.todo import AnyStep
from amphora_driver.points import Moment, Point
from amphora_driver.store.authorities import Kind

# octavia_lib leaves the socket of a refused connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Points that are not there, with the reason.
NO_POINT = {
    **{f"Await-{one.value}": "a job ends with it, and nothing is done" for one in Moment},
    **{f"{step}-done": "it asks, and leaves no mark in the store" for step in ("AskVips", "AskHolder", "AskSpares")},
}
# Points at which the database and the world are as they were at the point before.
NOTHING_NEW = (Point.BARRIER_NEXT, Point.FINISHING, Point.FLUSHING)
AUTHORITY_MOMENTS = (Moment.BEFORE, Moment.MARKED)


@pytest.fixture(scope="module")
def estate():
    # Each story copies the database and has it closed: on a disk that would mostly be waiting.
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder, pytest.MonkeyPatch.context() as patch:
        made = Estate(Path(folder), patch)
        try:
            yield made
        finally:
            made.end()


def _prepare(estate, name):
    if not estate.knows(name):
        beginning = BEGINNINGS[name]
        _prepare(estate, beginning.beginning)
        Story(estate, beginning).undisturbed()
        estate.keep(name)


@pytest.fixture(scope="module")
def passed(estate):
    """The points by which an operation comes, by its place in the table."""

    @cache
    def told(number):
        _prepare(estate, OPERATIONS[number].beginning)
        return Story(estate, OPERATIONS[number]).undisturbed()

    return told


def _reached(passed, numbers):
    """How often operations come to each point, at the most."""
    found = Counter()
    for number in numbers:
        found |= passed(number).all
    return found


def every_point():
    """Every point that a process of the control plane can come to."""
    kinds = [f"{step.__name__}-{moment.value}" for step in AnyStep.__args__ for moment in Moment]
    kinds += [f"Authority-{kind.value}-{moment.value}" for kind in Kind for moment in AUTHORITY_MOMENTS]
    return {point.value for point in Point} | set(kinds) - NO_POINT.keys()


def test_every_point_is_reached_by_an_operation(passed):
    assert set(_reached(passed, range(len(OPERATIONS)))) == every_point()


_TABLE = pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=[one.name for one in OPERATIONS])


@_TABLE
def test_a_death_at_each_point(estate, passed, number):
    """One process dies, once, at each point that no operation before this one in the table comes by.

    A step may write more than once, and be taken more than once: a process dies before each of these marks. The
    transaction of each request is another one, so the API dies in each of them.
    """
    before = _reached(passed, range(number))
    for point in (Point.INTENT_WRITTEN, Point.INTENT_COMMITTED):
        before.pop(point.value, None)
    for point, times in passed(number).all.items():
        last = times if point.endswith(Moment.DONE.value) else 1
        for visit in range(before[point] + 1, last + 1):
            Story(estate, OPERATIONS[number]).dies_once(point, passed(number), visit)


@_TABLE
def test_a_death_at_every_point_in_turn(estate, passed, number):
    """In one operation processes die at all of its points, each further on than the one before.

    After some deaths the way to the end is another one: the points that were left out are armed once more, alone.
    """
    left = Counter({point: 1 for point in passed(number).after if not _as_before(point)})
    left.update({point: times - 1 for point, times in passed(number).after.items() if point.endswith("-marked")})
    while left:
        met = Story(estate, OPERATIONS[number]).dies_again_and_again(left)
        assert met, f"no process came to one of {sorted(left)}"
        left = Counter(dict.fromkeys(left.keys() - met.keys(), 1))


def _as_before(point):
    """Whether nothing is written between this point and the one before it: one death of each kind is enough."""
    return point.endswith(Moment.BEFORE.value) or point in {one.value for one in NOTHING_NEW}
