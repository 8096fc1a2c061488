# SPDX-License-Identifier: Apache-2.0
"""Octavia's API with a provider that keeps Octavia's transaction open for a time after each call.

Octavia writes some PENDING states after the provider's method returns, and commits after that. In production this takes
milliseconds; here it takes long enough to expose every race with that transaction.
"""

import functools
import inspect
import os
import time

from octavia_lib.api.drivers import provider_base

from amphora_driver.driver import AmphoraProviderDriver
from sandbox import octavia_start

_SECONDS = float(os.environ.get("SLOW_OCTAVIA", "1.0"))
_WORDS = ("_create", "_update", "_delete", "_failover")


def _slowed(method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        answer = method(*args, **kwargs)
        time.sleep(_SECONDS)
        return answer

    return call


def api():
    """Return the WSGI application for gunicorn."""
    for name, _ in inspect.getmembers(provider_base.ProviderDriver, inspect.isfunction):
        if name.endswith(_WORDS):
            setattr(AmphoraProviderDriver, name, _slowed(getattr(AmphoraProviderDriver, name)))
    return octavia_start.api()
