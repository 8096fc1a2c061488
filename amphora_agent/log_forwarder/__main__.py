# SPDX-License-Identifier: Apache-2.0
"""The process of the log forwarder.

Invariant: the process needs neither the agent nor a file. The agent sends targets and the input socket over the control
socket. The process has a low priority, so that HAProxy has the processor first.

    python -I -S __main__.py DIRECTORY
"""

from __future__ import annotations

import os
import sys

# Python's options -I and -S save memory, but remove the package's directory from the search path. So the next line adds
# the directory again.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120

from amphora_agent.log_forwarder import ELSEWHERE, PACKAGES
from amphora_agent.log_forwarder.forwarder import Forwarder
from amphora_agent.source_checksum import source_checksum

NICENESS = 10


def main() -> None:
    """Forward lines until a signal ends the process."""
    os.nice(NICENESS)
    directory = sys.argv[1]
    version = source_checksum(PACKAGES, ELSEWHERE)
    Forwarder(f"{directory}/admin.sock", f"{directory}/control.sock", version).run()


if __name__ == "__main__":
    main()
