# SPDX-License-Identifier: Apache-2.0
"""`pytest tests/golden --update-golden` writes the expected files anew; read the difference before keeping it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.cfg anew")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    # The option exists only if this folder was named on the command line.
    return bool(request.config.getoption("--update-golden", default=False))
