# SPDX-License-Identifier: Apache-2.0
"""The parts of an amphora that a bundle changes.

Invariant: an agent has one of each, and uses the parts under the lock of the applier only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amphora_agent.apply.config_swap import ConfigSwap
from amphora_agent.apply.file_sets import FileSets
from amphora_agent.apply.haproxy_update import HaproxyUpdate
from amphora_agent.apply.udp_update import UdpUpdate
from amphora_agent.change_priority import ChangePriority
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.keepalived.process import Keepalived
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.plumbing import Plumbing
from amphora_agent.paths import Paths

if TYPE_CHECKING:
    from amphora_agent.l4_daemon.client import CheckerClient


class Components:
    """The parts that the applier changes and the drift check reads."""

    def __init__(
        self,
        paths: Paths,
        haproxy: Haproxy,
        keepalived: Keepalived,
        inner: Namespace,
        checker: CheckerClient,
        priority: ChangePriority,
    ) -> None:
        self.paths = paths
        self.haproxy = haproxy
        self.keepalived = keepalived
        self.priority = priority
        self.plumbing = Plumbing(inner)
        self.files = FileSets(paths)
        self.swap = ConfigSwap(paths)
        self.haproxy_update = HaproxyUpdate(haproxy, self.swap, self.files, paths)
        self.udp_update = UdpUpdate(checker)
