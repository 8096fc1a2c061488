# SPDX-License-Identifier: Apache-2.0
"""Trust store of a process: CAs, its client certificate, and the credentials of amphorae.

Invariant: the data of a handshake or a boot is at most a few seconds old on this process's monotonic clock, also after
a pause of the process. A rotation waits longer than that after each step. While the database is not available, the
process uses the data of its last read. Only one thread reads at a time; other threads wait for it only if their data is
too old. The private keys of CAs and of the process's own client certificate exist in memory only.

Before the first rotation of a kind of CA the configured files apply. The process reads a file again after its change.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from oslo_config.cfg import ConfigOpts

from amphora_driver.agent.tls import TlsOverride
from amphora_driver.certificates import ca_rotation
from amphora_driver.certificates.ca import Authority, Issued, create_authority, earliest_expiry, read_pem_file
from amphora_driver.errors import CertificateError, StoreError
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import TRUSTED_STATES, CaKind, CaRecord, CaState

if TYPE_CHECKING:
    from amphora_driver.database.engine import Database
    from amphora_driver.database.vault import Vault

LOG = logging.getLogger(__name__)
# Seconds for which a process uses its copy of the CAs before it reads them from the database again.
_MAX_AGE = 5.0
# Further limit for the use of the copy, as a fraction of the minimum duration of a CA rotation step ([amp_certificates]
# settle).
_OF_A_STEP = 0.25
# While one thread reads the CAs from the database, other threads may use a copy of up to this multiple of the maximum
# age.
_MEANWHILE = 3
# Maximum seconds that a failed read of the CAs counts as recent use of the database. A longer read means that the
# process was paused, so the copy in memory may be old.
_LONGEST_READ = 40.0
_LONGEST_HOST = 40


class AmphoraCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials of an amphora that is booted or renewed now; the CAs are in PEM.

    `desired` is the record of this trust. `client_ca` are the CAs of controllers, `server_ca` those of amphorae.
    """

    desired: ca_rotation.DesiredTrust
    client_ca: bytes
    server_ca: bytes
    issuer: Authority


class TrustStore:
    """Current CAs. For any thread."""

    def __init__(self, conf: ConfigOpts, database: Database, vault: Vault) -> None:
        self._options = conf.amp_certificates
        self._max_age = min(_MAX_AGE, _OF_A_STEP * conf.amp_certificates.settle)
        self._database = database
        self._vault = vault
        # `_lock` protects the CAs in memory, and a thread holds this lock only briefly. `_reading` permits one thread
        # at a time to read the database.
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._recorded: tuple[CaRecord, ...] | None = None
        # Time of the last read of the CAs, on the clock of `time.monotonic()`.
        self._known_at = 0.0
        # If the first read of the CAs failed: the time of the next attempt, and the error.
        self._unavailable: tuple[float, StoreError] | None = None
        self._issuers: dict[int, Authority] = {}
        self._file_issuer: tuple[object, Authority] | None = None
        # Client certificate of this process: the id of its CA, the certificate, and its renewal time on the wall clock.
        self._client: tuple[int, Issued, float] | None = None

    def tls_override(self) -> TlsOverride:
        """Return the CAs and the client certificate that replace the configured files.

        Raises:
            CertificateError: the key of a CA is invalid.
            StoreError: the key cannot be opened, or no read has succeeded yet.
        """
        self._refresh()
        with self._lock:
            recorded = self._recorded or ()
            anchors = _certificates(recorded, CaKind.AMPHORA, TRUSTED_STATES)
            own = self._client_certificate(_current(recorded, CaKind.CONTROLLER))
            version = (anchors, None if own is None else own.certificate)
            return TlsOverride(version=version, authorities=anchors, certificate=None if own is None else own.bundle())

    def credentials(self) -> AmphoraCredentials:
        """Return the credentials of an amphora that is booted or renewed now.

        Raises:
            CertificateError: a file cannot be read, or a key is invalid.
            StoreError: a key cannot be opened, or no read has succeeded yet.
        """
        self._refresh()
        with self._lock:
            recorded = self._recorded or ()
            signer = _current(recorded, CaKind.AMPHORA)
            controllers = [one.id for one in recorded if one.kind is CaKind.CONTROLLER and one.state in TRUSTED_STATES]
            client_ca = _certificates(recorded, CaKind.CONTROLLER, TRUSTED_STATES)
            client_ca = client_ca or read_pem_file(self._options.client_ca, "client_ca")
            server_ca = _certificates(recorded, CaKind.AMPHORA, {CaState.NEXT, CaState.CURRENT})
            server_ca = server_ca or read_pem_file(self._options.ca_certificate, "ca_certificate")
            trusts = ca_rotation.format_trusts(controllers, client_ca, server_ca if signer is None else None)
            desired = ca_rotation.DesiredTrust(authority=None if signer is None else signer.id, trusts=trusts)
            issuer = self._issuer(signer)
            return AmphoraCredentials(desired=desired, client_ca=client_ca, server_ca=server_ca, issuer=issuer)

    def _refresh(self) -> None:
        if self._is_newer_than(self._max_age):
            return
        if not self._reading.acquire(blocking=not self._is_newer_than(_MEANWHILE * self._max_age)):
            return
        try:
            if not self._is_newer_than(self._max_age):
                self._read()
        finally:
            self._reading.release()

    def _is_newer_than(self, seconds: float) -> bool:
        with self._lock:
            return self._recorded is not None and time.monotonic() - self._known_at < seconds

    def _read(self) -> None:
        begun = time.monotonic()
        if self._unavailable is not None and begun < self._unavailable[0]:
            raise StoreError(self._unavailable[1].wanted, self._unavailable[1].happened)
        try:
            found = self._database.read(ca_records.list_cas)
        except StoreError as error:
            with self._lock:
                if self._recorded is None:
                    self._unavailable = time.monotonic() + self._max_age, error
                    raise
                # After a failed read, the age of the copy counts from the end of that read. Otherwise, each thread
                # would start another slow read of the unavailable database.
                ended = time.monotonic()
                self._known_at = ended if ended - begun < _LONGEST_READ else begun
            LOG.warning(
                "this process cannot read the certificate authorities from the database and continues "
                "with those in memory: %s",
                error,
            )
            return
        with self._lock:
            # Rows may change during a read, so the age of the copy counts from the start of the read.
            self._recorded, self._known_at, self._unavailable = found, begun, None
            in_use = {one.id for one in found if one.state is not CaState.GONE}
            self._issuers = {number: issuer for number, issuer in self._issuers.items() if number in in_use}

    def _issuer(self, signer: CaRecord | None) -> Authority:
        if signer is None or signer.sealed_key is None:
            issuer = self._issuer_of_files()
            if signer is not None and not issuer.is_among(signer.certificate):
                happened = "the configured files hold another authority than the one that is being replaced"
                remedy = "Restore the files of [amp_certificates] ca_certificate and ca_private_key."
                raise CertificateError("use the certificate authority", happened, remedy)
            return issuer
        found = self._issuers.get(signer.id)
        if found is None:
            key = self._vault.open(signer.sealed_key, ca_records.key_location(signer.kind, signer.certificate))
            found = self._issuers[signer.id] = Authority(signer.certificate, key)
        return found

    def _issuer_of_files(self) -> Authority:
        paths = (self._options.ca_certificate, self._options.ca_private_key)
        versions = tuple(map(_file_version, paths))
        if self._file_issuer is None or self._file_issuer[0] != versions:
            try:
                issuer = Authority.load(*paths)
            except CertificateError as error:
                if self._file_issuer is None:
                    raise
                # An operator may be writing the CA file, so the file may be incomplete. This process reads the file
                # again after the next change of the file.
                LOG.warning(
                    "this process cannot read the file of the certificate authority and continues with "
                    "the present authority: %s",
                    error,
                )
                issuer = self._file_issuer[1]
            self._file_issuer = versions, issuer
        return self._file_issuer[1]

    def _client_certificate(self, signer: CaRecord | None) -> Issued | None:
        """Return the client certificate of this process; None while the configured one applies."""
        if signer is None or signer.sealed_key is None:
            self._client = None
            return None
        now = time.time()
        if self._client is None or self._client[0] != signer.id or self._client[2] <= now:
            name = f"controller on {socket.gethostname()[:_LONGEST_HOST]}"
            issued = self._issuer(signer).issue_client(name, self._options.validity_days)
            renewed = now + (issued.expires_at - now) * self._options.renew_at
            self._client = signer.id, issued, renewed
            LOG.info(
                "this process now uses a new client certificate for its connections to agents, which "
                "certificate authority %d has signed",
                signer.id,
            )
        return self._client[1]


def _current(recorded: Iterable[CaRecord], kind: CaKind) -> CaRecord | None:
    return next((one for one in recorded if one.kind is kind and one.state is CaState.CURRENT), None)


def _certificates(recorded: Iterable[CaRecord], kind: CaKind, states: Collection[CaState]) -> bytes | None:
    found = [one.certificate.strip() for one in recorded if one.kind is kind and one.state in states]
    return b"\n".join(found) + b"\n" if found else None


def load_configured_ca(conf: ConfigOpts, kind: CaKind) -> ca_records.NewCa:
    """Return the CA of this kind from the configured file, without its key.

    Raises:
        CertificateError: the file cannot be read or holds no certificate.
    """
    option = "ca_certificate" if kind is CaKind.AMPHORA else "client_ca"
    pem = read_pem_file(conf.amp_certificates[option], option)
    return ca_records.NewCa(certificate=pem, sealed_key=None, expires_at=earliest_expiry(pem))


def create_ca(kind: CaKind, vault: Vault, days: int) -> ca_records.NewCa:
    """Create a CA with a sealed key.

    Raises:
        CertificateError: the number of days is invalid.
    """
    # The name of each CA is unique, because TLS libraries find the issuer of a certificate by its name.
    name = f"{kind.value} authority {time.strftime('%Y-%m-%d', time.gmtime())} {secrets.token_hex(4)}"
    certificate, key = create_authority(name, days)
    sealed = vault.seal(key, ca_records.key_location(kind, certificate))
    return ca_records.NewCa(certificate=certificate, sealed_key=sealed, expires_at=earliest_expiry(certificate))


def _file_version(path: str) -> object:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
