# SPDX-License-Identifier: Apache-2.0
"""The network of the load balancer while one bundle takes the place of another.

Invariant: nothing is served to anybody who may not be served, at no moment and whatever fails; nothing that the running
configuration uses is taken away before its successor runs. So

    begin      only those may connect whom both bundles let in; what the new one needs is added
    (HAProxy is changed)
    finish     the neighbours are told of new VIPs, which another amphora may have served until now; what nothing needs
               any more is taken away, and those whom the new bundle lets in may connect
    go_back    as it was, whether or not it was finished

As long as the wanted network is the same and the kernel announces nothing, none of them asks it anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from amphora_agent.bundle import Bundle
from amphora_agent.errors import AgentError
from amphora_agent.network import firewall, interface_drift, interfaces, netlink_watch, nft_apply, sysctls
from amphora_agent.network.firewall import OPEN, Restrictions
from amphora_agent.network.interface_drift import Said
from amphora_agent.network.interfaces import NOTHING, Taken, Wanted
from amphora_agent.network.namespace import Namespace

_log = logging.getLogger(__name__)
# What is taken away may make the kernel take more away, and what comes last is announced last.
_MOST_PASSES = 4
_GLANCE_SECONDS = 0.01


class Plumbing:
    """What one namespace's network is and was told to be. Used by one thread at a time."""

    def __init__(self, inner: Namespace) -> None:
        self._inner = inner
        self._interfaces = netlink_watch.of_interfaces(inner)
        self._firewall = netlink_watch.of_firewall(inner)
        # As the kernel has it; None where somebody may have changed it.
        self._plugged: Wanted | None = None
        self._restricted: Restrictions | None = None
        self._begun = False
        # Where nobody listened yet when they were taken: the neighbours are not told before somebody does.
        self._taken: dict[Taken, None] = {}

    def is_as(self, bundle: Bundle) -> bool:
        """Whether everything is as a bundle wants, and nobody has touched it since. A change begins by asking this."""
        self._begun = False
        if self._interfaces.changed():
            self._plugged = None
        if self._firewall.changed() and not self._is_in_force():
            self._restricted = None
        restricted = firewall.restrictions_of(bundle)
        if self._inner.run(sysctls.forwards) != restricted.forwards:
            return False
        return (self._plugged, self._restricted) == (interfaces.wanted_of(bundle), restricted)

    def _is_in_force(self) -> bool:
        """Whether it was another table that somebody has changed: who forwards for virtual servers often does."""
        if self._restricted is None:
            return False
        with suppress(AgentError):
            return self._inner.run(nft_apply.same, firewall.render(self._restricted))
        return False

    def differences(self, bundle: Bundle) -> list[Said]:
        """What is not as a bundle wants it; changes nothing, and asks nothing if nothing was announced.

        Raises:
            FirewallError, InterfaceError: the kernel refused to tell.
        """
        if self.is_as(bundle):
            return []
        found: list[Said] = []
        wanted, restricted = interfaces.wanted_of(bundle), firewall.restrictions_of(bundle)
        if self._plugged != wanted:
            found = interface_drift.differences(self._inner, wanted)
            self._plugged = None if found else wanted
        if self._restricted != restricted:
            same = self._inner.run(nft_apply.same, firewall.render(restricted))
            self._restricted = restricted if same else None
            found += [] if same else [("firewall", "the rules are not as wanted")]
        if self._inner.run(sysctls.forwards) != restricted.forwards:
            found.append(("firewall", "whether packets may pass through is not as wanted"))
        return found

    def doubt(self) -> None:
        """Look at everything, whatever is known: somebody says the same once more, or has just started."""
        self._plugged = self._restricted = None

    def begin(self, bundle: Bundle, served: Bundle | None, *, may_lack: bool = False) -> None:
        """Make the network fit for two bundles.

        Args:
            bundle: what will be served.
            served: what is served until then; None for nothing.
            may_lack: go without interfaces that are nowhere and have no VIP.

        Raises:
            FirewallError: connections cannot be restricted.
            InterfaceError: an interface is missing, or the kernel refused something.
        """
        self._begun = True
        former = OPEN if served is None else firewall.restrictions_of(served)
        restricted = firewall.restrictions_of(bundle)
        self._restrict(firewall.tighter(former, restricted))
        wanted = interfaces.wanted_of(bundle)
        if self._plugged != wanted:
            self._plugged = None
            done = interfaces.add(self._inner, wanted, may_lack=may_lack)
            # Where nothing was served before, those too that one took who died before he told it.
            self._taken |= dict.fromkeys(done.taken if served is not None else interfaces.vips_of(wanted))
        if restricted.forwards:  # not before everything else is kept from passing
            self._inner.run(sysctls.forward, wanted=True)

    def finish(self, bundle: Bundle, *, may_lack: bool = False, ending: Callable[[], None] | None = None) -> None:
        """Make the network exactly what a bundle wants.

        Args:
            may_lack: as for `begin`.
            ending: ends who had the VIPs. keepalived lets go of them at once and takes a second to end: they are put
                back meanwhile.

        Raises:
            FirewallError, InterfaceError: as for `begin`.
        """
        self._begun = True
        wanted = interfaces.wanted_of(bundle)
        interfaces.tell(self._inner, self._taken)
        self._taken = {}
        if ending is not None:
            with ThreadPoolExecutor(1, "ending") as thread:
                ended = thread.submit(ending)
                while not ended.done():
                    self._settle(wanted, may_lack=may_lack)
                    wait([ended], _GLANCE_SECONDS)
                ended.result()
        self._settle(wanted, may_lack=may_lack)
        self._let_pass(firewall.restrictions_of(bundle))

    def go_back(self, served: Bundle | None) -> None:
        """Make the network what it was before; do nothing if nothing was begun."""
        if not self._begun:
            return
        self._taken = {}
        wanted = NOTHING if served is None else interfaces.wanted_of(served)
        former = OPEN if served is None else firewall.restrictions_of(served)
        try:
            self._let_pass(former)
            self._settle(wanted, may_lack=True)
            self._begun = False
        except AgentError as error:
            _log.error("Going back to the network of before: %s", error)

    def _settle(self, wanted: Wanted, *, may_lack: bool) -> None:
        """Until a look finds nothing to do. What was done is announced; what comes after the look is somebody else."""
        for _ in range(_MOST_PASSES):
            if self._interfaces.changed():
                self._plugged = None
            if self._plugged == wanted:
                return
            done = interfaces.settle(self._inner, wanted, may_lack=may_lack)
            if done.changed == 0 and not done.complete:
                _log.warning("An interface that was confirmed is gone; going without it")
                return
            if done.changed == 0:
                self._plugged = wanted

    def _let_pass(self, wanted: Restrictions) -> None:
        """Restrict, and pass packets on only while it is decided which: this amphora is no router for a moment."""
        if not wanted.forwards:
            self._inner.run(sysctls.forward, wanted=False)
        self._restrict(wanted)
        if wanted.forwards:
            self._inner.run(sysctls.forward, wanted=True)

    def _restrict(self, wanted: Restrictions) -> None:
        if self._restricted == wanted and not self._firewall.changed():
            return
        self._restricted = None
        text = firewall.render(wanted)
        self._firewall.changed()
        if not self._inner.run(nft_apply.replace, text):
            self._restricted = wanted
            return
        self._firewall.changed()
        if self._inner.run(nft_apply.same, text):
            self._restricted = wanted

    def close(self) -> None:
        self._interfaces.close()
        self._firewall.close()
