# SPDX-License-Identifier: Apache-2.0
"""Reads records from the status page of a process, for the read-only mode of amphoractl.

Invariant: the token leaves this process only in the header of a request to the given address; redirects are not
followed. The answer is untrusted data: it becomes rows of a database in memory, with the tables and columns that it
names and this version knows. A query about anything else fails.
"""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
import sqlalchemy as sa
import urllib3
from oslo_config import cfg
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool
from urllib3.exceptions import HTTPError

from amphora_driver import config
from amphora_driver.database import tables_fleet
from amphora_driver.errors import ConfigurationError, SchemaMismatch, StoreError
from amphora_driver.secret import Secret
from amphora_driver.telemetry.records import FORMAT, OPTIONS, Records, Scope, sent_columns
from amphora_driver.untrusted_text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_WANTED = "read from the status page"
# Time-outs in seconds of a connection to the status page and of each part of the answer.
_TIMEOUT = urllib3.Timeout(connect=10.0, read=30.0)
# Maximum size of an answer in bytes. The document about the largest fleet has 60 MB.
_MAX_BYTES = 256 * 2**20
_MAX_REASON = 500
_MAX_WORD = 64
_REMEDIES = {
    401: "Check the token file: the first line is the token of [amp_status_page] token_file.",
    403: "Set [amp_status_page] token_file in the configuration of that process.",
    404: "Upgrade the process at this address.",
}


def read_token(path: str) -> Secret:
    """Return the token in the first line of a file.

    Raises:
        ConfigurationError: the file is unreadable or empty, or other users can read it.
    """
    wanted = f"read the token of the status page from {path}"
    try:
        if Path(path).stat().st_mode & stat.S_IROTH:
            raise ConfigurationError(wanted, "other users can read the file", f"Run: chmod o-r {path}.")
        token = Secret(Path(path).read_bytes().split(b"\n", 1)[0].strip())
    except OSError as error:
        raise ConfigurationError(wanted, error.strerror or str(error), "Check the path and the permissions.") from error
    if not token.reveal():
        raise ConfigurationError(wanted, "its first line is empty", "Write the token into the first line.")
    return token


class StatusPageRecords:
    """Reads records from one status page.

    Args:
        url: address of the page: https://HOST:PORT, or http://HOST:PORT.
        token: the token of the page.
        ca_file: PEM file with the CA of the page's certificate; None for the CAs of the operating system.

    Raises:
        ConfigurationError: the address is invalid.
    """

    def __init__(self, url: str, token: Secret, ca_file: str | None = None) -> None:
        if "@" in url:
            remedy = "Use a token file: other users of this machine can read a command line."
            raise ConfigurationError(_WANTED, "the address contains a user name or a password", remedy)
        try:
            parts = urlsplit(url)
            valid = parts.scheme in {"http", "https"} and parts.hostname and not (parts.query or parts.fragment)
        except ValueError:
            valid = False
        if not valid:
            happened = f"{url} is not an address of a status page"
            raise ConfigurationError(_WANTED, happened, "Use https://HOST:PORT.")
        self._url = url.rstrip("/")
        self._token = token
        self._ca_file = ca_file
        self.newest: Records | None = None

    def read(self, work: Callable[[sa.Connection], T], scope: Scope) -> T:
        """Fetch the records of a scope and run `work` on them.

        Raises:
            ConfigurationError: the page refuses the token.
            StoreError: the page does not answer, or the records do not contain the data of the command.
        """
        found = self.newest = self._fetch(scope)
        engine = _load(found)
        try:
            with engine.connect() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            happened = f"its records do not have the data of this command: {getattr(error, 'orig', error)}"
            version = printable(found.version, _MAX_WORD)
            remedy = f"The process has version {version}. Run the command on a controller."
            raise SchemaMismatch(_WANTED, happened, remedy) from error
        finally:
            engine.dispose()

    def options(self) -> cfg.ConfigOpts:
        """Return the options of the process that answered; an option that it does not send is unknown."""
        found = self.newest or self._fetch(Scope())
        conf = cfg.ConfigOpts()
        for group, name in OPTIONS:
            if name in found.options.get(group, {}):
                conf.register_opts([one for one in config.GROUPS[group] if one.dest == name], group=group)
        conf([], project="amphora-driver", default_config_files=[], default_config_dirs=[])
        for group, name in OPTIONS:
            if name in found.options.get(group, {}):
                conf.set_override(name, found.options[group][name], group)
        return conf

    def _fetch(self, scope: Scope) -> Records:
        values = {name: value for name, value in msgspec.structs.asdict(scope).items() if value is not None}
        address = f"{self._url}/records.json" + (f"?{urlencode(values)}" if values else "")
        # The basic scheme encodes the token, so any characters of a token give a valid header.
        credentials = base64.b64encode(b"amphoractl:" + self._token.reveal()).decode()
        headers = {"Authorization": f"Basic {credentials}", "Accept-Encoding": "gzip"}
        trust: dict[str, Any] = {"ca_certs": self._ca_file} if self._ca_file else {}
        try:
            with (
                urllib3.PoolManager(retries=False, timeout=_TIMEOUT, cert_reqs="CERT_REQUIRED", **trust) as pools,
                pools.request("GET", address, headers=headers, redirect=False, preload_content=False) as answer,
            ):
                body = answer.read(_MAX_BYTES + 1)
        except (HTTPError, OSError, ValueError) as error:
            remedy = "Check the address, and that the process runs and listens there."
            raise StoreError(f"{_WANTED} {self._url}", printable(str(error), _MAX_REASON), remedy) from error
        if answer.status != 200:
            raise self._refusal(answer.status, body)
        return self._decode(body)

    def _refusal(self, status: int, body: bytes) -> StoreError | ConfigurationError:
        reason = printable(body[:_MAX_REASON].decode(errors="replace").strip().rstrip("."), _MAX_REASON)
        kind = ConfigurationError if status in {401, 403} else StoreError
        return kind(f"{_WANTED} {self._url}", f"it answers with status {status}: {reason}", _REMEDIES.get(status, ""))

    def _decode(self, body: bytes) -> Records:
        wanted = f"{_WANTED} {self._url}"
        try:
            if len(body) > _MAX_BYTES:
                raise StoreError(wanted, f"the answer is larger than {_MAX_BYTES} bytes")
            found = msgspec.json.decode(body, type=Records)
        except msgspec.DecodeError as error:
            remedy = "Check that the address is that of a controller or a health manager."
            raise StoreError(wanted, f"the answer has no records: {error}", remedy) from error
        if any(len(row) != len(one.columns) for one in found.tables.values() for row in one.rows):
            raise StoreError(wanted, "a row of the answer is incomplete")
        if found.format != FORMAT:
            happened = f"the process has version {printable(found.version, _MAX_WORD)}, with another format of records"
            raise SchemaMismatch(wanted, happened, "Use amphoractl of that version.")
        return found


def _load(records: Records) -> sa.Engine:
    """Return a database in memory with the tables and columns of the records."""
    engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    metadata = sa.MetaData()
    loaded = []
    for name, content in records.tables.items():
        known = tables_fleet.metadata.tables.get(name)
        if known is None:
            continue
        columns = {one.name: one for one in sent_columns(known)}
        names = [one for one in content.columns if one in columns]
        table = sa.Table(name, metadata, *(_copy(columns[one]) for one in names))
        rows = [dict(zip(content.columns, row, strict=True)) for row in content.rows]
        loaded.append((table, [{one: row[one] for one in names} for row in rows]))
    with engine.begin() as connection:
        metadata.create_all(connection)
        for table, rows in loaded:
            if rows:
                connection.execute(table.insert(), rows)
    return engine


def _copy(column: sa.Column[Any]) -> sa.Column[Any]:
    # amphoractl counts the pending objects of each load balancer. With this index, the count does not read all
    # statuses.
    indexed = column.name == "load_balancer_id" and not column.primary_key
    return sa.Column(column.name, column.type, primary_key=column.primary_key, index=indexed, autoincrement=False)
