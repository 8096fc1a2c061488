# SPDX-License-Identifier: Apache-2.0
"""The servers of a resource group in a Heat stack.

The value of a selector is `STACK/RESOURCE`. The resource is a resource group, an auto-scaling group or a nested stack
with servers at any depth, or a single server. Heat lists the resources of all nested stacks in one request.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

import msgspec

from amphora_cluster.cloud.errors import CloudError, Missing
from amphora_cluster.cloud.session import CloudConnection

_SERVER = "OS::Nova::Server"
_DEPTH = "5"
# States of a stack resource that has no server any more.
_GONE = frozenset({"DELETE_COMPLETE"})


class _Link(msgspec.Struct, frozen=True):
    href: str
    rel: str = ""


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource in an answer of Heat."""

    resource_name: str
    resource_type: str = ""
    resource_status: str = ""
    physical_resource_id: str | None = None
    links: list[_Link] = []

    def link(self, rel: str) -> str:
        """Return the last part of a link's path, which is the id of a stack; empty without the link."""
        href = next((one.href for one in self.links if one.rel == rel), "")
        return href.partition("?")[0].rstrip("/").rpartition("/")[2]

    @property
    def nested(self) -> str:
        """The id of the stack that the resource creates, if it is a nested one."""
        return self.link("nested") or self.physical_resource_id or ""


class _Resources(msgspec.Struct, frozen=True):
    resources: list[Resource]


class HeatStacks:
    """Heat's stacks, for the owner of some groups. Its methods are safe for threads."""

    def __init__(self, connection: CloudConnection) -> None:
        self._connection = connection

    def server_ids(self, value: str) -> frozenset[str]:
        """Return the ids of the servers below a resource.

        Args:
            value: `STACK/RESOURCE`; the stack by name or id.

        Raises:
            Missing: the stack or the resource does not exist.
            CloudError: Heat refuses the request, or does not answer.
        """
        stack, _, name = value.rpartition("/")
        wanted = f"read resource {name} of stack {stack}"
        if not (stack and name):
            raise CloudError(wanted, f"{value!r} is not STACK/RESOURCE", "Correct the selector.", final=True)
        # For the name of a stack, Heat redirects to the full path of the stack. The HTTP session follows the redirect.
        found = self._connection.request(
            "heat",
            "GET",
            f"/stacks/{quote(stack, safe='/')}/resources",
            kind=_Resources,
            wanted=wanted,
            params=[("nested_depth", _DEPTH)],
        )
        top = _top_stack(found.resources, stack)
        start = next((one for one in top if one.resource_name == name), None)
        if start is None:
            raise Missing(wanted, f"stack {stack} has no resource {name}", final=True)
        return frozenset(servers_below(start, found.resources))


def servers_below(start: Resource, resources: Iterable[Resource]) -> set[str]:
    """Return the servers of a resource, and of the stacks below it."""
    by_stack: dict[str, list[Resource]] = {}
    for one in resources:
        by_stack.setdefault(one.link("stack"), []).append(one)
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        one = waiting.pop()
        if one.resource_status in _GONE:
            continue
        if one.resource_type == _SERVER:
            found |= {one.physical_resource_id} if one.physical_resource_id else set()
        elif one.nested and one.nested not in seen:
            seen.add(one.nested)
            waiting += by_stack.get(one.nested, [])
    return found


def _top_stack(resources: list[Resource], stack: str) -> list[Resource]:
    """Return the resources of the stack itself, without those of nested stacks.

    The stack is named by name, id, or NAME/ID, as in the path of a link.
    """
    last = stack.rpartition("/")[2]
    nested = {one.nested for one in resources if one.nested}

    def named(one: Resource) -> bool:
        href = next((link.href for link in one.links if link.rel == "stack"), "").partition("?")[0].rstrip("/")
        return last in href.split("/")[-2:]

    return [one for one in resources if named(one) and one.link("stack") not in nested]
