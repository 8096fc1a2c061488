# SPDX-License-Identifier: Apache-2.0
"""To be written."""

from __future__ import annotations

from cliff.command import Command


class ListFailovers(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class ShowFailover(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class FailoverStatus(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class OpenBreaker(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class CloseBreaker(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError


class ListZombies(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError
