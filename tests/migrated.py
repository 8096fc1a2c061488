# SPDX-License-Identifier: Apache-2.0
"""SQLite databases with the newest schema: every test gets a copy of one migrated database.

The migrations take half a second of processor time, and run once in a process. Tests of the migrations are in
unit/store.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlalchemy as sa

from amphora_driver.database import migrate


def write(url: str) -> None:
    """Write an empty database of the newest schema to this URL; an existing file is kept."""
    file = Path(str(sa.make_url(url).database))
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_made())


@lru_cache
def _made() -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "driver.sqlite"
        migrate.upgrade(f"sqlite:///{file}")
        left = [one.name for one in Path(folder).iterdir() if one.name.endswith("-wal")]
        assert left == [], "the file does not contain the whole database"
        return file.read_bytes()
