# SPDX-License-Identifier: Apache-2.0
"""The CA: each certificate has one purpose, passes `openssl verify -x509_strict` and ends before the CA."""

from __future__ import annotations

import subprocess
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from amphora_driver.certificates.ca import CLOCK_SKEW, Authority, create_authority
from amphora_driver.errors import CertificateError
from amphora_driver.secret import Secret

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"


@pytest.fixture(scope="module")
def made():
    return create_authority("amphora authority")


@pytest.fixture
def authority(made):
    return Authority(*made)


def parsed(issued):
    return x509.load_pem_x509_certificate(issued.certificate)


def openssl_verify(tmp_path, ca, certificate, purpose, *more):
    (tmp_path / "ca.pem").write_bytes(ca)
    (tmp_path / "leaf.pem").write_bytes(certificate)
    command = ["openssl", "verify", "-x509_strict", "-CAfile", tmp_path / "ca.pem", "-purpose", purpose]
    command += [*more, tmp_path / "leaf.pem"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_openssl_strict_accepts_a_server_for_its_name_only(tmp_path, made, authority):
    issued = authority.issue_server(AMPHORA, 7)
    good = openssl_verify(tmp_path, made[0], issued.certificate, "sslserver", "-verify_hostname", AMPHORA)
    assert good.returncode == 0, good.stderr
    other = openssl_verify(tmp_path, made[0], issued.certificate, "sslserver", "-verify_hostname", "other")
    assert "hostname mismatch" in other.stderr


@pytest.mark.parametrize("purposes", [("sslserver", "sslclient"), ("sslclient", "sslserver")])
def test_each_certificate_has_one_purpose(tmp_path, made, authority, purposes):
    yes, no = purposes
    issue = authority.issue_server if yes == "sslserver" else authority.issue_client
    issued = issue(AMPHORA, 1)
    assert openssl_verify(tmp_path, made[0], issued.certificate, yes).returncode == 0
    assert openssl_verify(tmp_path, made[0], issued.certificate, no).returncode != 0


def test_the_amphora_id_is_the_only_name(authority):
    names = parsed(authority.issue_server(AMPHORA, 7)).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert list(names.value) == [x509.DNSName(AMPHORA)]


def test_a_client_has_no_alternative_name(authority):
    certificate = parsed(authority.issue_client("controller", 30))
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert list(usage.value) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_validity_begins_before_now_and_ends_at_the_requested_time(made):
    now = time.time()
    issued = Authority(*made, clock=lambda: now + 1000).issue_server(AMPHORA, 0.5)
    certificate = parsed(issued)
    assert certificate.not_valid_before_utc.timestamp() == pytest.approx(now + 1000 - CLOCK_SKEW, abs=1.5)
    assert issued.expires_at == pytest.approx(now + 1000 + 43200, abs=1.5)
    assert issued.expires_at == certificate.not_valid_after_utc.timestamp()


def test_certificates_stay_within_the_validity_of_their_ca(made, authority):
    issued = authority.issue_server(AMPHORA, 100_000)
    assert issued.expires_at == authority.expires_at
    ca = x509.load_pem_x509_certificate(made[0])
    early = Authority(*made, clock=lambda: time.time() - 200).issue_server(AMPHORA, 1)
    assert parsed(early).not_valid_before_utc == ca.not_valid_before_utc


def test_an_expired_ca_issues_no_certificate(made, authority):
    late = Authority(*made, clock=lambda: authority.expires_at + 1)
    with pytest.raises(CertificateError, match="expired on"):
        late.issue_client("controller", 1)


def test_a_clock_before_the_validity_of_the_ca_is_reported(made):
    early = Authority(*made, clock=lambda: time.time() - 2 * CLOCK_SKEW)
    with pytest.raises(CertificateError, match="clock"):
        early.issue_client("controller", 0.5)


@pytest.mark.parametrize("days", [0, -1, float("nan")])
def test_an_empty_validity_is_refused(authority, days):
    with pytest.raises(CertificateError, match="not a valid period"):
        authority.issue_server(AMPHORA, days)


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_unsuitable_names_are_refused(authority, name):
    with pytest.raises(CertificateError, match="64 characters"):
        authority.issue_client(name, 1)
    with pytest.raises(CertificateError, match="64 characters"):
        create_authority(name)


def test_a_name_without_dns_label_is_refused(authority):
    with pytest.raises(CertificateError, match="amphora"):
        authority.issue_server("amphöra", 1)


def test_a_ca_without_days_is_refused():
    with pytest.raises(CertificateError, match="not a valid period"):
        create_authority("x", 0)


def test_the_ca_signs_no_further_ca(made):
    ca = x509.load_pem_x509_certificate(made[0])
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)


def test_the_pem_has_certificate_then_key_and_the_repr_has_none(authority):
    issued = authority.issue_client("controller", 1)
    pem = issued.bundle().reveal()
    assert pem.startswith(issued.certificate)
    key = serialization.load_pem_private_key(pem, password=None)
    assert key.public_key() == x509.load_pem_x509_certificate(pem).public_key()
    assert b"PRIVATE" in pem
    assert "PRIVATE" not in repr(issued)
    assert "PRIVATE" not in f"{issued.bundle()}"


def test_serial_numbers_differ(authority):
    serials = {parsed(authority.issue_server(AMPHORA, 1)).serial_number for _ in range(20)}
    assert len(serials) == 20


def test_load_reads_files(tmp_path, made):
    (tmp_path / "ca.pem").write_bytes(made[0])
    (tmp_path / "ca.key").write_bytes(made[1].reveal())
    assert Authority.load(tmp_path / "ca.pem", str(tmp_path / "ca.key")).issue_server(AMPHORA, 1).certificate


def test_load_names_the_missing_file_and_the_option(tmp_path, made):
    with pytest.raises(CertificateError, match="ca_certificate") as caught:
        Authority.load(tmp_path / "ca.pem", tmp_path / "ca.key")
    assert str(tmp_path / "ca.pem") in str(caught.value)
    (tmp_path / "ca.pem").write_bytes(made[0])
    with pytest.raises(CertificateError, match="ca_private_key"):
        Authority.load(tmp_path / "ca.pem", tmp_path / "ca.key")


def test_the_key_of_another_ca_is_refused(made):
    with pytest.raises(CertificateError, match="does not belong"):
        Authority(made[0], create_authority("another")[1])


def test_a_leaf_certificate_is_refused_as_ca(authority):
    issued = authority.issue_server(AMPHORA, 1)
    with pytest.raises(CertificateError, match="may not sign"):
        Authority(issued.certificate, issued.key)


def test_errors_about_broken_files_do_not_quote_them(made):
    with pytest.raises(CertificateError, match="no PEM certificate"):
        Authority(b"rubbish", made[1])
    with pytest.raises(CertificateError, match="no PEM private key") as caught:
        Authority(made[0], Secret(b"-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----\n"))
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_encrypted_key_is_reported(made):
    key = serialization.load_pem_private_key(made[1].reveal(), password=None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"open sesame"),
    )
    with pytest.raises(CertificateError, match="passphrase"):
        Authority(made[0], Secret(locked))


def test_an_rsa_ca_without_key_identifier_is_accepted(tmp_path, made, authority):
    # Some tools write no subjectKeyIdentifier; the chain must be valid without it.
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "old tool")])
    template = x509.load_pem_x509_certificate(made[0])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 7)
        .not_valid_before(template.not_valid_before_utc)
        .not_valid_after(template.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, template.signature_hash_algorithm)
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    old_format = serialization.PrivateFormat.TraditionalOpenSSL
    private = key.private_bytes(serialization.Encoding.PEM, old_format, serialization.NoEncryption())
    issued = Authority(pem, Secret(private)).issue_server(AMPHORA, 1)
    (tmp_path / "ca.pem").write_bytes(pem)
    (tmp_path / "leaf.pem").write_bytes(issued.certificate)
    command = ["openssl", "verify", "-CAfile", tmp_path / "ca.pem", tmp_path / "leaf.pem"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
