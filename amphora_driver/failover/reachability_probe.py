# SPDX-License-Identifier: Apache-2.0
"""The second witness: the agent of a silent amphora is asked itself, and the network whether it is there.

Invariant: whoever decides waits for nobody here. A bounded number of threads ask, each for a bounded time; what they
hear lies ready. Trouble of our own (no route, no descriptor, no certificate, a database that is slow or away) is never
an amphora's: an amphora's time begins when everything of ours is there, and only silence counts. Who shows a wrong
certificate, or says no to ours, says something: that may be a certificate that has expired, or our clock.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from amphora_driver.deadline import Deadline
from amphora_driver.errors import (
    AgentRefused,
    AgentUnreachable,
    AgentUntrusted,
    AmphoraDriverError,
    ConfigurationError,
)
from amphora_driver.failover.failure_rules import Answer, How

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# Asked at once. With the default of two seconds that is eight dead amphorae a second.
_MOST_AT_ONCE = 16
# Seconds for which a witness is believed without being asked again.
_NETWORK_FRESH = 1.0
# What the kernel says of this machine, not of the other one. EHOSTUNREACH is not among them: it is what a machine that
# is off looks like, when nobody answers for its address any more.
_OURS = frozenset(
    {
        *(errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS),
        *(errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EADDRINUSE, errno.EAFNOSUPPORT),
    }
)


class Agents(Protocol):
    """What is needed of `AgentClient`."""

    def prepare(self) -> ssl.SSLContext:
        """What of our own a call needs."""

    def info(
        self,
        amphora_id: str,
        address: str,
        *,
        prepared: ssl.SSLContext | None = None,
        deadline: Deadline | None = None,
    ) -> object:
        """Versions and capabilities."""

    def forget(self, amphora_id: str) -> None:
        """Close idle connections."""


class Witnesses:
    """Asks agents, beside whoever decides.

    Args:
        agents: who talks to agents.
        timeout: seconds an agent has for its answer.
        others: host:port of machines that always listen ([failover] witnesses); empty for none.

    Raises:
        ConfigurationError: one of the others is not written like that.
    """

    def __init__(self, agents: Agents, timeout: float, others: Sequence[str] = ()) -> None:
        self._agents = agents
        self._timeout = timeout
        self._others = [_place(one) for one in others]
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, "witness")
        self._lock = threading.Lock()
        self._asking: set[str] = set()
        self._answers: dict[str, Answer] = {}
        self._network: tuple[float, str] | None = None
        self._looking = threading.Lock()

    def ask(self, amphora_id: str, address: str) -> bool:
        """Have an agent asked; False if it is being asked, or too many are."""
        with self._lock:
            if amphora_id in self._asking or len(self._asking) >= _MOST_AT_ONCE:
                return False
            self._asking.add(amphora_id)
        self._pool.submit(self._ask, amphora_id, address)
        return True

    def answer(self, amphora_id: str) -> Answer | None:
        """What came of it the last time."""
        with self._lock:
            return self._answers.get(amphora_id)

    def keep(self, amphora_ids: Collection[str]) -> None:
        """Forget what all others said."""
        with self._lock:
            self._answers = {one: said for one, said in self._answers.items() if one in amphora_ids}

    def close(self) -> None:
        """Ask nobody any more; whoever is being asked has his time."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, amphora_id: str, address: str) -> None:
        at = time.monotonic()
        try:
            how, words = self._tried(amphora_id, address)
        except Exception as error:  # noqa: BLE001 - what nobody thought of is no proof of anybody's death
            how, words = How.BLIND, f"{type(error).__name__}: {error}"
        with self._lock:
            self._asking.discard(amphora_id)
            before = self._answers.get(amphora_id)
            blind_at = at if how is How.BLIND else (None if before is None else before.blind_at)
            self._answers[amphora_id] = Answer(how=how, at=at, words=words, blind_at=blind_at)

    def _tried(self, amphora_id: str, address: str) -> tuple[How, str]:
        # Over a connection that was there before, a network that is gone looks like an agent that does not answer.
        self._agents.forget(amphora_id)
        begun = time.monotonic()
        try:
            prepared = self._agents.prepare()
            if (took := time.monotonic() - begun) > self._timeout:
                return How.BLIND, f"our own certificates were there only after {took:.1f} s"
            deadline = Deadline(self._timeout, "ask a silent amphora")
            self._agents.info(amphora_id, address, prepared=prepared, deadline=deadline)
        except (AgentRefused, AgentUntrusted) as error:
            return How.ANSWERS, error.happened
        except AmphoraDriverError as error:
            if is_alert(error):
                return How.ANSWERS, error.happened
            if own := our_trouble(error):
                return How.BLIND, own
            if deaf := self._nobody_there():
                return How.BLIND, deaf
            return How.UNANSWERED, error.happened
        return How.ANSWERS, ""

    def _nobody_there(self) -> str:
        """Why the network is not believed to be there; empty if it is."""
        if not self._others:
            return ""
        with self._looking:
            if self._network is None or time.monotonic() - self._network[0] > _NETWORK_FRESH:
                there = any(_listens(host, port, self._timeout) for host, port in self._others)
                self._network = time.monotonic(), "" if there else "none of [failover] witnesses can be reached"
            return self._network[1]


def our_trouble(error: AmphoraDriverError) -> str:
    """What of our own keeps us from asking; empty where that is not the reason."""
    if not isinstance(error, (AgentUnreachable, AgentUntrusted)):
        return str(error).rstrip(".")
    seen: BaseException | None = error
    while seen is not None:
        # Numbers of OpenSSL's mean something else.
        if isinstance(seen, OSError) and not isinstance(seen, ssl.SSLError) and seen.errno in _OURS:
            return (seen.strerror or str(seen)).lower()
        seen = seen.__cause__ or seen.__context__
    return ""


def is_alert(error: AmphoraDriverError) -> bool:
    """Whether the other side has said in TLS that it does not talk to us: an alert (RFC 8446, section 6.2)."""
    seen: BaseException | None = error
    while seen is not None:
        # urllib3's own error carries OpenSSL's as its argument.
        for one in (seen, *seen.args):
            if isinstance(one, ssl.SSLError) and "_ALERT_" in (one.reason or ""):
                return True
        seen = seen.__cause__ or seen.__context__
    return False


def _listens(host: str, port: int, timeout: float) -> bool:
    try:
        socket.create_connection((host, port), timeout).close()
    except ConnectionRefusedError:
        # Somebody is there to say no.
        return True
    except OSError:
        return False
    return True


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError("use [failover] witnesses", f"{text} is not host:port", "Write [2001:db8::1]:22.")
    return host.strip("[]"), int(port)
