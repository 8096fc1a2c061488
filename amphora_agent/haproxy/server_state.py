# SPDX-License-Identifier: Apache-2.0
"""The server-state file, in which a worker passes the check results of its servers to the next one.

Invariant: pure. The results of health checks are kept. Weight, maintenance and address are those of the new
configuration, whatever the runtime API has set before.
"""

from __future__ import annotations

from amphora_agent.haproxy.config_parser import Configuration

VERSION = "1"
_BACKEND, _NAME, _ADMIN, _WEIGHT, _INITIAL_WEIGHT, _PORT, _ADDRESS = 1, 3, 6, 7, 8, 18, 4
_MAINTENANCE_BY_CONFIGURATION = "5"
_FIELDS = 25
EMPTY = f"{VERSION}\n"


def compose_state(answer: str, wanted: Configuration) -> str:
    """Return the server-state file for a worker with the configuration `wanted`.

    Servers without a check are left out, because they have no results. So are servers with another address.

    Args:
        answer: of the old worker to ``show servers state``.
        wanted: the configuration of the new worker.
    """
    lines = answer.split("\n")
    if not lines or lines[0].strip() != VERSION:
        return EMPTY
    kept = [VERSION]
    servers = wanted.servers
    for line in lines[1:]:
        if line.startswith("#"):
            kept.append(line)
            continue
        fields = line.split(" ")
        if len(fields) < _FIELDS:
            continue
        server = servers.get((fields[_BACKEND], fields[_NAME]))
        if server is None or not server.checked or not _same_address(server.address, fields):
            continue
        fields[_ADMIN] = _MAINTENANCE_BY_CONFIGURATION if server.disabled else "0"
        fields[_WEIGHT] = fields[_INITIAL_WEIGHT] = str(server.weight)
        kept.append(" ".join(fields))
    return "\n".join(kept) + "\n"


def _same_address(address: str, fields: list[str]) -> bool:
    host, _, port = address.rpartition(":")
    return host.strip("[]").lower() == fields[_ADDRESS].lower() and port == fields[_PORT]
