# SPDX-License-Identifier: Apache-2.0
"""Commands about the tokens of webhooks.

Invariant: only `group token create` shows a token, once. The database has a digest.
"""

from __future__ import annotations

import argparse
from typing import Any

from amphora_cluster.cli.stores import GROUP, opened
from amphora_driver.cli.command import Lister, ShowOne, Table, argument, operator_at_host
from amphora_driver.cli.formatting import Timestamp

_HEAD = ("ID", "Name", "Created", "Created by", "Expires")


class CreateToken(ShowOne):
    """Create a token for the webhooks of one group, and show it. It cannot be shown again."""

    arguments = (
        GROUP,
        argument("--name", default="", metavar="NAME", help="Purpose of the token, for the list."),
        argument("--expires", type=float, metavar="SECONDS", help="Seconds of validity. Default: no limit."),
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Create the token."""
        with opened(self.app) as stores:
            group = stores.groups.find(parsed_args.group).group
            made, token = stores.tokens.create(group.id, parsed_args.name, operator_at_host(), parsed_args.expires)
        return {
            "ID": made.id,
            "Group": group.id,
            "Name": made.name,
            "Expires": Timestamp(made.expires_at),
            "Token": token.reveal().decode(),
        }


class ListTokens(Lister):
    """List the tokens of a group, oldest first."""

    arguments = (GROUP,)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        """Return the rows."""
        with opened(self.app) as stores:
            group = stores.groups.find(parsed_args.group).group
            found = stores.tokens.list_tokens(group.id)
        return _HEAD, [
            (one.id, one.name, Timestamp(one.created_at), one.created_by, Timestamp(one.expires_at)) for one in found
        ]


class DeleteToken(ShowOne):
    """Delete a token; the API refuses it from now on."""

    arguments = (GROUP, argument("token", metavar="ID", help="Id of the token."))

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Delete the token."""
        with opened(self.app) as stores:
            group = stores.groups.find(parsed_args.group).group
            stores.tokens.delete(group.id, parsed_args.token)
        return {"ID": parsed_args.token, "Group": group.id, "State": "deleted"}
