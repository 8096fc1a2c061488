# SPDX-License-Identifier: Apache-2.0
"""The sources of the commands: configuration, database, or the records of a status page.

Invariant: each source is opened at its first use. In the read-only mode, nothing opens the database, a key or a
configuration file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts
from sqlalchemy.exc import DBAPIError

from amphora_driver import config
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database, parse_url
from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.telemetry.records import Scope

if TYPE_CHECKING:
    from amphora_driver.telemetry.records_client import StatusPageRecords

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Sources:
    """The sources that the options before the words of a command name.

    Args:
        options: parsed options of amphoractl.
        token_variable: environment variable that names the token file, for an error.
    """

    def __init__(self, options: Any, token_variable: str) -> None:
        self._options = options
        self._token_variable = token_variable
        self._conf: ConfigOpts | None = None
        self._database: Database | None = None
        self._records: StatusPageRecords | None = None

    @property
    def records(self) -> StatusPageRecords | None:
        """The source of the read-only mode; None in the normal mode.

        The property raises ConfigurationError if the token file is missing or not usable.
        """
        if self._records is None and self._options.status_url:
            path = self._options.status_token_file
            if not path:
                remedy = f"Name a file with the token: --status-token-file, or {self._token_variable}."
                raise ConfigurationError("read from the status page", "no token file is given", remedy)
            # Only this mode needs the HTTP client.
            from amphora_driver.telemetry.records_client import StatusPageRecords, read_token  # noqa: PLC0415

            token = read_token(path)
            self._records = StatusPageRecords(self._options.status_url, token, self._options.status_ca_file)
        return self._records

    @property
    def conf(self) -> ConfigOpts:
        """The options; raises ConfigurationError if a configuration file does not exist or is not valid.

        In the read-only mode, they are options of the process that answers: those that commands of this mode use.
        """
        if self.records is not None:
            return self.records.options()
        if self._conf is None:
            self._conf = config.load(self._options.config_file, with_logging=False)
        return self._conf

    @property
    def database(self) -> Database:
        """The configured database; raises ConfigurationError if the SQLite file does not exist.

        In the read-only mode, nothing opens the database.
        """
        if self._options.status_url:
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
            # The engine for reads keeps this connection for the reads of the command.
            reading = self.database.engines[-1]
            with reading.connect().execution_options(amphora_read_only=True) as connection:
                return schema_check.read_state(connection)
        except DBAPIError as error:
            raise StoreError("read from the database", str(error.orig or error)) from error

    def close(self) -> None:
        """Close the connections of the database."""
        if self._database is not None:
            self._database.dispose()
            self._database = None
