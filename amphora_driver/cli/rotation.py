# SPDX-License-Identifier: Apache-2.0
"""To be written."""

from __future__ import annotations

from cliff.command import Command


class Rotate(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class ListRotations(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class ShowRotation(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class PauseRotation(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class ResumeRotation(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class AbortRotation(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError
