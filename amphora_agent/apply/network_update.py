# SPDX-License-Identifier: Apache-2.0
"""The network steps of one change: interfaces, firewall, and the owner of the VIPs.

Invariant: the agent removes nothing that the running configuration uses before `finish`.
"""

from __future__ import annotations

from amphora_agent.apply.components import Components
from amphora_agent.bundle import Bundle


class NetworkUpdate:
    """The network steps for one bundle. ``is_needed``: the network differed at the start of the change.

    With `may_lack`, a missing interface without a VIP is no error.
    """

    def __init__(self, parts: Components, bundle: Bundle, served: Bundle | None, *, may_lack: bool) -> None:
        self._parts = parts
        self._bundle = bundle
        self._served = served
        self._may_lack = may_lack
        self.is_needed = not parts.plumbing.matches(bundle)

    def begin(self) -> None:
        """Add the network configuration of the new bundle; allow only clients that both bundles allow."""
        if self.is_needed:
            self._parts.plumbing.prepare(self._bundle, self._served, may_lack=self._may_lack)

    def finish(self) -> None:
        """Remove the network configuration that no bundle needs, and announce the VIPs."""
        if not self.is_needed:
            return
        if self._bundle.virtual_servers:
            # Clients send packets as soon as the VIPs are announced, so the kernel's forwarding rules are written
            # first.
            self._parts.udp_update.apply(self._bundle)
        keepalived = self._parts.keepalived
        ends_vrrp = self._bundle.vrrp_instance is None and keepalived.is_running()
        ending = keepalived.stop if ends_vrrp else None
        self._parts.plumbing.commit(self._bundle, may_lack=self._may_lack, ending=ending)
