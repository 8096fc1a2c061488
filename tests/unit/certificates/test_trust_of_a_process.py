# SPDX-License-Identifier: Apache-2.0
"""The trust store of a process at each step of a CA rotation: shown certificates, trusted CAs, CAs of amphorae."""

import threading
import time

import migrated
import pytest
from cryptography import x509
from cryptography.fernet import Fernet

from amphora_driver import config
from amphora_driver.certificates import trust_store as trusting
from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.database.engine import Database
from amphora_driver.database.tables_fleet import certificate_authority
from amphora_driver.database.vault import Vault
from amphora_driver.errors import CertificateError, StoreError
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import CaKind, CaState

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"


class TrustedProcess:
    """A configuration with files, a database, and a process that reads both in each call."""

    def __init__(self, folder, monkeypatch):
        monkeypatch.setattr(trusting, "_MAX_AGE", 0.0)
        self.folder = folder
        for name in ("amphora", "controller"):
            certificate, key = create_authority(f"{name} of the files")
            (folder / f"{name}.pem").write_bytes(certificate)
            (folder / f"{name}.key").write_bytes(key.reveal())
        text = (
            f"[amp_certificates]\nca_certificate = {folder}/amphora.pem\nca_private_key = {folder}/amphora.key\n"
            f"client_ca = {folder}/controller.pem\nclient_certificate = {folder}/none.pem\n"
        )
        (folder / "driver.conf").write_text(text)
        self.conf = config.load([str(folder / "driver.conf")])
        url = f"sqlite:///{folder}/db.sqlite"
        migrated.write(url)
        self.database = Database(url)
        self.vault = Vault([Fernet.generate_key()])
        self.trust = TrustStore(self.conf, self.database, self.vault)

    def begin(self, kind):
        new = trusting.create_ca(kind, self.vault, 30)
        present = trusting.load_configured_ca(self.conf, kind)
        number = self.database.write(lambda c: ca_records.begin_ca_rotation(c, kind, present, new, 1.0))
        return number, new.certificate

    def move(self, **steps):
        rows = {one.id: one for one in self.database.read(ca_records.list_cas)}
        moves = {rows[int(name[1:])]: CaState(state) for name, state in steps.items()}
        assert self.database.write(lambda c: ca_records.change_ca_states(c, moves, 2.0))

    def file(self, name):
        return (self.folder / name).read_bytes()


@pytest.fixture
def trusted_process(tmp_path, monkeypatch):
    made = TrustedProcess(tmp_path, monkeypatch)
    yield made
    made.database.dispose()


def subjects(pem):
    return [one.subject for one in x509.load_pem_x509_certificates(pem)]


def issuer_of(pem):
    return x509.load_pem_x509_certificate(pem).issuer


def test_files_are_used_before_the_first_rotation(trusted_process):
    instead, papers = trusted_process.trust.tls_override(), trusted_process.trust.credentials()
    assert (instead.authorities, instead.certificate) == (None, None)
    assert (papers.client_ca, papers.server_ca) == (
        trusted_process.file("controller.pem"),
        trusted_process.file("amphora.pem"),
    )
    assert papers.desired.authority is None
    before = papers.desired.trusts
    trusted_process.folder.joinpath("controller.pem").write_bytes(create_authority("exchanged")[0])
    assert trusted_process.trust.credentials().desired.trusts != before, "the process reads a replaced file"


def test_the_controller_ca_is_rotated_in_steps(trusted_process):
    new, certificate = trusted_process.begin(CaKind.CONTROLLER)
    file = trusted_process.file("controller.pem")
    # Both CAs are trusted. The process still shows the certificate from the file.
    papers = trusted_process.trust.credentials()
    assert subjects(papers.client_ca) == subjects(file + certificate)
    assert papers.desired.trusts.split("/")[0] == f"{new - 1},{new}"
    assert trusted_process.trust.tls_override().certificate is None
    trusted_process.move(**{f"_{new}": "current", f"_{new - 1}": "former"})
    assert trusted_process.trust.credentials().desired == papers.desired, "still trusted"
    shown = trusted_process.trust.tls_override()
    assert issuer_of(shown.certificate.reveal()) == subjects(certificate)[0]
    assert trusted_process.trust.tls_override() == shown, "issued once"
    assert shown.authorities is None
    trusted_process.move(**{f"_{new - 1}": "leaving"})
    papers = trusted_process.trust.credentials()
    assert (papers.client_ca.strip(), papers.desired.trusts.split("/")[0]) == (certificate.strip(), str(new))


def test_the_amphora_ca_is_rotated_in_steps(trusted_process):
    new, certificate = trusted_process.begin(CaKind.AMPHORA)
    file = trusted_process.file("amphora.pem")
    assert subjects(trusted_process.trust.tls_override().authorities) == subjects(file + certificate)
    papers = trusted_process.trust.credentials()
    assert papers.desired.authority == new - 1
    assert issuer_of(papers.issuer.issue_server(AMPHORA, 1).certificate) == subjects(file)[0]
    trusted_process.move(**{f"_{new}": "current", f"_{new - 1}": "former"})
    papers = trusted_process.trust.credentials()
    assert papers.desired.authority == new
    assert issuer_of(papers.issuer.issue_server(AMPHORA, 1).certificate) == subjects(certificate)[0]
    assert papers.server_ca.strip() == certificate.strip()
    assert subjects(trusted_process.trust.tls_override().authorities) == subjects(file + certificate), (
        "other amphorae are still renewed"
    )
    trusted_process.move(**{f"_{new - 1}": "leaving"})
    assert trusted_process.trust.tls_override().authorities.strip() == certificate.strip()
    trusted_process.folder.joinpath("amphora.pem").unlink()
    trusted_process.folder.joinpath("amphora.key").unlink()
    assert trusted_process.trust.credentials().desired.authority == new, "the files are not needed any more"


def test_files_that_change_during_a_rotation_sign_nothing(trusted_process):
    trusted_process.begin(CaKind.AMPHORA)
    certificate, key = create_authority("another")
    trusted_process.folder.joinpath("amphora.pem").write_bytes(certificate)
    trusted_process.folder.joinpath("amphora.key").write_bytes(key.reveal())
    with pytest.raises(CertificateError, match="another authority than the one that is being replaced"):
        trusted_process.trust.credentials()


def test_the_last_snapshot_is_used_while_the_database_is_unreachable(trusted_process, monkeypatch):
    new, _ = trusted_process.begin(CaKind.CONTROLLER)
    before = trusted_process.trust.credentials()

    def away(_work):
        raise StoreError("read", "unreachable")

    monkeypatch.setattr(trusted_process.database, "read", away)
    assert trusted_process.trust.credentials().desired == before.desired
    with pytest.raises(StoreError):
        TrustStore(trusted_process.conf, trusted_process.database, trusted_process.vault).credentials()
    assert new


class Reads:
    """Successive database reads of chosen durations; `error` for those that fail."""

    def __init__(self, trusted_process, monkeypatch):
        self.number = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error = None
        self._read = trusted_process.database.read
        monkeypatch.setattr(trusted_process.database, "read", self)

    def __call__(self, work):
        self.number += 1
        self.begun.set()
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        return self._read(work)


@pytest.fixture
def reads(trusted_process, monkeypatch):
    """The cached CAs are due for a new read but are not expired."""
    trusted_process.begin(CaKind.CONTROLLER)
    trusted_process.trust.credentials()
    made = Reads(trusted_process, monkeypatch)
    clock = Clock(trusted_process.trust, monkeypatch)
    clock.later(6.0)
    yield made
    made.go_on.set()


class Clock:
    """The monotonic clock as seen by one module."""

    def __init__(self, trust, monkeypatch):
        self.ahead = 0.0
        trust._max_age = 5.0
        trust.clock = self
        monkeypatch.setattr(trusting, "time", self)

    def later(self, seconds):
        self.ahead += seconds

    def monotonic(self):
        return time.monotonic() + self.ahead

    def __getattr__(self, name):
        return getattr(time, name)


def asking(trust, found):
    thread = threading.Thread(target=lambda: found.append(trust.tls_override()))
    thread.start()
    return thread


def test_slow_database_delays_the_reader_only(trusted_process, reads):
    found = []
    one = asking(trusted_process.trust, found)
    assert reads.begun.wait(60)
    before = trusted_process.trust.credentials().desired
    assert trusted_process.trust.tls_override().version == trusted_process.trust.tls_override().version
    assert (reads.number, found) == (1, []), "one thread reads, the others use the cache"
    reads.go_on.set()
    one.join(60)
    assert trusted_process.trust.credentials().desired == before
    assert (reads.number, len(found)) == (1, 1)


def test_expired_snapshot_is_not_used(trusted_process, reads):
    """A process can stop for longer than the rotation waits, so its snapshot is too old."""
    trusted_process.trust.clock.later(3600.0)
    found = []
    threads = [asking(trusted_process.trust, found) for _ in range(3)]
    assert reads.begun.wait(60)
    assert not any(_ended(thread) for thread in threads)
    reads.go_on.set()
    for thread in threads:
        thread.join(60)
    assert (reads.number, len(found)) == (1, 3), "one read serves all threads"


def _ended(thread):
    thread.join(0.1)
    return not thread.is_alive()


def test_a_slow_failed_read_is_not_retried_at_once(trusted_process, reads):
    reads.error = StoreError("read", "away")
    found = []
    one = asking(trusted_process.trust, found)
    assert reads.begun.wait(60)
    trusted_process.trust.clock.later(12.0)
    reads.go_on.set()
    one.join(60)
    trusted_process.trust.credentials()
    assert reads.number == 1, "the back-off starts at the end of the read"
    trusted_process.trust.clock.later(6.0)
    trusted_process.trust.credentials()
    assert reads.number == 2
    # A read that the process stop interrupted counts as an old failure.
    trusted_process.trust.clock.later(6.0)
    reads.go_on.clear()
    reads.begun.clear()
    one = asking(trusted_process.trust, found)
    assert reads.begun.wait(60)
    trusted_process.trust.clock.later(3600.0)
    reads.go_on.set()
    one.join(60)
    trusted_process.trust.credentials()
    assert reads.number == 4


def test_missing_tables_are_cached(trusted_process, reads):
    reads.error = StoreError("read", "away")
    reads.go_on.set()
    new = TrustStore(trusted_process.conf, trusted_process.database, trusted_process.vault)
    new._max_age = 5.0
    for _ in range(3):
        with pytest.raises(StoreError, match="away"):
            new.credentials()
    assert reads.number == 1
    trusted_process.trust.clock.later(6.0)
    reads.error = None
    assert new.credentials().desired == trusted_process.trust.credentials().desired


def test_keys_of_removed_cas_leave_the_cache(trusted_process):
    new, _ = trusted_process.begin(CaKind.CONTROLLER)
    trusted_process.move(**{f"_{new}": "current", f"_{new - 1}": "former"})
    trusted_process.trust.tls_override()
    assert set(trusted_process.trust._issuers) == {new}
    trusted_process.move(**{f"_{new - 1}": "leaving"})
    trusted_process.move(**{f"_{new - 1}": "gone"})
    newest, _ = trusted_process.begin(CaKind.CONTROLLER)
    trusted_process.move(**{f"_{newest}": "current", f"_{new}": "former"})
    trusted_process.trust.tls_override()
    assert set(trusted_process.trust._issuers) == {new, newest}, "the CA is still trusted"
    trusted_process.move(**{f"_{new}": "leaving"})
    trusted_process.move(**{f"_{new}": "gone"})
    trusted_process.trust.tls_override()
    assert set(trusted_process.trust._issuers) == {newest}


def test_two_cas_never_have_the_same_name(trusted_process):
    first, second = (trusting.create_ca(CaKind.AMPHORA, trusted_process.vault, 30) for _ in range(2))
    assert subjects(first.certificate) != subjects(second.certificate)
    key = trusted_process.vault.open(first.sealed_key, ca_records.key_location(CaKind.AMPHORA, first.certificate))
    assert Authority(first.certificate, key).expires_at == first.expires_at


def test_the_key_of_another_ca_signs_nothing(trusted_process):
    """An attacker with write access to the database could exchange the kinds of two CAs."""
    for kind in CaKind:
        number, _ = trusted_process.begin(kind)
        trusted_process.move(**{f"_{number - 1}": "former", f"_{number}": "current"})
    by_kind = {
        one.kind: one for one in trusted_process.database.read(ca_records.list_cas) if one.state is CaState.CURRENT
    }
    copied = by_kind[CaKind.CONTROLLER].sealed_key
    mine = certificate_authority.c.id == by_kind[CaKind.AMPHORA].id
    trusted_process.database.write(
        lambda c: c.execute(certificate_authority.update().where(mine).values(sealed_key=copied))
    )
    trusted_process.trust.tls_override()
    with pytest.raises(StoreError, match="table certificate_authority was encrypted for another row or purpose"):
        trusted_process.trust.credentials()
