# SPDX-License-Identifier: Apache-2.0
"""The options of the control plane: one module for each component."""

from amphora_driver.config.opts import (
    DEFAULT_FILE,
    FILE_VARIABLE,
    GROUPS,
    list_opts,
    load,
    load_groups,
    shared,
    with_help,
)

__all__ = ["DEFAULT_FILE", "FILE_VARIABLE", "GROUPS", "list_opts", "load", "load_groups", "shared", "with_help"]
