# SPDX-License-Identifier: Apache-2.0
"""Lists that a service returns in pages.

A request for the next page names the last object that was read. The service refuses the request if this object was
deleted meanwhile. The list then begins again. A list without such markers is read with overlapping pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from amphora_driver.openstack.errors import ApiError

T = TypeVar("T")
# Maximum number of times that the driver starts to read a list again from the first page.
MOST_RESTARTS = 3
# In a list without markers, a deletion moves later objects to earlier pages, so the driver reads the earlier pages
# again. It does so at most this number of times.
MOST_STEPS_BACK = 100
# Error messages about a missing marker. Nova: "marker [ID] not found". Octavia: "Supplied pagination marker 'ID' is not
# valid".
_REFUSED_MARKER = re.compile(r"\bmarker\b.* not (found|valid)", re.IGNORECASE)


def is_refused_marker(error: ApiError) -> bool:
    """Whether Nova or Octavia does not know the last object that was read any more."""
    return error.status == 400 and _REFUSED_MARKER.search(error.message) is not None


def read_pages(
    read: Callable[[T | None], tuple[Sequence[T], bool]], is_deleted: Callable[[Exception], bool]
) -> list[T]:
    """Return all objects of a list.

    Args:
        read: reads the page after an object, or the first page; returns it, and whether another page follows.
        is_deleted: whether an error means that the service does not know the object any more.
    """
    found: list[T] = []
    restarts = 0
    while True:
        try:
            page, has_next = read(found[-1] if found else None)
        except Exception as error:
            if not found or restarts == MOST_RESTARTS or not is_deleted(error):
                raise
            found, restarts = [], restarts + 1
            continue
        found += page
        # Octavia announces another page after each full page, so the last page can be empty.
        if not (page and has_next):
            return found


def read_overlapping(read: Callable[[int], Sequence[T]], key: Callable[[T], object]) -> list[T] | None:
    """Return all objects of a list whose pages begin at a number; None if the list changes too fast.

    A deletion moves all later objects, so the next page could leave out objects. Each page therefore begins with the
    last object of the page before. If it begins with an unknown object, it is read again from an earlier place. The
    service keeps the order of the objects and adds new ones at the end.

    Args:
        read: reads at least two objects from this number on, if there are so many.
        key: identifies an object.
    """
    found: dict[object, T] = {}
    begin, distance, steps_back = 0, 1, 0
    while True:
        page = read(begin)
        if begin and not (page and key(page[0]) in found):
            if steps_back == MOST_STEPS_BACK:
                return None
            begin, distance, steps_back = max(0, begin - distance), 2 * distance, steps_back + 1
            continue
        distance = 1
        found.update((key(one), one) for one in page)
        if len(page) <= 1:
            return list(found.values())
        begin += len(page) - 1
