# SPDX-License-Identifier: Apache-2.0
"""To be written."""

from __future__ import annotations

from cliff.command import Command


class ListSpares(Command):
    """To be written."""

    def take_action(self, parsed_args: object) -> None:
        """To be written."""
        raise NotImplementedError
