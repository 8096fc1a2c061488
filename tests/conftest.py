# SPDX-License-Identifier: Apache-2.0
"""Rules for every ring: the order they run in, what a run says of itself, and the plugins of all tests."""

import faulthandler
import os
import tempfile

import feature_matrix
import haproxy_versions
import pytest
import two_parts
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("calm")


def pytest_report_header():
    """A green run says what it was green on."""
    return haproxy_versions.header()


def pytest_addoption(parser):
    feature_matrix.add_options(parser)
    two_parts.add_options(parser)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "lasts(seconds): hangs only after more than that, where it is longer than faulthandler_timeout"
    )
    matrix = feature_matrix.FeatureMatrix(config)
    config.pluginmanager.register(matrix, "feature matrix")
    two_parts.register(config, matrix)
    if not hasattr(config, "workerinput"):
        # Workers inherit both: where the preloaded process listens (tests/forks.py), and when it ends.
        folder = tempfile.TemporaryDirectory(prefix="adp-")
        config.add_cleanup(folder.cleanup)
        os.environ["AMPHORA_TESTS_PRELOADED"], os.environ["AMPHORA_TESTS_RUN"] = folder.name, str(os.getpid())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Set the limit of a test that lasts long anew: pytest has set the one of all tests a moment ago."""
    usual = float(item.config.getini("faulthandler_timeout"))
    marker = item.get_closest_marker("lasts")
    if usual and marker and marker.args[0] > usual:
        file = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(marker.args[0], exit=True, file=file)


def pytest_collection_modifyitems(items):
    """Cheap rings first, so that a plain mistake is found before anything is booted."""
    rings = [*two_parts.RINGS, ""]
    items.sort(key=lambda item: rings.index(ring) if (ring := two_parts.ring(item.nodeid)) in rings else len(rings))
