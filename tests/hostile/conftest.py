# SPDX-License-Identifier: Apache-2.0
"""The same examples in every run, so that a failure is reproducible; AMPHORA_EXAMPLES=5000 tests more."""

import os

from hypothesis import HealthCheck, settings

_MORE = os.environ.get("AMPHORA_EXAMPLES")
settings.register_profile(
    "hostile",
    max_examples=int(_MORE or 25),
    derandomize=_MORE is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("hostile")
