# SPDX-License-Identifier: Apache-2.0
"""The certificate authority of amphorae and controllers.

Invariant: each certificate has one purpose. A server certificate names one amphora and is valid for servers only; a
client certificate is valid for clients only. Neither can sign other certificates or outlive its authority.
Source: RFC 5280 §4.2. OpenSSL accepts these certificates with X509_V_FLAG_X509_STRICT, Python's default since 3.13.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from amphora_driver.errors import CertificateError
from amphora_driver.secret import Secret

# A certificate is valid from one day before its issue, because the clocks of amphorae and hosts differ.
CLOCK_SKEW = 86400.0
_DAY = 86400.0
# Maximum number of characters in the common name of a certificate (`ub-common-name` in X.520).
_LONGEST_NAME = 64

_IssuerKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey
_ISSUER_KEYS = (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey, ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey)


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate (PEM), its private key (PKCS8 PEM) and its expiry in seconds since 1970."""

    certificate: bytes
    key: Secret
    expires_at: float

    def bundle(self) -> Secret:
        """Return certificate and private key in one PEM, the format that daemons read from one file."""
        return Secret(self.certificate + self.key.reveal())


def create_authority(common_name: str, days: int = 3650) -> tuple[bytes, Secret]:
    """Create an authority: a self-signed EC P-256 certificate and its private key.

    The results are the certificate in PEM and the unencrypted private key in PKCS8 PEM.

    Raises:
        CertificateError: the name (at most 64 characters) or the number of days is invalid.
    """
    wanted = f"create the certificate authority {common_name!r}"
    name = _name(common_name, wanted)
    if days <= 0:
        raise CertificateError(wanted, f"{days} days is not a valid period", "Give at least one day.")
    key = ec.generate_private_key(ec.SECP256R1())
    now = time.time()
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _builder(name, name, key.public_key(), _moment(now - CLOCK_SKEW), _moment(now + days * _DAY))
        # With path length 0, the CA cannot sign certificates of other CAs.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM), _pem(key)


class Authority:
    """Issues certificates, which never outlive the authority; the first certificate of the PEM counts.

    Raises:
        CertificateError: the certificate or the key is invalid, or they are not a pair.
    """

    def __init__(self, certificate_pem: bytes, key: Secret, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._certificate = _read_certificate(certificate_pem)
        self._key = _read_key(key)
        if self._certificate.public_key() != self._key.public_key():
            happened = "its private key does not belong to its certificate"
            remedy = "Check that [amp_certificates] ca_certificate and ca_private_key are a pair."
            raise CertificateError("use the certificate authority", happened, remedy)
        self._identifier = _authority_identifier(self._certificate)

    @classmethod
    def load(cls, certificate_path: str | Path, key_path: str | Path) -> Authority:
        """Read an authority from two PEM files.

        Raises:
            CertificateError: a file cannot be read or has the wrong content.
        """
        certificate = read_pem_file(certificate_path, "ca_certificate")
        return cls(certificate, Secret(read_pem_file(key_path, "ca_private_key")))

    @property
    def expires_at(self) -> float:
        """Expiry of the authority's certificate, in seconds since 1970."""
        return self._certificate.not_valid_after_utc.timestamp()

    def is_among(self, pem: bytes) -> bool:
        return self._certificate in x509.load_pem_x509_certificates(pem)

    def issue_server(self, amphora_id: str, days: float) -> Issued:
        """Issue the server certificate of one amphora; its id is the only subject alternative name.

        Raises:
            CertificateError: the authority has expired, or the id or the number of days is invalid.
        """
        try:
            names = x509.SubjectAlternativeName([x509.DNSName(amphora_id)])
        except ValueError as error:
            raise CertificateError(f"issue a certificate to amphora {amphora_id!r}", str(error)) from error
        return self._issue(amphora_id, days, ExtendedKeyUsageOID.SERVER_AUTH, names)

    def issue_client(self, name: str, days: float) -> Issued:
        """Issue the client certificate of a controller.

        Raises:
            CertificateError: the authority has expired, or the name or the number of days is invalid.
        """
        return self._issue(name, days, ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def _issue(
        self, name: str, days: float, purpose: x509.ObjectIdentifier, names: x509.SubjectAlternativeName | None
    ) -> Issued:
        wanted = f"issue a certificate to {name!r}"
        begin, end = self._validity(days, wanted)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_name(name, wanted), self._certificate.subject, key.public_key(), begin, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(self._identifier, critical=False)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, _digest(self._key))
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return Issued(certificate=pem, key=_pem(key), expires_at=end.timestamp())

    def _validity(self, days: float, wanted: str) -> tuple[dt.datetime, dt.datetime]:
        now = self._clock()
        if not days > 0:
            raise CertificateError(wanted, f"{days} days is not a valid period", "Give more than zero.")
        if self.expires_at <= now:
            happened = f"the authority expired on {self._certificate.not_valid_after_utc:%Y-%m-%d}"
            raise CertificateError(wanted, happened, "Replace the authority: see docs/how-to/rotate-certificates.md.")
        # Some programs check the validity of the whole chain. So the validity period of a certificate lies within the
        # period of its CA.
        begin = max(_moment(now - CLOCK_SKEW), self._certificate.not_valid_before_utc)
        end = min(_moment(now + days * _DAY), self._certificate.not_valid_after_utc)
        if end <= begin:
            happened = f"the authority is valid only from {begin:%Y-%m-%d %H:%M} UTC"
            raise CertificateError(wanted, happened, "Check the clock of this machine.")
        return begin, end


def earliest_expiry(pem: bytes) -> float:
    """Return the earliest expiry of these CA certificates, in seconds since 1970.

    Raises:
        CertificateError: the PEM holds no certificate.
    """
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise CertificateError("read an authority's certificate", f"it is no PEM certificate ({error})") from error
    return min(one.not_valid_after_utc.timestamp() for one in found)


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of the first certificate's DER, in hexadecimal."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: dt.datetime, end: dt.datetime
) -> x509.CertificateBuilder:
    """Return a builder with the fields that all certificates have."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(seconds), dt.timezone.utc)


def _name(text: str, wanted: str) -> x509.Name:
    if not 0 < len(text) <= _LONGEST_NAME:
        happened = f"a name has 1 to {_LONGEST_NAME} characters, this one {len(text)}"
        raise CertificateError(wanted, happened, "Use a shorter name.")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    signs = sign_certificates
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **unused)


def _authority_identifier(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    # A certificate's authority key identifier must equal the CA's subject key identifier. Another tool may have
    # computed that identifier by another method, so the code reads the identifier from the CA.
    try:
        own = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:
        key = certificate.public_key()
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own.value)


def _digest(key: _IssuerKey) -> hashes.SHA256 | None:
    # The cryptography library requires None for Ed25519 and Ed448, which define their own hash function.
    return None if isinstance(key, (ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey)) else hashes.SHA256()


def _pem(key: ec.EllipticCurvePrivateKey) -> Secret:
    plain = serialization.NoEncryption()
    return Secret(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


def read_pem_file(path: str | Path, option: str) -> bytes:
    """Return the content of the PEM file that an option of [amp_certificates] names.

    Raises:
        CertificateError: the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        happened = f"{path} cannot be read ({error.strerror})"
        remedy = f"Set [amp_certificates] {option} to a PEM file that this process may read."
        raise CertificateError("read a file of the certificate authority", happened, remedy) from error


def _read_certificate(pem: bytes) -> x509.Certificate:
    wanted = "use the certificate authority"
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        constraints = None
    except ValueError as error:
        happened = f"its certificate is no PEM certificate ({error})"
        raise CertificateError(wanted, happened, "Check [amp_certificates] ca_certificate.") from error
    if constraints is None or not constraints.value.ca:
        happened = "its certificate may not sign others (basicConstraints does not say CA)"
        remedy = "Check [amp_certificates] ca_certificate: it may be a server's or a controller's certificate."
        raise CertificateError(wanted, happened, remedy)
    return certificate


def _read_key(secret: Secret) -> _IssuerKey:
    wanted, remedy = "use the certificate authority", "Check [amp_certificates] ca_private_key."
    try:
        key = serialization.load_pem_private_key(secret.reveal(), password=None)
    except TypeError as error:
        happened = "its private key is encrypted with a passphrase"
        raise CertificateError(wanted, happened, "Store it unencrypted, readable by the controller only.") from error
    except (ValueError, UnsupportedAlgorithm):
        # `from None` drops the original error, whose message could quote the private key.
        raise CertificateError(wanted, "its private key is no PEM private key", remedy) from None
    if not isinstance(key, _ISSUER_KEYS):
        raise CertificateError(wanted, "its private key is of a kind that cannot sign certificates", remedy)
    return key
