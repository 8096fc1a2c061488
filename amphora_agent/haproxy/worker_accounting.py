# SPDX-License-Identifier: Apache-2.0
"""What who replaces and ends workers needs of who reads their counters.

Invariant: no worker ends before it was read to the end, unless it dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Accounts(Protocol):
    """Who reads what workers have counted, to the end (`amphora_agent.stats.collector`)."""

    def sample(self) -> None:
        """Read every worker that lives."""

    def sample_servers(self, servers: Sequence[tuple[str, str]]) -> None:
        """Read these of the present worker, by HAProxy's numbers of backend and server."""

    def hold(self, drain: float) -> None:
        """The present worker is about to be replaced, and may go on for so many seconds."""

    def finish(self, pid: int, grace: float) -> int:
        """End a replaced worker; the connections it still has after so many seconds are closed, and counted."""

    def finish_all(self, grace: float) -> int:
        """Have all that leave close their connections; somebody else will end them."""
