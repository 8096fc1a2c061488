# SPDX-License-Identifier: Apache-2.0
"""The version of this agent, read once: a running agent keeps its version during an installation."""

from __future__ import annotations

from functools import cache

DISTRIBUTION = "octavia-amphora-driver"


@cache
def agent_version() -> str:
    """Return the installed version; "unknown" for a tree that is not installed."""
    from importlib import metadata  # noqa: PLC0415 (the import takes time, and the agent needs it once)

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
