# SPDX-License-Identifier: Apache-2.0
"""The file in which a worker leaves its servers' states to the next one.

Invariant: pure. What HAProxy's checks found out is kept; what the configuration decides (weight, maintenance,
address) is the new configuration's, whatever was set at run time before.
"""

from __future__ import annotations

from amphora_agent.haproxy.config_parser import Configuration

VERSION = "1"
_BACKEND, _NAME, _ADMIN, _WEIGHT, _INITIAL_WEIGHT, _PORT, _ADDRESS = 1, 3, 6, 7, 8, 18, 4
_MAINTENANCE_BY_CONFIGURATION = "5"
_FIELDS = 25
EMPTY = f"{VERSION}\n"


def rewrite(answer: str, wanted: Configuration) -> str:
    """Turn the answer to ``show servers state`` into a file for a worker that will run `wanted`.

    Servers without a check are left out (nothing was found out about them), and so are those whose address
    changed.
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
