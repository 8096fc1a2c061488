# SPDX-License-Identifier: Apache-2.0
"""Who this amphora is to its controllers, and who they are to it.

Invariant: new handshakes use what is in the files, and go on with what was there before while that cannot be
read. A certificate that is taken over the wire has proven in a handshake that it is this amphora's, before it is
written and after; no step of that can shut out the controller that sent it. No key is in an error or a log.
A boot brings back the files of the first boot. A replaced authority of callers is not trusted again after it: its
successor is on the disk. It is no secret.
Source: RFC 5280 section 6; TLS 1.3 (RFC 8446).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from amphora_agent.errors import AgentError, CertificateRefused, MachineError
from amphora_agent.paths import Paths, write, write_atomically

_log = logging.getLogger(__name__)
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME; the ssl module does not name it.
_NO_CHECK_TIME = 0x200000
_MOST_FLIGHTS = 8
SELF_SECONDS = 5.0
_WANTED = "install a new certificate"
# An issuer or a subject as the ssl module has it.
Name = tuple[tuple[tuple[str, str], ...], ...]


@dataclass(frozen=True)
class Certificate:
    """What a certificate says of itself. ``expires`` is in seconds since 1970."""

    fingerprint: str
    expires: float

    @property
    def expires_at(self) -> str:
        """The end of its validity as RFC 3339 has it."""
        return datetime.fromtimestamp(self.expires, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Identity:
    """The certificates in /etc/amphora-agent, and the TLS context made of them.

    Attributes:
        refused: how many handshakes failed, by OpenSSL's reason.
    """

    def __init__(self, paths: Paths, amphora_id: uuid.UUID) -> None:
        self._own = paths.etc / "server.pem"
        self._callers = paths.etc / "client_ca.pem"
        self._issuers = paths.etc / "server_ca.pem"
        self._kept = paths.callers
        self._name = str(amphora_id)
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        self._marks: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._certificate: Certificate | None = None
        self.refused: Counter[str] = Counter()

    def context(self) -> ssl.SSLContext:
        """The context for the next handshake.

        Raises:
            MachineError: there was none before and the files cannot be read.
        """
        with self._lock:
            if self._context is None:
                self._restore()
            marks = tuple(map(_mark, (self._own, self._callers)))
            if self._context is None or marks != self._marks:
                try:
                    self._context = _server(self._own, self._callers)
                    self._certificate = _describe(self._context, self._own.read_text(encoding="utf-8"))
                    self._keep()
                except (OSError, ValueError) as error:
                    if self._context is None:
                        raise MachineError("read the certificates", _reason(error)) from None
                    _log.warning("The certificates in use are kept, those in the files cannot be read: %s", error)
                self._marks = marks  # even then: the next attempt waits for the next change
            return self._context

    def _restore(self) -> None:
        """Restore the authority of callers, if the file has a replaced one.

        An unknown authority was put into the file on purpose, and is trusted.
        """
        try:
            callers, replaced = _read_kept(self._kept)
            if _digest(self._callers.read_text(encoding="utf-8")) in replaced:
                write_atomically(self._callers, callers)
                _log.warning("The authority of callers from before the start is in use: the file had an earlier one")
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("Could not restore the authority of callers; %s is in use: %s", self._callers, error)

    def _keep(self) -> None:
        """Write the authority of callers to the disk, with the digests of all authorities that it has replaced.

        On a full disk the agent continues with a line in the log.
        """
        try:
            self._note(self._callers.read_text(encoding="utf-8"))
        except OSError as error:
            _log.error("The authority of callers may be an earlier one after a boot: %s", error)

    def _note(self, callers: str) -> None:
        before, replaced = "", set[str]()
        with suppress(OSError, ValueError, KeyError, TypeError):
            before, replaced = _read_kept(self._kept)
        if callers == before:
            return
        if before:
            replaced.add(_digest(before))
        replaced.discard(_digest(callers))
        write_atomically(self._kept, json.dumps({"client_ca": callers, "replaced": sorted(replaced)}))

    def certificate(self) -> Certificate | None:
        """The one that new handshakes show; None if even that cannot be told."""
        with suppress(AgentError):
            self.context()
        return self._certificate

    def replace(
        self,
        pem: str,
        *,
        client_ca: str | None,
        server_ca: str | None,
        caller: Name,
        prove: Callable[[str], str],
    ) -> Certificate:
        """Show another certificate from now on. Connections that are open go on.

        Args:
            pem: the certificate, those that lead to its authority, and its private key.
            client_ca: the authorities whose clients may call from now on; None: as before.
            server_ca: the authorities that vouch for amphorae from now on; None: as before.
            caller: the issuer of the certificate of who asks for this.
            prove: shakes hands with this agent, believing these authorities; what fingerprint it was shown.

        Raises:
            CertificateRefused: it is not this amphora's, or not valid now, or nobody could call any more.
            MachineError: it could not be written, or did not work; what was there before is there again.
        """
        with self._changing:
            candidate = self._own.with_name(".server.pem.new")
            try:
                if client_ca is not None:
                    _admits(client_ca, caller)
                found, anchor = self._examine(candidate, pem, server_ca)
            except OSError as error:
                raise MachineError(_WANTED, error.strerror or type(error).__name__) from None
            finally:
                with suppress(OSError):
                    candidate.unlink(missing_ok=True)
            # Whoever signs and who may call first: a certificate without them would be of no use.
            contents = {self._issuers: server_ca, self._callers: client_ca, self._own: pem}
            changed = {file: content for file, content in contents.items() if content is not None}
            self._exchange(changed, found, lambda: prove(anchor))
        _log.info("New certificate: valid until %s, fingerprint %s", found.expires_at, found.fingerprint)
        return found

    def _examine(self, candidate: Path, pem: str, server_ca: str | None) -> tuple[Certificate, str]:
        """Have a candidate shake hands in memory with somebody as critical as a controller.

        Returns:
            What it says, and the authorities that this one believed.
        """
        write(candidate, pem, durable=False)
        try:
            server = _server(candidate, None)
        except (ssl.SSLError, ValueError) as error:
            raise CertificateRefused(
                _WANTED, f"it is no certificate with its key in PEM ({_reason(error)})", "Send both, not encrypted."
            ) from None
        anchor = self._anchor(server_ca, pem)
        try:
            critic = _client(anchor)
        except (ssl.SSLError, ValueError) as error:
            raise CertificateRefused(_WANTED, f"server_ca is no authority's certificate ({_reason(error)})") from None
        try:
            _shake(server, critic, self._name)
        except ssl.SSLError as error:
            raise CertificateRefused(
                _WANTED,
                f"nobody would take it for amphora {self._name} ({_reason(error)})",
                "Its subject alternative name is the amphora's id, and an authority in server_ca.pem has signed it.",
            ) from None
        return _describe(server, pem), anchor

    def _anchor(self, server_ca: str | None, pem: str) -> str:
        """Who has to have signed a new certificate, in PEM.

        Where nobody told this amphora who vouches for amphorae, that is the controllers' authority if it has signed the
        present certificate. If it has not, only the controller knows; everything else is looked at all the same.
        """
        if server_ca is not None:
            return server_ca
        if (known := _content(self._issuers)) is not None:
            return known
        callers = self._callers.read_text(encoding="utf-8")
        try:
            _shake(_server(self._own, None), _client(callers, timeless=True), self._name)
        except (OSError, ValueError):
            return _leaf(pem)
        return callers

    def _exchange(self, contents: Mapping[Path, str], wanted: Certificate, prove: Callable[[], str]) -> None:
        before = {file: _content(file) for file in contents}
        try:
            for file, content in contents.items():
                write_atomically(file, content)
            if prove() != wanted.fingerprint:
                raise MachineError(_WANTED, "handshakes still show another one")
            if (callers := contents.get(self._callers)) is not None:
                self._note(callers)  # an error when there is no room: it would not outlive a boot
        except (AgentError, OSError) as error:
            for file, old in reversed(before.items()):
                if old is None:
                    file.unlink(missing_ok=True)
                else:
                    write_atomically(file, old)
            self._keep()
            raise MachineError(_WANTED, _reason(error), "The one from before is in use again.") from None


def shown_by(host: str, port: int, name: str, authorities: str) -> str:
    """Shake hands as a controller would, but without a certificate: TLS 1.3 tells that only afterwards.

    Returns:
        The fingerprint of the certificate that was shown.

    Raises:
        OSError: no handshake came about.
    """
    client = _client(authorities)
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with (
        socket.create_connection((local, port), SELF_SECONDS) as plain,
        client.wrap_socket(plain, server_hostname=name) as connection,
    ):
        return _fingerprint(connection.getpeercert(binary_form=True))


def _server(own: Path, callers: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(own, password=b"")  # an encrypted key must fail, not ask a terminal
    if callers is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=callers)
    return context


def _client(authorities: str, *, timeless: bool = False) -> ssl.SSLContext:
    """As critical as a controller; `timeless`: whenever the certificates are valid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if timeless:
        context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=authorities)
    return context


def _shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """A handshake without a network.

    Returns:
        The client's end. What the server thinks of the client is not waited for.

    Raises:
        SSLError: one of them did not want to.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_MOST_FLIGHTS):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            if end is ours:
                return ours
    raise ssl.SSLError("the handshake does not end")


def _describe(server: ssl.SSLContext, pem: str) -> Certificate:
    """What the certificate of a context says; whoever signed it, and whether it is still valid."""
    # The ssl module reads out only what was verified, so the certificate is made its own authority.
    client = _client(_leaf(pem), timeless=True)
    client.check_hostname = False
    end = _shake(server, client, None)
    said: dict[str, Any] = end.getpeercert() or {}
    return Certificate(
        _fingerprint(end.getpeercert(binary_form=True)), float(ssl.cert_time_to_seconds(str(said["notAfter"])))
    )


def _read_kept(file: Path) -> tuple[str, set[str]]:
    """The authority of callers, and the digests of those that it has replaced.

    Raises:
        OSError, ValueError, KeyError, TypeError: there is no such file, or it is not whole.
    """
    found = json.loads(file.read_text(encoding="utf-8"))
    _leaf(found["client_ca"])
    return found["client_ca"], set(found["replaced"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _leaf(pem: str) -> str:
    """The first certificate.

    Raises:
        ValueError: there is none.
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("no certificate in it")
    return found.group()


def _admits(client_ca: str, caller: Name) -> None:
    """Refuse authorities of which none could have signed the caller's certificate: it could not call any more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=client_ca)
    except (ssl.SSLError, ValueError) as error:
        raise CertificateRefused(_WANTED, f"client_ca is no authority's certificate ({_reason(error)})") from None
    authorities: Sequence[Mapping[str, Any]] = context.get_ca_certs()
    now = time.time()
    valid = [one["subject"] for one in authorities if ssl.cert_time_to_seconds(str(one["notAfter"])) > now]
    if caller not in valid:
        raise CertificateRefused(
            _WANTED,
            "none of the authorities in client_ca has signed the certificate of who sends it",
            "Send the old and the new authority first; the new one alone when all controllers have its certificates.",
        )


def _fingerprint(certificate: bytes | None) -> str:
    return hashlib.sha256(certificate or b"").hexdigest()


def _mark(file: Path) -> object:
    with suppress(OSError):
        found = file.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _content(file: Path) -> str | None:
    with suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8")
    return None


def _reason(error: Exception) -> str:
    """Why, without anything of what was read."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not readable").replace("_", " ").lower()
    if isinstance(error, AgentError):
        return error.happened
    return getattr(error, "strerror", None) or type(error).__name__
