# SPDX-License-Identifier: Apache-2.0
"""`amphoractl`, the operator's command line.

Invariant: commands read the database, so their output does not depend on other processes of the control plane. A
command that writes can be repeated. No command shows a secret, encrypted or not. Untrusted text reaches a terminal only
as printable characters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import sqlalchemy as sa
from cliff.app import App
from cliff.commandmanager import CommandManager
from oslo_config.cfg import ConfigOpts
from sqlalchemy.exc import DBAPIError

from amphora_driver import config
from amphora_driver.cli.formatting import escaping_stream
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database, parse_url
from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.store.process_registry import installed_version

COMMANDS = "amphoractl.commands"
T = TypeVar("T")


class Amphoractl(App):
    """The application. Commands read with `read`; commands that write use `database`."""

    NAME = "amphoractl"

    def __init__(self, commands: CommandManager | None = None, **streams: Any) -> None:
        super().__init__(
            description="Show and operate load balancers, amphorae and controllers; maintain database and keys.",
            version=installed_version(),
            command_manager=CommandManager(COMMANDS) if commands is None else commands,
            deferred_help=True,
            **streams,
        )
        # The library cliff also writes to the streams of amphoractl, with its own loggers and formatters. So the
        # streams themselves escape unprintable characters.
        self.stdout: TextIO = escaping_stream(streams.get("stdout") or sys.stdout)
        self.stderr: TextIO = escaping_stream(streams.get("stderr") or sys.stderr)
        self._conf: ConfigOpts | None = None
        self._database: Database | None = None

    @property
    def conf(self) -> ConfigOpts:
        """The options; raises ConfigurationError if a configuration file does not exist or is not valid."""
        if self._conf is None:
            self._conf = config.load(self.options.config_file)
        return self._conf

    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: dict[str, Any] | None = None
    ) -> argparse.ArgumentParser:
        named = {"prog": self.NAME, **(argparse_kwargs or {})}
        parser: argparse.ArgumentParser = super().build_option_parser(description, version, named)
        default = f"Default: ${config.FILE_VARIABLE} or {config.DEFAULT_FILE}."
        words = f"Configuration file; can be repeated. {default}"
        parser.add_argument("--config-file", action="append", metavar="FILE", help=words)
        return parser

    @property
    def database(self) -> Database:
        """The configured database; raises ConfigurationError if the SQLite file does not exist."""
        if self._database is None:
            url = self.conf.amp_database.connection
            found = parse_url(url)
            path = found.database if found.get_backend_name() == "sqlite" else None
            if path is not None and not Path(path).exists():
                # SQLite would create a missing database file, but a command of amphoractl that only reads must create
                # nothing.
                raise ConfigurationError(
                    "open the database",
                    f"{path} does not exist",
                    "Check [amp_database] connection, or use --config-file. New database: amphoractl database upgrade.",
                )
            self._database = Database(url)
        return self._database

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one reading transaction; raises SchemaMismatch for a schema of another version."""
        return self.database.read(work)

    def recorded_schema(self) -> tuple[str, ...]:
        """Return the revisions of the database's schema, also of a schema of another version."""
        try:
            with self.database.engine.connect().execution_options(amphora_read_only=True) as connection:
                return schema_check.read_revisions(connection)
        except DBAPIError as error:
            raise StoreError("read from the database", str(error.orig or error)) from error

    def clean_up(self, cmd: object, result: int, err: BaseException | None) -> None:
        super().clean_up(cmd, result, err)
        if self._database is not None:
            self._database.dispose()
            self._database = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; None for the arguments of this process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Without a command, cliff would open an interactive session, so amphoractl prints the help instead.
    return int(Amphoractl().run(arguments or ["help"]))


if __name__ == "__main__":
    sys.exit(main())
