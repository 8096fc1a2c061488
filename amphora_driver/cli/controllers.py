# SPDX-License-Identifier: Apache-2.0
"""To be written."""

from __future__ import annotations

from cliff.command import Command


class ListControllers(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class DrainController(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class ResumeController(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError
