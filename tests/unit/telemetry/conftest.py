# SPDX-License-Identifier: Apache-2.0
"""A database with the real schema, for telemetry that reads rows."""

import migrated
import pytest

from amphora_driver.database.engine import Database


@pytest.fixture
def url(tmp_path):
    found = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(found)
    return found


@pytest.fixture
def database(url):
    made = Database(url, durable=False)
    yield made
    made.dispose()
