# SPDX-License-Identifier: Apache-2.0
"""The result of applying a bundle.

Invariant: ``loaded`` is the answer of HAProxy itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amphora_agent.apply.change_log import Change
from amphora_agent.haproxy.runtime_state import Loaded


@dataclass(frozen=True)
class ApplyResult:
    """The change that was made for a generation, and the configuration that HAProxy reports."""

    generation: int
    change: Change
    loaded: Loaded

    @property
    def how(self) -> str:
        return self.change.how

    @property
    def reason(self) -> str:
        return self.change.reason

    def document(self) -> dict[str, Any]:
        """Return the answer to a push."""
        return {
            "generation": self.generation,
            "how": self.how,
            "reason": self.reason,
            "loaded": self.loaded.document(),
        }
