# SPDX-License-Identifier: Apache-2.0
"""Checks of the Nova flavors, zones, images and networks that Octavia's flavors and zones name.

Invariant: only existing objects are cached. A missing object is read again at the next check, because the operator may
have created it meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from amphora_driver.compute.nova_client import Nova
from amphora_driver.errors import ComputeError, UnsupportedOption
from amphora_driver.openstack.cache import TimedCache
from amphora_driver.openstack.errors import translated_for_compute
from amphora_driver.openstack.glance import Images


class KnowsNetworks(Protocol):
    """The part of the network backend that checks networks of the operator."""

    def require_network(self, network_id: str) -> None:
        """Check that a network exists; raise `UnsupportedOption` if not."""


class Profiles:
    """Finds the objects of the cloud that a boot needs. Its methods are safe for threads.

    Args:
        nova: the client of Nova.
        images: the images of the owner.
        image_owner: the owner, for messages.
        network: the network backend.
        cache_time: seconds for which flavors and zones are kept.
        boot_volume: whether servers boot from volumes.
        default_zones: the zones of a profile that names none.
    """

    def __init__(
        self,
        nova: Nova,
        images: Images,
        *,
        image_owner: str,
        network: KnowsNetworks,
        cache_time: float,
        boot_volume: bool,
        default_zones: Sequence[str],
    ) -> None:
        self._nova = nova
        self._images = images
        self._image_owner = image_owner
        self._network = network
        self._boot_volume = boot_volume
        self._default_zones = tuple(default_zones)
        self._cache = TimedCache(cache_time)

    def flavor_id(self, name: str | None) -> str:
        """Return the id of the flavor with this id or name.

        Raises:
            ComputeError: it does not exist, or none is configured.
            ApiError: Nova refuses the request.
        """
        if name is None:
            remedy = "Set [amp_compute_nova] flavor, or compute_flavor in the flavor of the load balancer."
            raise ComputeError("choose a Nova flavor", "none is configured", remedy, final=True)
        found = self._find_flavor(name)
        if found is None:
            raise ComputeError(
                f"use the Nova flavor {name!r}", "it does not exist", "Create it, or correct its name.", final=True
            )
        return found

    def image_id(self, tag: str, *, cached: bool = False) -> str:
        """Return the id of the newest image with a tag; see `Images.newest`.

        Raises:
            ComputeError: no image has this tag.
            ApiError: Glance refuses the request.
        """
        found = self._images.newest(tag, cached=cached)
        if found is None:
            raise ComputeError(f"find the image {tag!r}", self._no_image(tag), _IMAGE_REMEDY, final=True)
        return found

    def validate(self, metadata: Mapping[str, object]) -> None:
        """Check the objects that the metadata of a flavor or availability zone names.

        Raises:
            UnsupportedOption: one of these objects does not exist.
            ComputeError: a service of the cloud does not answer.
        """
        for key, value in metadata.items():
            happened, remedy = self._missing(key, value, metadata)
            if happened:
                raise UnsupportedOption(f"use {value!r} as {key}", happened, remedy)

    def _missing(self, key: str, value: object, metadata: Mapping[str, object]) -> tuple[str, str]:
        """Return the reason for the refusal of a value, and the remedy; two empty texts for an accepted value."""
        match key, value:
            case "compute_flavor", str():
                with translated_for_compute(f"read the Nova flavor {value!r}"):
                    exists = self._find_flavor(value) is not None
                return (
                    ("", "") if exists else ("Nova has no flavor with this id or name", "See: openstack flavor list.")
                )
            case "amp_image_tag", str():
                with translated_for_compute(f"find the image {value!r}"):
                    exists = self._images.newest(value) is not None
                return ("", "") if exists else (self._no_image(value), _IMAGE_REMEDY)
            case "compute_zone", str():
                return self._missing_zones([value])
            case "compute_zones", list() | tuple():
                return self._missing_zones(value)
            case "management_network", str():
                return self._missing_network(value)
            case "volume_zone", str():
                return self._wrong_volume_zone(value, metadata)
            case _:
                return "", ""

    def _missing_zones(self, names: Sequence[str]) -> tuple[str, str]:
        with translated_for_compute("read the availability zones of Nova"):
            known = self._cache.get(("zones",), self._nova.zones)
            if not known.issuperset(names):
                known = self._cache.refresh(("zones",), self._nova.zones)
        missing = [one for one in names if one not in known]
        if not missing:
            return "", ""
        return f"Nova has no availability zone {', '.join(missing)}", f"Nova has: {', '.join(sorted(known))}."

    def _missing_network(self, network_id: str) -> tuple[str, str]:
        with translated_for_compute(f"read network {network_id}"):
            try:
                self._network.require_network(network_id)
            except UnsupportedOption as error:
                return error.happened, "Give the id of a network: see openstack network list."
        return "", ""

    def _wrong_volume_zone(self, zone: str, metadata: Mapping[str, object]) -> tuple[str, str]:
        if not self._boot_volume:
            return "servers have no boot volume", "Set [amp_compute_nova] boot_volume_size, or remove volume_zone."
        one, several = metadata.get("compute_zone"), metadata.get("compute_zones")
        zones = (one,) if isinstance(one, str) else tuple(several) if isinstance(several, list | tuple) else ()
        if set(zones or self._default_zones) == {zone}:
            return "", ""
        return (
            "Nova creates the boot volume in the zone of the server, or in the default zone of Cinder",
            "Give volume_zone the value of compute_zone, and set [cinder] cross_az_attach = false in Nova.",
        )

    def _find_flavor(self, name: str) -> str | None:
        def read() -> str:
            found = self._nova.flavor(name)
            ids = [name] if found is not None else [one["id"] for one in self._nova.flavors() if one["name"] == name]
            if not ids:
                raise _NotFoundError
            return str(ids[0])

        try:
            return self._cache.get(("flavor", name), read)
        except _NotFoundError:
            return None

    def _no_image(self, tag: str) -> str:
        return f"Glance has no active image with the tag {tag!r} and the owner {self._image_owner}"


class _NotFoundError(Exception):
    """The object does not exist. The cache stores nothing if its read function raises this error."""


_IMAGE_REMEDY = "Upload an image with this tag in the project of [amp_compute_nova] image_owner."
