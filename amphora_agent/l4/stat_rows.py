# SPDX-License-Identifier: Apache-2.0
"""Virtual servers as rows of HAProxy's statistics (management guide 9.1), for the responder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IDENTITY = ("pxname", "svname", "type", "mode", "status")
COLUMNS = (*_IDENTITY, "scur", "stot", "conn_tot", "bin", "bout", "ereq", "weight", "lbtot")
_LISTENER, _POOL, _MEMBER = "0", "1", "2"
# Columns of HAProxy's statistics, with the L4 daemon's names of the counters. HAProxy's column lbtot counts the
# sessions that the balancing algorithm assigned, which are all sessions of UDP and SCTP.
_OF_MEMBERS = {
    "scur": "active_connections",
    "stot": "total_connections",
    "lbtot": "total_connections",
    "bin": "bytes_in",
    "bout": "bytes_out",
}


def render_rows(servers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return CSV for the servers of the L4 daemon's state: columns, then listeners, pools and members."""
    lines = [",".join(COLUMNS)]
    for name, found in servers.items():
        total = found["total_connections"]
        counted = {"scur": found["active_connections"], "stot": total}
        counted |= {"bin": found["bytes_in"], "bout": found["bytes_out"]}
        errors = {"conn_tot": total, "ereq": found["request_errors"]}
        lines.append(_row(name, "FRONTEND", _LISTENER, found["status"], {**counted, **errors}))
        if (pool := found["pool"]) is None:
            continue
        proxy = f"{pool['id']}:{name}"
        # All flows of a listener go to its pool, so the pool has the same counters.
        lines.append(_row(proxy, "BACKEND", _POOL, pool["status"], counted))
        for member, one in pool["members"].items():
            own = {column: one[field] for column, field in _OF_MEMBERS.items() if field in one}
            lines.append(_row(proxy, member, _MEMBER, one["status"], {"weight": one["weight"], **own}))
    return "\n".join(lines) + "\n"


def _row(proxy: str, name: str, kind: str, status: str, counted: Mapping[str, int]) -> str:
    known = {"pxname": proxy, "svname": name, "type": kind, "mode": "udp", "status": status, **counted}
    return ",".join(str(known.get(column, "")) for column in COLUMNS)
