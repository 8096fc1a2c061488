# SPDX-License-Identifier: Apache-2.0
"""The socket on which heartbeats arrive.

Invariant: the loop that reads the socket waits for nothing but the socket. Keys come from memory; a key that is not
there is looked up by another thread, one at a time and not more often than a limit allows, while what it is needed
for waits in a short line. So neither a slow database nor a flood of made-up amphorae stops genuine heartbeats, and
no flood makes the database work. What this process sends to itself to know that it hears is no heartbeat.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping

from amphora_driver.errors import AmphoraDriverError, ConfigurationError, HeartbeatRefused
from amphora_driver.health.budgets import Budgets
from amphora_driver.health.heartbeat import Heartbeat, Signed, amphora_id_of, read, unpack, verify
from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)

Keys = Callable[[str], Secret | None]

_LARGEST_DATAGRAM = 65536
# What the kernel may hold for us while this process is not scheduled; it grants net.core.rmem_max at most.
_SOCKET_BUFFER = 32 << 20
# Linux, socket(7); Python has no name for it.
_SO_RCVBUFFORCE = 33
# Datagrams read in one go before stop() and finished lookups get a look.
_BURST = 256
# Seconds for which a key is believed to be this amphora's, or an amphora to be unknown.
_KEY_AGE = 300.0
_UNKNOWN_AGE = 10.0
_MOST_UNKNOWN = 10_000
_MOST_WAITING = 1000
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
        keys: the heartbeat key of an amphora, None if there is no such amphora. Called in a thread of its own;
            may raise, then it is asked again with a later heartbeat.
        on_heartbeat: called with each genuine heartbeat, in the thread of `run`.
        lookups: how many keys may be looked up in a second.
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
        lookups: float = 200.0,
        on_unknown: Callable[[str, str], None] = lambda _amphora_id, _address: None,
        is_newer: Callable[[str, tuple[int, int]], bool] = lambda _amphora_id, _order: True,
    ) -> None:
        self.accepted = 0
        # By reason; "unknown", "busy" and "lookup" are about keys, "handler" is an error of on_heartbeat.
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
        self._keys = _KeyRing(keys, self._wake, lookups)

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
        """Learn many keys at once, so that a health manager that starts need not look them up one by one."""
        self._keys.learn(keys)

    def forget(self, amphora_ids: Iterable[str]) -> None:
        """Drop the keys and the accounts of amphorae that are gone."""
        for amphora_id in amphora_ids:
            self._keys.forget(amphora_id)
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
            while (datagram := self._keys.next_ready()) is not None:
                self._take(memoryview(datagram), "", waited=True)
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
            key = self._keys.get(amphora_id_of(datagram), datagram, waited=waited)
            if key is None:
                return
            heartbeat = self._read(datagram, key)
        except HeartbeatRefused as refusal:
            self._refuse(refusal)
            if refusal.reason == "unknown" and sender:
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


class _Entry:
    __slots__ = ("key", "until")

    def __init__(self, key: Secret | None, until: float) -> None:
        self.key = key
        self.until = until


class _KeyRing:
    """Keys in memory, and the thread that looks up the others."""

    def __init__(self, keys: Keys, wake: Callable[[], None], per_second: float) -> None:
        self._look_up = keys
        self._wake = wake
        self._pause = 1.0 / per_second
        self._known: dict[str, _Entry] = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._wanted: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        # One waiting datagram for each amphora whose key is being looked up: a later one says more than an earlier.
        self._waiting: dict[str, bytes] = {}
        self._ready: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def get(self, amphora_id: str, datagram: memoryview, *, waited: bool) -> Secret | None:
        """The key, or None if the datagram has been put in line until it is known.

        Raises:
            HeartbeatRefused: there is no such amphora, or too many keys are being looked up.
        """
        entry = self._known.get(amphora_id)
        now = time.monotonic()
        if entry is not None and entry.until > now:
            return entry.key
        with self._lock:
            if entry is None and self._unknown.get(amphora_id, 0.0) > now:
                raise _no_key(amphora_id, "no such amphora is recorded", "unknown")
            if entry is None and waited:
                raise _no_key(amphora_id, "its key could not be looked up", "lookup")
            asked = self._ask(amphora_id)
            if entry is not None:
                # A key that is merely old is good until the database says otherwise: that may be what is away.
                return entry.key
            if not asked:
                raise _no_key(amphora_id, "too many keys are being looked up", "busy")
            self._waiting[amphora_id] = bytes(datagram)
        return None

    def _ask(self, amphora_id: str) -> bool:
        if amphora_id not in self._waiting:
            try:
                self._wanted.put_nowait(amphora_id)
            except queue.Full:
                return False
            self._waiting[amphora_id] = b""
        return True

    def next_ready(self) -> bytes | None:
        """A datagram whose key has been looked up."""
        return self._ready.popleft() if self._ready else None

    def learn(self, keys: Mapping[str, Secret]) -> None:
        """Remember these keys."""
        until = time.monotonic() + _KEY_AGE
        with self._lock:
            for amphora_id, key in keys.items():
                self._known[amphora_id] = _Entry(key, until)
                self._unknown.pop(amphora_id, None)

    def forget(self, amphora_id: str) -> None:
        """Do not know this amphora's key any more."""
        with self._lock:
            self._known.pop(amphora_id, None)

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()
        try:
            self._wanted.put_nowait(None)
        except queue.Full:
            # Then it is not waiting for work and sees the event first.
            return

    def run(self) -> None:
        """Look up what is wanted, until `stop`."""
        while not self._stopped.is_set():
            amphora_id = self._wanted.get()
            if amphora_id is None or self._stopped.is_set():
                return
            self._answer(amphora_id)
            self._stopped.wait(self._pause)

    def _answer(self, amphora_id: str) -> None:
        failed = False
        key: Secret | None = None
        try:
            key = self._look_up(amphora_id)
        except AmphoraDriverError as error:
            failed = True
            LOG.warning("the heartbeat key of amphora %s is not known yet: %s", amphora_id, error)
        except Exception:
            failed = True
            LOG.exception("the heartbeat key of amphora %s could not be looked up", amphora_id)
        now = time.monotonic()
        with self._lock:
            if failed:
                entry = self._known.get(amphora_id)
                if entry is not None:
                    entry.until = now + _UNKNOWN_AGE
            elif key is not None:
                self._known[amphora_id] = _Entry(key, now + _KEY_AGE)
            else:
                self._known.pop(amphora_id, None)
                self._unknown[amphora_id] = now + _UNKNOWN_AGE
                while len(self._unknown) > _MOST_UNKNOWN:
                    self._unknown.popitem(last=False)
            datagram = self._waiting.pop(amphora_id, b"")
        if datagram:
            self._ready.append(datagram)
            self._wake()


def _no_key(amphora_id: str, happened: str, reason: str) -> HeartbeatRefused:
    return HeartbeatRefused(f"check a heartbeat of amphora {amphora_id}", happened, reason=reason)


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
