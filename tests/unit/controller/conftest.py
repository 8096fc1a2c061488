# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the failure detector tests (detector_scene.py)."""

import migrated
import pytest
from detector_scene import Scene


@pytest.fixture
def detector_database(tmp_path):
    migrated.write(f"sqlite:///{tmp_path}/driver.sqlite")


@pytest.fixture
def scene(detector_database, tmp_path, monkeypatch):
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.database.dispose()
