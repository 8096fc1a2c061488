# SPDX-License-Identifier: Apache-2.0
"""octavia-driver-agent with a provider agent whose read time-out is four seconds instead of thirty.

Octavia's reading process crashes when it has to answer with a refusal, so the provider agent gets no answer.
"""

import sys

from octavia_lib.api.drivers import driver_lib

from sandbox import octavia_start

driver_lib.DRIVER_AGENT_TIMEOUT = 4
sys.exit(octavia_start.driver_agent())
