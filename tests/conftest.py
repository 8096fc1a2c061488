# SPDX-License-Identifier: Apache-2.0
"""Rules for every ring: the order they run in, what a run says of itself, and the plugins of all tests."""

import feature_matrix
import haproxy_versions
import two_parts
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
    matrix = feature_matrix.FeatureMatrix(config)
    config.pluginmanager.register(matrix, "feature matrix")
    two_parts.register(config, matrix)


def pytest_collection_modifyitems(items):
    """Cheap rings first, so that a plain mistake is found before anything is booted."""
    rings = [*two_parts.RINGS, ""]
    items.sort(key=lambda item: rings.index(ring) if (ring := two_parts.ring(item.nodeid)) in rings else len(rings))
