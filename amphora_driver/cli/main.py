# SPDX-License-Identifier: Apache-2.0
"""`amphoractl`, the operator's command line.

Invariant: commands read the database, so their output does not depend on other processes of the control plane. A
command that writes can be repeated. No command shows a secret, encrypted or not. Untrusted text reaches a terminal only
as printable characters.

In the read-only mode, commands read records from the status page of a process. amphoractl then opens no database, no
key and no configuration file, and refuses all other commands.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO, TypeVar

import sqlalchemy as sa
from cliff.app import App
from cliff.commandmanager import CommandManager
from oslo_config.cfg import ConfigOpts
from sqlalchemy.exc import DBAPIError

from amphora_driver import config
from amphora_driver.cli.command import Command
from amphora_driver.cli.formatting import escaping_stream
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database, parse_url
from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.store.process_registry import installed_version
from amphora_driver.telemetry.records import Scope
from amphora_driver.telemetry.records_client import StatusPageRecords, read_token

LOG = logging.getLogger(__name__)
COMMANDS = "amphoractl.commands"
URL_VARIABLE = "AMPHORACTL_STATUS_URL"
TOKEN_VARIABLE = "AMPHORACTL_STATUS_TOKEN_FILE"  # noqa: S105 - the name of a variable with a path
CA_VARIABLE = "AMPHORACTL_STATUS_CA_FILE"
T = TypeVar("T")


class LazyCommands(CommandManager):
    """The commands of a group of entry points. The class of a command is imported at its use."""

    def load_commands(self, namespace: str) -> None:
        """Add the commands of a group without an import.

        The method of the base class imports the classes of all commands, for which it needs half of the time of a
        command.
        """
        self.group_list.append(namespace)
        found = {one.name.replace("_", " "): one for one in metadata.entry_points(group=namespace)}
        self.commands |= {name: one for name, one in found.items() if name not in self.commands}


class Amphoractl(App):
    """The application. Commands read with `read`; commands that write use `database`."""

    NAME = "amphoractl"

    def __init__(self, commands: CommandManager | None = None, **streams: Any) -> None:
        super().__init__(
            description="Show and operate load balancers, amphorae and controllers; maintain database and keys.",
            version=installed_version(),
            command_manager=LazyCommands(COMMANDS) if commands is None else commands,
            deferred_help=True,
            **streams,
        )
        # The library cliff writes untrusted text to these streams with its own loggers and formatters. So the streams
        # escape unprintable characters.
        self.stdout: TextIO = escaping_stream(streams.get("stdout") or sys.stdout)
        self.stderr: TextIO = escaping_stream(streams.get("stderr") or sys.stderr)
        self._conf: ConfigOpts | None = None
        self._database: Database | None = None
        self._records: StatusPageRecords | None = None

    @property
    def records(self) -> StatusPageRecords | None:
        """The source of the read-only mode; None in the normal mode.

        The property raises ConfigurationError if the token file is missing or not usable.
        """
        if self._records is None and self.options.status_url:
            path = self.options.status_token_file
            if not path:
                remedy = f"Name a file with the token: --status-token-file, or {TOKEN_VARIABLE}."
                raise ConfigurationError("read from the status page", "no token file is given", remedy)
            self._records = StatusPageRecords(self.options.status_url, read_token(path), self.options.status_ca_file)
        return self._records

    @property
    def conf(self) -> ConfigOpts:
        """The options; raises ConfigurationError if a configuration file does not exist or is not valid.

        In the read-only mode, they are options of the process that answers: those that commands of this mode use.
        """
        if self.records is not None:
            return self.records.options()
        if self._conf is None:
            self._conf = config.load(self.options.config_file)
        return self._conf

    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: dict[str, Any] | None = None
    ) -> argparse.ArgumentParser:
        # By default, argparse accepts abbreviated options. It would read `--status` of a command as an abbreviation of
        # `--status-url`.
        named = {"prog": self.NAME, "allow_abbrev": False, **(argparse_kwargs or {})}
        parser: argparse.ArgumentParser = super().build_option_parser(description, version, named)
        default = f"Default: ${config.FILE_VARIABLE} or {config.DEFAULT_FILE}."
        words = f"Configuration file; can be repeated. {default}"
        parser.add_argument("--config-file", action="append", metavar="FILE", help=words)
        for name, (variable, metavar, text) in READ_ONLY_OPTIONS.items():
            help_text = f"{text} Default: ${variable}."
            parser.add_argument(name, default=os.environ.get(variable), metavar=metavar, help=help_text)
        return parser

    def prepare_to_run_command(self, cmd: object) -> None:
        """Refuse a command that the read-only mode does not have; the help is always possible."""
        if self.options.status_url and isinstance(cmd, Command) and not cmd.read_only_mode:
            happened = "--status-url gives read access to records only, and this command needs the database or a key"
            remedy = f"Run it without --status-url and {URL_VARIABLE}, on a host with the driver's configuration."
            raise ConfigurationError("run the command", happened, remedy)

    @property
    def database(self) -> Database:
        """The configured database; raises ConfigurationError if the SQLite file does not exist.

        In the read-only mode, nothing opens the database.
        """
        if self.options.status_url:
            raise ConfigurationError("open the database", "the read-only mode has no database", "Omit --status-url.")
        if self._database is None:
            url = self.conf.amp_database.connection
            found = parse_url(url)
            path = found.database if found.get_backend_name() == "sqlite" else None
            if path is not None and not Path(path).exists():
                # SQLite creates a missing database file. A command that only reads must not create a file.
                raise ConfigurationError(
                    "open the database",
                    f"{path} does not exist",
                    "Check [amp_database] connection, or use --config-file. New database: amphoractl database upgrade.",
                )
            self._database = Database(url)
        return self._database

    def read(self, work: Callable[[sa.Connection], T], scope: Scope | None = None) -> T:
        """Run `work` in one reading transaction; raises SchemaMismatch for a schema of another version.

        In the read-only mode, `work` reads the records of the scope. Without a scope, it reads those of the fleet.
        """
        if self.records is None:
            return self.database.read(work)
        found = self.records.read(work, scope or Scope())
        if self.records.newest is not None and self.records.newest.cut:
            LOG.warning(
                "the status page returned only a part of the records, because the fleet is too large, so "
                "the output is incomplete; for all records, run the command on a host with access to the "
                "database"
            )
        return found

    def recorded_schema(self) -> schema_check.SchemaState:
        """Return the state of the database's schema, also of a schema of another version."""
        try:
            with self.database.engine.connect().execution_options(amphora_read_only=True) as connection:
                return schema_check.read_state(connection)
        except DBAPIError as error:
            raise StoreError("read from the database", str(error.orig or error)) from error

    def clean_up(self, cmd: object, result: int, err: BaseException | None) -> None:
        super().clean_up(cmd, result, err)
        if self._database is not None:
            self._database.dispose()
            self._database = None


# Options of the read-only mode: environment variable, value and help text.
READ_ONLY_OPTIONS = {
    "--status-url": (
        URL_VARIABLE,
        "URL",
        "Read-only mode: read from this status page (https://HOST:PORT), without database, keys and configuration.",
    ),
    "--status-token-file": (
        TOKEN_VARIABLE,
        "FILE",
        "File with the token of the status page in its first line; the token itself is never an argument.",
    ),
    "--status-ca-file": (
        CA_VARIABLE,
        "FILE",
        "PEM file with the CA of the status page, if the operating system does not trust it.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; None for the arguments of this process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return int(Amphoractl().run(arguments or ["help"]))


if __name__ == "__main__":
    sys.exit(main())
