# SPDX-License-Identifier: Apache-2.0
"""Octavia's console script octavia-driver-agent, unchanged."""

import sys

from octavia.cmd import driver_agent

if __name__ == "__main__":
    sys.exit(driver_agent.main())
