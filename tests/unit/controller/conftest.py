# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the failure detector tests (detector_lab.py)."""

import migrated
import pytest
from detector_lab import DetectorLab


@pytest.fixture
def detector_database(tmp_path):
    migrated.write(f"sqlite:///{tmp_path}/driver.sqlite")


@pytest.fixture
def lab(detector_database, tmp_path, monkeypatch):
    made = DetectorLab(tmp_path, monkeypatch)
    yield made
    made.database.dispose()
