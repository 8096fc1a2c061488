# SPDX-License-Identifier: Apache-2.0
"""What a change of this amphora has come to.

Invariant: what it says is loaded HAProxy itself has said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amphora_agent.apply.change_log import Deed
from amphora_agent.haproxy.runtime_state import Loaded


@dataclass(frozen=True)
class Outcome:
    """What was done to serve a generation."""

    generation: int
    deed: Deed
    loaded: Loaded

    @property
    def how(self) -> str:
        return self.deed.how

    @property
    def reason(self) -> str:
        return self.deed.reason

    def document(self) -> dict[str, Any]:
        """The answer to a push."""
        return {
            "generation": self.generation,
            "how": self.how,
            "reason": self.reason,
            "loaded": self.loaded.document(),
        }
