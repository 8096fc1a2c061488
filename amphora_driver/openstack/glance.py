# SPDX-License-Identifier: Apache-2.0
"""The image of amphorae in Glance.

Invariant: an image is selected by its tag and its owner. Other projects can share images that have the same tag, so a
tag alone would let them choose the image of amphorae (CVE-2019-3895).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amphora_driver.openstack.cache import TimedCache

if TYPE_CHECKING:
    from amphora_driver.openstack.session import Service


class Images:
    """Finds images. Its methods are safe for threads.

    Args:
        service: sends the requests to Glance.
        owner: the project that owns the images.
        cache_time: seconds for which a found image is kept.
    """

    def __init__(self, service: Service, owner: str, cache_time: float) -> None:
        self._service = service
        self._owner = owner
        self._cache = TimedCache(cache_time)

    def newest(self, tag: str, *, cached: bool = False) -> str | None:
        """Return the id of the newest active image with a tag; None without one.

        Args:
            tag: the tag.
            cached: whether the value may be as old as the cache time.

        Raises:
            ApiError: Glance refuses the request.
            NetworkError: Glance does not answer.
        """
        read = self._cache.get if cached else self._cache.refresh
        return read((tag,), lambda: self._read(tag))

    def _read(self, tag: str) -> str | None:
        # Glance stores creation times in whole seconds. The additional sort by id gives images with equal times a fixed
        # order.
        params = [("tag", tag), ("owner", self._owner), ("status", "active"), ("sort", "created_at:desc,id:desc")]
        found = self._service.request("GET", "/images", params=[*params, ("limit", "1")])["images"]
        # The security of all amphorae depends on the owner of the image. So the driver also checks the owner in the
        # answer, not only in the query.
        return next((str(one["id"]) for one in found if one.get("owner") == self._owner), None)
