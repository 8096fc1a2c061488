# SPDX-License-Identifier: Apache-2.0
"""Who a controller is to agents, and whom it believes: the TLS side of its connections.

Invariant: the other side proves to be the amphora that is meant, or nothing is sent. That its certificate is still
valid is asked of everybody but who is about to be given another one. An exchange ends in time as a whole.
"""

from __future__ import annotations

import logging
import ssl
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from amphora_driver.errors import CertificateError

LOG = logging.getLogger(__name__)
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME; the ssl module does not name it.
_NO_CHECK_TIME = 0x200000
# When the exchange that this thread is in has to be over, on `time.monotonic()`'s clock.
LATEST: ContextVar[float] = ContextVar("LATEST")


class BoundedSocket(ssl.SSLSocket):
    """Ends an exchange as a whole in time: a timeout for each read alone lets a peer drip bytes for ever."""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        self._hurry()
        return super().recv_into(buffer, nbytes, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        self._hurry()
        return super().send(data, flags)

    def _hurry(self) -> None:
        left = LATEST.get(float("inf")) - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        timeout = self.gettimeout()
        if timeout is None or timeout > left:
            self.settimeout(left)


class _RenewingSocket(BoundedSocket):
    """Of a connection on which nobody has looked at the clock: what is not valid yet is refused here."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        shown = self.getpeercert() or {}
        if ssl.cert_time_to_seconds(str(shown["notBefore"])) > time.time():
            error = ssl.SSLCertVerificationError(1, "certificate is not yet valid")
            error.verify_message = "certificate is not yet valid"
            raise error


class Identity:
    """Our certificate and whom we trust, read again whenever the files change."""

    def __init__(self, client_certificate: str, ca_certificate: str) -> None:
        self._client_certificate = client_certificate
        self._ca_certificate = ca_certificate
        self._marks: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """The TLS context. While new files cannot be read (half written, say) the last good one stays."""
        marks = (_mark(self._client_certificate), _mark(self._ca_certificate))
        if self._context is None or marks != self._marks:
            try:
                self._context = self._read()
            except CertificateError as error:
                if self._context is None:
                    raise
                LOG.warning("the certificates in use are kept: %s", error)
            # Even when it failed: the next attempt waits for the next change.
            self._marks = marks
        return self._context

    def tolerant(self) -> ssl.SSLContext:
        """A context for a connection to somebody whose certificate may have expired, or its authority's."""
        context = self._read()
        context.sslsocket_class = _RenewingSocket
        context.verify_flags |= _NO_CHECK_TIME
        return context

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = BoundedSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The configured authority is the anchor, even if another one once signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        remedy = "Check [certificates] ca_certificate and client_certificate."
        try:
            context.load_verify_locations(cafile=self._ca_certificate)
        except OSError as error:
            happened = f"{self._ca_certificate}: {error.strerror or error}"
            raise CertificateError("read the amphorae's authority", happened, remedy) from error
        try:
            # An encrypted key must fail here, not ask a terminal for its passphrase.
            context.load_cert_chain(self._client_certificate, password=b"")
        except (OSError, ValueError) as error:
            happened = f"{self._client_certificate}: {getattr(error, 'strerror', None) or error}"
            raise CertificateError("read the controllers' certificate and key", happened, remedy) from error
        return context


def _mark(path: str) -> object:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
