# SPDX-License-Identifier: Apache-2.0
"""All options of the control plane, and the configuration file that sets them.

Invariant: the options are registered in a `ConfigOpts` object of this package, never in the global one. Inside
octavia-api the global object belongs to Octavia.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from oslo_config import cfg
from oslo_log import log

from amphora_driver.config import (
    agent,
    certificates,
    compute,
    controller,
    failover,
    haproxy,
    health,
    maintenance,
    network,
    octavia,
    openstack,
    queue,
    status,
    store,
    vrrp,
)
from amphora_driver.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_FILE = "/etc/amphora-driver/amphora-driver.conf"
FILE_VARIABLE = "AMPHORA_DRIVER_CONFIG"

_MODULES = (
    store,
    queue,
    controller,
    agent,
    octavia,
    health,
    haproxy,
    vrrp,
    compute,
    network,
    openstack,
    certificates,
    failover,
    maintenance,
    status,
)
GROUPS: dict[str, list[cfg.Opt]] = {group: options for one in _MODULES for group, options in one.OPTIONS.items()}


def load(files: Sequence[str] | None = None) -> cfg.ConfigOpts:
    """Return the options as the configuration files set them.

    Args:
        files: configuration files; None for the file that the environment names, or the default file.

    Raises:
        ConfigurationError: a named file does not exist or is not valid.
    """
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    for group, options in GROUPS.items():
        conf.register_opts(options, group=group)
    named = os.environ.get(FILE_VARIABLE)
    if files is None:
        files = [named] if named else [path for path in (DEFAULT_FILE,) if os.path.exists(path)]  # noqa: PTH110 - text paths for oslo.config
    try:
        conf([], project="amphora-driver", default_config_files=list(files), default_config_dirs=[])
    except cfg.Error as error:
        raise ConfigurationError("read the configuration", str(error), f"Check {', '.join(files)}.") from error
    return conf


@lru_cache(maxsize=1)
def shared() -> cfg.ConfigOpts:
    """Return the options of this process, which reads its files once."""
    return load()


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """Return all options by group, for oslo-config-generator."""
    return list(GROUPS.items())
