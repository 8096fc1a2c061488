# SPDX-License-Identifier: Apache-2.0
"""All options of the control plane, and the configuration file that sets them.

Invariant: this package registers the options in a `ConfigOpts` object of its own, never in the global object. Inside
octavia-api the global object belongs to Octavia.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from oslo_config import cfg

from amphora_driver.config import (
    adoption,
    agent,
    backends,
    controller,
    failover,
    haproxy,
    health,
    logs,
    maintenance,
    notifications,
    octavia,
    openstack,
    queue,
    status,
    store,
)
from amphora_driver.errors import ConfigurationError
from amphora_driver.installation import CONFIG_FILE, CONFIG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_FILE = CONFIG_FILE
FILE_VARIABLE = CONFIG_VARIABLE

_MODULES = (
    store,
    queue,
    controller,
    agent,
    octavia,
    health,
    logs,
    haproxy,
    backends,
    openstack,
    failover,
    maintenance,
    adoption,
    status,
    notifications,
)


def with_help(options: dict[cfg.Opt, str]) -> list[cfg.Opt]:
    """Return the options, each with its help text."""
    for option, text in options.items():
        option.help = text
    return list(options)


GROUPS = {group: with_help(options) for one in _MODULES for group, options in one.OPTIONS.items()}


def load(files: Sequence[str] | None = None, *, with_logging: bool = True) -> cfg.ConfigOpts:
    """Return the options of these files; by default of the file in the environment, or the default file.

    See `load_groups` for `with_logging`.

    The function raises ConfigurationError if a file does not exist or is not valid.
    """
    return load_groups(GROUPS, files, "amphora-driver", FILE_VARIABLE, DEFAULT_FILE, with_logging=with_logging)


def load_groups(
    groups: Mapping[str, Sequence[cfg.Opt]],
    files: Sequence[str] | None,
    project: str,
    variable: str,
    default: str,
    *,
    with_logging: bool = True,
) -> cfg.ConfigOpts:
    """Return the options of some groups and those of logging.

    Args:
        files: configuration files; None for the file that the environment `variable` names, or the file `default` if
            it exists.
        project: name of the program for oslo.config.
        with_logging: whether the program uses oslo.log.

    Raises:
        ConfigurationError: a file does not exist or is not valid.
    """
    conf = cfg.ConfigOpts()
    if with_logging:
        # The import of oslo.log takes a tenth of the time of a short command.
        from oslo_log import log  # noqa: PLC0415

        log.register_options(conf)
    for group, options in groups.items():
        conf.register_opts(options, group=group)
    named = os.environ.get(variable)
    if files is None:
        files = [named] if named else [path for path in (default,) if os.path.exists(path)]  # noqa: PTH110 - oslo.config takes paths as text
    try:
        conf([], project=project, default_config_files=list(files), default_config_dirs=[])
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
