# SPDX-License-Identifier: Apache-2.0
"""Probes the agents of silent amphorae in worker threads, and checks that the network works.

Invariant: the detector never waits for a probe. A bounded number of threads probe, each with a time-out; the detector
reads the results later. A fault of the controller's host (no route, no descriptor, no certificate, a slow or
unavailable database) never counts against an amphora. The time-out starts after all local preparation, and only a
missing answer counts as NO_ANSWER. A wrong certificate or a TLS refusal is an answer: a certificate may have expired,
or a clock may be wrong.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentRefused, AgentUnreachable, AgentUntrusted, AmphoraDriverError, ConfigurationError
from amphora_driver.failover.failure_rules import ProbeOutcome, ProbeResult

if TYPE_CHECKING:
    from amphora_driver.agent.client import AgentClient

# Maximum number of probes at the same time. With a time-out of two seconds, 16 probes detect eight dead amphorae per
# second.
_MOST_AT_ONCE = 16
# Seconds for which the result of a check of the management network stays valid.
_NETWORK_FRESH = 1.0
# Kernel errors that show a fault of the controller's own host. EHOSTUNREACH is missing, because a probed machine that
# is switched off causes this error too.
_LOCAL_ERRORS = frozenset(
    {
        *(errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS),
        *(errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EADDRINUSE, errno.EAFNOSUPPORT),
    }
)


class ReachabilityProbe:
    """Probes agents in its own threads.

    `witnesses` are host:port of machines that always listen ([amp_failover] witnesses).

    Raises:
        ConfigurationError: a witness is not host:port.
    """

    def __init__(self, agents: AgentClient, timeout: float, witnesses: Sequence[str] = ()) -> None:
        self._agents = agents
        self._timeout = timeout
        self._witnesses = [_parse_witness(one) for one in witnesses]
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, "probe")
        self._lock = threading.Lock()
        self._probing: set[str] = set()
        self._results: dict[str, ProbeResult] = {}
        self._network: tuple[float, str] | None = None
        self._network_lock = threading.Lock()

    def start(self, amphora_id: str, address: str) -> bool:
        """Start a probe; return False if a probe of the amphora is running, or too many probes are."""
        with self._lock:
            if amphora_id in self._probing or len(self._probing) >= _MOST_AT_ONCE:
                return False
            self._probing.add(amphora_id)
        self._pool.submit(self._run, amphora_id, address)
        return True

    def result(self, amphora_id: str) -> ProbeResult | None:
        with self._lock:
            return self._results.get(amphora_id)

    def retain(self, amphora_ids: Collection[str]) -> None:
        with self._lock:
            self._results = {one: result for one, result in self._results.items() if one in amphora_ids}

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, amphora_id: str, address: str) -> None:
        at = time.monotonic()
        try:
            outcome, detail = self._probe(amphora_id, address)
        except Exception as error:  # noqa: BLE001 - an unexpected error here must not count as a dead amphora
            outcome, detail = ProbeOutcome.INCONCLUSIVE, f"{type(error).__name__}: {error}"
        with self._lock:
            self._probing.discard(amphora_id)
            before = self._results.get(amphora_id)
            last = None if before is None else before.inconclusive_at
            inconclusive = at if outcome is ProbeOutcome.INCONCLUSIVE else last
            self._results[amphora_id] = ProbeResult(outcome=outcome, at=at, detail=detail, inconclusive_at=inconclusive)

    def _probe(self, amphora_id: str, address: str) -> tuple[ProbeOutcome, str]:
        # After a network failure, an old connection may hang although the agent answers. So the probe uses a new
        # connection.
        self._agents.forget(amphora_id)
        begun = time.monotonic()
        try:
            prepared = self._agents.prepare()
            if (took := time.monotonic() - begun) > self._timeout:
                return ProbeOutcome.INCONCLUSIVE, f"loading the controller's certificates took {took:.1f} s"
            deadline = Deadline(self._timeout, "probe a silent amphora")
            self._agents.info(amphora_id, address, prepared=prepared, deadline=deadline)
        except (AgentRefused, AgentUntrusted) as error:
            return ProbeOutcome.ANSWERED, error.happened
        except AmphoraDriverError as error:
            if is_tls_alert(error):
                return ProbeOutcome.ANSWERED, error.happened
            if fault := local_fault(error) or self._network_fault():
                return ProbeOutcome.INCONCLUSIVE, fault
            return ProbeOutcome.NO_ANSWER, error.happened
        return ProbeOutcome.ANSWERED, ""

    def _network_fault(self) -> str:
        """Return why the network seems to have failed; empty with a reachable witness or without any."""
        if not self._witnesses:
            return ""
        with self._network_lock:
            if self._network is None or time.monotonic() - self._network[0] > _NETWORK_FRESH:
                works = any(_is_reachable(host, port, self._timeout) for host, port in self._witnesses)
                self._network = time.monotonic(), "" if works else "none of [amp_failover] witnesses can be reached"
            return self._network[1]


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def local_fault(error: AmphoraDriverError) -> str:
    """Return the fault of this host that prevented the probe; empty for another cause."""
    if not isinstance(error, (AgentUnreachable, AgentUntrusted)):
        return str(error).rstrip(".")
    for one in _causes(error):
        # SSLErrors are excluded, because their `errno` is a number of OpenSSL and not of the operating system.
        if isinstance(one, OSError) and not isinstance(one, ssl.SSLError) and one.errno in _LOCAL_ERRORS:
            return (one.strerror or str(one)).lower()
    return ""


def is_tls_alert(error: AmphoraDriverError) -> bool:
    """Return whether the agent refused the connection with a TLS alert (RFC 8446, section 6.2)."""
    # urllib3 keeps the SSLError in the arguments of its own exception, so this function also searches these arguments.
    found = (one for seen in _causes(error) for one in (seen, *seen.args))
    return any(isinstance(one, ssl.SSLError) and "_ALERT_" in (one.reason or "") for one in found)


def _is_reachable(host: str, port: int, timeout: float) -> bool:
    try:
        socket.create_connection((host, port), timeout).close()
    except ConnectionRefusedError:
        # A refused connection proves that a machine runs at this address and that the management network works.
        return True
    except OSError:
        return False
    return True


def _parse_witness(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(
            "use [amp_failover] witnesses", f"{text} is not HOST:PORT", "Example: [2001:db8::1]:22."
        )
    return host.strip("[]"), int(port)
