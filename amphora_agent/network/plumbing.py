# SPDX-License-Identifier: Apache-2.0
"""The network of the load balancer while one bundle replaces another.

Invariant: at no moment, and whatever fails, is a client served that may not be served. Nothing that the running
configuration uses is removed before its successor runs. Therefore a change has two phases:

    prepare     permit only clients that both bundles permit; add what the new bundle needs
    commit      announce new VIPs, which another amphora may have served until now; remove unwanted items; permit the
                clients of the new bundle
    roll_back   restore the previous state, before or after `commit`

While the wanted network is unchanged and the kernel announces no change, no method sends a request to the kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from amphora_agent.bundle import Bundle
from amphora_agent.errors import AgentError
from amphora_agent.network import firewall, interface_drift, interfaces, netlink_watch, nft_apply, sysctls
from amphora_agent.network.firewall import UNRESTRICTED, Restrictions
from amphora_agent.network.interface_drift import Finding
from amphora_agent.network.interfaces import NO_NETWORK, AddedVip, WantedNetwork
from amphora_agent.network.namespace import Namespace

_log = logging.getLogger(__name__)
# Maximum number of attempts to reach the wanted network. The kernel may remove more than requested or announce changes
# late, so one attempt may leave differences.
_MAX_PASSES = 4
_POLL_SECONDS = 0.01


class Plumbing:
    """The interfaces, routes and firewall of one namespace. Used by one thread at a time."""

    def __init__(self, inner: Namespace) -> None:
        self._inner = inner
        self._interface_watch = netlink_watch.watch_interfaces(inner)
        self._nftables_watch = netlink_watch.watch_nftables(inner)
        self._forwarding = sysctls.Forwarding(inner)
        # The network and the restrictions that were applied last; None if the kernel may have another state.
        self._network: WantedNetwork | None = None
        self._restrictions: Restrictions | None = None
        self._is_changing = False
        # `commit` announces these new VIPs in their order after HAProxy has begun to listen. The values of the
        # dictionary have no meaning.
        self._unannounced: dict[AddedVip, None] = {}

    def matches(self, bundle: Bundle) -> bool:
        """Return whether the network is as a bundle wants. Each change begins with this call."""
        self._is_changing = False
        if self._interface_watch.has_changed():
            self._network = None
        if self._nftables_watch.has_changed() and not self._holds_restrictions():
            self._restrictions = None
        restricted = firewall.restrictions_of(bundle)
        if self._forwarding.is_enabled() != restricted.forwards:
            return False
        return (self._network, self._restrictions) == (interfaces.wanted_network(bundle), restricted)

    def _holds_restrictions(self) -> bool:
        """Return whether the firewall table is unchanged, because the table of virtual servers changes often."""
        if self._restrictions is None:
            return False
        with suppress(AgentError):
            return self._inner.run(nft_apply.holds, firewall.render(self._restrictions))
        return False

    def find_drift(self, bundle: Bundle) -> list[Finding]:
        """Return the differences from a bundle; raises FirewallError or InterfaceError."""
        if self.matches(bundle):
            return []
        found: list[Finding] = []
        wanted, restricted = interfaces.wanted_network(bundle), firewall.restrictions_of(bundle)
        if self._network != wanted:
            found = interface_drift.find_drift(self._inner, wanted)
            self._network = None if found else wanted
        if self._restrictions != restricted:
            same = self._inner.run(nft_apply.holds, firewall.render(restricted))
            self._restrictions = restricted if same else None
            found += [] if same else [("firewall", "the rules are not as wanted")]
        if self._forwarding.is_enabled() != restricted.forwards:
            found.append(("firewall", "forwarding of packets is not as wanted"))
        return found

    def invalidate(self) -> None:
        """Forget the known state of the kernel, so that the next change reads all of it."""
        self._network = self._restrictions = None

    def prepare(self, bundle: Bundle, served: Bundle | None, *, may_lack: bool = False) -> None:
        """Make the network suitable for a new bundle and the bundle that is served now (None for none).

        With ``may_lack`` an interface without VIPs may be missing. Raises FirewallError if connections cannot be
        restricted, and InterfaceError if an interface is missing or the kernel refuses a request.
        """
        self._is_changing = True
        former = UNRESTRICTED if served is None else firewall.restrictions_of(served)
        restricted = firewall.restrictions_of(bundle)
        self._restrict(firewall.intersect(former, restricted))
        wanted = interfaces.wanted_network(bundle)
        if self._network != wanted:
            self._network = None
            done = interfaces.converge(self._inner, wanted, may_lack=may_lack, removes=False)
            # A crashed agent may have added VIPs without an announcement, so all VIPs are announced after a start.
            self._unannounced |= dict.fromkeys(done.added_vips if served is not None else interfaces.own_vips(wanted))
        if restricted.forwards:
            # Forwarding is enabled only after the kernel has the rules that restrict it.
            self._inner.run(sysctls.set_forwarding, wanted=True)

    def commit(self, bundle: Bundle, *, may_lack: bool = False, ending: Callable[[], None] | None = None) -> None:
        """Make the network exactly as a bundle wants. The errors and ``may_lack`` are those of `prepare`.

        ``ending`` stops keepalived. keepalived removes the VIPs at once and takes a second to end; meanwhile this
        method adds the VIPs again.
        """
        self._is_changing = True
        wanted = interfaces.wanted_network(bundle)
        interfaces.announce_vips(self._inner, self._unannounced)
        self._unannounced = {}
        if ending is not None:
            with ThreadPoolExecutor(1, "ending") as thread:
                ended = thread.submit(ending)
                while not ended.done():
                    self._converge(wanted, may_lack=may_lack)
                    wait([ended], _POLL_SECONDS)
                ended.result()
        self._converge(wanted, may_lack=may_lack)
        self._apply_restrictions(firewall.restrictions_of(bundle))

    def roll_back(self, served: Bundle | None) -> None:
        """Restore the previous network; does nothing if no change was begun."""
        if not self._is_changing:
            return
        self._unannounced = {}
        wanted = NO_NETWORK if served is None else interfaces.wanted_network(served)
        former = UNRESTRICTED if served is None else firewall.restrictions_of(served)
        try:
            self._apply_restrictions(former)
            self._converge(wanted, may_lack=True)
            self._is_changing = False
        except AgentError as error:
            _log.error(
                "The agent could not restore the former network settings of the amphora, and retries at the next drift "
                "check: %s",
                error,
            )

    def _converge(self, wanted: WantedNetwork, *, may_lack: bool) -> None:
        """Run passes until one changes nothing. A later announcement comes from a change outside the agent."""
        for _ in range(_MAX_PASSES):
            if self._interface_watch.has_changed():
                self._network = None
            if self._network == wanted:
                return
            done = interfaces.converge(self._inner, wanted, may_lack=may_lack)
            interfaces.announce_vips(self._inner, done.added_vips)
            if done.changed == 0 and not done.complete:
                absent = [one.name for one in wanted.interfaces if not one.vips]
                _log.warning(
                    "The amphora lacks at least one of the network interfaces %s, and the agent continues without the "
                    "missing interfaces",
                    ", ".join(absent),
                )
                return
            if done.changed == 0:
                self._network = wanted

    def _apply_restrictions(self, wanted: Restrictions) -> None:
        """Load the rules, and forward packets only while rules limit it: the amphora is never a router."""
        if not wanted.forwards:
            self._inner.run(sysctls.set_forwarding, wanted=False)
        self._restrict(wanted)
        if wanted.forwards:
            self._inner.run(sysctls.set_forwarding, wanted=True)

    def _restrict(self, wanted: Restrictions) -> None:
        if self._restrictions == wanted and not self._nftables_watch.has_changed():
            return
        self._restrictions = None
        text = firewall.render(wanted)
        self._nftables_watch.has_changed()
        if not self._inner.run(nft_apply.replace_table, text):
            self._restrictions = wanted
            return
        self._nftables_watch.has_changed()
        if self._inner.run(nft_apply.holds, text):
            self._restrictions = wanted

    def close(self) -> None:
        self._interface_watch.close()
        self._nftables_watch.close()
        self._forwarding.close()
