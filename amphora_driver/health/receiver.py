# SPDX-License-Identifier: Apache-2.0
"""The socket on which heartbeats arrive.

Invariant: the loop that reads the socket waits for nothing but the socket. Keys come from memory (`keys.py`). Neither a
slow database nor datagrams with invented ids stop genuine heartbeats or cause much work for the database. A datagram
that this process sends to itself, as a proof that it receives, is no heartbeat.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from amphora_driver.errors import ConfigurationError, HeartbeatRefused
from amphora_driver.health.amphora_budgets import Budgets
from amphora_driver.health.heartbeat_codec import Heartbeat, Signed, amphora_id_of, read, unpack, verify
from amphora_driver.health.heartbeat_keys import KeyRing, Keys
from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

_LARGEST_DATAGRAM = 65536
# What the kernel may hold for us while this process is not scheduled; it grants net.core.rmem_max at most.
_SOCKET_BUFFER = 32 << 20
# Linux, socket(7); Python has no name for it.
_SO_RCVBUFFORCE = 33
# Datagrams read in one go before stop() and finished lookups get a look.
_BURST = 256
# Seconds between two lines about refused datagrams in the log, and amphorae that such a line names.
_LOG_INTERVAL = 60.0
_MOST_NAMED = 5
# A datagram of this process to itself: these bytes, and a number nobody else knows.
_OWN_MAGIC = b"AHM1"
_OWN_SIZE = 32
# A proof needs no other address than the one that any address of this host is heard on.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Receiver:
    """Receives, verifies and hands on.

    Args:
        bind_address: IPv4 or IPv6 address.
        port: UDP port; 0 for any (see the attribute `port`).
        keys: reads the keys of all amphorae but those that it is given. Called in a thread of its own; may raise, then
            it is called again after a later heartbeat.
        on_heartbeat: called with each genuine heartbeat, in the thread of `run`.
        pause: seconds between two calls of `keys`.
        on_unknown: called with the id and the sender's address of what comes from an amphora that nobody knows, in the
            thread of `run`; for no more than a look, and not to be believed: nobody has signed that.
        is_newer: whether (epoch, sequence) is after all that this amphora has sent. Called before a datagram is
            unpacked: a replay costs no more than its signature.

    Raises:
        ConfigurationError: the address cannot be had.
    """

    def __init__(
        self,
        bind_address: str,
        port: int,
        keys: Keys,
        on_heartbeat: Callable[[Heartbeat], None],
        *,
        pause: float = 0.5,
        on_unknown: Callable[[str, str], None] = lambda _amphora_id, _address: None,
        is_newer: Callable[[str, tuple[int, int]], bool] = lambda _amphora_id, _order: True,
    ) -> None:
        self.accepted = 0
        # By reason; "unknown", "busy" and "lookup" concern keys, "handler" is an error of on_heartbeat.
        self.refused: Counter[str] = Counter()
        # By amphora, of those whose signature was right.
        self.misbehaved: Counter[str] = Counter()
        self._is_newer = is_newer
        self._budgets = Budgets()
        self._on_heartbeat = on_heartbeat
        self._on_unknown = on_unknown
        # What was sent last for a proof, and whether it has come back.
        self._own = b""
        self._came_back = threading.Event()
        self._stopping = False
        self._logged_at = 0.0
        self._closing = threading.Lock()
        self._socket = _bind(bind_address, port)
        self.port: int = self._socket.getsockname()[1]
        self._address = (_LOOPBACK.get(bind_address, bind_address), self.port)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._keys = KeyRing(keys, self._wake, pause)

    def run(self) -> None:
        """Receive until `stop` is called, from whatever thread; closes the socket then."""
        lookups = threading.Thread(target=self._keys.run, name="heartbeat-keys", daemon=True)
        lookups.start()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                self._loop(selector)
        finally:
            self._keys.stop()
            # A lookup that hangs must not keep the process.
            lookups.join(timeout=1.0)
            self.close()

    def stop(self) -> None:
        """Make `run` return at once. May be called from a signal handler, and more than once."""
        self._stopping = True
        self._wake()

    def close(self) -> None:
        """Give the port back; `run` does it by itself."""
        with self._closing:
            for one in (self._socket, self._woken, self._waker):
                one.close()

    def preload(self, keys: Mapping[str, Secret]) -> None:
        """Learn keys that were read before `run`."""
        self._keys.learn(keys)

    def forget(self, amphora_ids: Iterable[str]) -> None:
        """Drop the keys and the accounts of amphorae that are gone."""
        gone = set(amphora_ids)
        self._keys.forget(gone)
        for amphora_id in gone:
            self._budgets.forget(amphora_id)
            self.misbehaved.pop(amphora_id, None)

    def hears(self, seconds: float = 1.0) -> bool:
        """Whether what is sent to the socket is received: sends something to itself, and waits for it. For one thread.

        False also while `run` does not run, or is so far behind that it takes longer.
        """
        self._came_back.clear()
        self._own = own = _OWN_MAGIC + secrets.token_bytes(_OWN_SIZE)
        try:
            with socket.socket(self._socket.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(own, self._address)
        except OSError as error:
            LOG.warning("this health manager cannot send itself anything: %s", error)
            return False
        heard = self._came_back.wait(seconds)
        self._own = b""
        return heard

    def _is_own(self, datagram: memoryview) -> bool:
        """Whether it is what this process sent to itself last; each counts once."""
        if len(datagram) != len(_OWN_MAGIC) + _OWN_SIZE or datagram[:4] != _OWN_MAGIC:
            return False
        if not hmac.compare_digest(datagram, self._own):
            return False
        self._own = b""
        self._came_back.set()
        return True

    def _loop(self, selector: selectors.BaseSelector) -> None:
        buffer = bytearray(_LARGEST_DATAGRAM)
        view = memoryview(buffer)
        receive = self._socket.recvfrom_into
        while True:
            selector.select()
            if self._stopping:
                return
            self._drain_wakes()
            while (ready := self._keys.next_ready()) is not None:
                datagram, address = ready
                self._take(memoryview(datagram), address, waited=True)
            try:
                for _ in range(_BURST):
                    size, sender = receive(buffer)
                    self._take(view[:size], sender[0], waited=False)
            except BlockingIOError:
                pass
            except OSError as error:
                # An ICMP error of something else must not end the loop.
                LOG.warning("the heartbeat socket says: %s", error)

    def _take(self, datagram: memoryview, sender: str, *, waited: bool) -> None:
        if self._is_own(datagram):
            return
        try:
            key = self._keys.get(amphora_id_of(datagram), datagram, sender, waited=waited)
            if key is None:
                return
            heartbeat = self._read(datagram, key)
        except HeartbeatRefused as refusal:
            self._refuse(refusal)
            if refusal.reason == "unknown":
                self._on_unknown(amphora_id_of(datagram), sender)
            return
        self.accepted += 1
        try:
            self._on_heartbeat(heartbeat)
        except Exception:
            # One amphora's strange report must not make us deaf to all the others.
            self.refused["handler"] += 1
            LOG.exception("a heartbeat of amphora %s could not be processed", heartbeat.amphora_id)

    def _read(self, datagram: memoryview, key: Secret) -> Heartbeat:
        """The cheap checks come first: signature, order, budget, size, content."""
        signed = verify(datagram, key)
        try:
            self._check_turn(signed)
            document = unpack(signed)
            self._budgets.charge(signed.amphora_id, len(document))
            return read(signed, document)
        except HeartbeatRefused:
            self.misbehaved[signed.amphora_id] += 1
            raise

    def _check_turn(self, signed: Signed) -> None:
        mine = signed.amphora_id
        if not self._is_newer(mine, (signed.epoch, signed.sequence)):
            raise HeartbeatRefused("read a heartbeat", f"amphora {mine} has sent a later one before", reason="old")
        if not self._budgets.take(mine, time.monotonic()):
            raise HeartbeatRefused("read a heartbeat", f"amphora {mine} sends too much", reason="budget")

    def _refuse(self, refusal: HeartbeatRefused) -> None:
        self.refused[refusal.reason] += 1
        now = time.monotonic()
        # A flood must not fill the disk.
        if now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            most = dict(self.misbehaved.most_common(_MOST_NAMED))
            LOG.warning(
                "%s Refused since the start, by reason: %s; of amphorae with a right signature, most: %s",
                refusal,
                dict(self.refused),
                most,
            )

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            # Full: it is awake already. Closed: it has ended.
            return

    def _drain_wakes(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            return


def _bind(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        try:
            # Beyond net.core.rmem_max, where this process may (CAP_NET_ADMIN).
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _SOCKET_BUFFER)
        except PermissionError:
            LOG.info("the receive buffer for heartbeats is limited by net.core.rmem_max")
        made.bind((address, port))
    except (OSError, ValueError) as error:
        made.close()
        raise ConfigurationError(
            f"receive heartbeats on {address} port {port}",
            getattr(error, "strerror", None) or str(error),
            "Check [health] bind_address and bind_port.",
        ) from error
    return made
