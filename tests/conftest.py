# SPDX-License-Identifier: Apache-2.0
"""Rules for all test rings: their order, the header of a run, and shared plugins."""

import faulthandler
import os
import tempfile

import feature_matrix
import haproxy_versions
import pytest
import two_parts
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

# Its assertions are those of tests in two rings.
pytest.register_assert_rewrite("cluster_scenarios")

# The time of an example depends on the machine.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("calm")


def pytest_report_header():
    """Return the tested versions for the header of a run."""
    return haproxy_versions.header()


def pytest_addoption(parser):
    feature_matrix.add_options(parser)
    two_parts.add_options(parser)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "lasts(seconds): the time limit of the test, if it is longer than faulthandler_timeout"
    )
    matrix = feature_matrix.FeatureMatrix(config)
    config.pluginmanager.register(matrix, "feature matrix")
    two_parts.register(config, matrix)
    if not hasattr(config, "workerinput"):
        # Workers inherit both variables: the folder of the preloaded processes (tests/forks.py), and the run that ends
        # these processes.
        folder = tempfile.TemporaryDirectory(prefix="adp-")
        config.add_cleanup(folder.cleanup)
        os.environ["AMPHORA_TESTS_PRELOADED"], os.environ["AMPHORA_TESTS_RUN"] = folder.name, str(os.getpid())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Set the time limit of a long test, because pytest has just set the common limit."""
    usual = float(item.config.getini("faulthandler_timeout"))
    marker = item.get_closest_marker("lasts")
    if usual and marker and marker.args[0] > usual:
        file = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(marker.args[0], exit=True, file=file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one worker run the files that share a cloud."""
    return two_parts.scheduler(config, log)


def pytest_collection_modifyitems(items):
    """Sort the tests: fast rings run first, so that they find simple errors before any boot."""
    rings = [*two_parts.RINGS, ""]
    items.sort(key=lambda item: rings.index(ring) if (ring := two_parts.ring(item.nodeid)) in rings else len(rings))
