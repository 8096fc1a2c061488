# SPDX-License-Identifier: Apache-2.0
"""Give the VIPs to the partner on purpose, and let go of nobody.

Invariant: a release moves the VIPs within a moment or says that it did not, and whoever dies meanwhile, one of the two
takes them: keepalived goes on deciding. What was begun for open connections ends with the last of them, or when its
time is over, also if the agent was restarted in between.

    partner   expect    it will get packets of connections that it does not know, and hands them on
    holder    release   the VIPs go; its connections go on, by way of the partner
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from amphora_agent.errors import AgentError, FirewallError, InterfaceError, NotElected
from amphora_agent.keepalived.configuration import Pair
from amphora_agent.keepalived.vrrp_state import Role
from amphora_agent.network import connection_tunnel
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import NetlinkError
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services.health_file import ALIVE, DEAD

_log = logging.getLogger(__name__)
RELEASE_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.005
_FAILURES = (AgentError, NetlinkError, OSError)


@dataclass
class Until:
    """Until when something goes on, in seconds of the machine's monotonic clock; None where nothing does."""

    expecting: float | None = None
    draining: float | None = None


class Handover:
    """Both sides of it.

    Args:
        pair: what this amphora takes part in at the moment; None if it is on its own.
    """

    def __init__(self, paths: Paths, inner: Namespace, role: Role, pair: Callable[[], Pair | None]) -> None:
        self._paths = paths
        self._inner = inner
        self._role = role
        self._pair = pair
        self._until = self._read()
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="handover", daemon=True)

    def start(self) -> None:
        """Go on with what an agent before this one has begun, and end what nobody knows of any more."""
        with suppress(FileNotFoundError):
            if self._paths.released.read_text(encoding="ascii") != ALIVE:
                self._paths.released.write_text(ALIVE, encoding="ascii")
        if self._until == Until():
            try:
                self._inner.run(connection_tunnel.stop_leading)
                self._fill_in()
            except _FAILURES as error:
                _log.warning("What is left of a hand-over stays: %s", error)
        self._thread.start()

    # -- what can be asked ----------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """How far it is: seconds that are left, and the connections to VIPs that this amphora has."""
        pair, now = self._pair(), time.monotonic()
        found = self._inner.run(connection_tunnel.connections, pair) if pair is not None else []
        return {
            "holds_vip": self._role.holds_vip,
            "connections": len(found),
            **{name: None if end is None else max(0.0, end - now) for name, end in asdict(self._until).items()},
        }

    def expect(self, seconds: float) -> None:
        """Hand packets of connections that are unknown here on to the partner, for some time.

        Raises:
            NotElected: there is not exactly one partner.
            InterfaceError, FirewallError: this machine cannot do it.
        """
        with self._lock:
            pair = self._partnered("expect the VIPs")
            with self._beginning(replace(self._until, expecting=time.monotonic() + seconds)):
                self._dig(pair)
                self._inner.run(connection_tunnel.lead, pair)

    def release(self, drain: float) -> None:
        """Give the VIPs to the partner; returns when they are gone from here.

        Args:
            drain: for how many seconds open connections may go on; 0 for not at all. They can by way of one partner
                only: nobody knows beforehand which one of several takes the VIPs.

        Raises:
            NotElected: the VIPs are not here, or there is nobody to take them; or they did not go.
            InterfaceError, FirewallError: this machine cannot do it; the VIPs are still here.
        """
        with self._lock:
            pair = self._partnered("release the VIPs", alone=drain > 0)
            if not self._role.holds_vip:
                raise NotElected("release the VIPs", "they are not here")
            if drain:
                with self._beginning(replace(self._until, draining=time.monotonic() + drain)):
                    self._dig(pair)
            # keepalived sees a fault, and says so in its last advertisement (priority 0, RFC 9568, 6.4.3): the partner
            # does not wait. After that it is well again, and takes the VIPs only if nobody else has them.
            self._paths.released.write_text(DEAD, encoding="ascii")
            try:
                self._await_gone()
            finally:
                self._paths.released.write_text(ALIVE, encoding="ascii")

    def _partnered(self, wanted: str, *, alone: bool = True) -> Pair:
        pair = self._pair()
        if pair is None or not pair.vrrp.peers:
            raise NotElected(wanted, "this amphora has no partner")
        if alone and len(pair.vrrp.peers) > 1:
            raise NotElected(wanted, f"this amphora has {len(pair.vrrp.peers)} partners, and connections go to one")
        return pair

    def _await_gone(self) -> None:
        deadline = time.monotonic() + RELEASE_SECONDS
        while self._role.holds_vip:
            if time.monotonic() > deadline:
                raise NotElected("release the VIPs", f"they are still here after {RELEASE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    # -- the detour -----------------------------------------------------------------------------------------------

    @contextmanager
    def _beginning(self, until: Until) -> Iterator[None]:
        """Kept before the kernel is changed: what an error or the agent's death interrupts has an end, too."""
        before, self._until = self._until, until
        try:
            self._keep()
            yield
        except _FAILURES:
            self._until = _given_up(before, until, time.monotonic())
            with suppress(*_FAILURES):  # then the thread tries it again
                self._look()
            raise

    def _dig(self, pair: Pair) -> None:
        try:
            self._inner.run(connection_tunnel.guard, pair)
            self._inner.run(connection_tunnel.dig, pair)
            self._inner.run(connection_tunnel.keep, pair)
        except NetlinkError as error:
            raise InterfaceError("dig a tunnel to the partner", f"the kernel refused: {error}") from error

    def _run(self) -> None:
        """End what is over."""
        while True:
            idle = self._until == Until()
            self._changed.wait(None if idle else _LOOK_SECONDS)
            self._changed.clear()
            try:
                self._look()
            except _FAILURES as error:
                _log.warning("Handing over: %s", error)

    def _look(self) -> None:
        with self._lock:
            now, left = time.monotonic(), replace(self._until)
            if left.expecting is not None and (left.expecting <= now or self._is_parted()):
                self._inner.run(connection_tunnel.stop_leading)
                left.expecting = None
            if left.draining is not None and (left.draining <= now or self._is_drained()):
                left.draining = None
            if left == self._until:
                return
            if left == Until():
                self._fill_in()
            self._until = left  # not before: what failed is tried again
            self._keep()

    def _fill_in(self) -> None:
        # One at the other end may still be needed there: each end belongs to its own amphora.
        self._inner.run(connection_tunnel.fill_in)
        with suppress(FirewallError):
            self._inner.run(connection_tunnel.stop_guarding)

    def _is_parted(self) -> bool:
        """Whether the one the tunnel leads to is no partner any more: what it had is answered with a reset now."""
        pair, end = self._pair(), self._inner.run(connection_tunnel.leads_to)
        return pair is not None and end is not None and all(one.address != end for one in pair.vrrp.peers)

    def _is_drained(self) -> bool:
        """Whether no connection is left that came by the partner."""
        pair = self._pair()
        return pair is None or (not self._role.holds_vip and not self._inner.run(connection_tunnel.connections, pair))

    def _keep(self) -> None:
        write_atomically(self._paths.handover, json.dumps(asdict(self._until)), durable=False)
        self._changed.set()

    def _read(self) -> Until:
        try:
            return Until(**json.loads(self._paths.handover.read_text(encoding="ascii")))
        except (OSError, ValueError, TypeError):
            return Until()


def _given_up(before: Until, begun: Until, now: float) -> Until:
    """Pure: what was begun is over at once; what went on before goes on."""
    pairs = zip(astuple(before), astuple(begun), strict=True)
    return Until(*(now if old is None and new is not None else old for old, new in pairs))
