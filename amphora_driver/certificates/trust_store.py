# SPDX-License-Identifier: Apache-2.0
"""Whom this process trusts, who it is to agents, and what an amphora is given.

Invariant: what is used for a handshake or a boot is never older than a few seconds by this process's own clock, also
after it was stopped for a while; a rotation waits for longer than that after each of its steps. While the database is
away, what was read last is used. Nobody waits for a slow database but the one who reads, and whoever knows nothing that
is new enough. The private key of the client certificate that a process issues to itself is in its memory only, as are
those of authorities in use.

Before the first rotation of a kind, the files of the configuration are what counts; they are read whenever they change.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.agent.tls import Instead
from amphora_driver.certificates import ca_rotation
from amphora_driver.certificates.ca import Authority, Issued, create_authority, ends
from amphora_driver.errors import CertificateError, StoreError
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import TRUSTED_STATES, CaKind, CaRecord, CaState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.database.vault import Vault

LOG = logging.getLogger(__name__)
# Seconds for which what was read is used, at the most, and the part of a rotation's shortest step that this may be.
_FRESH, _OF_A_STEP = 5.0, 0.25
# So many times longer it is used by the others while one reads anew: three quarters of a step, and never longer than
# 15 s. A read that took longer than this many seconds was not slow: this process was stopped.
_MEANWHILE = 3
_LONGEST_READ = 40.0
_LONGEST_HOST = 40


class Papers(msgspec.Struct, frozen=True, kw_only=True):
    """What an amphora is given: a certificate by `issuer`, and whom it is to trust.

    Attributes:
        wanted: how that is written down.
        client_ca: authorities in PEM whose clients may call.
        server_ca: authorities in PEM that vouch for amphorae.
        issuer: signs its certificate.
    """

    wanted: ca_rotation.Wanted
    client_ca: bytes
    server_ca: bytes
    issuer: Authority


class Trust:
    """Authorities as they are now, for any thread.

    Args:
        conf: the group `certificates` is used.
        database: where authorities are recorded.
        vault: opens their keys.
    """

    def __init__(self, conf: ConfigOpts, database: Database, vault: Vault) -> None:
        self._options = conf.certificates
        self._fresh = min(_FRESH, _OF_A_STEP * conf.certificates.settle)
        self._database = database
        self._vault = vault
        # Held for moments: what is known, and what follows from it. The other one is held by who reads.
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._recorded: tuple[CaRecord, ...] | None = None
        # Since when what is recorded counts as known, by `time.monotonic()`.
        self._known_at = 0.0
        # Until when nobody asks again who knows nothing, and why.
        self._away: tuple[float, StoreError] | None = None
        self._issuers: dict[int, Authority] = {}
        self._of_files: tuple[object, Authority] | None = None
        # The client certificate of this process, who issued it, and when it is issued anew (by the wall clock).
        self._client: tuple[int, Issued, float] | None = None

    def instead(self) -> Instead:
        """What takes the place of the configured files in connections to agents.

        Raises:
            CertificateError: the key of an authority is not what it should be.
            StoreError: it cannot be opened, or nothing was ever read.
        """
        self._refresh()
        with self._lock:
            recorded = self._recorded or ()
            anchors = _certificates(recorded, CaKind.AMPHORA, TRUSTED_STATES)
            shown = self._client_certificate(_current(recorded, CaKind.CONTROLLER))
            mark = (anchors, None if shown is None else shown.certificate)
            return Instead(mark=mark, authorities=anchors, certificate=None if shown is None else shown.bundle())

    def papers(self) -> Papers:
        """What an amphora is given that is booted or renewed now.

        Raises:
            CertificateError: a file cannot be read, or a key is not what it should be.
            StoreError: a key cannot be opened, or nothing was ever read.
        """
        self._refresh()
        with self._lock:
            recorded = self._recorded or ()
            signer, controllers = _current(recorded, CaKind.AMPHORA), _ids(recorded, CaKind.CONTROLLER)
            client_ca = _certificates(recorded, CaKind.CONTROLLER, TRUSTED_STATES) or _file(
                self._options.client_ca, "client_ca"
            )
            server_ca = _certificates(recorded, CaKind.AMPHORA, {CaState.NEXT, CaState.CURRENT})
            if server_ca is None:
                server_ca = _file(self._options.ca_certificate, "ca_certificate")
            named = ca_rotation.trusts(controllers, client_ca, server_ca if signer is None else None)
            return Papers(
                wanted=ca_rotation.Wanted(authority=None if signer is None else signer.id, trusts=named),
                client_ca=client_ca,
                server_ca=server_ca,
                issuer=self._issuer(signer),
            )

    def _refresh(self) -> None:
        """See to it that what is recorded is known, and new enough.

        Raises:
            StoreError: nothing was ever read.
        """
        if self._is_known_for(self._fresh):
            return
        # While somebody reads, the others go on with what they have; not with what is too old for that.
        if not self._reading.acquire(blocking=not self._is_known_for(_MEANWHILE * self._fresh)):
            return
        try:
            if not self._is_known_for(self._fresh):
                self._read()
        finally:
            self._reading.release()

    def _is_known_for(self, seconds: float) -> bool:
        """Whether what is known became known no longer ago than that."""
        with self._lock:
            return self._recorded is not None and time.monotonic() - self._known_at < seconds

    def _read(self) -> None:
        begun = time.monotonic()
        if self._away is not None and begun < self._away[0]:
            raise StoreError(self._away[1].wanted, self._away[1].happened)
        try:
            found = self._database.read(ca_records.list_cas)
        except StoreError as error:
            with self._lock:
                if self._recorded is None:
                    self._away = time.monotonic() + self._fresh, error
                    raise
                # Nothing can be written down either: whatever is begun now comes to nothing. A database that is slow
                # to say no is not asked by everybody, one after the other: so from the end.
                ended = time.monotonic()
                self._known_at = ended if ended - begun < _LONGEST_READ else begun
            LOG.warning("the authorities in use are kept: %s", error)
            return
        with self._lock:
            # From the beginning of reading, not from its end.
            self._recorded, self._known_at, self._away = found, begun, None
            in_use = {one.id for one in found if one.state is not CaState.GONE}
            self._issuers = {number: issuer for number, issuer in self._issuers.items() if number in in_use}

    def _issuer(self, signer: CaRecord | None) -> Authority:
        if signer is None or signer.sealed_key is None:
            issuer = self._issuer_of_files()
            if signer is not None and not issuer.is_among(signer.certificate):
                raise CertificateError(
                    "use the certificate authority",
                    "the one in the files is not the one that is being replaced",
                    "Put the files back to which [certificates] ca_certificate and ca_private_key pointed.",
                )
            return issuer
        found = self._issuers.get(signer.id)
        if found is None:
            key = self._vault.open(signer.sealed_key, ca_records.key_location(signer.kind, signer.certificate))
            found = self._issuers[signer.id] = Authority(signer.certificate, key)
        return found

    def _issuer_of_files(self) -> Authority:
        paths = (self._options.ca_certificate, self._options.ca_private_key)
        marks = tuple(map(_mark, paths))
        if self._of_files is None or self._of_files[0] != marks:
            try:
                issuer = Authority.load(*paths)
            except CertificateError as error:
                if self._of_files is None:
                    raise
                # Half written, say. It is tried again after the next change.
                LOG.warning("the authority in use is kept: %s", error)
                issuer = self._of_files[1]
            self._of_files = marks, issuer
        return self._of_files[1]

    def _client_certificate(self, signer: CaRecord | None) -> Issued | None:
        """Who this process is to agents; None while that is the configured certificate."""
        if signer is None or signer.sealed_key is None:
            self._client = None
            return None
        now = time.time()
        if self._client is None or self._client[0] != signer.id or self._client[2] <= now:
            name = f"controller on {socket.gethostname()[:_LONGEST_HOST]}"
            issued = self._issuer(signer).issue_client(name, self._options.validity_days)
            renewed = now + (issued.expires_at - now) * self._options.renew_at
            self._client = signer.id, issued, renewed
            LOG.info("agents are shown a certificate of authority %d from now on", signer.id)
        return self._client[1]


def _current(recorded: Iterable[CaRecord], kind: CaKind) -> CaRecord | None:
    return next((one for one in recorded if one.kind is kind and one.state is CaState.CURRENT), None)


def _ids(recorded: Iterable[CaRecord], kind: CaKind) -> list[int]:
    return [one.id for one in recorded if one.kind is kind and one.state in TRUSTED_STATES]


def _certificates(recorded: Iterable[CaRecord], kind: CaKind, states: Iterable[CaState]) -> bytes | None:
    chosen = set(states)
    found = [one.certificate.strip() for one in recorded if one.kind is kind and one.state in chosen]
    return b"\n".join(found) + b"\n" if found else None


def configured(conf: ConfigOpts, kind: CaKind) -> ca_records.NewCa:
    """The authority of this kind that the files of the configuration hold, without its key.

    Raises:
        CertificateError: the file cannot be read, or holds something else.
    """
    option = "ca_certificate" if kind is CaKind.AMPHORA else "client_ca"
    pem = _file(conf.certificates[option], option)
    return ca_records.NewCa(certificate=pem, sealed_key=None, expires_at=ends(pem))


def create(kind: CaKind, vault: Vault, days: int) -> ca_records.NewCa:
    """A new authority, its key sealed.

    Raises:
        CertificateError: the number of days cannot be used.
    """
    # No two authorities have one name: who signed something is found by it.
    name = f"{kind.value} authority {time.strftime('%Y-%m-%d', time.gmtime())} {secrets.token_hex(4)}"
    certificate, key = create_authority(name, days)
    sealed = vault.seal(key, ca_records.key_location(kind, certificate))
    return ca_records.NewCa(certificate=certificate, sealed_key=sealed, expires_at=ends(certificate))


def _file(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(
            "read an authority's certificate",
            f"{path} cannot be read ({error.strerror})",
            f"Set [certificates] {option} to a PEM file that this process may read.",
        ) from error


def _mark(path: str) -> object:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
