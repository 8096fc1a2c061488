# SPDX-License-Identifier: Apache-2.0
"""Commands about the processes of the control plane.

Invariant: the output shows the rows that the processes write about themselves. A process without a recent "last sign"
is dead. A drain is a database row, which the controller obeys within a few seconds.
"""

from __future__ import annotations

import argparse
from typing import Any

import sqlalchemy as sa

from amphora_driver.cli.command import Command, Lister, Table, argument, operator_at_host
from amphora_driver.cli.formatting import Age, Timestamp, ValueList
from amphora_driver.errors import UnknownObject
from amphora_driver.store import process_registry
from amphora_driver.store.process_registry import ProcessKind

_HEAD = ("Name", "Kind", "Host", "Version", "Since", "Last sign", "Jobs", "Duties", "Draining")


class ListControllers(Lister):
    """List controllers with their jobs, duties and drain state. An old last sign means a dead controller."""

    read_only_mode = True
    arguments = (argument("--all", action="store_true", help="Include health managers and provider agents."),)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        def read(connection: sa.Connection) -> tuple[Any, dict[str, list[str]], dict[str, float]]:
            kind = None if parsed_args.all else ProcessKind.CONTROLLER
            every = process_registry.list_processes(connection, kind)
            return every, process_registry.list_duties(connection), process_registry.list_drained_hosts(connection)

        rows, duties, hosts = self.app.read(read)
        return _HEAD, (_row(row, duties.get(row.name, []), hosts) for row in rows)


class _SetDraining(Command):
    """Set or clear the drain of controllers."""

    draining = True

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        which = parser.add_mutually_exclusive_group(required=True).add_argument
        which("name", nargs="?", metavar="NAME", help="Name of one running controller.")
        which("--host", metavar="HOST", help="All controllers of this host, including those that start later.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        self.app.database.write(lambda connection: self._set(connection, parsed_args.name, parsed_args.host))

    def _set(self, connection: sa.Connection, name: str, host: str | None) -> None:
        if host is not None:
            process_registry.set_host_draining(connection, host, operator_at_host(), draining=self.draining)
            return
        attempt = f"{'drain' if self.draining else 'resume'} controller {name}"
        rows = {one.name: one for one in process_registry.list_processes(connection, ProcessKind.CONTROLLER)}
        row = rows.get(name)
        if row is None:
            remedy = "List them: amphoractl controller list."
            raise UnknownObject(attempt, "no controller has this name", remedy)
        if not self.draining and row.host in process_registry.list_drained_hosts(connection):
            remedy = f"Use: amphoractl controller resume --host {row.host}."
            raise UnknownObject(attempt, f"its host {row.host} is drained", remedy)
        process_registry.set_process_draining(connection, name, draining=self.draining)


class DrainController(_SetDraining):
    """Drain a controller: it finishes its jobs, starts no new ones, and releases its duties."""


class ResumeController(_SetDraining):
    """End the drain of a controller: it starts jobs again."""

    draining = False


def _row(row: Any, duties: list[str], hosts: dict[str, float]) -> tuple[Any, ...]:
    draining = row.draining or (row.kind == ProcessKind.CONTROLLER.value and row.host in hosts)
    return (
        *(row.name, row.kind, row.host, row.version),
        *(Timestamp(row.started_at), Age(row.seen_at), row.jobs, ValueList(duties), bool(draining)),
    )
