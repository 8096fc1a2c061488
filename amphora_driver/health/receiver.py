# SPDX-License-Identifier: Apache-2.0
"""The UDP socket that receives heartbeats.

Invariant: the receive loop waits for the socket only. Keys come from a cache (`heartbeat_keys`). Neither a slow
database nor datagrams with invented ids delay authentic heartbeats or cause much database load.

If more heartbeats arrive than the health manager can process, statistics are omitted first, then statuses, and the
times of heartbeats never. An omission delays a value and loses none: counters are absolute, and the next complete
heartbeat repeats all statuses.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum

from amphora_driver.errors import ConfigurationError, HeartbeatRefused
from amphora_driver.health.amphora_budgets import AmphoraBudgets
from amphora_driver.health.heartbeat_codec import (
    AmphoraKey,
    Heartbeat,
    VerifiedDatagram,
    decompress_document,
    format_amphora_id,
    parse_document,
    read_amphora_id,
    read_raw_id,
    verify_datagram,
)
from amphora_driver.health.heartbeat_keys import KeyCache, KeyReader
from amphora_driver.health.receiver_group import GroupMember
from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

_MAX_DATAGRAM = 65536
# Size in bytes of the socket buffer. It holds the heartbeats that arrive while the kernel does not schedule the health
# manager.
_SOCKET_BUFFER = 32 << 20
# Linux's socket option SO_RCVBUFFORCE (socket(7)), for which Python has no name.
_SO_RCVBUFFORCE = 33
# Maximum number of datagrams in a row, before the loop checks for a stop request and for new keys.
_BURST = 256
# After the loop has emptied the socket, it lets datagrams arrive for 10 ms. A wake-up for each single datagram would
# cost more than the datagram. The receive buffer holds the datagrams of a much longer time.
_BATCH_SECONDS = 0.01
# Refused heartbeats are logged every _LOG_INTERVAL seconds at most, with up to _MAX_NAMED amphorae.
_LOG_INTERVAL, _MAX_NAMED = 60.0, 5
# The self-test sends a datagram of these magic bytes and a secret random number to the heartbeat socket.
_PROBE_MAGIC, _PROBE_SIZE = b"AHM1", 32
# Targets of the self-test if the health manager listens on a wildcard address.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}

# Number of Linux's socket option SO_MEMINFO (since Linux 4.12), for which Python's socket module has no name. The
# kernel returns nine integers: the first is the used receive memory, the second its limit, and the last counts lost
# datagrams.
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("=9I")
# Used fraction of the receive buffer from which the health manager omits statistics, from which it also omits statuses,
# and below which it omits nothing.
_STATISTICS_FROM, _STATUSES_FROM, _ENDS_BELOW = 0.25, 0.5, 0.1


class Omitted(IntEnum):
    """What the health manager omits; each value includes the lower ones."""

    NOTHING = 0
    STATISTICS = 1
    STATUSES = 2


_TEXTS = {
    Omitted.STATISTICS: "the health manager postpones statistics",
    Omitted.STATUSES: "the health manager postpones statistics, and reads only the times of heartbeats",
}


class OverloadMonitor:
    """The omissions of one receiver. `omitted` and `lost` may be read by any thread.

    Attributes:
        omitted: what is omitted now.
        lost: datagrams that the kernel could not store, since the start.
    """

    def __init__(self, *receiving: socket.socket) -> None:
        self._sockets = receiving
        self.omitted = Omitted.NOTHING
        self.lost = 0

    def measure(self) -> Omitted:
        """Measure the receive buffer, and return what to omit."""
        highest, lost = 0.0, 0
        for one in self._sockets:
            answer = one.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
            used, limit, *_, dropped = _MEMINFO.unpack(answer)
            highest, lost = max(highest, used / max(limit, 1)), lost + dropped
        self.lost = lost
        return self._decide(highest)

    def _decide(self, used: float) -> Omitted:
        before = self.omitted
        if used >= _STATUSES_FROM:
            self.omitted = Omitted.STATUSES
        elif used >= _STATISTICS_FROM:
            self.omitted = max(before, Omitted.STATISTICS)
        elif used < _ENDS_BELOW:
            self.omitted = Omitted.NOTHING
        if self.omitted > before:
            LOG.warning(
                "%s, because more heartbeats arrive than the health manager can process: %d %% of the receive buffer "
                "are in use; add a processor or a health manager, or increase [amp_health] interval",
                _TEXTS[self.omitted],
                100 * used,
            )
        elif self.omitted is Omitted.NOTHING and before:
            LOG.info(
                "the health manager processes complete heartbeats again, because its receive buffer is almost empty"
            )
        return self.omitted


class Receiver:
    """Receives and verifies heartbeats, and passes them to a callback.

    The constructor raises ConfigurationError if it cannot bind the socket to the address.

    Args:
        port: UDP port; 0 for any (see the attribute `port`).
        read_keys: called in a thread of its own, at most once per `key_read_interval`.
        on_unknown: called with the unverified amphora id and the source address of each datagram of an unknown
            amphora. The callback has to return fast.
        is_newer: returns whether (epoch, sequence) is after all heartbeats of this amphora. The receiver asks before
            it decompresses a datagram, so that a replay costs one signature check only.
        accept_time: called with amphora id and order of a verified heartbeat whose document is not read because of
            overload. Returns whether the document may be left out.
        member: this receiver's part of a group on one port; its sockets are used instead of new ones.
    """

    def __init__(
        self,
        bind_address: str,
        port: int,
        read_keys: KeyReader,
        on_heartbeat: Callable[[Heartbeat], None],
        *,
        key_read_interval: float = 0.5,
        on_unknown: Callable[[str, str], None] = lambda _amphora_id, _address: None,
        is_newer: Callable[[str, tuple[int, int]], bool] = lambda _amphora_id, _order: True,
        accept_time: Callable[[str, tuple[int, int]], bool] = lambda _amphora_id, _order: False,
        member: GroupMember | None = None,
    ) -> None:
        self.accepted = 0
        # Number of heartbeats that were accepted during overload without a read of their documents.
        self.shortened = 0
        # Refused heartbeats by reason. For "unknown", "busy" and "lookup", the health manager could not get the key of
        # the amphora; "handler" means an error in `on_heartbeat`.
        self.refused: Counter[str] = Counter()
        # Only heartbeats with a valid signature count here, because any sender can write the id of an amphora into a
        # datagram.
        self.refused_by_amphora: Counter[str] = Counter()
        self._is_newer = is_newer
        self._accept_time = accept_time
        self._budgets = AmphoraBudgets()
        self._on_heartbeat = on_heartbeat
        self._on_unknown = on_unknown
        self._probe = b""
        self._probe_received = threading.Event()
        self._stopping = False
        self._logged_at = self._error_logged_at = float("-inf")
        self._closing = threading.Lock()
        self._member = member
        self._socket = bind_socket(bind_address, port) if member is None else member.receiving
        self._forwarded = None if member is None else member.forwarded
        self._inputs = tuple(one for one in (self._socket, self._forwarded) if one is not None)
        self.port: int = self._socket.getsockname()[1]
        self.overload = OverloadMonitor(*self._inputs)
        self._address = (_LOOPBACK.get(bind_address, bind_address), self.port)
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_reader.setblocking(False)
        self._wakeup_writer.setblocking(False)
        self._keys = KeyCache(read_keys, self._wake_up, key_read_interval)

    def run(self) -> None:
        """Receive until any thread calls `stop`, and close the socket then."""
        lookups = threading.Thread(target=self._keys.run, name="heartbeat-keys", daemon=True)
        lookups.start()
        try:
            with selectors.DefaultSelector() as selector, selectors.DefaultSelector() as wakeups:
                for each in self._inputs:
                    selector.register(each, selectors.EVENT_READ)
                for one in (selector, wakeups):
                    one.register(self._wakeup_reader, selectors.EVENT_READ)
                self._receive_until_stopped(selector, wakeups)
        finally:
            self._keys.stop()
            # The wait has a limit, because the thread `lookups` hangs while the database does not answer its read of
            # keys.
            lookups.join(timeout=1.0)
            self.close()

    def stop(self) -> None:
        """Make `run` return at once. A signal handler may call this method, also more than once."""
        self._stopping = True
        self._wake_up()

    def close(self) -> None:
        """Close the sockets. `run` closes them at its end, too."""
        with self._closing:
            for one in (*self._inputs, self._wakeup_reader, self._wakeup_writer):
                one.close()

    def preload(self, keys: Mapping[str, Secret]) -> None:
        self._keys.add(keys)

    def forget(self, amphora_ids: Iterable[str]) -> None:
        """Drop the keys and the budgets of deleted amphorae."""
        gone = set(amphora_ids)
        self._keys.forget(gone)
        for amphora_id in gone:
            self._budgets.forget(amphora_id)
            self.refused_by_amphora.pop(amphora_id, None)

    def receives_probe(self, seconds: float = 1.0) -> bool:
        """Send a probe to each socket, and return whether `run` reads all of them in time. Not thread-safe.

        A receiver of a group also gets heartbeats that other receivers forward to its second socket.
        """
        deadline = time.monotonic() + seconds
        if not self._is_received(self._send_probe, seconds):
            return False
        member = self._member
        return member is None or self._is_received(
            lambda probe: member.forward(member.index, memoryview(probe)), max(0.0, deadline - time.monotonic())
        )

    def _is_received(self, send: Callable[[bytes], None], seconds: float) -> bool:
        self._probe_received.clear()
        probe = _PROBE_MAGIC + secrets.token_bytes(_PROBE_SIZE)
        while self._member is not None and not self._member.is_own_probe(probe):
            probe = _PROBE_MAGIC + secrets.token_bytes(_PROBE_SIZE)
        self._probe = probe
        try:
            send(probe)
        except OSError as error:
            LOG.warning(
                "the health manager fails its self-test, because it cannot send a probe to its heartbeat socket: %s",
                error,
            )
            return False
        received = self._probe_received.wait(seconds)
        self._probe = b""
        return received

    def _send_probe(self, probe: bytes) -> None:
        with socket.socket(self._socket.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(probe, self._address)

    def _accept_probe(self, datagram: memoryview) -> bool:
        """Return whether the datagram is the outstanding probe. The receiver accepts each probe once."""
        if len(datagram) != len(_PROBE_MAGIC) + _PROBE_SIZE or datagram[:4] != _PROBE_MAGIC:
            return False
        if not hmac.compare_digest(datagram, self._probe):
            return False
        self._probe = b""
        self._probe_received.set()
        return True

    def _receive_until_stopped(self, selector: selectors.BaseSelector, wakeups: selectors.BaseSelector) -> None:
        buffer = bytearray(_MAX_DATAGRAM)
        while True:
            selector.select()
            # `stop` sets the flag before it sends a wake-up, so the loop removes wake-ups before it reads the flag. In
            # the other order, the loop could miss the flag and wait for ever.
            self._drain_wakeups()
            if self._stopping:
                return
            self.overload.measure()
            while (ready := self._keys.pop_ready()) is not None:
                datagram, address = ready
                self._handle_datagram(memoryview(datagram), address, retried=True)
            empty = [self._receive_burst(one, buffer) for one in self._inputs]
            if all(empty):
                wakeups.select(_BATCH_SECONDS)

    def _receive_burst(self, receiving: socket.socket, buffer: bytearray) -> bool:
        """Process up to `_BURST` datagrams, and return whether the socket is empty."""
        view, receive, forwarded = memoryview(buffer), receiving.recvfrom_into, receiving is self._forwarded
        try:
            for _ in range(_BURST):
                size, sender = receive(buffer)
                self._handle_datagram(view[:size], sender[0], retried=False, forwarded=forwarded)
        except BlockingIOError:
            # The receiver measures the overload only with datagrams. Without this measurement, an overload that has
            # ended would last until the next datagram.
            if self.overload.omitted:
                self.overload.measure()
            return True
        except OSError as error:
            # A temporary socket error, for example an ICMP error after a probe, must not end the receive loop.
            LOG.warning(
                "the health manager could not read a datagram from its heartbeat socket and continues: %s", error
            )
        return False

    def _is_forwarded(self, amphora_id: str, datagram: memoryview) -> bool:
        """Send the datagram to another receiver if that one processes the amphora, and return whether it does."""
        member = self._member
        if member is None or (owner := member.owner(amphora_id)) == member.index:
            return False
        member.forward(owner, datagram)
        return True

    def _handle_datagram(self, datagram: memoryview, sender: str, *, retried: bool, forwarded: bool = False) -> None:
        if self._probe and self._accept_probe(datagram):
            return
        try:
            raw_id = read_raw_id(datagram)
            if self._member is not None and not forwarded and self._is_forwarded(format_amphora_id(raw_id), datagram):
                return
            key = self._keys.find(raw_id)
            if key is None:
                self._keys.await_key(raw_id, datagram, sender, retried=retried)
                return
            heartbeat = self._decode(datagram, key)
            if heartbeat is None:
                return
        except HeartbeatRefused as refusal:
            self._record_refusal(refusal)
            if refusal.reason == "unknown":
                self._on_unknown(read_amphora_id(datagram), sender)
            return
        self.accepted += 1
        try:
            self._on_heartbeat(heartbeat)
        except Exception:
            # An error in the report of one amphora must not stop the processing of other amphorae's heartbeats. A log
            # message for each of these errors could fill the disk.
            self.refused["handler"] += 1
            now = time.monotonic()
            if now - self._error_logged_at >= _LOG_INTERVAL:
                self._error_logged_at = now
                LOG.exception(
                    "the health manager could not process a heartbeat of amphora %s and drops the heartbeat; "
                    "heartbeats dropped because of unexpected errors since the start: %d",
                    heartbeat.amphora_id,
                    self.refused["handler"],
                )

    def _decode(self, datagram: memoryview, key: AmphoraKey) -> Heartbeat | None:
        """Decode a datagram; None if only its time is used.

        The cheap checks come first: signature, order, budget, size, content.
        """
        verified = verify_datagram(datagram, key)
        try:
            self._check_order_and_budget(verified)
            if self.overload.omitted is Omitted.STATUSES and self._shorten(verified):
                return None
            document = decompress_document(verified)
            self._budgets.charge_bytes(verified.amphora_id, len(document))
            return parse_document(verified, document)
        except HeartbeatRefused:
            self.refused_by_amphora[verified.amphora_id] += 1
            raise

    def _shorten(self, verified: VerifiedDatagram) -> bool:
        if not self._accept_time(verified.amphora_id, (verified.epoch, verified.sequence)):
            return False
        self.accepted += 1
        self.shortened += 1
        return True

    def _check_order_and_budget(self, verified: VerifiedDatagram) -> None:
        amphora_id = verified.amphora_id
        if not self._is_newer(amphora_id, (verified.epoch, verified.sequence)):
            happened = f"a later heartbeat of amphora {amphora_id} was accepted before"
            raise HeartbeatRefused("read a heartbeat", happened, reason="old")
        if not self._budgets.take_datagram(amphora_id, time.monotonic()):
            raise HeartbeatRefused("read a heartbeat", f"amphora {amphora_id} exceeds its budget", reason="budget")

    def _record_refusal(self, refusal: HeartbeatRefused) -> None:
        self.refused[refusal.reason] += 1
        now = time.monotonic()
        # Refused heartbeats are logged at intervals, because a log message for each datagram of a flood would fill the
        # disk.
        if now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            amphorae = dict(self.refused_by_amphora.most_common(_MAX_NAMED))
            numbers = (
                "the health manager refused a heartbeat: %s Heartbeats refused since the start, by reason: %s; "
                "refused heartbeats with a valid signature, by amphora: %s"
            )
            LOG.warning(numbers, refusal, dict(self.refused), amphorae)

    def _wake_up(self) -> None:
        try:
            self._wakeup_writer.send(b"\0")
        except OSError:
            # A full socket buffer already contains a wake-up, and after the end of the loop no wake-up is needed. So
            # errors are ignored.
            return

    def _drain_wakeups(self) -> None:
        try:
            while self._wakeup_reader.recv(4096):
                pass
        except BlockingIOError:
            return


def bind_socket(address: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket for heartbeats, or raise ConfigurationError.

    `shared` permits further sockets with this port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        try:
            # SO_RCVBUFFORCE may exceed the kernel's limit net.core.rmem_max, but needs the capability CAP_NET_ADMIN.
            # Without the capability, the buffer stays within the limit.
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _SOCKET_BUFFER)
        except PermissionError:
            LOG.info(
                "the health manager does not have CAP_NET_ADMIN, so the kernel limits the receive buffer for "
                "heartbeats to net.core.rmem_max; if heartbeats are lost, increase this limit"
            )
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((address, port))
    except (OSError, ValueError) as error:
        made.close()
        wanted, happened = (
            f"receive heartbeats on {address} port {port}",
            getattr(error, "strerror", None) or str(error),
        )
        raise ConfigurationError(wanted, happened, "Check [amp_health] bind_address and bind_port.") from error
    return made
