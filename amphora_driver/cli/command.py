# SPDX-License-Identifier: Apache-2.0
"""Base classes of commands with declared arguments, and the operator's name for the database."""

from __future__ import annotations

import argparse
import getpass
import itertools
import logging
import socket
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from cliff import command, lister, show
from stevedore import ExtensionManager

from amphora_driver.errors import UnknownObject
from amphora_driver.installation import find_plugins

LOG = logging.getLogger(__name__)
# The names of a command-line argument, and the keyword parameters of `ArgumentParser.add_argument`.
Argument = tuple[tuple[str, ...], dict[str, Any]]
# The column names and the rows of a list command.
Table = tuple[tuple[str, ...], Iterable[tuple[Any, ...]]]
# Maximum number of characters of an operator's name in the database.
_MAX_NAME_LENGTH = 128
# Maximum number of rows of a table without the option `--limit`. A command shows this number of rows in less than a
# second.
_PAGE = 1000


class _Formatters(ExtensionManager):
    """The output formatters of a kind of command."""

    def list_entry_points(self) -> list[metadata.EntryPoint]:
        return list(find_plugins(self.namespace))


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument for `Command.arguments`, with the parameters of `add_argument` of argparse."""
    return names, options


LOAD_BALANCER = argument("load_balancer", metavar="ID", help="Id of the load balancer, or a unique prefix of it.")
AMPHORA = argument("amphora", metavar="ID", help="Id of the amphora, or a unique prefix of it.")


class Command(command.Command):
    """A command with the arguments that its class declares."""

    arguments: tuple[Argument, ...] = ()
    # Whether the command is available in the read-only mode of amphoractl (`--status-url`).
    read_only_mode = False

    def __init__(self, app: Any, app_args: argparse.Namespace | None) -> None:
        # With the further parameter `cmd_name`, cliff would search for plug-ins of each command (hooks).
        super().__init__(app, app_args)

    def get_epilog(self) -> str:
        # The method of the base class adds the name of another distribution. For that it reads the file list of all
        # installed distributions. The commands belong to the distribution of amphoractl.
        return self._epilog or ""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        for names, options in self.arguments:
            parser.add_argument(*names, **options)
        return parser


class _DisplayCommand(Command):
    """A command with output formats."""

    def _load_formatter_plugins(self) -> ExtensionManager:
        return _Formatters(self.formatter_namespace, invoke_on_load=True)


class Lister(_DisplayCommand, lister.Lister):
    """A command that lists rows."""


class PagedLister(Lister):
    """A command that lists many rows, in pages. The first value of a row is its id."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        limit = f"Largest number of rows; 0 for all (default: {_PAGE} in a table, otherwise all)."
        parser.add_argument("--limit", type=int, metavar="NUMBER", help=limit)
        parser.add_argument(
            "--marker", metavar="ID", help="Only rows after the row with this id, the last one of a page."
        )
        return parser

    def page(self, rows: Iterable[tuple[Any, ...]], parsed_args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of one page; log a warning if more rows follow.

        Raises:
            UnknownObject: no row has the id of the marker.
        """
        following = iter(rows)
        if parsed_args.marker:
            skipped = itertools.dropwhile(lambda row: str(row[0]) != parsed_args.marker, following)
            if next(skipped, None) is None:
                raise UnknownObject(f"list the rows after {parsed_args.marker}", "no row has this id")
            following = skipped
        limit, last = self.page_size(parsed_args), None
        for number, row in enumerate(following):
            if 0 < limit <= number:
                LOG.warning(
                    "the list ends after %d rows, and more rows follow: use --marker %s for the next rows, or "
                    "--limit 0 for all rows",
                    limit,
                    last,
                )
                return
            last = row[0]
            yield row

    def page_size(self, parsed_args: argparse.Namespace) -> int:
        """Return the largest number of rows; 0 or less for all."""
        if parsed_args.limit is not None:
            return int(parsed_args.limit)
        # Only a table has a default limit. A program that reads another format would not see the warning about further
        # rows.
        return _PAGE if getattr(parsed_args, "formatter", "table") == "table" else 0


class ShowOne(_DisplayCommand, show.ShowOne):
    """A command that shows the values of one object, by name."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        shown = self.values(parsed_args)
        return tuple(shown), tuple(shown.values())

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        raise NotImplementedError


def operator_name() -> str:
    """Return the name of the operating system's user, in at most 128 characters.

    A process can run under a user id without an entry in the user database; the name is then "unknown".
    """
    try:
        return getpass.getuser()[:_MAX_NAME_LENGTH]
    except (KeyError, OSError):
        return "unknown"


def operator_at_host() -> str:
    """Return user@host, in at most 128 characters."""
    return f"{operator_name()}@{socket.gethostname()}"[:_MAX_NAME_LENGTH]


# Arguments of the commands that upgrade a schema.
UPGRADE_ARGUMENTS = (
    argument(
        "--contract",
        action="store_true",
        help="Also apply the contract migrations, with which processes of the previous version do not work. The "
        "command is refused while such processes run.",
    ),
    argument(
        "--force",
        action="store_true",
        help="Upgrade even if processes seem to use the database. Use it only if none of them runs.",
    ),
)
