# SPDX-License-Identifier: Apache-2.0
"""Configuration texts as a controller writes them.

Invariant: names are those of docs/reference/agent-api.md: listeners, pools and members by their ids.
"""

from __future__ import annotations

import uuid

from amphora_lab import MEMBERS, VIP, VIP6

LISTENER, SECOND, POOL = (str(uuid.uuid5(uuid.NAMESPACE_DNS, name)) for name in ("one", "two", "pool"))
MEMBER_IDS = {name: str(uuid.uuid5(uuid.NAMESPACE_DNS, name)) for name in MEMBERS}
# Without `timeout check`, a check that takes longer than `inter` makes its member DOWN, and clients get status 503.
# Members answer later than `inter` on a busy machine.
DEFAULTS = """defaults
    mode http
    balance roundrobin
    retries 3
    option redispatch
    option idle-close-on-response
    timeout connect 2s
    timeout client 10s
    timeout server 10s
    timeout check 5s
"""
# The connection of a check must not take longer than `inter`, also with `timeout check`. The first check of a member
# decides alone, and later ones only together.
CHECK = "check inter 1s fastinter 200 downinter 200 fall 2 rise 1"


def server(name: str, keywords: str = f"weight 1 {CHECK}") -> str:
    return f"    server {MEMBER_IDS[name]} {MEMBERS[name]}:80 {keywords}\n"


def listener(members, *, listener_id: str = LISTENER, port: int = 80, extra: str = "", **keywords: str) -> str:
    lines = "".join(server(name, keywords[name]) if name in keywords else server(name) for name in members)
    return (
        f"frontend {listener_id}\n    bind {VIP}:{port}\n    bind [{VIP6}]:{port}\n"
        f"    default_backend {POOL}:{listener_id}\n"
        f"backend {POOL}:{listener_id}\n    option httpchk GET /health\n"
        f"    load-server-state-from-file global\n{extra}{lines}"
    )


def text(*listeners: str) -> str:
    return DEFAULTS + "".join(listeners)
