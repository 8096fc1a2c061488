# SPDX-License-Identifier: Apache-2.0
"""GET /v2/diagnostics: everything a person asks for first, as one document.

Invariant: a part that cannot be had says why in its place and spoils no other part. No key is ever in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
from flask import Blueprint
from flask.typing import ResponseReturnValue

from amphora_agent.errors import AgentError
from amphora_agent.haproxy.process import SERVICE, Haproxy
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace
from amphora_agent.paths import Paths
from amphora_agent.services import Services
from amphora_agent.stats.sender import Sender


def blueprint(paths: Paths, services: Services, haproxy: Haproxy, inner: Namespace, sender: Sender) -> Blueprint:
    """The route."""
    routes = Blueprint("diagnostics", __name__)
    parts: dict[str, Callable[[], Any]] = {
        "machine.cfg": lambda: paths.machine_configuration.read_text(encoding="utf-8"),
        "haproxy.cfg": lambda: paths.configuration.read_text(encoding="utf-8"),
        "show info": lambda: haproxy.worker.ask("show info"),
        "show stat": lambda: haproxy.worker.ask("show stat -1 7 -1"),
        "show servers state": lambda: haproxy.worker.ask("show servers state"),
        "show proc": lambda: haproxy.master.ask("show proc"),
        "interfaces": lambda: interfaces.describe(inner),
        "haproxy log": lambda: services.log(SERVICE),
        "agent log": lambda: services.log("amphora-agent"),
        "heartbeat errors": sender.errors,
        "processes": _processes,
    }

    @routes.get("/v2/diagnostics")
    def get_diagnostics() -> ResponseReturnValue:
        return {name: _part(read) for name, read in parts.items()}

    return routes


def _part(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AgentError, OSError, psutil.Error) as error:
        return {"error": str(error)}


def _processes() -> list[dict[str, Any]]:
    found = []
    for process in psutil.process_iter(["pid", "name", "create_time", "memory_info"]):
        info = process.info
        memory = info["memory_info"]
        found.append(
            {
                "pid": info["pid"],
                "name": info["name"],
                "started": info["create_time"],
                "resident_bytes": memory.rss if memory else None,
            }
        )
    return found
