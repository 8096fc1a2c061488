# SPDX-License-Identifier: Apache-2.0
"""The TLS identity of the agent: its certificate, and the CA of its clients, the controllers.

Invariant: new handshakes use the files; while they cannot be read, the former content stays in use. The agent proves a
received certificate in a handshake before and after writing it. No step can lock out the controller that sent it. No
key is in an error or a log. A boot restores the files of the first boot. The agent also stores the CA of the clients on
the disk, and never trusts a replaced CA again. Source: RFC 5280 section 6; TLS 1.3 (RFC 8446).
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
from amphora_agent.paths import Paths, file_identity, read_if_exists, write, write_atomically

_log = logging.getLogger(__name__)
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# OpenSSL's flag X509_V_FLAG_NO_CHECK_TIME: accept expired certificates. Python's ssl module has no name for it.
_NO_CHECK_TIME = 0x200000
_MOST_FLIGHTS = 8
SELF_SECONDS = 5.0
_WANTED = "install a new certificate"
# Issuer or subject of a certificate, as Python's ssl module represents it.
Name = tuple[tuple[tuple[str, str], ...], ...]


@dataclass(frozen=True)
class Certificate:
    """The facts of a certificate; ``expires`` is in seconds since 1970."""

    fingerprint: str
    expires: float

    @property
    def expires_at(self) -> str:
        return datetime.fromtimestamp(self.expires, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Identity:
    """The certificates in /etc/amphora-agent, and the TLS context that uses them.

    ``refused`` counts failed handshakes by OpenSSL's reason.
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
        """Return the context for the next handshake. Raises MachineError if no files could be read."""
        with self._lock:
            if self._context is None:
                self._restore()
            marks = tuple(map(file_identity, (self._own, self._callers)))
            if self._context is None or marks != self._marks:
                try:
                    self._context = _server(self._own, self._callers)
                    self._certificate = _describe(self._context, self._own.read_text(encoding="utf-8"))
                    self._keep()
                except (OSError, ValueError) as error:
                    if self._context is None:
                        raise MachineError("read the certificates", _reason(error)) from None
                    _log.warning(
                        "The agent cannot read its certificate files, and the former certificates stay in use: %s",
                        error,
                    )
                # The agent reads the files again only after a change of one of them, also if this read has failed.
                self._marks = marks
            return self._context

    def _restore(self) -> None:
        """Restore the CA of the clients if the file has a replaced one.

        An operator installs an unknown CA in the file, so the agent trusts an unknown CA.
        """
        try:
            callers, replaced = _read_kept(self._kept)
            if _digest(self._callers.read_text(encoding="utf-8")) in replaced:
                write_atomically(self._callers, callers)
                _log.warning(
                    "The agent wrote the current CA of the controllers again, because the file %s had an older CA",
                    self._callers,
                )
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error(
                "The agent cannot restore the controllers' CA from its disk, and trusts the CA in the file %s: %s",
                self._callers,
                error,
            )

    def _keep(self) -> None:
        """Write the CA of the clients and the digests of its predecessors to the disk, or log the error."""
        try:
            self._note(self._callers.read_text(encoding="utf-8"))
        except OSError as error:
            _log.error(
                "The agent cannot store the controllers' CA, and may trust an older CA after the next boot: %s", error
            )

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
        """Return the certificate that new handshakes show; None if it cannot be read."""
        with suppress(AgentError):
            self.context()
        return self._certificate

    def replace(
        self, pem: str, *, client_ca: str | None, server_ca: str | None, caller: Name, prove: Callable[[str], str]
    ) -> Certificate:
        """Install a certificate with its intermediate certificates and its key. Open connections continue.

        Args:
            pem: the certificates and the key.
            client_ca: the new CAs of the clients; None keeps the present ones.
            server_ca: the new CAs of amphorae; None keeps the present ones.
            caller: the issuer of the client certificate of this request.
            prove: makes a handshake with this agent that trusts the given CAs; returns the fingerprint that was shown.

        Raises:
            CertificateRefused: the certificate is not valid for this amphora, or would lock out controllers.
            MachineError: the certificate could not be written or is not in use; the former files are restored.
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
            # A crash must not leave the new certificate without its CA. So the agent writes the CAs first.
            contents = {self._issuers: server_ca, self._callers: client_ca, self._own: pem}
            changed = {file: content for file, content in contents.items() if content is not None}
            self._exchange(changed, found, lambda: prove(anchor))
        _log.info(
            "The agent installed a new certificate for its API, which is valid until %s and has the fingerprint %s",
            found.expires_at,
            found.fingerprint,
        )
        return found

    def _examine(self, candidate: Path, pem: str, server_ca: str | None) -> tuple[Certificate, str]:
        """Make a handshake in memory between a candidate and a client with a controller's checks.

        Returns the facts of the certificate, and the CAs that the client trusted.
        """
        write(candidate, pem, durable=False)
        try:
            server = _server(candidate, None)
        except (ssl.SSLError, ValueError) as error:
            raise CertificateRefused(
                _WANTED,
                f"the body is not a certificate with its key in PEM ({_reason(error)})",
                "Send both, not encrypted.",
            ) from None
        anchor = self._anchor(server_ca, pem)
        try:
            critic = _client(anchor)
        except (ssl.SSLError, ValueError) as error:
            raise CertificateRefused(_WANTED, f"server_ca is not a CA certificate ({_reason(error)})") from None
        try:
            _shake(server, critic, self._name)
        except ssl.SSLError as error:
            raise CertificateRefused(
                _WANTED,
                f"a controller would not accept it for amphora {self._name} ({_reason(error)})",
                "Its subject alternative name must be the amphora's id, and a CA in server_ca.pem must have signed it.",
            ) from None
        return _describe(server, pem), anchor

    def _anchor(self, server_ca: str | None, pem: str) -> str:
        """Return the CAs that must have signed a new certificate, in PEM.

        Without a configured CA of amphorae, the CA of the controllers is returned if that CA has signed the present
        certificate. Otherwise only the controller knows the CA, and all other properties are checked.
        """
        if server_ca is not None:
            return server_ca
        if (known := read_if_exists(self._issuers)) is not None:
            return known
        callers = self._callers.read_text(encoding="utf-8")
        try:
            _shake(_server(self._own, None), _client(callers, timeless=True), self._name)
        except (OSError, ValueError):
            return _leaf(pem)
        return callers

    def _exchange(self, contents: Mapping[Path, str], wanted: Certificate, prove: Callable[[], str]) -> None:
        before = {file: read_if_exists(file) for file in contents}
        try:
            for file, content in contents.items():
                write_atomically(file, content)
            if prove() != wanted.fingerprint:
                raise MachineError(_WANTED, "the agent's server still sends another certificate in TLS handshakes")
            if (callers := contents.get(self._callers)) is not None:
                # The installation fails if the CA of the controllers cannot be stored, because the next boot would
                # restore the old CA.
                self._note(callers)
        except (AgentError, OSError) as error:
            for file, old in reversed(before.items()):
                if old is None:
                    file.unlink(missing_ok=True)
                else:
                    write_atomically(file, old)
            self._keep()
            raise MachineError(_WANTED, _reason(error), "The former certificate is in use again.") from None


def shown_by(host: str, port: int, name: str, authorities: str) -> str:
    """Make a handshake as a controller does; return the fingerprint of the server's certificate.

    In TLS 1.3 the server refuses a missing client certificate only after the handshake. Raises OSError.
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
    # With an empty password, OpenSSL refuses an encrypted key. Without the argument `password`, OpenSSL would ask for a
    # password on the terminal.
    context.load_cert_chain(own, password=b"")
    if callers is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=callers)
    return context


def _client(authorities: str, *, timeless: bool = False) -> ssl.SSLContext:
    """Return a client context with a controller's checks; `timeless` accepts expired certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if timeless:
        context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=authorities)
    return context


def _shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """Make a handshake in memory; return the client's end before the server has verified the client.

    Raises SSLError if one end refuses the other.
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
    # Python's ssl module shows the fields of verified certificates only. So the agent makes a handshake with a test
    # client that trusts the agent's own certificate.
    client = _client(_leaf(pem), timeless=True)
    client.check_hostname = False
    end = _shake(server, client, None)
    said: dict[str, Any] = end.getpeercert() or {}
    return Certificate(
        _fingerprint(end.getpeercert(binary_form=True)), float(ssl.cert_time_to_seconds(str(said["notAfter"])))
    )


def _read_kept(file: Path) -> tuple[str, set[str]]:
    """Return the CA of the clients and the digests of its predecessors.

    Raises OSError, ValueError, KeyError or TypeError for a missing or damaged file.
    """
    found = json.loads(file.read_text(encoding="utf-8"))
    _leaf(found["client_ca"])
    return found["client_ca"], set(found["replaced"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _leaf(pem: str) -> str:
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("there is no certificate")
    return found.group()


def _admits(client_ca: str, caller: Name) -> None:
    """Refuse CAs if none has signed the client's certificate, because they would lock out this client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=client_ca)
    except (ssl.SSLError, ValueError) as error:
        raise CertificateRefused(_WANTED, f"client_ca is not a CA certificate ({_reason(error)})") from None
    authorities: Sequence[Mapping[str, Any]] = context.get_ca_certs()
    now = time.time()
    valid = [one["subject"] for one in authorities if ssl.cert_time_to_seconds(str(one["notAfter"])) > now]
    if caller not in valid:
        raise CertificateRefused(
            _WANTED,
            "none of the CAs in client_ca has signed the client certificate of this request",
            "Send the old and the new CA first, and the new CA alone when all controllers have its certificates.",
        )


def _fingerprint(certificate: bytes | None) -> str:
    return hashlib.sha256(certificate or b"").hexdigest()


def _reason(error: Exception) -> str:
    """Return the reason of an error without any content of files."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not readable").replace("_", " ").lower()
    if isinstance(error, AgentError):
        return error.happened
    return getattr(error, "strerror", None) or type(error).__name__
