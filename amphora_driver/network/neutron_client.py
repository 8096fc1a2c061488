# SPDX-License-Identifier: Apache-2.0
"""Requests to Neutron: lists in pages, objects by id, a short cache.

Invariant: each method sends one request, or one for each page of a list. A list in pages that changes while it is read
begins again. For a missing object, a method returns None or False. For any other refusal, it raises `ApiError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from amphora_driver.openstack.cache import TimedCache
from amphora_driver.openstack.errors import ApiError
from amphora_driver.openstack.pages import read_pages

if TYPE_CHECKING:
    from amphora_driver.openstack.session import Service

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Json = dict[str, Any]
# For each kind of object: the path in Neutron's API, and the singular and plural name in JSON.
_NAMES = {
    "ports": ("/ports", "port", "ports"),
    "networks": ("/networks", "network", "networks"),
    "subnets": ("/subnets", "subnet", "subnets"),
    "groups": ("/security-groups", "security_group", "security_groups"),
    "rules": ("/security-group-rules", "security_group_rule", "security_group_rules"),
    "policies": ("/qos/policies", "policy", "policies"),
    "rbac": ("/rbac-policies", "rbac_policy", "rbac_policies"),
    "extensions": ("/extensions", "extension", "extensions"),
}


class Neutron:
    """A client of Neutron. Its methods are safe for threads.

    Args:
        service: sends the requests.
        page_size: number of objects in one answer of a paged list.
        cache_time: seconds for which `cached` keeps a value.
    """

    def __init__(self, service: Service, page_size: int, cache_time: float) -> None:
        self._service = service
        self._page_size = page_size
        self._cache = TimedCache(cache_time)
        self._extensions: frozenset[str] | None = None

    def project_id(self) -> str:
        """Return the project of the service account."""
        return self._service.project_id()

    def find(self, kind: str, *, fields: Sequence[str] = (), **filters: str | Sequence[str]) -> list[Json]:
        """Return all objects with these values; several values of one attribute are alternatives."""
        path, _, many = _NAMES[kind]
        found: list[Json] = self._service.request("GET", path, params=query(fields, filters))[many]
        return found

    def find_paged(self, kind: str, *, fields: Sequence[str], **filters: str | Sequence[str]) -> list[Json]:
        """Return the same as `find`, read in pages. `fields` must contain `id`."""
        path, _, many = _NAMES[kind]

        def read(last: Json | None) -> tuple[list[Json], bool]:
            marker = () if last is None else (("marker", last["id"]),)
            size = ("limit", str(self._page_size)), ("sort_key", "id"), ("sort_dir", "asc")
            answer = self._service.request("GET", path, params=(*query(fields, filters), *size, *marker))
            # Neutron may return fewer objects than requested although more follow. Only a missing link "next" shows the
            # end.
            links = answer.get(f"{many}_links") or ()
            return answer[many], any(one["rel"] == "next" for one in links)

        return read_pages(read, lambda error: isinstance(error, ApiError) and error.status == 404)

    def get(self, kind: str, object_id: str) -> Json | None:
        """Return one object; None if it does not exist."""
        path, one, _ = _NAMES[kind]
        try:
            found: Json = self._service.request("GET", f"{path}/{object_id}")[one]
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def create(self, kind: str, values: Mapping[str, object]) -> Json:
        """Create an object; return it."""
        path, one, _ = _NAMES[kind]
        made: Json = self._service.request("POST", path, json={one: dict(values)})[one]
        return made

    def create_tagged(self, kind: str, values: Mapping[str, object], tags: Sequence[str]) -> Json:
        """Create an object, and tag it in a second request, as all versions of Neutron need; return it."""
        made = self.create(kind, values)
        try:
            self._service.request("PUT", f"{_NAMES[kind][0]}/{made['id']}/tags", json={"tags": list(tags)})
        except ApiError as error:
            # An object without tags works, because tags only help operators to find objects. So the error is logged
            # only.
            LOG.warning(
                "the network backend could not add tags to %s %s; the object works, but operators cannot find the "
                "object by its tags: %s",
                _NAMES[kind][1],
                made["id"],
                error,
            )
        return made

    def add_tag(self, port_id: str, tag: str) -> None:
        """Add a tag to a port; other tags stay."""
        self._service.request("PUT", f"/ports/{port_id}/tags/{tag}")

    def remove_tag(self, port_id: str, tag: str) -> None:
        """Remove a tag of a port; no error if port or tag do not exist."""
        try:
            self._service.request("DELETE", f"/ports/{port_id}/tags/{tag}")
        except ApiError as error:
            if error.status != 404:
                raise

    def create_rules(self, rules: Sequence[Mapping[str, object]]) -> None:
        """Create rules of security groups in one request: all or none."""
        self._service.request("POST", "/security-group-rules", json={"security_group_rules": list(rules)})

    def update(self, kind: str, object_id: str, values: Mapping[str, object], revision: int | None = None) -> Json:
        """Change an object, only in this revision if one is given; return it."""
        path, one, _ = _NAMES[kind]
        headers = {} if revision is None else {"If-Match": f"revision_number={revision}"}
        changed: Json = self._service.request("PUT", f"{path}/{object_id}", json={one: dict(values)}, headers=headers)[
            one
        ]
        return changed

    def delete(self, kind: str, object_id: str) -> bool:
        """Delete an object; return whether it existed."""
        try:
            self._service.request("DELETE", f"{_NAMES[kind][0]}/{object_id}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def has_extension(self, alias: str) -> bool:
        """Whether Neutron has an API extension. The list is read once."""
        if self._extensions is None:
            self._extensions = frozenset(one["alias"] for one in self.find("extensions"))
        return alias in self._extensions

    def cached(self, key: tuple[str, ...], read: Callable[[], T]) -> T:
        """Return a value that was read less than the cache time ago, or read it."""
        return self._cache.get(key, read)

    def forget(self, *keys: tuple[str, ...]) -> None:
        """Remove values from the cache."""
        self._cache.forget(*keys)


def query(fields: Sequence[str], filters: Mapping[str, str | Sequence[str]]) -> tuple[tuple[str, str], ...]:
    """Return the parameters of a list."""
    values = [
        (name, one)
        for name, value in sorted(filters.items())
        for one in ((value,) if isinstance(value, str) else value)
    ]
    return (*values, *(("fields", field) for field in fields))
