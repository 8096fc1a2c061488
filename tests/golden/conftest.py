# SPDX-License-Identifier: Apache-2.0
"""`--update-golden` writes the expected files; review the difference before a commit."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.cfg")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    # The option exists only if the command line names this folder.
    return bool(request.config.getoption("--update-golden", default=False))
