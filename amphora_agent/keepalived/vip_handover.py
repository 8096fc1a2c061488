# SPDX-License-Identifier: Apache-2.0
"""Planned hand-over of the VIPs to the partner, without a lost connection.

Invariant: a release moves the VIPs within `RELEASE_SECONDS`, or reports that it did not. If an amphora dies meanwhile,
the other one takes the VIPs: keepalived continues to decide. The redirection of open connections ends with the last
connection or at its deadline, also after a restart of the agent.

    partner   expect_vips    redirects packets of connections that it does not know to the former holder
    holder    release_vips   gives up the VIPs; its connections continue by way of the partner
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

from amphora_agent.bundle import VrrpInstance
from amphora_agent.errors import AgentError, FirewallError, InterfaceError, NotElected
from amphora_agent.keepalived.vrrp_state import VrrpState
from amphora_agent.network import connection_reset, connection_tunnel, tunnel_answers
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import NetlinkError
from amphora_agent.paths import Paths, write_atomically
from amphora_agent.services.health_file import ALIVE, DEAD

_log = logging.getLogger(__name__)
RELEASE_SECONDS = 5.0
_CHECK_INTERVAL_SECONDS = 0.5
_POLL_SECONDS = 0.005
_FAILURES = (AgentError, NetlinkError, OSError)


@dataclass
class HandoverDeadlines:
    """Deadlines of both sides in seconds of the monotonic clock; None while a side is inactive."""

    expecting: float | None = None
    draining: float | None = None


class VipHandover:
    """Both sides of a hand-over. ``instance`` returns the VRRP instance; None for a single amphora."""

    def __init__(
        self, paths: Paths, inner: Namespace, vrrp_state: VrrpState, instance: Callable[[], VrrpInstance | None]
    ) -> None:
        self._paths = paths
        self._inner = inner
        self._vrrp_state = vrrp_state
        self._instance = instance
        self._deadlines = self._read_deadlines()
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="handover", daemon=True)

    def start(self) -> None:
        """Continue a recorded hand-over of a former agent; remove the remains of one without a record."""
        with suppress(FileNotFoundError):
            if self._paths.released.read_text(encoding="ascii") != ALIVE:
                self._paths.released.write_text(ALIVE, encoding="ascii")
        if self._deadlines == HandoverDeadlines():
            try:
                self._inner.run(connection_tunnel.stop_redirect)
                self._remove_tunnel()
            except _FAILURES as error:
                _log.warning(
                    "The agent cannot remove the tunnel of a former VIP hand-over, "
                    "and keeps the tunnel until the next hand-over: %s",
                    error,
                )
        self._thread.start()

    def describe(self) -> dict[str, Any]:
        instance, now = self._instance(), time.monotonic()
        found = self._inner.run(connection_tunnel.list_connections, instance) if instance is not None else []
        deadlines = asdict(self._deadlines).items()
        return {
            "holds_vip": self._vrrp_state.holds_vip,
            "connections": len(found),
            **{name: None if end is None else max(0.0, end - now) for name, end in deadlines},
        }

    def expect_vips(self, seconds: float) -> None:
        """Redirect unknown connections to the partner; raises NotElected, InterfaceError or FirewallError."""
        with self._lock:
            instance = self._instance_with_partner("expect the VIPs")
            with self._recording(replace(self._deadlines, expecting=time.monotonic() + seconds)):
                self._create_tunnel(instance)
                self._inner.run(connection_tunnel.start_redirect, instance)

    def release_vips(self, drain: float, *, direct_answers: bool = True) -> None:
        """Give the VIPs to the partner; returns when the VIPs have left this amphora.

        ``drain`` is the number of seconds for which open connections may continue; 0 ends them. Connections continue by
        way of one partner only, because it is not known in advance which one of several partners takes the VIPs.
        Without ``direct_answers`` a stateful security group drops answers that leave directly. A drain then requires a
        kernel that sends answers through the tunnel.

        Raises NotElected if this amphora does not have the VIPs, has no suitable partner, or kept the VIPs. After an
        InterfaceError or FirewallError the VIPs are still here.
        """
        with self._lock:
            instance = self._instance_with_partner("release the VIPs", only_one=drain > 0)
            if not self._vrrp_state.holds_vip:
                raise NotElected("release the VIPs", "this amphora does not have them")
            if drain:
                with self._recording(replace(self._deadlines, draining=time.monotonic() + drain)):
                    self._create_tunnel(instance)
                    self._start_answers(instance, direct_allowed=direct_answers)
            # DEAD makes keepalived give up the VIPs with a last advertisement of priority 0 (RFC 9568, section 6.4.3).
            # After ALIVE, keepalived takes the VIPs only if no other amphora has them.
            self._paths.released.write_text(DEAD, encoding="ascii")
            try:
                deadline = time.monotonic() + RELEASE_SECONDS
                while self._vrrp_state.holds_vip:
                    if time.monotonic() > deadline:
                        raise NotElected(
                            "release the VIPs", f"this amphora still has them after {RELEASE_SECONDS:.0f} s"
                        )
                    time.sleep(_POLL_SECONDS)
            finally:
                self._paths.released.write_text(ALIVE, encoding="ascii")
            if not drain:
                self._reset_connections(instance)

    def _start_answers(self, instance: VrrpInstance, *, direct_allowed: bool) -> None:
        """Send answers through the tunnel if the kernel can; otherwise they leave directly, if allowed."""
        try:
            self._inner.run(tunnel_answers.start_answers, instance)
        except FirewallError as error:
            if not direct_allowed:
                raise
            _log.warning(
                "The agent could not load the firewall rules that send answers of open connections "
                "through the hand-over tunnel, so a stateful security group may drop these answers: %s",
                error,
            )

    def _reset_connections(self, instance: VrrpInstance) -> None:
        """Reset connections to VIPs that have left. The VIPs have moved, so a failure is logged only."""
        try:
            self._inner.run(connection_reset.reset_connections, instance)
        except _FAILURES as error:
            _log.warning(
                "The agent could not reset the connections to VIPs that have moved to the partner. "
                "Each of these connections stays open until a time-out: %s",
                error,
            )

    def _instance_with_partner(self, attempt: str, *, only_one: bool = True) -> VrrpInstance:
        instance = self._instance()
        if instance is None or not instance.vrrp.peers:
            raise NotElected(attempt, "this amphora has no partner")
        partners = len(instance.vrrp.peers)
        if only_one and partners > 1:
            raise NotElected(
                attempt, f"this amphora has {partners} partners, and open connections can move to one partner only"
            )
        return instance

    @contextmanager
    def _recording(self, deadlines: HandoverDeadlines) -> Iterator[None]:
        """Record deadlines before the kernel is changed, so that a crash leaves no tunnel for ever."""
        before, self._deadlines = self._deadlines, deadlines
        try:
            self._write_deadlines()
            yield
        except _FAILURES:
            self._deadlines = _expire_new(before, deadlines, time.monotonic())
            with suppress(*_FAILURES):
                # An error in this clean-up is ignored, because the background thread repeats the clean-up.
                self._end_expired()
            raise

    def _create_tunnel(self, instance: VrrpInstance) -> None:
        try:
            for step in (connection_tunnel.add_guard, connection_tunnel.create_tunnel, connection_tunnel.add_vips):
                self._inner.run(step, instance)
        except NetlinkError as error:
            raise InterfaceError("create a tunnel to the partner", f"the kernel refused: {error}") from error

    def _run(self) -> None:
        while True:
            idle = self._deadlines == HandoverDeadlines()
            self._changed.wait(None if idle else _CHECK_INTERVAL_SECONDS)
            self._changed.clear()
            try:
                self._end_expired()
            except _FAILURES as error:
                _log.warning(
                    "The agent cannot complete the hand-over of the VIPs, and retries in %.1f s: %s",
                    _CHECK_INTERVAL_SECONDS,
                    error,
                )

    def _end_expired(self) -> None:
        """End each side that has reached its deadline or has no connection left."""
        with self._lock:
            now, left = time.monotonic(), replace(self._deadlines)
            if left.expecting is not None and (left.expecting <= now or self._is_peer_gone()):
                self._inner.run(connection_tunnel.stop_redirect)
                left.expecting = None
            if left.draining is not None and (left.draining <= now or self._is_drained()):
                instance = self._instance()
                if instance is not None and not self._vrrp_state.holds_vip:
                    self._reset_connections(instance)
                self._inner.run(tunnel_answers.stop_answers)
                left.draining = None
            if left == self._deadlines:
                return
            if left == HandoverDeadlines():
                self._remove_tunnel()
            # The deadlines stay until the tunnel is removed, so that the background thread retries a failed removal.
            self._deadlines = left
            self._write_deadlines()

    def _remove_tunnel(self) -> None:
        self._inner.run(tunnel_answers.stop_answers)
        # Only this amphora's end of the tunnel is removed, because the partner may still need the other end.
        self._inner.run(connection_tunnel.remove_tunnel)
        with suppress(FirewallError):
            self._inner.run(connection_tunnel.remove_guard)

    def _is_peer_gone(self) -> bool:
        """Return whether the far end of the tunnel is no partner any more, so that its connections are lost.

        The last amphora of a former pair has no VRRP when its partner is deleted.
        """
        instance, peer = self._instance(), self._inner.run(connection_tunnel.tunnel_peer)
        peers = () if instance is None else instance.vrrp.peers
        return peer is not None and all(one.address != peer for one in peers)

    def _is_drained(self) -> bool:
        """Return whether no connection is left that arrives by way of the partner."""
        instance = self._instance()
        if instance is None:
            return True
        return not self._vrrp_state.holds_vip and not self._inner.run(connection_tunnel.list_connections, instance)

    def _write_deadlines(self) -> None:
        write_atomically(self._paths.handover, json.dumps(asdict(self._deadlines)), durable=False)
        self._changed.set()

    def _read_deadlines(self) -> HandoverDeadlines:
        try:
            return HandoverDeadlines(**json.loads(self._paths.handover.read_text(encoding="ascii")))
        except (OSError, ValueError, TypeError):
            return HandoverDeadlines()


def _expire_new(before: HandoverDeadlines, begun: HandoverDeadlines, now: float) -> HandoverDeadlines:
    """Return deadlines that expire the newly begun sides now and leave the others unchanged."""
    pairs = zip(astuple(before), astuple(begun), strict=True)
    return HandoverDeadlines(*(now if old is None and new is not None else old for old, new in pairs))
