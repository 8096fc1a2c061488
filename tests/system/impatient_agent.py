# SPDX-License-Identifier: Apache-2.0
"""octavia-driver-agent with a provider agent that waits four seconds for an answer, and not half a minute.

Octavia does not answer at all where it should say no: the process that reads dies of it.
"""

import sys

from octavia_lib.api.drivers import driver_lib

from sandbox import octavia_start

driver_lib.DRIVER_AGENT_TIMEOUT = 4
sys.exit(octavia_start.driver_agent())
