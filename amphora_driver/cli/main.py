# SPDX-License-Identifier: Apache-2.0
"""`amphoractl`: the operator's look at what is recorded.

Invariant: what is shown is read from the database: it says the same whether or not any other process of ours is alive.
Only the commands whose name is a verb of change write (`database upgrade`, `secrets reseal`), and they may be repeated.
No secret is ever shown, sealed or open. Strangers' words reach a terminal only as printable text.
"""

from __future__ import annotations

import argparse
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
from amphora_driver.cli.terminal_escape import screened
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database, parse_url
from amphora_driver.errors import ConfigurationError, StoreError

COMMANDS = "amphoractl.commands"
T = TypeVar("T")


class Amphoractl(App):
    """The application; commands read through `read`, those that write take `database`."""

    NAME = "amphoractl"

    def __init__(self, commands: CommandManager | None = None, **streams: Any) -> None:
        super().__init__(
            description="Look at load balancers and amphorae as they are recorded; look after database and keys.",
            version=_version(),
            command_manager=CommandManager(COMMANDS) if commands is None else commands,
            deferred_help=True,
            **streams,
        )
        # Also what a logger or a formatter of cliff's writes goes through these.
        self.stdout: TextIO = screened(streams.get("stdout") or sys.stdout)
        self.stderr: TextIO = screened(streams.get("stderr") or sys.stderr)
        self._conf: ConfigOpts | None = None
        self._database: Database | None = None

    @property
    def conf(self) -> ConfigOpts:
        """Our options.

        Raises:
            ConfigurationError: a file that was asked for is missing or not understood.
        """
        if self._conf is None:
            self._conf = config.load(self.options.config_file)
        return self._conf

    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: dict[str, Any] | None = None
    ) -> argparse.ArgumentParser:
        """Cliff's options and ours."""
        named = {"prog": self.NAME, **(argparse_kwargs or {})}
        parser: argparse.ArgumentParser = super().build_option_parser(description, version, named)
        parser.add_argument(
            "--config-file",
            action="append",
            metavar="FILE",
            help=f"Configuration file; may be repeated. Default: ${config.FILE_VARIABLE} or {config.DEFAULT_FILE}.",
        )
        return parser

    @property
    def database(self) -> Database:
        """Our database.

        Raises:
            ConfigurationError: there is none where the configuration says.
        """
        if self._database is None:
            self._database = _database(self.conf.store.connection)
        return self._database

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one reading transaction.

        Raises:
            ConfigurationError: no database is where the configuration says.
            SchemaMismatch: it is not one for this version.
            StoreError: the database said no.
        """
        return self.database.read(work)

    def recorded_schema(self) -> tuple[str, ...]:
        """Where the database's schema stands, whichever that is.

        Raises:
            ConfigurationError: no database is where the configuration says.
            StoreError: the database said no.
        """
        try:
            with self.database.engine.connect().execution_options(amphora_read_only=True) as connection:
                return schema_check.read_revisions(connection)
        except DBAPIError as error:
            raise StoreError("read from the database", str(error.orig or error)) from error

    def clean_up(self, cmd: object, result: int, err: BaseException | None) -> None:
        """Close connections when a command ends."""
        super().clean_up(cmd, result, err)
        if self._database is not None:
            self._database.dispose()
            self._database = None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script.

    Args:
        argv: arguments without the program's name; None for those of this process.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Without a command cliff would open an interactive session.
    return int(Amphoractl().run(arguments or ["help"]))


def _database(url: str) -> Database:
    found = parse_url(url)
    path = found.database if found.get_backend_name() == "sqlite" else None
    if path is not None and not Path(path).exists():
        # SQLite would make an empty one: a reader must not.
        raise ConfigurationError(
            "open the database",
            f"{path} does not exist",
            "Check [store] connection, or give --config-file. A new one is made by: amphoractl database upgrade.",
        )
    return Database(url)


def _version() -> str:
    try:
        return metadata.version("octavia-amphora-driver")
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
