# SPDX-License-Identifier: Apache-2.0
"""Processor time, memory and statements of processes, from /proc and from the counters of the database."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

_TICKS = os.sysconf("SC_CLK_TCK")
_STATEMENTS = ("Com_select", "Com_insert", "Com_update", "Com_delete", "Com_commit")


def family(pid: int) -> list[int]:
    """The process and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ... (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except OSError:
        return []


def title(pid: int) -> str:
    """The command line of a process, which the process may replace; empty after its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def cpu_seconds(pids: Iterable[int]) -> float:
    """The processor time of these processes and of their children that have ended, in seconds."""
    ticks = 0
    for pid in pids:
        fields = _stat(pid)
        ticks += sum(map(int, fields[11:15])) if fields else 0
    return ticks / _TICKS


def memory_mib(pids: Iterable[int]) -> float:
    """The proportional memory (PSS) of these processes, in MiB."""
    found = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
                if line.startswith("Pss:"):
                    found += int(line.split()[1])
        except OSError:
            continue
    return found / 1024


def load_average() -> float:
    return os.getloadavg()[0]


class DatabaseCounters:
    """Counts the statements of a MariaDB or PostgreSQL server, or of all nodes: in total, and for each user."""

    def __init__(self, *urls: str) -> None:
        self._engines = [sa.create_engine(url) for url in urls]
        self._kind = self._engines[0].dialect.name

    def read(self) -> dict[str, float]:
        """The counters now, by `all` and by the name of a user. SQLite has none."""
        if self._kind == "mysql":
            return self._read_mariadb()
        if self._kind == "postgresql":
            # PostgreSQL counts transactions, and statements only with an extension.
            query = "SELECT xact_commit FROM pg_stat_database WHERE datname = 'fleet'"
            return {"all": float(self._rows(query)[0][0])}
        return {}

    def _read_mariadb(self) -> dict[str, float]:
        names = ", ".join(f"'{one}'" for one in _STATEMENTS)
        query = f"SHOW GLOBAL STATUS WHERE Variable_name IN ({names})"
        users = "SELECT USER, SELECT_COMMANDS + UPDATE_COMMANDS FROM information_schema.USER_STATISTICS"
        return {"all": sum(self._sums(query).values()), **self._sums(users)}

    def rows_read(self) -> dict[str, float]:
        """The rows that the server has read for each user (MariaDB); other servers have no such counter."""
        if self._kind != "mysql":
            return {}
        query = "SELECT USER, ROWS_READ FROM information_schema.USER_STATISTICS"
        return self._sums(query)

    def tables(self) -> dict[str, tuple[int, float]]:
        """Rows and MiB of each table with rows."""
        if self._kind == "mysql":
            self._rows("SELECT 1")
            sizes = self._rows(
                "SELECT TABLE_NAME, (DATA_LENGTH + INDEX_LENGTH) / 1048576 FROM information_schema.TABLES "
                "WHERE TABLE_SCHEMA = 'fleet'"
            )
        elif self._kind == "postgresql":
            sizes = self._rows("SELECT relname, pg_total_relation_size(relid) / 1048576.0 FROM pg_stat_user_tables")
        else:
            sizes = [(name, 0) for (name,) in self._rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {}
        for name, size in sizes:
            rows = int(self._rows(f"SELECT count(*) FROM {name}")[0][0])
            if rows:
                found[name] = (rows, float(size))
        return found

    def dispose(self) -> None:
        for engine in self._engines:
            engine.dispose()

    def _sums(self, query: str) -> dict[str, float]:
        """The sums over the servers, by the name in the first column."""
        found: dict[str, float] = {}
        for engine in self._engines:
            for name, value in _rows(engine, query):
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def _rows(self, query: str) -> list[Any]:
        return _rows(self._engines[0], query)


def _rows(engine: sa.Engine, query: str) -> list[Any]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(query).fetchall()]
