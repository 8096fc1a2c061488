# SPDX-License-Identifier: Apache-2.0
"""Amphorae with each HAProxy that is here.

Invariant: which one an amphora runs is decided by its PATH alone, as on a real machine; a version that is not here is
skipped with the reason.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
from served import Lab

_labs = itertools.count()


def lab_with(version, authority, directory: Path) -> Lab:
    """A lab whose amphora runs this HAProxy."""
    with pytest.MonkeyPatch.context() as patch:
        if version.here().series != "system":
            patch.setenv("PATH", f"{Path(version.program).parent}:{os.environ['PATH']}")
        return Lab(f"dv{os.getpid()}n{next(_labs)}", directory, authority)


class Words:
    """A worker's socket, as the agent asks it."""

    def __init__(self, amphora) -> None:
        self.ask = amphora.ask_haproxy


def worker(served) -> int:
    """The worker's process id."""
    return int(re.search(r"^Pid: (\d+)$", served.amphora.ask_haproxy("show info"), re.MULTILINE).group(1))
