# SPDX-License-Identifier: Apache-2.0
"""Tenants' authorities, intermediates, server and client certificates, and revocation lists.

Invariant: certificates exist in memory, are valid for an hour by default, and only this run trusts them. Certificates
share keys, because few tests need a separate key.
"""

from __future__ import annotations

import ipaddress
import itertools
from datetime import datetime, timedelta, timezone
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_DER = serialization.Encoding.DER
_serial = itertools.count(0x5E51A1)


@cache
def key(kind: str, number: int = 0):
    """Return the `number`th key of a kind, "EC" or "RSA"."""
    if kind == "EC":
        return ec.generate_private_key(ec.SECP256R1())
    return rsa.generate_private_key(65537, 2048)


def named(common: str, **more: str) -> x509.Name:
    """Return a distinguished name: `named("Ada", organization_name="Engines")`."""
    found = [x509.NameAttribute(getattr(NameOID, word.upper()), value) for word, value in more.items()]
    return x509.Name([*found, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def subject_alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class Certificate:
    """A leaf certificate with its key, and the intermediates that lead to it."""

    def __init__(self, certificate: x509.Certificate, private, chain: tuple[x509.Certificate, ...]) -> None:
        self.certificate = certificate
        self.chain = chain
        self.key_pem = private.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        self.certificate_pem = certificate.public_bytes(_PEM).decode()
        self.chain_pem = "".join(each.public_bytes(_PEM).decode() for each in chain)

    @property
    def pem(self) -> str:
        """The PEM for an amphora: the leaf, its intermediates in order, the key."""
        return self.certificate_pem + self.chain_pem + self.key_pem

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(_DER)

    @property
    def sha1(self) -> str:
        return self.certificate.fingerprint(hashes.SHA1()).hex()


class Authority:
    """A certificate authority, a root or (with `parent`) an intermediate."""

    def __init__(self, name: str, parent: Authority | None = None) -> None:
        self.name = named(name)
        self.parent = parent
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        builder = self._builder(self.name, self._key.public_key(), 1, parent or self)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, decipher_only=False, **usage),
            critical=True,
        )
        self.certificate = builder.sign((parent or self)._key, hashes.SHA256())
        self.pem = self.certificate.public_bytes(_PEM).decode()

    @staticmethod
    def _builder(subject: x509.Name, public, hours: float, issuer: Authority) -> x509.CertificateBuilder:
        now = datetime.now(timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.name)
            .public_key(public)
            .serial_number(next(_serial))
            .not_valid_before(now - timedelta(hours=2))
            .not_valid_after(now + timedelta(hours=hours))
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer._key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )

    @property
    def chain(self) -> tuple[x509.Certificate, ...]:
        """The intermediates from this one up, without the root."""
        return () if self.parent is None else (self.certificate, *self.parent.chain)

    def issue(
        self, *names: str, kind: str = "EC", number: int = 0, hours: float = 1, subject: x509.Name | None = None
    ) -> Certificate:
        """Issue a certificate for DNS names, wildcards and addresses; the first is the common name.

        `hours` below zero makes an expired certificate; `number` selects a key.
        """
        private = key(kind, number)
        builder = self._builder(subject or named(names[0]), private.public_key(), hours, self)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        if names:
            alternatives = x509.SubjectAlternativeName([subject_alternative(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        return Certificate(builder.sign(self._key, hashes.SHA256()), private, self.chain)

    def revoke(self, *certificates: Certificate) -> str:
        """Return a revocation list with these certificates, as PEM."""
        now = datetime.now(timezone.utc)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.name)
            .last_update(now - timedelta(hours=1))
            .next_update(now + timedelta(hours=1))
        )
        for each in certificates:
            revoked = x509.RevokedCertificateBuilder().serial_number(each.certificate.serial_number)
            builder = builder.add_revoked_certificate(revoked.revocation_date(now - timedelta(hours=1)).build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM).decode()
