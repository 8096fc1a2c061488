# SPDX-License-Identifier: Apache-2.0
"""Fixtures: one image and one switch per run; each guest boots when the first test uses it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import claimed
import pytest

# The tests use members, clients, builders of the model and certificates of the data plane's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "dataplane"))

import image
import pki
import saved_guest
import two_parts
from balanced import Balanced
from guest_lab import GuestLab

from amphora_driver.host import namespaces

ASKED = two_parts.image_asked()


def pytest_configure(config):
    config.addinivalue_line("markers", "everything: only with AMPHORA_IMAGE=all, because it takes minutes")


def pytest_runtest_setup(item):
    if not ASKED:
        pytest.skip(f"{two_parts.IMAGE}=0 omits the image")
    if item.get_closest_marker("everything") and ASKED != "all":
        pytest.skip(f"{two_parts.IMAGE}=all runs this")


def pytest_terminal_summary(terminalreporter):
    """Print the measurements at the end of a run."""
    reports = [one for outcome in ("passed", "failed") for one in terminalreporter.stats.get(outcome, ())]
    found = [each for one in reports if one.nodeid.startswith("tests/image/") for each in one.user_properties]
    for name, value in found:
        terminalreporter.write_line(f"image: {name}: {value}")


@pytest.fixture(scope="session")
def images():
    return image.images()


@pytest.fixture(scope="session")
def why_cold(images):
    """Return the reason for cold boots of all guests; empty if they resume from a saved one."""
    return saved_guest.ensure(images)


@pytest.fixture(scope="session")
def guest_lab(images):
    folder = Path(tempfile.mkdtemp(prefix="adi-"))
    free = lambda number: not namespaces.names(f"i{number}-")  # noqa: E731
    with claimed.number(free) as number:
        made = GuestLab(folder, number, images)
        try:
            made.build()
            yield made
        finally:
            made.close()
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def first(guest_lab):
    """The guest of most tests, after a cold boot."""
    guest = guest_lab.boot()
    # The port is plugged before the kernel runs, because the controller does not wait for the kernel.
    guest.plug()
    guest.booted_after = guest.await_agent()
    return guest


@pytest.fixture(scope="session")
def another(guest_lab, why_cold):
    """Makes another guest, resumed from a saved one if possible."""

    def boot():
        guest = guest_lab.boot(None if why_cold else saved_guest.TAG)
        guest.plug()
        guest.booted_after = guest.await_agent()
        return guest

    return boot


@pytest.fixture(scope="session")
def second(first, another):
    """A second guest, for tests with two."""
    return another()


@pytest.fixture
def balanced(guest_lab, first):
    made = Balanced(guest_lab, first)
    yield made
    made.close()


@pytest.fixture
def pair(guest_lab, first, second):
    made = Balanced(guest_lab, first, second)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tenant():
    return pki.Authority("tenant")
