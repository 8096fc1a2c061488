# SPDX-License-Identifier: Apache-2.0
"""Bringing a database to the schema this version needs.

Invariant: the schema of a running database is only ever made by the migrations, one after the other; the tables in
`tables.py` describe where they end, and a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config

from amphora_driver.store.engine import Database

if TYPE_CHECKING:
    import sqlalchemy as sa

_HERE = Path(__file__).parent / "migrations"


def upgrade(url: str) -> None:
    """Bring the database at this URL to the newest schema; harmless when it is there already."""
    database = Database(url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(configuration(connection), "head")
            connection.commit()
    finally:
        database.dispose()


def configuration(connection: sa.Connection) -> Config:
    """Alembic's view of our migrations on an open connection."""
    config = Config()
    config.set_main_option("script_location", str(_HERE))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
