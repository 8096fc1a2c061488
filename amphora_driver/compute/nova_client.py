# SPDX-License-Identifier: Apache-2.0
"""Requests to Nova: servers by tag, interfaces, server groups, flavors, zones.

Invariant: each method sends one request, or one for each page of a list. For a missing object, a method returns None or
False. For any other refusal, it raises `ApiError`. No request is repeated, except for those of a list that changes
while it is read. Nova shows the user data, which contain keys, to administrators. So the client logs no details of
servers, and returns them without user data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amphora_driver.openstack.errors import ApiError
from amphora_driver.openstack.pages import is_refused_marker, read_overlapping, read_pages

if TYPE_CHECKING:
    from amphora_driver.openstack.session import Service

Json = dict[str, Any]
# All requests use this microversion of Nova's API (OpenStack Stein, 2019). The type of a boot volume needs 2.67.
MICROVERSION = "2.67"
_HEADERS = {"OpenStack-API-Version": f"compute {MICROVERSION}"}
_DETAIL, _USER_DATA = "/servers/detail", "OS-EXT-SRV-ATTR:user_data"
# Nova's error message quotes the refused request, including base64-encoded secrets. So the client hides every run of 64
# or more base64 characters.
_ENCODED = re.compile(r"[A-Za-z0-9+/=]{64,}")


class Nova:
    """A client of Nova. Its methods are safe for threads.

    Args:
        service: sends the requests.
        page_size: number of objects in one answer of a list.
    """

    def __init__(self, service: Service, page_size: int) -> None:
        self._service = service
        self._page_size = page_size

    def project_id(self) -> str:
        """Return the project of the service account."""
        return self._service.project_id()

    def find_servers(self, *tags: str) -> list[Json]:
        """Return the details of all servers of the project that have each of these tags; only a few exist."""
        found = self._send("GET", _DETAIL, params=[("tags", ",".join(tags))], secret=True)["servers"]
        return _without_user_data(found)

    def list_servers(self, tag: str, *, detail: bool) -> list[Json]:
        """Return all servers of the project with a tag, with id and name only or with details."""
        path = _DETAIL if detail else "/servers"
        return _without_user_data(self._pages(path, "servers", [("tags", tag)], secret=detail))

    def create_server(self, body: Mapping[str, object]) -> Json:
        """Create a server; return its id and links."""
        try:
            made: Json = self._send("POST", "/servers", json=dict(body), secret=True)["server"]
        except ApiError as error:
            message = _ENCODED.sub("***", error.message)
            raise ApiError(error.request, error.status, error.kind, message) from None
        return made

    def delete_server(self, server_id: str) -> bool:
        """Begin the deletion of a server; return whether it exists."""
        return self._delete(f"/servers/{server_id}")

    def interface(self, server_id: str, port_id: str) -> Json | None:
        """Return the interface of a port; None if the port is not attached to the server."""
        return self._get(f"/servers/{server_id}/os-interface/{port_id}", "interfaceAttachment")

    def attach_port(self, server_id: str, port_id: str) -> Json:
        """Attach a port to a server; return the interface."""
        body = {"interfaceAttachment": {"port_id": port_id}}
        made: Json = self._send("POST", f"/servers/{server_id}/os-interface", json=body)["interfaceAttachment"]
        return made

    def detach_port(self, server_id: str, port_id: str) -> bool:
        """Begin the removal of an interface; return whether it exists."""
        return self._delete(f"/servers/{server_id}/os-interface/{port_id}")

    def flavor(self, flavor_id: str) -> Json | None:
        """Return the flavor with an id."""
        return self._get(f"/flavors/{flavor_id}", "flavor")

    def flavors(self) -> list[Json]:
        """Return id and name of all flavors that the service account sees."""
        return self._pages("/flavors", "flavors", [("is_public", "None")])

    def zones(self) -> frozenset[str]:
        """Return the names of all availability zones."""
        found = self._send("GET", "/os-availability-zone")["availabilityZoneInfo"]
        return frozenset(one["zoneName"] for one in found)

    def server_groups(self, name: str) -> list[Json]:
        """Return the server groups of the project with a name. Nova has no filter, so all groups are read."""
        path = "/os-server-groups"

        def read(begin: int) -> list[Json]:
            # Nova has no markers for lists of server groups, so the pages are requested by offset.
            where = [("limit", str(max(2, self._page_size))), ("offset", str(begin))]
            page: list[Json] = self._send("GET", path, params=where)["server_groups"]
            return page

        found = read_overlapping(read, lambda one: one["id"])
        if found is None:
            raise ApiError(f"GET {path}", 503, "", "the list of server groups changed each time that it was read")
        return [one for one in found if one["name"] == name]

    def create_server_group(self, name: str, policy: str) -> Json:
        """Create a server group; return it."""
        body = {"server_group": {"name": name, "policy": policy}}
        made: Json = self._send("POST", "/os-server-groups", json=body)["server_group"]
        return made

    def delete_server_group(self, group_id: str) -> bool:
        """Delete a server group; return whether it existed."""
        return self._delete(f"/os-server-groups/{group_id}")

    def _pages(self, path: str, many: str, params: Sequence[tuple[str, str]], *, secret: bool = False) -> list[Json]:
        def read(last: Json | None) -> tuple[list[Json], bool]:
            marker = [] if last is None else [("marker", last["id"])]
            where = [*params, ("limit", str(self._page_size)), *marker]
            answer = self._send("GET", path, params=where, secret=secret)
            # A page may be shorter than the requested limit although more objects follow. Only the last page has no
            # link to the next one.
            return answer[many], bool(answer.get(f"{many}_links"))

        return read_pages(read, lambda error: isinstance(error, ApiError) and is_refused_marker(error))

    def _get(self, path: str, one: str) -> Json | None:
        try:
            found: Json = self._send("GET", path)[one]
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def _delete(self, path: str) -> bool:
        try:
            self._send("DELETE", path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def _send(self, method: str, path: str, **more: Any) -> Any:
        return self._service.request(method, path, headers=_HEADERS, **more)


def _without_user_data(found: Sequence[Json]) -> list[Json]:
    return [{name: value for name, value in one.items() if name != _USER_DATA} for one in found]
