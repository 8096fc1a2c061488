# SPDX-License-Identifier: Apache-2.0
"""The detector's scene (detector_scene.py)."""

import shutil

import pytest
from detector_scene import Scene

from amphora_driver.store import migrate


@pytest.fixture(scope="session")
def detector_template(tmp_path_factory):
    """A database with the schema, made once."""
    path = tmp_path_factory.mktemp("detector") / "driver.sqlite"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def detector_database(detector_template, tmp_path):
    shutil.copy(detector_template, tmp_path / "driver.sqlite")


@pytest.fixture
def scene(detector_database, tmp_path, monkeypatch):
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.database.dispose()
