# SPDX-License-Identifier: Apache-2.0
"""Which version this agent is.

Invariant: it is what is installed, asked once: whatever is put beside a running agent, that one stays what it is.
"""

from __future__ import annotations

from functools import cache

DISTRIBUTION = "octavia-amphora-driver"


@cache
def agent_version() -> str:
    """The installed version; "unknown" for a tree that is not installed."""
    from importlib import metadata  # noqa: PLC0415 (takes a part of the start, and is needed once)

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
