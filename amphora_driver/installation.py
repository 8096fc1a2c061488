# SPDX-License-Identifier: Apache-2.0
"""The version of this installation, the place of its configuration file, and its plug-ins.

Invariant: this module imports no other module of the project and no library, so that `amphoractl --version` needs few
imports.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from typing import Any

CONFIG_FILE = "/etc/amphora-driver/amphora-driver.conf"
# Environment variable with the path of another configuration file.
CONFIG_VARIABLE = "AMPHORA_DRIVER_CONFIG"


def installed_version() -> str:
    """Return the version of this installation."""
    try:
        return metadata.version("octavia-amphora-driver")
    except metadata.PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=1)
def read_entry_points() -> Any:
    """Return the entry points of all installed distributions, as of the first call."""
    return metadata.entry_points()


def find_plugins(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group, of all installed distributions.

    A process reads the metadata of the distributions once. The library stevedore sorts all entry points by their group,
    which takes ten times as long, unless it can write a cache file.
    """
    found: metadata.EntryPoints = read_entry_points().select(group=group)
    return found
