# SPDX-License-Identifier: Apache-2.0
"""Amphorae with each installed HAProxy version.

Invariant: only the PATH of an amphora selects its HAProxy, as on a real machine; a missing version is skipped with the
reason.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
from haproxy_versions import VERSIONS, HAProxy
from served import Lab

_EVERY_RUN = {"system", "3.0"}
on_every_haproxy = pytest.mark.parametrize(
    "lab",
    [pytest.param(one, marks=() if one.series in _EVERY_RUN else pytest.mark.extended) for one in VERSIONS],
    ids=str,
    indirect=True,
    scope="module",
)
"""The mark of a module whose tests run with each HAProxy version."""
_labs = itertools.count()


def lab_with(version: HAProxy, authority, directory: Path) -> Lab:
    """A lab whose amphora runs this HAProxy."""
    with pytest.MonkeyPatch.context() as patch:
        if version.here().series != "system":
            patch.setenv("PATH", f"{Path(version.program).parent}:{os.environ['PATH']}")
        made = Lab(f"dl{os.getpid()}n{next(_labs)}", directory, authority)
    made.series = version.series
    return made


class RuntimeSocket:
    """The interface of the agent's runtime socket, over a lab's amphora."""

    def __init__(self, amphora) -> None:
        self.ask = amphora.ask_haproxy


def worker(served) -> int:
    """Return the worker's process id."""
    return int(re.search(r"^Pid: (\d+)$", served.amphora.ask_haproxy("show info"), re.MULTILINE).group(1))
