# SPDX-License-Identifier: Apache-2.0
"""The version of this agent, read once: a running agent keeps its version during an installation."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

# Distributions with the agent: its own wheel, and the complete project (a checkout, the image).
DISTRIBUTIONS = ("octavia-amphora-agent", "octavia-amphora-driver")


@cache
def agent_version() -> str:
    """Return the installed version; "unknown" for a tree that is not installed."""
    from importlib import metadata  # noqa: PLC0415 (the import takes time, and the agent needs it once)

    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"
