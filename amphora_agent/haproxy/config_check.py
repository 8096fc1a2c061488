# SPDX-License-Identifier: Apache-2.0
"""A HAProxy that reads a file and says whether it would serve it (management guide, section 3, "-c").

Invariant: it runs beside the one that serves and touches nothing of it; what it says no to is told in its own words.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from amphora_agent.errors import AgentError, MachineError


class Check:
    """A HAProxy that reads a file, from now on.

    Args:
        process: `read` has begun it.
        refusal: what its output means if it says no.
        seconds: for how long it may read.
    """

    def __init__(self, process: subprocess.Popen[str], refusal: Callable[[str], AgentError], seconds: float) -> None:
        self._process = process
        self._refusal = refusal
        self._seconds = seconds

    def end(self) -> None:
        """Wait for its judgement.

        Raises:
            ConfigurationRefused: it says no; with its own first line and the object it is about.
        """
        try:
            output, _ = self._process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired as error:
            raise MachineError("check the configuration", f"no answer within {self._seconds:.0f} s") from error
        if self._process.returncode != 0:
            raise self._refusal(output)


def read(argv: list[str]) -> subprocess.Popen[str]:
    """Begin. Called in the namespace whose addresses the file names."""
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
