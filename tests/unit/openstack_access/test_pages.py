# SPDX-License-Identifier: Apache-2.0
"""Lists whose pages begin at a number, while objects are deleted and added."""

import random

import pytest

from amphora_driver.openstack.pages import MOST_STEPS_BACK, read_overlapping


class ChangingList:
    """A list of a service, which loses and gains objects after each answer."""

    def __init__(self, size, page_size, changes):
        self.objects = list(range(size))
        self.deleted = set()
        self.requests = 0
        self._page_size = page_size
        self._changes = changes

    def read(self, begin):
        self.requests += 1
        page = self.objects[begin : begin + self._page_size]
        self._changes(self)
        return page

    def delete(self, place):
        self.deleted.add(self.objects.pop(place))


@pytest.mark.parametrize(("size", "requests"), [(0, 1), (1, 1), (2, 2), (10, 2), (11, 3), (100, 12)])
def test_a_list_without_changes_needs_one_request_for_each_page(size, requests):
    there = ChangingList(size, 10, lambda _: None)
    assert read_overlapping(there.read, lambda one: one) == list(range(size))
    assert there.requests == requests


@pytest.mark.parametrize("seed", range(200))
def test_no_object_that_stays_is_left_out(seed):
    chance = random.Random(seed)

    def change(one):
        for _ in range(chance.randrange(3)):
            if len(one.objects) > 1:
                one.delete(chance.randrange(len(one.objects)))
        one.objects += range(1000 + one.requests * 10, 1000 + one.requests * 10 + chance.randrange(3))

    there = ChangingList(chance.randrange(60), chance.randrange(6, 12), change)
    before = set(there.objects)
    found = read_overlapping(there.read, lambda one: one)
    assert found is not None
    assert before - there.deleted <= set(found)
    assert len(found) == len(set(found))


def test_a_list_that_changes_each_time_is_given_up():
    there = iter(range(10**6))
    requests = []

    def read(begin):
        requests.append(begin)
        return [next(there), next(there)]

    assert read_overlapping(read, lambda one: one) is None
    assert len(requests) <= 2 * MOST_STEPS_BACK + 2
