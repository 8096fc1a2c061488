# SPDX-License-Identifier: Apache-2.0
"""Lists that a service returns in pages.

A request for the next page names the last object that was read. The service refuses the request if this object was
deleted meanwhile. The list then begins again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from amphora_driver.openstack.errors import ApiError

T = TypeVar("T")
# Maximum number of times that a list begins again.
MOST_RESTARTS = 3
# Nova: "marker [ID] not found". Octavia: "Supplied pagination marker 'ID' is not valid".
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
