# SPDX-License-Identifier: Apache-2.0
"""Who a controller is to agents, and whom it believes: the TLS side of its connections.

Invariant: the other side proves to be the amphora that is meant, or nothing is sent. That its certificate is still
valid is asked of everybody but who is about to be given another one. An exchange ends in time as a whole.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from amphora_driver.errors import CertificateError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from amphora_driver.secret import Secret

T = TypeVar("T")
LOG = logging.getLogger(__name__)
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME; the ssl module does not name it.
_NO_CHECK_TIME = 0x200000


class Exchange(msgspec.Struct, frozen=True):
    """One request and its answer.

    Attributes:
        deadline: when it has to be over.
        silence: seconds of silence after which the other side is asked whether it is there at all.
        there: asks it.
    """

    deadline: Any
    silence: float
    there: Any


# The exchange that this thread is in.
EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)
# Seconds between two looks whether that moment was brought forward.
_SLICE = 0.25


class BoundedSocket(ssl.SSLSocket):
    """Ends an exchange as a whole in time: a timeout for each read alone lets a peer drip bytes for ever."""

    def do_handshake(self, block: bool = False) -> None:
        self._in_slices(lambda: super(BoundedSocket, self).do_handshake(block))

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        return self._in_slices(lambda: super(BoundedSocket, self).recv_into(buffer, nbytes, flags))

    def send(self, data: Any, flags: int = 0) -> int:
        return self._in_slices(lambda: super(BoundedSocket, self).send(data, flags))

    def _in_slices(self, act: Callable[[], T]) -> T:
        """Wait a little at a time: somebody who waits for a dead peer hears within one slice that he need not."""
        exchange, patience = EXCHANGE.get(), self.gettimeout()
        asked = time.monotonic()
        end = None if patience is None else asked + patience
        try:
            while True:
                now = time.monotonic()
                left = _SLICE if exchange is None else min(exchange.deadline.left(), _SLICE)
                left = left if end is None else min(left, end - now)
                if exchange is not None and now - asked >= exchange.silence:
                    # Long work looks like a dead agent. A frozen one shakes no hands.
                    asked = now
                    left = left if exchange.there(exchange.deadline) else 0.0
                if left <= 0:
                    raise TimeoutError("timed out")
                self.settimeout(left)
                try:
                    return act()
                except TimeoutError as error:
                    # The kernel's own (ETIMEDOUT): the peer does not acknowledge what we send.
                    if error.errno is not None:
                        raise
        finally:
            self.settimeout(patience)


class _RenewingSocket(BoundedSocket):
    """Of a connection on which nobody has looked at the clock: what is not valid yet is refused here."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        shown = self.getpeercert() or {}
        if ssl.cert_time_to_seconds(str(shown["notBefore"])) > time.time():
            error = ssl.SSLCertVerificationError(1, "certificate is not yet valid")
            error.verify_message = "certificate is not yet valid"
            raise error


class Instead(msgspec.Struct, frozen=True, kw_only=True):
    """What takes the place of the files, once an authority was rotated.

    Attributes:
        mark: another one where something of this has changed.
        authorities: who vouches for amphorae, in PEM; None for the file.
        certificate: our own one with its key, in PEM; None for the file.
    """

    mark: Any = None
    authorities: bytes | None = None
    certificate: Secret | None = None


class Identity:
    """Our certificate and whom we trust, read again whenever the files change.

    Args:
        client_certificate: the file with our certificate and key.
        ca_certificate: the file with who vouches for amphorae.
        instead: says what takes their place now.
    """

    def __init__(
        self, client_certificate: str, ca_certificate: str, instead: Callable[[], Instead] | None = None
    ) -> None:
        self._client_certificate = client_certificate
        self._ca_certificate = ca_certificate
        self._instead = instead or Instead
        self._marks: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """The TLS context, for any thread. While new files cannot be read (half written) the last good one stays."""
        # Not under the lock: it may take long, and others need not wait for it.
        instead = self._chosen()
        with self._lock:
            return self._of(instead)

    def _of(self, instead: Instead | None) -> ssl.SSLContext:
        if instead is None:
            assert self._context is not None  # noqa: S101 (for the type checker: otherwise it would have raised)
            return self._context
        marks = (
            None if instead.certificate else _mark(self._client_certificate),
            None if instead.authorities else _mark(self._ca_certificate),
            instead.mark,
        )
        if self._context is None or marks != self._marks:
            try:
                self._context = self._read(instead)
            except CertificateError as error:
                if self._context is None:
                    raise
                LOG.warning("the certificates in use are kept: %s", error)
            # Even when it failed: the next attempt waits for the next change.
            self._marks = marks
        return self._context

    def tolerant(self) -> ssl.SSLContext:
        """A context for a connection to somebody whose certificate may have expired, or its authority's."""
        context = self._read(self._instead())
        context.sslsocket_class = _RenewingSocket
        context.verify_flags |= _NO_CHECK_TIME
        return context

    def _chosen(self) -> Instead | None:
        """What takes the place of the files; None where that cannot be told just now."""
        try:
            return self._instead()
        except (CertificateError, StoreError) as error:
            if self._context is None:
                raise
            LOG.warning("the certificates in use are kept: %s", error)
            return None

    def _read(self, instead: Instead) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = BoundedSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The configured authority is the anchor, even if another one once signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        remedy = "Check [certificates] ca_certificate and client_certificate."
        try:
            if instead.authorities is None:
                context.load_verify_locations(cafile=self._ca_certificate)
            else:
                context.load_verify_locations(cadata=instead.authorities.decode())
        except OSError as error:
            happened = f"{self._ca_certificate}: {error.strerror or error}"
            raise CertificateError("read the amphorae's authority", happened, remedy) from error
        try:
            # An encrypted key must fail here, not ask a terminal for its passphrase.
            if instead.certificate is None:
                context.load_cert_chain(self._client_certificate, password=b"")
            else:
                _load(context, instead.certificate)
        except (OSError, ValueError) as error:
            happened = f"{self._client_certificate}: {getattr(error, 'strerror', None) or error}"
            raise CertificateError("read the controllers' certificate and key", happened, remedy) from error
        return context


def _load(context: ssl.SSLContext, certificate: Secret) -> None:
    """The ssl module reads certificates from files only: this one is in memory, and nobody else's."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, certificate.reveal())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=b"")
    finally:
        os.close(descriptor)


def _mark(path: str) -> object:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
