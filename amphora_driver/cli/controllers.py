# SPDX-License-Identifier: Apache-2.0
"""Commands about the processes of the control plane.

Invariant: what is shown is what processes said of themselves; one that is dead has said nothing for a while. Draining
is written down, and obeyed by the controller itself within a few seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from cliff.command import Command
from cliff.lister import Lister

from amphora_driver.cli.failover_request import who_where
from amphora_driver.cli.formatting import Age, Listed, Moment
from amphora_driver.errors import UnknownObject
from amphora_driver.store import process_registry
from amphora_driver.store.process_registry import ProcessKind

_HEAD = ("Name", "Kind", "Host", "Version", "Since", "Last sign", "Jobs", "Duties", "Draining")


class ListControllers(Lister):
    """Controllers: what each works on, which duties it has, and whether it drains. One without a sign is dead."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--all", action="store_true", help="Health managers and provider agents too.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""

        def read(connection: sa.Connection) -> tuple[Any, dict[str, list[str]], dict[str, float]]:
            kind = None if parsed_args.all else ProcessKind.CONTROLLER
            every = process_registry.list_processes(connection, kind)
            return every, process_registry.list_duties(connection), process_registry.list_drained_hosts(connection)

        rows, duties, hosts = self.app.read(read)
        return _HEAD, (_shown(row, duties.get(row.name, []), hosts) for row in rows)


class _Draining(Command):
    """Whether controllers take up anything new."""

    draining = True

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("name", nargs="?", metavar="NAME", help="Name of a controller, as long as it runs.")
        which.add_argument("--host", metavar="HOST", help="All controllers of this host, also those that start later.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down."""
        if parsed_args.host is None:
            self.app.database.write(lambda connection: self._one(connection, parsed_args.name))
        else:
            self.app.database.write(lambda connection: self._host(connection, parsed_args.host))

    def _one(self, connection: sa.Connection, name: str) -> None:
        verb = "drain" if self.draining else "resume"
        row = next(
            (one for one in process_registry.list_processes(connection, ProcessKind.CONTROLLER) if one.name == name),
            None,
        )
        if row is None:
            raise UnknownObject(f"{verb} controller {name}", "none of this name is known", "See: controller list.")
        if not self.draining and row.host in process_registry.list_drained_hosts(connection):
            remedy = f"Use: amphoractl controller resume --host {row.host}."
            raise UnknownObject(f"resume controller {name}", f"its host {row.host} is drained", remedy)
        process_registry.set_process_draining(connection, name, draining=self.draining)

    def _host(self, connection: sa.Connection, host: str) -> None:
        process_registry.set_host_draining(connection, host, who_where(), draining=self.draining)


class DrainController(_Draining):
    """Have a controller finish what it works on, take up nothing new, and give its duties to others."""


class ResumeController(_Draining):
    """Have a controller that drains take up work again."""

    draining = False


def _shown(row: Any, duties: list[str], hosts: dict[str, float]) -> tuple[Any, ...]:
    draining = row.draining or (row.kind == ProcessKind.CONTROLLER.value and row.host in hosts)
    return (
        *(row.name, row.kind, row.host, row.version),
        *(Moment(row.started_at), Age(row.seen_at), row.jobs, Listed(duties), bool(draining)),
    )
