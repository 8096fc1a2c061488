# SPDX-License-Identifier: Apache-2.0
"""A change of the running HAProxy through its stats socket.

Invariant: a failure of HAProxy is a value, not an exception: the caller then reloads HAProxy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amphora_agent.apply.config_swap import ConfigSwap
from amphora_agent.errors import HaproxyError
from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.haproxy.runtime_actions import Action, changed_servers
from amphora_agent.haproxy.runtime_commands import run_actions
from amphora_agent.haproxy.runtime_state import Loaded

RuntimeResult = Loaded | HaproxyError
"""The configuration that HAProxy reports after the change, or the reason why the change failed."""


class RuntimeUpdate:
    """Runtime actions in two steps, so that another HAProxy can check the new file between them.

    Args:
        actions: to carry out; None if the running HAProxy stays as it is, and both steps do nothing.
        directory: of the files that the new configuration names.

    Attributes:
        result: None before the update ended.
    """

    def __init__(
        self,
        haproxy: Haproxy,
        swap: ConfigSwap,
        actions: Sequence[Action] | None,
        wanted: Configuration,
        directory: Path,
    ) -> None:
        self._haproxy = haproxy
        self._swap = swap
        self._wanted = wanted
        self._directory = directory
        self.actions = actions
        self.result: RuntimeResult | None = None

    def start(self) -> None:
        """Mark the change as unfinished and carry out the actions.

        Raises:
            OSError: the mark could not be written; HAProxy is unchanged.
        """
        if self.actions is None:
            return
        self._swap.mark_unfinished()
        self.result = self._run(self.actions)
        reach(Point.EARLY)

    def verify(self) -> None:
        """Read back the changed servers, unless an action failed."""
        if self.actions is None or self.result is not None:
            return
        try:
            self.result = self._haproxy.verify(self._wanted, touched=changed_servers(self.actions))
        except HaproxyError as error:
            self.result = error

    def _run(self, actions: Sequence[Action]) -> HaproxyError | None:
        try:
            run_actions(
                actions, self._haproxy.worker, self._directory, self._haproxy.features(), self._haproxy.read_counters
            )
        except HaproxyError as error:
            return error
        except OSError as error:
            return HaproxyError("change the running HAProxy", str(error))
        return None
