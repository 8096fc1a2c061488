# SPDX-License-Identifier: Apache-2.0
"""The servers of a group in Nova's public API.

Invariant: a server that is missing in a list is not deleted for certain. A paged list of Nova leaves out the servers of
a cell whose database does not answer, without an error. A missing server that the group knows is therefore read by its
id: only the answer 404 proves the deletion. Nova shows a server of such a cell with the status UNKNOWN.

Calls: one paged list for each read. All groups of an owner share a list of all servers for `server_list_age` seconds,
or until a notification of Nova. Nova filters by tag only: it ignores filters by metadata and ids of other than
administrators. One more request reads the ids of a server group or of a Heat stack. The subnets of a server's addresses
need one request, which is repeated only if the addresses change.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec

from amphora_cluster.cloud.errors import CloudError, ListChanged, Missing
from amphora_cluster.cloud.heat import HeatStacks
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.members import GONE
from amphora_cluster.model import Address, Selector, SelectorKind, Server
from amphora_driver.openstack.pages import read_pages

# Minimum microversion of Nova's API, available since OpenStack Stein (2019). Below 2.69, Nova omits the servers of a
# cell that does not answer.
MICROVERSION = "2.69"
_HEADERS = {"OpenStack-API-Version": f"compute {MICROVERSION}"}
_FIXED = "fixed"
_MOST_SUBNETS = 50_000


class _Address(msgspec.Struct, frozen=True):
    addr: str
    version: int
    type: str = msgspec.field(name="OS-EXT-IPS:type", default=_FIXED)


class _Flavor(msgspec.Struct, frozen=True):
    vcpus: int | None = None


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A server in an answer of Nova.

    For a server of a cell that does not answer, Nova sends id and status only.
    """

    id: str
    status: str
    name: str = ""
    created: datetime | None = None
    flavor: _Flavor = _Flavor()
    addresses: dict[str, list[_Address]] = {}
    metadata: dict[str, str] = {}
    tags: tuple[str, ...] = ()

    def server(self, subnets: dict[str, str] | None = None) -> Server:
        """Return the server as the plan reads it, with the subnets of its addresses."""
        return Server(
            id=self.id,
            name=self.name,
            status=self.status,
            addresses=tuple(
                Address(ip=ip, family=family, subnet_id=(subnets or {}).get(ip)) for ip, family in self.fixed()
            ),
            created_at=self.created.timestamp() if self.created else 0.0,
            vcpus=self.flavor.vcpus,
            metadata=self.metadata,
        )

    def fixed(self) -> list[tuple[str, int]]:
        """Return the fixed addresses with their families, in the order of Nova."""
        return [(one.addr, one.version) for net in self.addresses.values() for one in net if one.type == _FIXED]


class _Servers(msgspec.Struct, frozen=True):
    servers: list[ServerRecord]
    servers_links: list[dict[str, str]] = []


class _ServerAnswer(msgspec.Struct, frozen=True):
    server: ServerRecord


class _ServerGroup(msgspec.Struct, frozen=True):
    members: tuple[str, ...]


class _ServerGroupAnswer(msgspec.Struct, frozen=True):
    server_group: _ServerGroup


class _FixedIp(msgspec.Struct, frozen=True):
    ip_address: str
    subnet_id: str


class _Interface(msgspec.Struct, frozen=True):
    fixed_ips: list[_FixedIp] | None = None


class _Interfaces(msgspec.Struct, frozen=True):
    interfaceAttachments: list[_Interface]  # noqa: N815 - Nova's name


# The addresses of a server at the last read of its subnets, and the subnet of each address. Changed addresses cause a
# new read.
_Known = tuple[tuple[tuple[str, int], ...], dict[str, str]]


class NovaServers:
    """Nova's servers, for the owner of some groups. Its methods are safe for threads.

    Args:
        connection: the services of the cloud.
        heat: resolves the stacks of selectors; None if the cloud has no Heat.
    """

    def __init__(self, connection: CloudConnection, heat: HeatStacks | None = None) -> None:
        self._connection = connection
        self._heat = heat
        self._lock = threading.Lock()
        self._listed: tuple[float, list[ServerRecord]] = (float("-inf"), [])
        self._changed_at = float("-inf")
        self._subnets_lock = threading.Lock()
        self._subnets: OrderedDict[str, _Known] = OrderedDict()

    def servers(
        self, selector: Selector, *, known: Collection[str] = (), subnets: bool = False, fresh: bool = False
    ) -> tuple[Server, ...]:
        """Return the servers of a selector, sorted by id.

        Args:
            selector: how the group finds its servers.
            known: servers that the group knows. If one is missing in the list, it is read by its id. If it exists, the
                result contains it with `selected` False.
            subnets: read the subnets of the addresses.
            fresh: do not use a list that another group has read; needed for servers of a new request.

        Raises:
            Missing: the server group or the stack does not exist, and not all known servers are deleted.
            CloudError: Nova or Heat refuses the request, or does not answer.
        """
        wanted = "read the servers of the group"
        try:
            ids = self._ids(selector, wanted)
        except Missing:
            # The user deleted the stack or the server group, but its servers may still exist. So each known server is
            # checked.
            if known and self._are_deleted(known, wanted):
                return ()
            raise
        selected = _condition(selector, ids)
        if selector.kind is SelectorKind.TAG:
            listed = self._pages([("tags", selector.value)], wanted)
        else:
            listed = self._all(wanted, fresh=fresh)
        shown = {one.id: one for one in listed}
        found = {one.id: one for one in listed if selected(one)}
        former: set[str] = set()
        for server_id in sorted(set(known) - set(found)):
            one = shown.get(server_id) or self._server(server_id, wanted)
            if one is None:
                continue
            found[server_id] = one
            # Nova omits tags and metadata of servers in a cell that does not answer. Without them, such a server stays
            # selected.
            unreadable = ids is None and one.status == "UNKNOWN"
            if not unreadable and not selected(one):
                former.add(server_id)
        servers = (self._with_subnets(found[one], wanted, subnets=subnets) for one in sorted(found))
        return tuple(msgspec.structs.replace(one, selected=one.id not in former) for one in servers)

    def servers_changed(self) -> None:
        """Do not use a list that was read before this call."""
        self._changed_at = time.monotonic()

    def _ids(self, selector: Selector, wanted: str) -> frozenset[str] | None:
        """Return the ids of a selector; None if it selects by a property of the servers."""
        match selector.kind:
            case SelectorKind.LIST:
                return frozenset(selector.servers)
            case SelectorKind.SERVER_GROUP:
                path = f"/os-server-groups/{quote(selector.value, safe='')}"
                found: _ServerGroupAnswer = self._get(path, _ServerGroupAnswer, wanted)
                return frozenset(found.server_group.members)
            case SelectorKind.HEAT_STACK:
                if self._heat is None:
                    raise CloudError(wanted, "this service has no endpoint of Heat", "Configure Heat.", final=True)
                return self._heat.server_ids(selector.value)
            case _:
                return None

    def _all(self, wanted: str, *, fresh: bool) -> list[ServerRecord]:
        age = 0.0 if fresh else self._connection.settings.server_list_age
        # Threads of other groups wait here while one thread reads the list from Nova. Then all these threads use the
        # list without another request.
        with self._lock:
            read_at, listed = self._listed
            if time.monotonic() - read_at >= age or read_at <= self._changed_at:
                read_at = time.monotonic()
                listed = self._pages([], wanted)
                self._listed = read_at, listed
            return listed

    def _pages(self, params: Sequence[tuple[str, str]], wanted: str) -> list[ServerRecord]:
        limit = ("limit", str(self._connection.settings.page_size))

        def read(last: ServerRecord | None) -> tuple[list[ServerRecord], bool]:
            marker = [] if last is None else [("marker", last.id)]
            page: _Servers = self._get("/servers/detail", _Servers, wanted, [*params, limit, *marker])
            # A page may be shorter than the requested limit although more servers follow. Only the last page has no
            # link to the next one.
            return page.servers, bool(page.servers_links)

        return read_pages(read, lambda error: isinstance(error, ListChanged))

    def _are_deleted(self, server_ids: Collection[str], wanted: str) -> bool:
        # The list is read first. With a wrong endpoint of Nova, the list fails, so a 404 for a server does not count as
        # a deletion.
        shown = {one.id: one for one in self._all(wanted, fresh=True)}
        found = (shown.get(one) or self._server(one, wanted) for one in sorted(server_ids))
        return all(one is None or one.status in GONE for one in found)

    def _server(self, server_id: str, wanted: str) -> ServerRecord | None:
        try:
            found: _ServerAnswer = self._get(f"/servers/{quote(server_id, safe='')}", _ServerAnswer, wanted)
        except Missing:
            return None
        return found.server

    def _with_subnets(self, record: ServerRecord, wanted: str, *, subnets: bool) -> Server:
        addresses = tuple(record.fixed())
        if not (subnets and addresses):
            return record.server()
        with self._subnets_lock:
            known = self._subnets.get(record.id)
            if known is not None and known[0] == addresses:
                self._subnets.move_to_end(record.id)
                return record.server(known[1])
        try:
            answer: _Interfaces = self._get(f"/servers/{record.id}/os-interface", _Interfaces, wanted)
        except Missing:
            # The server was deleted after Nova returned the list, so its subnets are unknown.
            return record.server()
        found = {ip.ip_address: ip.subnet_id for one in answer.interfaceAttachments for ip in one.fixed_ips or ()}
        if all(ip in found for ip, _ in addresses):
            with self._subnets_lock:
                self._subnets[record.id] = addresses, found
                while len(self._subnets) > _MOST_SUBNETS:
                    self._subnets.popitem(last=False)
        return record.server(found)

    def _get(self, path: str, kind: Any, wanted: str, params: Iterable[tuple[str, str]] = ()) -> Any:
        return self._connection.request(
            "nova", "GET", path, kind=kind, wanted=wanted, params=list(params), headers=_HEADERS
        )


def _condition(selector: Selector, ids: frozenset[str] | None) -> Callable[[ServerRecord], bool]:
    """Return the function that decides whether a selector selects a server."""
    if ids is not None:
        return lambda one: one.id in ids
    if selector.kind is SelectorKind.TAG:
        return lambda one: selector.value in one.tags
    key, _, value = selector.value.partition("=")
    return lambda one: one.metadata.get(key) == value
