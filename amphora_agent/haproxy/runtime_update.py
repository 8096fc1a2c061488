# SPDX-License-Identifier: Apache-2.0
"""Changing the HAProxy that runs, and asking it what came of that.

Invariant: nothing is raised. What it cannot do is a value, for whoever then has a new worker read the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.haproxy.runtime_actions import Step, touched
from amphora_agent.haproxy.runtime_commands import carry_out
from amphora_agent.haproxy.runtime_state import Loaded

# What came of it: what it runs now, or what it could not do.
Changed = Loaded | HaproxyError


def make(haproxy: Haproxy, steps: Sequence[Step], directory: Path) -> HaproxyError | None:
    """Carry out steps; what could not be done, if anything.

    Args:
        directory: of the files that the new configuration names.
    """
    try:
        carry_out(steps, haproxy.worker, directory, haproxy.abilities(), haproxy.count)
    except HaproxyError as error:
        return error
    except OSError as error:
        return HaproxyError("change the running HAProxy", str(error))
    return None


def outcome(haproxy: Haproxy, steps: Sequence[Step], wanted: Configuration) -> Changed:
    """What it runs after that, if it is as wanted."""
    try:
        return haproxy.verify(wanted, touched=touched(steps))
    except HaproxyError as error:
        return error
