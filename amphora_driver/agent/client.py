# SPDX-License-Identifier: Apache-2.0
"""The only code that talks to agents.

Invariant: nothing is sent before the other side has proven to be the amphora that is meant: its certificate
comes from our authority and names that amphora's id. Our own certificate is shown only after that (TLS 1.3),
and what an agent answers is read within limits of size and time: an amphora may be in a stranger's hands.
A certificate that has expired is accepted by the one call that replaces it, and by no other.
Neither proxies nor any other environment variable change whom we trust. Bodies are never logged.
Source: docs/agent-api.md.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import urllib3
from urllib3.exceptions import ClosedPoolError, HTTPError, NewConnectionError, ProtocolError, SSLError
from urllib3.exceptions import TimeoutError as HTTPTimeoutError

from amphora_driver.agent.responses import Applied, BundleState, Generation, Info, Loaded, Renewed, Vrrp
from amphora_driver.agent.tls import EXCHANGE, Exchange, Identity
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentRefused, AgentUnreachable, AgentUntrusted
from amphora_driver.secret import Secret
from amphora_driver.untrusted_text import printable

if TYPE_CHECKING:
    from amphora_driver.certificates.trust_store import Trust

# What agents answer is known from here.
__all__ = ["AgentClient", "Applied", "BundleState", "Info", "Loaded", "Renewed", "Vrrp"]
T = TypeVar("T")

# Amphorae whose connection is kept open, and connections for each: one thread works on one load balancer.
_MOST_POOLS = 256
_CONNECTIONS = 2
# Largest answers in bytes.
_MOST_PATIENCE = 5
_MOST_ANSWER = 4 << 20
_MOST_DIAGNOSTICS = 32 << 20
_CHUNK = 1 << 16
# Nesting too deep and text that is no UTF-8 are not all DecodeErrors.
_NOT_UNDERSTOOD = (msgspec.DecodeError, ValueError, RecursionError)
# Pauses between questions to an agent whose port listens before it can answer, and how long a port that does not
# is tried for, in seconds: a machine that is not there yet drops what is sent to it.
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.2
_KNOCK = 0.3
# Seconds in which a machine acknowledges what it is sent, or the connection counts as broken (tcp(7)).
_UNACKNOWLEDGED = 10.0
# Seconds after which an agent that says nothing is asked by another connection whether it is there at all (as many
# times longer as its answer may take), and the time it has for shaking hands.
_SILENCE, _HANDSHAKE = 10.0, 5.0
_SOCKET_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED * 1000)),
]


class _ErrorWords(msgspec.Struct):
    wanted: str = ""
    happened: str = ""
    remedy: str = ""


# Characters of an agent's words, of which there are three at most, and of an id.
_MOST_WORDS, _MOST_ID = 2000, 80


class _ErrorDocument(msgspec.Struct):
    error: _ErrorWords
    object_id: str | None = None
    generation: Generation | None = None


class AgentClient:
    """Calls agents, from any thread. Connections stay open between calls.

    Every method takes the amphora's id, its management address and optionally the `deadline` of what it is a part of,
    and raises

    * `AgentUnreachable`: no answer in time, or the connection broke. Every call may be repeated.
    * `AgentUntrusted`: the other side is not that amphora.
    * `AgentRefused`: it answered no; `status` is HTTP's.
    * `CertificateError`: our own certificate or the authority's cannot be read.

    Args:
        conf: the groups `agent` and `certificates` are used (`amphora_driver.config`).
        trust: says what takes the place of the configured certificates once an authority was rotated (its `instead`);
            without it they are all there is.
    """

    def __init__(self, conf: Any, trust: Trust | None = None) -> None:
        self._port = int(conf.agent.port)
        self._connect_timeout = float(conf.agent.connect_timeout)
        self._request_timeout = float(conf.agent.request_timeout)
        files = (conf.certificates.client_certificate, conf.certificates.ca_certificate)
        self._identity = Identity(*files, None if trust is None else trust.instead)
        self._pools: OrderedDict[tuple[str, str], urllib3.HTTPSConnectionPool] = OrderedDict()
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def put_bundle(self, amphora_id: str, address: str, body: bytes, *, deadline: Deadline | None = None) -> Applied:
        """Give the amphora its whole wanted state (the JSON document of docs/agent-api.md).

        Returns once the amphora serves it.
        """
        call = _Call("PUT", "/v2/bundle", f"give amphora {amphora_id} its configuration", body=body)
        return _decode(self._request(amphora_id, address, call, deadline), Applied, call)

    def bundle_state(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> BundleState:
        """What the amphora confirmed last."""
        call = _Call("GET", "/v2/bundle", f"ask amphora {amphora_id} what it serves")
        return _decode(self._request(amphora_id, address, call, deadline), BundleState, call)

    def prepare(self) -> ssl.SSLContext:
        """What of our own a call needs; it may take as long as the database does.

        Raises:
            CertificateError: our certificate or the authority's cannot be read.
            StoreError: the authorities are not known, or a key cannot be opened.
        """
        return self._identity.context()

    def info(
        self,
        amphora_id: str,
        address: str,
        *,
        prepared: ssl.SSLContext | None = None,
        deadline: Deadline | None = None,
    ) -> Info:
        """Versions and capabilities.

        Args:
            prepared: from `prepare`: nothing of ours is waited for then, and no connection is used that was there.
        """
        call = _Call("GET", "/v2/info", f"ask amphora {amphora_id} for its versions")
        if prepared is None:
            return _decode(self._request(amphora_id, address, call, deadline), Info, call)
        return _decode(self._alone(prepared, amphora_id, address, call, deadline), Info, call)

    def expect_vips(self, amphora_id: str, address: str, seconds: float, *, deadline: Deadline | None = None) -> None:
        """Have the amphora be ready for its partner's VIPs, and hand on what belongs to connections of that one."""
        body = msgspec.json.encode({"seconds": seconds})
        call = _Call("POST", "/v2/vrrp/expect", f"have amphora {amphora_id} expect the VIPs", body=body)
        self._request(amphora_id, address, call, deadline)

    def release_vips(self, amphora_id: str, address: str, drain: float, *, deadline: Deadline | None = None) -> None:
        """Have the amphora give the VIPs to its partner; its connections may go on for `drain` seconds."""
        body = msgspec.json.encode({"drain": drain})
        call = _Call("POST", "/v2/vrrp/release", f"have amphora {amphora_id} hand its VIPs over", body=body)
        self._request(amphora_id, address, call, deadline)

    def vrrp(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> Vrrp:
        """Who has the VIPs as far as the amphora knows, and whether connections go on after they went."""
        call = _Call("GET", "/v2/vrrp", f"ask amphora {amphora_id} about its VIPs")
        return _decode(self._request(amphora_id, address, call, deadline), Vrrp, call)

    def diagnostics(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> dict[str, Any]:
        """All that helps to understand a broken amphora, as one document."""
        call = _Call("GET", "/v2/diagnostics", f"diagnose amphora {amphora_id}", most=_MOST_DIAGNOSTICS)
        return _decode(self._request(amphora_id, address, call, deadline), dict[str, Any], call)

    def configuration(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> dict[str, Any]:
        """What the amphora confirmed and what it has, without any secret, to be compared.

        Raises:
            AgentRefused: also with status 404, by an agent that is too old to tell.
        """
        wanted = f"compare amphora {amphora_id}"
        call = _Call("GET", "/v2/configuration", wanted, most=_MOST_DIAGNOSTICS)
        return _decode(self._request(amphora_id, address, call, deadline), dict[str, Any], call)

    def renew(
        self,
        amphora_id: str,
        address: str,
        certificate: Secret,
        *,
        client_ca: bytes | None = None,
        server_ca: bytes | None = None,
        deadline: Deadline | None = None,
    ) -> Renewed:
        """Give the amphora another certificate, even if the one it shows has expired.

        Everything else about that one has to be right: who signed it, whose it is, what it is for. No other call is
        made over this connection.

        Args:
            certificate: certificate and private key in one PEM (`Issued.bundle`).
            client_ca: the authorities in PEM whose clients may call from now on; None: as before. Ours has to be
                among them.
            server_ca: the authorities in PEM that vouch for amphorae from now on; None: as before.
        """
        authorities = {"client_ca": client_ca, "server_ca": server_ca}
        document = {name: pem.decode() for name, pem in authorities.items() if pem is not None}
        body = msgspec.json.encode({"certificate": certificate.reveal().decode(), **document})
        call = _Call("PUT", "/v2/certificate", f"renew the certificate of amphora {amphora_id}", body=body)
        return _decode(self._alone(self._identity.tolerant(), amphora_id, address, call, deadline), Renewed, call)

    def prove(self, amphora_id: str, address: str, fingerprint: str, *, deadline: Deadline | None = None) -> None:
        """Make sure that new connections show this certificate, and that we are answered on them.

        Args:
            fingerprint: the SHA-256 of the certificate's DER, in hexadecimal.

        Raises:
            AgentUntrusted: they show another one.
        """
        call = _Call("GET", "/v2/info", f"see the new certificate of amphora {amphora_id}")
        limit = Deadline(self._request_timeout, call.wanted, deadline)
        try:
            shown = self._shown(amphora_id, address, limit)
        except OSError as error:
            raise AgentUnreachable(call.wanted, f"{address}: {_words(error)}") from error
        if shown != fingerprint:
            raise AgentUntrusted(call.wanted, f"{address} shows another one")
        # Whether ours is accepted is told only after the handshake (TLS 1.3), and on a connection that is new too.
        self._alone(self._identity.context(), amphora_id, address, call, limit)

    def wait_until_ready(self, amphora_id: str, address: str, deadline: Deadline) -> Info:
        """Ask the agent of a booting amphora, again while its port listens but nothing stands behind it yet.

        Whether the port listens is for others to wait for.

        Raises:
            AgentUnreachable: the port does not listen, or it did not answer until the deadline.
        """
        pause = _FIRST_PAUSE
        call = _Call("GET", "/v2/info", f"reach the agent of amphora {amphora_id}")
        self._knock(address, call, deadline)
        while True:
            try:
                return _decode(self._request(amphora_id, address, call, deadline), Info, call)
            except AgentRefused as error:
                # A server that stands before its application says 503 for a moment.
                if error.status != 503 or deadline.left() <= pause:
                    raise
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _knock(self, address: str, call: _Call, deadline: Deadline) -> None:
        try:
            socket.create_connection((address, self._port), max(min(_KNOCK, deadline.left()), 0.001)).close()
        except OSError as error:
            raise AgentUnreachable(call.wanted, f"{address}: {_words(error)}") from error

    def forget(self, amphora_id: str) -> None:
        """Close the connections to an amphora that is gone."""
        with self._lock:
            for key in [key for key in self._pools if key[0] == amphora_id]:
                self._pools.pop(key).close()

    def close(self) -> None:
        """Close every idle connection; the client can be used again."""
        with self._lock:
            self._drop_all()

    def _request(self, amphora_id: str, address: str, call: _Call, deadline: Deadline | None) -> bytes:
        there = partial(self._shakes_hands, amphora_id, address)
        return self._ask(lambda: self._pool(amphora_id, address), address, call, deadline, there)

    def _alone(
        self, context: ssl.SSLContext, amphora_id: str, address: str, call: _Call, deadline: Deadline | None
    ) -> bytes:
        """Over a connection of its own."""
        pool = self._connect(context, amphora_id, address)
        try:
            return self._ask(lambda: pool, address, call, deadline)
        finally:
            pool.close()

    def _shakes_hands(self, amphora_id: str, address: str, deadline: Deadline) -> bool:
        try:
            self._shown(amphora_id, address, deadline)
        except OSError:
            return False
        return True

    def _shown(self, amphora_id: str, address: str, deadline: Deadline) -> str:
        """Shake hands; the fingerprint of the certificate that was shown."""
        # An exchange of its own, that asks nobody.
        token = EXCHANGE.set(Exchange(deadline.within(_HANDSHAKE), float("inf"), lambda _: True))
        try:
            with socket.create_connection((address, self._port), _KNOCK) as plain:
                plain.settimeout(_HANDSHAKE)
                with self._identity.context().wrap_socket(plain, server_hostname=amphora_id) as connection:
                    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
        finally:
            EXCHANGE.reset(token)

    def _ask(
        self,
        pool_of: Callable[[], urllib3.HTTPSConnectionPool],
        address: str,
        call: _Call,
        deadline: Deadline | None,
        there: Callable[[Deadline], bool] = lambda _: True,
    ) -> bytes:
        """Send and receive; once more if the connection, perhaps kept from an earlier call, broke."""
        latest = Deadline(self._request_timeout * _patience(call), call.wanted, deadline)
        for last in (False, True):
            pool = pool_of()
            try:
                return self._attempt(pool, call, latest, there)
            except (ProtocolError, ClosedPoolError) as error:
                # The agent restarted since the last call. Every call is idempotent: generations see to that.
                if last or latest.passed():
                    raise AgentUnreachable(call.wanted, f"{address} {_words(error)}") from error
            except NewConnectionError as error:
                # A kind of timeout by its class, though it may well be a refusal.
                raise AgentUnreachable(call.wanted, f"{address}: {_words(error)}") from error
            except HTTPTimeoutError as error:
                raise AgentUnreachable(call.wanted, f"{address} did not answer in time") from error
            except SSLError as error:
                if last or not isinstance(_cause(error), (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                    raise _tls_failure(call, address, error) from error
            except HTTPError as error:
                raise AgentUnreachable(call.wanted, f"{address}: {_words(error)}") from error
        raise AssertionError("unreachable")

    def _attempt(
        self, pool: urllib3.HTTPSConnectionPool, call: _Call, latest: Deadline, there: Callable[[Deadline], bool]
    ) -> bytes:
        left = latest.left()
        if left <= 0:
            raise AgentUnreachable(call.wanted, "no time was left for it")
        connect = min(self._connect_timeout, left)
        token = EXCHANGE.set(Exchange(latest, _SILENCE * _patience(call), there))
        try:
            return self._exchange(pool, call, urllib3.Timeout(connect=connect, read=left))
        finally:
            EXCHANGE.reset(token)

    def _exchange(self, pool: urllib3.HTTPSConnectionPool, call: _Call, timeout: urllib3.Timeout) -> bytes:
        response = pool.urlopen(
            call.method,
            call.path,
            body=call.body,
            headers={"Content-Type": "application/json"} if call.body is not None else {},
            timeout=timeout,
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        try:
            content = _read(response, call)
        except BaseException:
            # What is left of this answer must not be taken for the beginning of the next one.
            response.close()
            raise
        response.release_conn()
        if response.status != 200:
            raise _refusal(call, response.status, content)
        return content

    def _pool(self, amphora_id: str, address: str) -> urllib3.HTTPSConnectionPool:
        # Before the lock: who waits for the database must not keep from calling who need not.
        context = self._identity.context()
        with self._lock:
            if context is not self._context:
                self._drop_all()
                self._context = context
            key = (amphora_id, address)
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = self._connect(context, amphora_id, address)
                while len(self._pools) > _MOST_POOLS:
                    self._pools.popitem(last=False)[1].close()
            self._pools.move_to_end(key)
            return pool

    def _drop_all(self) -> None:
        # Connections in use at this moment are closed when they come back.
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _connect(self, context: ssl.SSLContext, amphora_id: str, address: str) -> urllib3.HTTPSConnectionPool:
        # server_hostname makes OpenSSL compare the id during the handshake, before our certificate is shown;
        # assert_hostname would switch that off and compare afterwards.
        return urllib3.HTTPSConnectionPool(
            address,
            self._port,
            maxsize=_CONNECTIONS,
            ssl_context=context,
            cert_reqs="CERT_REQUIRED",
            server_hostname=amphora_id,
            socket_options=_SOCKET_OPTIONS,
        )


class _Call(msgspec.Struct, frozen=True):
    """One request: `wanted` is what it is for, `most` the largest answer in bytes."""

    method: str
    path: str
    wanted: str
    body: bytes | None = None
    most: int = _MOST_ANSWER


def _patience(call: _Call) -> float:
    """How often the usual time an agent is given: HAProxy 2.6 reads 10,000 members (1.3 MB) for up to minutes."""
    return 1 + min(_MOST_PATIENCE - 1, 3 * len(call.body or b"") / 1_000_000)


def _read(response: urllib3.BaseHTTPResponse, call: _Call) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := response.read1(_CHUNK, decode_content=False):
        size += len(part)
        if size > call.most:
            raise AgentRefused(call.wanted, f"its answer is longer than {call.most} bytes", status=response.status)
        parts.append(part)
    return b"".join(parts)


def _decode(content: bytes, shape: type[T], call: _Call) -> T:
    try:
        return msgspec.json.decode(content, type=shape)
    except _NOT_UNDERSTOOD as error:
        raise AgentRefused(
            call.wanted,
            f"its answer is not understood ({error})",
            "Check that the agent's version fits this controller's.",
            status=200,
        ) from error


def _refusal(call: _Call, status: int, content: bytes) -> AgentRefused:
    try:
        document = msgspec.json.decode(content, type=_ErrorDocument)
    except _NOT_UNDERSTOOD:
        # Not quoted: nobody knows what it holds.
        return AgentRefused(call.wanted, f"it answered {status} without an explanation", status=status)
    words = document.error
    happened = printable(words.happened, _MOST_WORDS) or f"it answered {status}"
    if words.wanted:
        happened = f"the agent could not {printable(words.wanted, _MOST_WORDS)}: {happened}"
    return AgentRefused(
        call.wanted,
        happened,
        printable(words.remedy, _MOST_WORDS),
        object_id=None if document.object_id is None else printable(document.object_id, _MOST_ID),
        status=status,
        generation=document.generation,
    )


def _cause(error: SSLError) -> object:
    return error.args[0] if error.args else error


def _tls_failure(call: _Call, address: str, error: SSLError) -> AgentUntrusted | AgentUnreachable:
    cause = _cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return AgentUntrusted(
            call.wanted,
            f"{address} shows a certificate that is not accepted ({cause.verify_message})",
            "Check that this address is the amphora's, and that its certificate has not expired.",
        )
    # Among others the agent's verdict on our certificate. A machine that just booted may have a wrong clock.
    return AgentUnreachable(
        call.wanted,
        f"{address} broke off the TLS handshake ({getattr(cause, 'reason', None) or cause})",
        "If it stays so, check that client_ca signed client_certificate (group [certificates]).",
    )


def _words(error: BaseException) -> str:
    """The operating system's own words where there are some: urllib3's quote objects, not reasons."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror.lower()
        if isinstance(seen, ConnectionError):
            return str(seen).lower() or "closed the connection"
        seen = seen.__cause__ or seen.__context__
    return "closed the connection" if isinstance(error, (ProtocolError, ClosedPoolError)) else str(error)
