# SPDX-License-Identifier: Apache-2.0
"""A real SQLite database with the real schema."""

import migrated
import pytest

from amphora_driver.database.engine import Database


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(url)
    database = Database(url)
    yield database
    database.dispose()
