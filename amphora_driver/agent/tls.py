# SPDX-License-Identifier: Apache-2.0
"""TLS of connections to agents: identity, trust and time limits.

Invariant: the controller accepts an expired certificate of an agent only to renew it. A deadline limits each exchange
as a whole.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from amphora_driver.errors import CertificateError, StoreError
from amphora_driver.secret import Secret

T = TypeVar("T")
LOG = logging.getLogger(__name__)
# OpenSSL's flag X509_V_FLAG_NO_CHECK_TIME: accept expired certificates. Python's ssl module has no name for it.
_NO_CHECK_TIME = 0x200000
# Seconds between two checks of the deadline during a read. Another thread may move the deadline to an earlier time.
_SLICE = 0.25


class Exchange(msgspec.Struct, frozen=True):
    """One request and its response.

    After `silence` seconds without data, `is_alive` checks the peer on another connection within the deadline.
    """

    deadline: Any
    silence: float
    is_alive: Any


EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)
"""The current exchange of this thread."""


class BoundedSocket(ssl.SSLSocket):
    """Applies one deadline to all reads of an exchange, because each read restarts its time-out."""

    def do_handshake(self, block: bool = False) -> None:
        self._in_slices(lambda: super(BoundedSocket, self).do_handshake(block))

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        return self._in_slices(lambda: super(BoundedSocket, self).recv_into(buffer, nbytes, flags))

    def send(self, data: Any, flags: int = 0) -> int:
        return self._in_slices(lambda: super(BoundedSocket, self).send(data, flags))

    def _in_slices(self, act: Callable[[], T]) -> T:
        """Wait in short slices, so that a cancelled deadline ends the wait within one slice."""
        exchange, timeout = EXCHANGE.get(), self.gettimeout()
        checked = time.monotonic()
        end = float("inf") if timeout is None else checked + timeout
        try:
            while True:
                now = time.monotonic()
                left = min(_SLICE, end - now)
                if exchange is not None:
                    left = min(left, exchange.deadline.left())
                    if now - checked >= exchange.silence:
                        # A busy agent completes a TLS handshake on another connection, and a frozen agent does not.
                        # After a completed handshake, the request may continue.
                        checked = now
                        left = left if exchange.is_alive(exchange.deadline) else 0.0
                if left <= 0:
                    raise TimeoutError("timed out")
                self.settimeout(left)
                try:
                    return act()
                except TimeoutError as error:
                    # An error of the kernel (ETIMEDOUT) ends the request. A time-out of Python's socket, which has no
                    # error number, is only a pause between checks.
                    if error.errno is not None:
                        raise
        finally:
            self.settimeout(timeout)


class _ExpiryTolerantSocket(BoundedSocket):
    """A socket that accepts an expired certificate, but refuses a certificate that is not yet valid."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        shown = self.getpeercert() or {}
        if ssl.cert_time_to_seconds(str(shown["notBefore"])) > time.time():
            error = ssl.SSLCertVerificationError(1, "certificate is not yet valid")
            error.verify_message = "certificate is not yet valid"
            raise error


class TlsOverride(msgspec.Struct, frozen=True, kw_only=True):
    """Replacement (in PEM) of the configured files after a CA rotation.

    None means the configured file. `version` changes with every other attribute.
    """

    version: Any = None
    authorities: bytes | None = None
    certificate: Secret | None = None


class TlsIdentity:
    """Client certificate and trusted CAs of a controller, from files or from `load_override`."""

    def __init__(
        self, client_certificate: str, ca_certificate: str, load_override: Callable[[], TlsOverride] | None = None
    ) -> None:
        self._client_certificate = client_certificate
        self._ca_certificate = ca_certificate
        self._load_override = load_override or TlsOverride
        self._versions: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """Return the TLS context, for any thread. The last context stays valid while new files are unreadable."""
        # The database may answer slowly. During this read, the thread must not hold the lock.
        try:
            override = self._load_override()
        except (CertificateError, StoreError) as error:
            if self._context is None:
                raise
            LOG.warning(
                "this process cannot read the TLS certificates for agents and keeps the previous ones: %s", error
            )
            return self._context
        with self._lock:
            certificate = None if override.certificate else _file_version(self._client_certificate)
            authorities = None if override.authorities else _file_version(self._ca_certificate)
            versions = (certificate, authorities, override.version)
            if self._context is None or versions != self._versions:
                try:
                    self._context = self._create_context(override)
                except CertificateError as error:
                    if self._context is None:
                        raise
                    LOG.warning(
                        "this process cannot use the new TLS certificates for agents and keeps the previous ones: %s",
                        error,
                    )
                # The versions are recorded also after a failure to load the certificates. Otherwise, each request would
                # load the same certificates again.
                self._versions = versions
            return self._context

    def context_ignoring_expiry(self) -> ssl.SSLContext:
        """Return a context that accepts expired certificates of the agent and of its CA, for a renewal."""
        context = self._create_context(self._load_override())
        context.sslsocket_class = _ExpiryTolerantSocket
        context.verify_flags |= _NO_CHECK_TIME
        return context

    def _create_context(self, override: TlsOverride) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = BoundedSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The configured CA is the trust anchor for the certificates of agents. Another CA may have signed the
        # configured CA, so OpenSSL must accept a trust anchor that is not self-signed.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        remedy = "Check [amp_certificates] ca_certificate and client_certificate."
        try:
            if override.authorities is None:
                context.load_verify_locations(cafile=self._ca_certificate)
            else:
                context.load_verify_locations(cadata=override.authorities.decode())
        except OSError as error:
            happened = f"{self._ca_certificate}: {error.strerror or error}"
            raise CertificateError("read the certificate authority of amphorae", happened, remedy) from error
        try:
            # With an empty password, OpenSSL refuses an encrypted key. If the call had no password, OpenSSL would ask
            # for a password on the terminal.
            if override.certificate is None:
                context.load_cert_chain(self._client_certificate, password=b"")
            else:
                _load_certificate(context, override.certificate)
        except (OSError, ValueError) as error:
            happened = f"{self._client_certificate}: {getattr(error, 'strerror', None) or error}"
            raise CertificateError("read the controllers' certificate and key", happened, remedy) from error
        return context


def _load_certificate(context: ssl.SSLContext, certificate: Secret) -> None:
    """Load a certificate from memory through an anonymous file, because the ssl module reads files only."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, certificate.reveal())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=b"")
    finally:
        os.close(descriptor)


def _file_version(path: str) -> object:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
