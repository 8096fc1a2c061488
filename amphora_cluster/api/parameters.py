# SPDX-License-Identifier: Apache-2.0
"""The parameters of a webhook, from its body and its query. Pure.

A caller gives the parameters in the body as JSON, or in the query. Some callers have a body of their own, for example
an alarm of Aodh or a signal of Heat. The API therefore ignores other fields of the body, and a body that is not JSON.
Aodh cannot set a header, but it sends an own X-OpenStack-Request-ID with each alarm, which serves as idempotency key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from amphora_cluster.model import Criterion, Request, RequestKind
from amphora_cluster.requests import SERVER_ID
from amphora_driver.errors import RequestError

MOST_SERVERS = 1000
MOST_BYTES = 128 * 1024
_NAMES = ("server", "servers", "count", "criterion")
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a webhook requests.

    Args:
        key: idempotency key; None for a request that can be repeated without one.
    """

    servers: tuple[str, ...] = ()
    count: int = 0
    criterion: Criterion = Criterion.RANDOM
    key: str | None = None

    def request(self, group_id: str, kind: RequestKind) -> Request:
        """Return the request to record."""
        return Request(
            id="", group_id=group_id, kind=kind, servers=self.servers, count=self.count, criterion=self.criterion
        )

    def digest(self, kind: RequestKind) -> str:
        """Return a digest of the content, by which a repeated key is compared."""
        content = [kind.value, *self.servers, str(self.count), self.criterion.value]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_parameters(
    kind: RequestKind, query: Mapping[str, Sequence[str]], body: bytes, headers: Mapping[str, str]
) -> Parameters:
    """Return the parameters of a webhook.

    Args:
        kind: what the webhook requests.
        query: all values of each parameter of the query.
        body: the body of the request, at most `MOST_BYTES`.
        headers: the headers of the request, with names in lower case.

    Raises:
        RequestError: a parameter is missing or invalid, or is in both places.
    """
    given = _of_body(body)
    for name in _NAMES:
        if query.get(name):
            if name in given:
                _refuse(f"{name} is in the query and in the body", "Give each parameter once.")
            values = [part for value in query[name] for part in value.split(",")]
            given[name] = values if name in {"server", "servers"} else query[name][0]
    servers = _servers(given)
    criterion = _criterion(given.get("criterion"))
    count = _count(given.get("count"))
    key = _key(query, headers)
    match kind:
        case RequestKind.SYNC if count or "criterion" in given:
            _refuse("a sync has no count and no criterion", "Name servers, or nothing.")
        case RequestKind.JOIN | RequestKind.LEAVE if bool(servers) == bool(count):
            _refuse("it needs either servers or a count", 'Send {"servers": [ID, ...]} or {"count": NUMBER}.')
        case _ if servers and "criterion" in given:
            _refuse("a criterion chooses servers, and the request names servers", "Send a count instead of servers.")
        case _ if count and key is None:
            # If a client repeats a request with a count, the controller would choose more servers. So the API requires
            # an idempotency key.
            _refuse("a request with a count needs an idempotency key", "Send the header Idempotency-Key.")
    return Parameters(
        servers=servers, count=count, criterion=criterion, key=key if count or _own_key(query, headers) else None
    )


def _of_body(body: bytes) -> dict[str, object]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return {name: found[name] for name in _NAMES if name in found} if isinstance(found, dict) else {}


def _servers(given: Mapping[str, object]) -> tuple[str, ...]:
    if "server" in given and "servers" in given:
        _refuse("it has server and servers", "Send one of them.")
    value = given.get("server", given.get("servers", ()))
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(
        isinstance(one, str) and SERVER_ID.fullmatch(one) for one in values
    ):
        _refuse("servers is not a list of server ids", "Send the ids that Nova shows.")
    if len(values) > MOST_SERVERS:
        _refuse(f"it names more than {MOST_SERVERS} servers", "Send several requests.")
    if ("server" in given or "servers" in given) and not values:
        _refuse("the list of servers is empty", "Name a server.")
    return tuple(dict.fromkeys(values))


def _count(value: object) -> int:
    if value is None:
        return 0
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) > 0):
        _refuse("count is not a number above 0", "Send the number of servers.")
    return int(text)


def _criterion(value: object) -> Criterion:
    if value is None:
        return Criterion.RANDOM
    try:
        return Criterion(value)
    except ValueError:
        _refuse("criterion is not valid", f"Use one of: {', '.join(one.value for one in Criterion)}.")


def _own_key(query: Mapping[str, Sequence[str]], headers: Mapping[str, str]) -> str | None:
    return headers.get("idempotency-key") or next(iter(query.get("idempotency_key", ())), None)


def _key(query: Mapping[str, Sequence[str]], headers: Mapping[str, str]) -> str | None:
    key = _own_key(query, headers) or headers.get("x-openstack-request-id")
    if key is not None and not _KEY.fullmatch(key):
        _refuse("the idempotency key is not valid", "Use 1 to 200 printable ASCII characters without spaces.")
    return key


def _refuse(happened: str, remedy: str) -> NoReturn:
    raise RequestError("read the request", happened, remedy)
