# SPDX-License-Identifier: Apache-2.0
"""The version of this installation, and the place of its configuration file.

Invariant: this module imports no other module of the project and no library, so that `amphoractl --version` needs few
imports.
"""

from __future__ import annotations

from importlib import metadata

CONFIG_FILE = "/etc/amphora-driver/amphora-driver.conf"
# Environment variable with the path of another configuration file.
CONFIG_VARIABLE = "AMPHORA_DRIVER_CONFIG"


def installed_version() -> str:
    """Return the version of this installation."""
    try:
        return metadata.version("octavia-amphora-driver")
    except metadata.PackageNotFoundError:
        return "not installed"
