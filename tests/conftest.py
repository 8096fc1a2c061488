# SPDX-License-Identifier: Apache-2.0
"""Rules for every ring: none is left out silently, and a skip says why."""

import os
from collections import Counter
from pathlib import Path

import haproxy_versions
import pytest
from feature_matrix import FeatureMatrix, add_options

RINGS = ("unit", "golden", "hostile", "dataplane", "compat", "system")
_TESTS = Path(__file__).parent
_passed: Counter[str] = Counter()


def pytest_report_header():
    """A green run says what it was green on."""
    return haproxy_versions.header()


def pytest_addoption(parser):
    add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(FeatureMatrix(config), "feature matrix")


def pytest_collection_modifyitems(items):
    """Cheap rings first, so that a plain mistake is found before anything is booted."""
    items.sort(key=lambda item: RINGS.index(_ring(item.path)) if _ring(item.path) in RINGS else len(RINGS))


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        # Relative to where pytest was started.
        _passed[_ring(Path.cwd() / report.fspath)] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """With AMPHORA_EVERY_RING a ring in which nothing passed is a failure."""
    missing = [ring for ring in RINGS if not _passed[ring]]
    if os.environ.get("AMPHORA_EVERY_RING") and missing and exitstatus == pytest.ExitCode.OK:
        session.config.get_terminal_writer().line(f"\nno test passed in: {', '.join(missing)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _ring(path):
    try:
        return Path(path).relative_to(_TESTS).parts[0]
    except ValueError:
        return ""
