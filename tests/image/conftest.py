# SPDX-License-Identifier: Apache-2.0
"""Fixtures: one image for the run, one switch, and guests that are booted when the first test asks for them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import claimed
import pytest

# Members, clients, builders of the model and certificates are those of the data plane's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "dataplane"))

import image
import pki
import two_parts
from balanced import Balanced
from estate import Estate

from amphora_driver.network import namespaces

ALL = os.environ.get(two_parts.IMAGE) == "all"


def pytest_configure(config):
    config.addinivalue_line("markers", "everything: only with AMPHORA_IMAGE=all, because it takes minutes")


def pytest_runtest_setup(item):
    if not os.environ.get(two_parts.IMAGE):
        pytest.skip(f"{two_parts.IMAGE}=1 boots the image")
    if item.get_closest_marker("everything") and not ALL:
        pytest.skip(f"{two_parts.IMAGE}=all runs this")


@pytest.fixture(scope="session")
def images():
    return image.images()


@pytest.fixture(scope="session")
def estate(images):
    folder = Path(tempfile.mkdtemp(prefix="adi-"))
    free = lambda number: not namespaces.names(f"i{number}-")  # noqa: E731
    with claimed.number(free) as number:
        made = Estate(folder, number, images)
        try:
            made.build()
            yield made
        finally:
            made.close()
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def first(estate):
    """The guest of most tests, from a cold boot."""
    guest = estate.boot()
    # Before there is a kernel that could be told of it: the controller does not wait either.
    guest.plug()
    guest.booted_after = guest.await_agent()
    return guest


@pytest.fixture(scope="session")
def second(estate, first):
    """Another one, for whatever takes two."""
    guest = estate.boot()
    guest.booted_after = guest.await_agent()
    return guest


@pytest.fixture
def balanced(estate, first):
    made = Balanced(estate, first)
    yield made
    made.close()


@pytest.fixture
def pair(estate, first, second):
    if not second.plugged:
        second.plug()
    made = Balanced(estate, first, second)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tenant():
    return pki.Authority("tenant")
