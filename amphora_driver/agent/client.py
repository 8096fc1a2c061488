# SPDX-License-Identifier: Apache-2.0
"""Client of the amphora agent.

Invariant: no request is sent before the peer has proven to be the intended amphora. Its certificate comes from the CA
of amphorae and names the amphora's id. The client certificate is sent only after that (TLS 1.3). Responses are read
within limits of size and time, because an attacker may control an amphora. Only the renewal call accepts an expired
certificate. Environment variables, such as proxies, have no effect. Bodies are never logged.
Source: docs/reference/agent-api.md.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import urllib3
from urllib3.exceptions import ClosedPoolError, HTTPError, NewConnectionError, ProtocolError, SSLError
from urllib3.exceptions import TimeoutError as HTTPTimeoutError

from amphora_driver.agent.responses import Applied, BundleState, Generation, Info, Loaded, Renewed, SettingsState, Vrrp
from amphora_driver.agent.tls import EXCHANGE, Exchange, TlsIdentity
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentRefused, AgentUnreachable, AgentUntrusted
from amphora_driver.secret import Secret
from amphora_driver.untrusted_text import printable

if TYPE_CHECKING:
    from amphora_driver.certificates.trust_store import TrustStore

__all__ = ["AgentClient", "Applied", "BundleState", "Info", "Loaded", "Renewed", "SettingsState", "Vrrp"]
T = TypeVar("T")

# The client keeps connections to _MOST_POOLS amphorae at most, and _CONNECTIONS connections to each.
_MOST_POOLS, _CONNECTIONS = 256, 2
# A large configuration increases the time-out of a request to an agent by a factor of at most five.
_MOST_TIMEOUT_FACTOR = 5
# Maximum size in bytes of a normal response, maximum size of diagnostics or a configuration, and size of one read.
_MOST_ANSWER, _MOST_DIAGNOSTICS, _CHUNK = 4 << 20, 32 << 20, 1 << 16
# Errors of msgspec for an unusable document. For invalid UTF-8, msgspec raises ValueError, and for deep nesting
# RecursionError.
_DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
# A booting agent answers 503. The pause before the next request grows between these limits, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2
# Time-out in seconds of a TCP connection attempt. An amphora that has not booted does not answer. Several short
# attempts reach the booted amphora sooner than one long attempt.
_CONNECT_TIMEOUT = 0.3
# Seconds without an acknowledgement of sent data, after which the kernel closes the connection (tcp(7),
# TCP_USER_TIMEOUT).
_UNACKNOWLEDGED = 10.0
# After _SILENCE seconds without data, the client starts a TLS handshake on another connection. If this handshake does
# not succeed within _HANDSHAKE_TIMEOUT seconds, the client ends the request.
_SILENCE, _HANDSHAKE_TIMEOUT = 10.0, 5.0
_SOCKET_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED * 1000)),
]


class _ErrorWords(msgspec.Struct):
    wanted: str = ""
    happened: str = ""
    remedy: str = ""


# Maximum number of characters of an agent's error text and of an object id. A compromised agent may send longer texts.
_MOST_WORDS, _MOST_ID = 2000, 80


class _ErrorDocument(msgspec.Struct):
    error: _ErrorWords
    object_id: str | None = None
    generation: Generation | None = None


class AgentClient:
    """Calls agents. Thread-safe; connections stay open between calls.

    Every method takes the amphora's id, its management address and optionally the `deadline` of the caller's operation,
    and raises

    * `AgentUnreachable`: no response in time, or the connection broke. The caller may repeat every call.
    * `AgentUntrusted`: the peer is not that amphora.
    * `AgentRefused`: the agent refused the call; `status` is the HTTP status.
    * `CertificateError`: the client certificate or the CA cannot be read.

    After a CA rotation the trust store replaces the configured certificates.
    """

    def __init__(self, conf: Any, trust: TrustStore | None = None) -> None:
        self._port = int(conf.amp_agent.port)
        self._connect_timeout = float(conf.amp_agent.connect_timeout)
        self._request_timeout = float(conf.amp_agent.request_timeout)
        files = (conf.amp_certificates.client_certificate, conf.amp_certificates.ca_certificate)
        self._identity = TlsIdentity(*files, None if trust is None else trust.tls_override)
        self._pools: OrderedDict[tuple[str, str], urllib3.HTTPSConnectionPool] = OrderedDict()
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def put_bundle(self, amphora_id: str, address: str, body: bytes, *, deadline: Deadline | None = None) -> Applied:
        """Push the complete configuration (docs/reference/agent-api.md), and wait for its confirmation."""
        call = _Call("PUT", "/v2/bundle", f"push the configuration of amphora {amphora_id}", body=body)
        return _decode(self._request(amphora_id, address, call, deadline), Applied, call)

    def bundle_state(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> BundleState:
        call = _Call("GET", "/v2/bundle", f"get the bundle state of amphora {amphora_id}")
        return _decode(self._request(amphora_id, address, call, deadline), BundleState, call)

    def put_settings(
        self, amphora_id: str, address: str, body: bytes, *, deadline: Deadline | None = None
    ) -> SettingsState:
        """Change heartbeat targets and intervals. Older agents answer 404."""
        call = _Call("PUT", "/v2/settings", f"change the settings of amphora {amphora_id}", body=body)
        return _decode(self._request(amphora_id, address, call, deadline), SettingsState, call)

    def prepare(self) -> ssl.SSLContext:
        """Return the TLS context of a call. The method may wait for the database, and raises StoreError too."""
        return self._identity.context()

    def info(
        self, amphora_id: str, address: str, *, prepared: ssl.SSLContext | None = None, deadline: Deadline | None = None
    ) -> Info:
        """Return versions. With a result of `prepare`, the call never waits for the database."""
        call = _Call("GET", "/v2/info", f"get the versions of amphora {amphora_id}")
        if prepared is None:
            return _decode(self._request(amphora_id, address, call, deadline), Info, call)
        return _decode(self._request_on_new_connection(prepared, amphora_id, address, call, deadline), Info, call)

    def announce_vips(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> None:
        """Announce the VIPs of a single amphora to the neighbours again. Older agents answer 404."""
        call = _Call("POST", "/v2/vips/announce", f"announce the VIPs of amphora {amphora_id}")
        self._request(amphora_id, address, call, deadline)

    def expect_vips(self, amphora_id: str, address: str, seconds: float, *, deadline: Deadline | None = None) -> None:
        """Prepare the amphora for its partner's VIPs and for packets of the partner's connections."""
        body = msgspec.json.encode({"seconds": seconds})
        call = _Call("POST", "/v2/vrrp/expect", f"prepare amphora {amphora_id} for the VIPs", body=body)
        self._request(amphora_id, address, call, deadline)

    def release_vips(
        self,
        amphora_id: str,
        address: str,
        drain: float,
        *,
        direct_answers: bool = True,
        deadline: Deadline | None = None,
    ) -> None:
        """Release the VIPs to the partner; connections may continue for `drain` seconds.

        Without `direct_answers` the agent refuses a drain whose answers cannot go through the tunnel.
        """
        body = msgspec.json.encode({"drain": drain, "direct_answers": direct_answers})
        call = _Call("POST", "/v2/vrrp/release", f"release the VIPs of amphora {amphora_id}", body=body)
        self._request(amphora_id, address, call, deadline)

    def vrrp(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> Vrrp:
        call = _Call("GET", "/v2/vrrp", f"get the VIP state of amphora {amphora_id}")
        return _decode(self._request(amphora_id, address, call, deadline), Vrrp, call)

    def diagnostics(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> dict[str, Any]:
        call = _Call("GET", "/v2/diagnostics", f"diagnose amphora {amphora_id}", most=_MOST_DIAGNOSTICS)
        return _decode(self._request(amphora_id, address, call, deadline), dict[str, Any], call)

    def configuration(self, amphora_id: str, address: str, *, deadline: Deadline | None = None) -> dict[str, Any]:
        """Return the confirmed and the actual configuration without secrets. Older agents answer 404."""
        wanted = f"get the configuration of amphora {amphora_id}"
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
        """Give the amphora a new certificate and key in one PEM, even if its present certificate has expired.

        The client still checks the issuer, name and purpose of the present certificate. New CAs of controllers in PEM
        must include the CA of this controller. None keeps the present CAs.
        """
        authorities = {"client_ca": client_ca, "server_ca": server_ca}
        document = {name: pem.decode() for name, pem in authorities.items() if pem is not None}
        body = msgspec.json.encode({"certificate": certificate.reveal().decode(), **document})
        call = _Call("PUT", "/v2/certificate", f"renew the certificate of amphora {amphora_id}", body=body)
        context = self._identity.context_ignoring_expiry()
        return _decode(self._request_on_new_connection(context, amphora_id, address, call, deadline), Renewed, call)

    def verify_certificate(
        self, amphora_id: str, address: str, fingerprint: str, *, deadline: Deadline | None = None
    ) -> None:
        """Verify that the agent answers on new connections with this certificate (SHA-256 of its DER).

        Raise AgentUntrusted for another certificate.
        """
        call = _Call("GET", "/v2/info", f"verify the new certificate of amphora {amphora_id}")
        limit = Deadline(self._request_timeout, call.wanted, deadline)
        try:
            actual = self._handshake(amphora_id, address, limit)
        except OSError as error:
            raise AgentUnreachable(call.wanted, f"{address}: {_words(error)}") from error
        if actual != fingerprint:
            raise AgentUntrusted(call.wanted, f"the agent at {address} still uses another certificate")
        # In TLS 1.3, the client finishes the handshake before the agent checks the client certificate. So the client
        # also sends a request. The answer shows whether the agent has accepted the certificate.
        self._request_on_new_connection(self._identity.context(), amphora_id, address, call, limit)

    def wait_until_ready(self, amphora_id: str, address: str, deadline: Deadline) -> Info:
        """Return the versions of a booting amphora. Repeat the request while the agent answers 503.

        Raise AgentUnreachable at once if the port does not listen, so that the caller waits for the port.
        """
        pause = _FIRST_PAUSE
        call = _Call("GET", "/v2/info", f"reach the agent of amphora {amphora_id}")
        try:
            socket.create_connection((address, self._port), max(min(_CONNECT_TIMEOUT, deadline.left()), 0.001)).close()
        except OSError as error:
            raise AgentUnreachable(call.wanted, f"{address}: {_words(error)}") from error
        while True:
            try:
                return _decode(self._request(amphora_id, address, call, deadline), Info, call)
            except AgentRefused as error:
                # The amphora's web server answers 503 until the agent's application has started, so the client tries
                # again.
                if error.status != 503 or deadline.left() <= pause:
                    raise
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def forget(self, amphora_id: str) -> None:
        with self._lock:
            for key in [key for key in self._pools if key[0] == amphora_id]:
                self._pools.pop(key).close()

    def close(self) -> None:
        """Close all idle connections. The client stays usable."""
        with self._lock:
            self._drop_all()

    def _request(self, amphora_id: str, address: str, call: _Call, deadline: Deadline | None) -> bytes:
        def is_alive(limit: Deadline) -> bool:
            try:
                self._handshake(amphora_id, address, limit)
            except OSError:
                return False
            return True

        return self._send(lambda: self._pool(amphora_id, address), address, call, deadline, is_alive)

    def _request_on_new_connection(
        self, context: ssl.SSLContext, amphora_id: str, address: str, call: _Call, deadline: Deadline | None
    ) -> bytes:
        pool = self._connect(context, amphora_id, address)
        try:
            return self._send(lambda: pool, address, call, deadline)
        finally:
            pool.close()

    def _handshake(self, amphora_id: str, address: str, deadline: Deadline) -> str:
        """Complete a TLS handshake, and return the fingerprint of the agent's certificate."""
        token = EXCHANGE.set(Exchange(deadline.within(_HANDSHAKE_TIMEOUT), float("inf"), lambda _: True))
        try:
            with socket.create_connection((address, self._port), _CONNECT_TIMEOUT) as plain:
                plain.settimeout(_HANDSHAKE_TIMEOUT)
                with self._identity.context().wrap_socket(plain, server_hostname=amphora_id) as connection:
                    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
        finally:
            EXCHANGE.reset(token)

    def _send(
        self,
        pool_of: Callable[[], urllib3.HTTPSConnectionPool],
        address: str,
        call: _Call,
        deadline: Deadline | None,
        is_alive: Callable[[Deadline], bool] = lambda _: True,
    ) -> bytes:
        """Send a request, and return the response. Repeat once if a connection of an earlier call broke."""
        latest = Deadline(self._request_timeout * call.timeout_factor, call.wanted, deadline)
        for last in (False, True):
            pool = pool_of()
            try:
                return self._attempt(pool, call, latest, is_alive)
            except (ProtocolError, ClosedPoolError) as error:
                # The agent may have restarted, which breaks the connection. The client may repeat any call, because all
                # calls to an agent are idempotent.
                if last or latest.passed():
                    raise AgentUnreachable(call.wanted, f"{address} {_words(error)}") from error
            except NewConnectionError as error:
                # urllib3 derives NewConnectionError from its TimeoutError, so this branch must precede the branch for
                # HTTPTimeoutError.
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
        self, pool: urllib3.HTTPSConnectionPool, call: _Call, latest: Deadline, is_alive: Callable[[Deadline], bool]
    ) -> bytes:
        left = latest.left()
        if left <= 0:
            raise AgentUnreachable(call.wanted, "the deadline of the operation has passed")
        connect = min(self._connect_timeout, left)
        token = EXCHANGE.set(Exchange(latest, _SILENCE * call.timeout_factor, is_alive))
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
            # The connection must be closed, because the next call on it would read the rest of this response.
            response.close()
            raise
        response.release_conn()
        if response.status != 200:
            raise _refusal(call, response.status, content)
        return content

    def _pool(self, amphora_id: str, address: str) -> urllib3.HTTPSConnectionPool:
        # `context()` may wait for the database. So the client calls it before it takes the lock. Otherwise, requests to
        # all other agents would wait too.
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
        # urllib3 closes the idle connections of a pool immediately. Requests of other threads continue, because urllib3
        # closes their connections at the end of the request.
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _connect(self, context: ssl.SSLContext, amphora_id: str, address: str) -> urllib3.HTTPSConnectionPool:
        # With `server_hostname`, OpenSSL checks the amphora id during the handshake. With `assert_hostname`, urllib3
        # would check it only after the client has sent its certificate.
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
    """One request: `wanted` is the purpose for error messages, `most` the largest response in bytes."""

    method: str
    path: str
    wanted: str
    body: bytes | None = None
    most: int = _MOST_ANSWER

    @property
    def timeout_factor(self) -> float:
        # HAProxy 2.6 may need minutes to read a configuration of 10,000 members (1.3 MB). So the time-out grows with
        # the size of the configuration.
        return 1 + min(_MOST_TIMEOUT_FACTOR - 1, 3 * len(self.body or b"") / 1_000_000)


def _read(response: urllib3.BaseHTTPResponse, call: _Call) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := response.read1(_CHUNK, decode_content=False):
        size += len(part)
        if size > call.most:
            raise AgentRefused(call.wanted, f"its response is longer than {call.most} bytes", status=response.status)
        parts.append(part)
    return b"".join(parts)


def _decode(content: bytes, shape: type[T], call: _Call) -> T:
    try:
        return msgspec.json.decode(content, type=shape)
    except _DECODE_ERRORS as error:
        happened = f"its response cannot be decoded ({error})"
        remedy = "Check that the versions of agent and controller are compatible."
        raise AgentRefused(call.wanted, happened, remedy, status=200) from error


def _refusal(call: _Call, status: int, content: bytes) -> AgentRefused:
    try:
        document = msgspec.json.decode(content, type=_ErrorDocument)
    except _DECODE_ERRORS:
        # The body of an agent's response is untrusted, so this error must not quote the body.
        return AgentRefused(call.wanted, f"it answered {status} without an explanation", status=status)
    words = document.error
    happened = printable(words.happened, _MOST_WORDS) or f"it answered {status}"
    if words.wanted:
        happened = f"the agent could not {printable(words.wanted, _MOST_WORDS)}: {happened}"
    remedy = printable(words.remedy, _MOST_WORDS)
    object_id = None if document.object_id is None else printable(document.object_id, _MOST_ID)
    generation = document.generation
    return AgentRefused(call.wanted, happened, remedy, object_id=object_id, status=status, generation=generation)


def _cause(error: SSLError) -> object:
    return error.args[0] if error.args else error


def _tls_failure(call: _Call, address: str, error: SSLError) -> AgentUntrusted | AgentUnreachable:
    cause = _cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        happened = f"the certificate of {address} is not accepted ({cause.verify_message})"
        remedy = "Check that the address belongs to the amphora, and that its certificate has not expired."
        return AgentUntrusted(call.wanted, happened, remedy)
    # An agent ends the TLS handshake if it refuses the client certificate, for example because the amphora's clock is
    # wrong after a boot.
    happened = f"{address} broke off the TLS handshake ({getattr(cause, 'reason', None) or cause})"
    remedy = "If this continues, check that client_ca signed client_certificate (group [amp_certificates])."
    return AgentUnreachable(call.wanted, happened, remedy)


def _words(error: BaseException) -> str:
    """Return the error text of the operating system if any, because urllib3's texts quote objects."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror.lower()
        if isinstance(seen, ConnectionError):
            return str(seen).lower() or "closed the connection"
        seen = seen.__cause__ or seen.__context__
    return "closed the connection" if isinstance(error, (ProtocolError, ClosedPoolError)) else str(error)
