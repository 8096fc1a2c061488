# SPDX-License-Identifier: Apache-2.0
"""How much a HAProxy can take here, and how long it may take for it.

Invariant: no limit is so tight that a configuration which HAProxy can run would never be run.
"""

from __future__ import annotations

import resource

from amphora_agent.haproxy.config_parser import Configuration

LARGEST_MAXCONN = 50_000
# HAProxy 2.6 reads 10,000 members of one pool for 4 s of a processor that it has for itself, and a change has it read
# twice or three times; on a machine with other work that was a minute. Who gives up sooner would only begin anew.
LEAST_PATIENCE, PATIENCE_FOR_EACH = 60.0, 0.02


def patience(configuration: Configuration) -> float:
    """For how many seconds HAProxy may read a configuration."""
    return LEAST_PATIENCE + PATIENCE_FOR_EACH * configuration.size


def largest_maxconn(configuration: Configuration) -> int:
    """The connections that the limit on files leaves room for.

    Two files each, half a file for the pipes of spliced connections (HAProxy sets aside a pipe for every fourth
    connection, manual 3.2 "maxpipes"), and some for the rest.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return LARGEST_MAXCONN
    binds = sum(line.words[0] == "bind" for section in configuration.sections for line in section.lines)
    spare = 500 + 2 * (configuration.size + binds)
    return max(100, min(LARGEST_MAXCONN, (hard - spare) // 250 * 100))
