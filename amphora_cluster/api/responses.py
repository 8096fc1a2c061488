# SPDX-License-Identifier: Apache-2.0
"""The JSON documents of the API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from amphora_cluster.database.groups import GroupRecord
from amphora_cluster.model import Node, NodeState, Request
from amphora_driver.errors import AmphoraDriverError

Json = dict[str, Any]


def error_json(error: AmphoraDriverError) -> Json:
    """Return an error with its three parts."""
    return {"wanted": error.wanted, "happened": error.happened, "remedy": error.remedy}


def request_json(request: Request) -> Json:
    """Return a request with its outcome; `state` is open, succeeded or failed."""
    return {
        "id": request.id,
        "group_id": request.group_id,
        "kind": request.kind.value,
        "state": state_of(request),
        "servers": list(request.servers),
        **({"count": request.count, "criterion": request.criterion.value} if request.count else {}),
        "created_at": _time(request.created_at),
        "ended_at": _time(request.ended_at),
        "succeeded": [one for one in request.servers if request.outcome.get(one) == ""],
        "failed": failed_of(request),
        "refusal": request.refusal,
    }


def state_of(request: Request) -> str:
    """Return open, succeeded or failed."""
    if request.ended_at is None:
        return "open"
    return "failed" if request.refusal or failed_of(request) else "succeeded"


def failed_of(request: Request) -> dict[str, str]:
    """Return the servers for which a request failed, with the reasons."""
    return {server: reason for server, reason in request.outcome.items() if reason}


def failure_json(request: Request) -> Json:
    """Return the error for a request that ended with a failure."""
    failed = failed_of(request)
    happened = request.refusal or f"{len(failed)} of {len(request.servers)} servers failed"
    return {
        "wanted": f"let servers {request.kind.value}" if request.kind.value != "sync" else "synchronize the group",
        "happened": happened,
        "remedy": "Correct the reasons, and send a new request.",
        "failed": failed,
        "request": request_json(request),
    }


def unfinished_json(request: Request) -> Json:
    """Return the error for a request that has not ended, for a caller that continues after the end only."""
    return {
        "wanted": f"answer at the end of the {request.kind.value}",
        "happened": "the request has not ended yet, and continues",
        "remedy": "Send the same request again, or read the URL.",
        "request": request_json(request),
    }


def group_json(record: GroupRecord, nodes: Sequence[Node]) -> Json:
    """Return the status of a group. It contains no credential and no token."""
    group = record.group
    return {
        "id": group.id,
        "name": group.name,
        "project_id": group.project_id,
        "load_balancer_id": group.load_balancer_id,
        "pool_id": group.pool_id,
        "deleting": record.deleting,
        "passed_at": _time(record.passed_at),
        "error": record.error,
        "serving": sum(one.state is NodeState.SERVING for one in nodes),
        "minimum": group.minimum,
        "nodes": [
            {
                "server_id": one.server_id,
                "state": one.state.value,
                "since": _time(one.since),
                "leaving": one.leaving,
                "reason": one.reason,
            }
            for one in nodes
        ],
        "unhealthy": [
            {"server_id": one.server_id, "since": _time(one.since), "reason": one.reason}
            for one in nodes
            if one.state is NodeState.UNHEALTHY
        ],
    }


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
