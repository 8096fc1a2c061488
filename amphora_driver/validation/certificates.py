# SPDX-License-Identifier: Apache-2.0
"""Conversion of users' certificates, CAs and revocation lists to the PEM files of HAProxy.

Invariant: the result is parsed and encoded again. The result contains only certificates, one key, or revocation lists.
An empty line, which would end a payload of HAProxy's runtime API, is not in the result. Unusable content raises
`UnsupportedOption` with the option. The error never contains content of the secret, nor the message of a library, which
can quote the content.

This module accepts expired and future certificates: HAProxy serves them, the CA's clock can be ahead, and a refusal
would block all other changes of the load balancer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NoReturn, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.secret_refs import Purpose, SecretMaterial, SecretName
from amphora_driver.secret import Secret

# With OpenSSL's security level 2, as on Debian and Ubuntu, HAProxy refuses shorter keys.
_SHORTEST_RSA = 2048
_SHORTEST_CURVE = 224
_BROKEN_HASHES = (hashes.MD5, hashes.SHA1)
# Maximum size of a PEM text in bytes. Chains of certificates are far shorter.
_MAX_SIZE = 1 << 20

# The expression matches each BEGIN or END line of a PEM text once (RFC 7468). So its time grows linearly with the text.
_BOUNDARY = re.compile(rb"-----(?:BEGIN ([A-Z0-9 ]{1,40})-----\s|END ([A-Z0-9 ]{1,40})-----)")
_KEYS = (b"PRIVATE KEY", b"RSA PRIVATE KEY", b"EC PRIVATE KEY", b"ENCRYPTED PRIVATE KEY")
_LIBRARY_ERRORS = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
_ServerKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey
_T = TypeVar("_T")


def prepare_secrets(given: Mapping[SecretName, SecretMaterial]) -> dict[SecretName, Secret]:
    """Return the PEM texts of all secrets. A CA must have signed its revocation lists."""
    found = {name: build_pem(name.purpose, material) for name, material in given.items()}
    authorities = {name.object_id: secret for name, secret in found.items() if name.purpose is Purpose.CA}
    for name, secret in found.items():
        if name.purpose is Purpose.CRL and name.object_id in authorities:
            check_revocation_lists(given[name].option, secret, authorities[name.object_id])
    return found


def build_pem(purpose: Purpose, material: SecretMaterial) -> Secret:
    """Return the PEM text of a secret for HAProxy."""
    option = material.option
    parts = (material.text, *material.intermediates, *((material.private_key,) if material.private_key else ()))
    if sum(len(part.reveal()) for part in parts) > _MAX_SIZE:
        _refuse(option, f"it is larger than {_MAX_SIZE} bytes")
    if purpose is Purpose.CERTIFICATE:
        return _server_pem(option, material)
    parsed = (_authorities if purpose is Purpose.CA else _revocations)(option, material.text)
    return Secret(b"".join(one.public_bytes(Encoding.PEM) for one in parsed))


def check_revocation_lists(option: str, revocations: Secret, authorities: Secret) -> None:
    """Check that one of the CAs signed each revocation list.

    HAProxy accepts any list. HAProxy then rejects every client if no list of the client's CA exists.
    """
    known = _authorities(option, authorities)
    for one in _revocations(option, revocations):
        if not any(_signed(one, authority) for authority in known):
            _refuse(option, "none of the given certificate authorities signed a revocation list in it")


def _server_pem(option: str, material: SecretMaterial) -> Secret:
    """Return the certificate, the intermediates in order, and the key."""
    key = _key(option, material)
    public_key = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    blocks = [block for part in (material.text, *material.intermediates) for block in _blocks(part, b"CERTIFICATE")]
    certificates = _certificates(option, blocks)
    for leaf in certificates:
        public = _parse(option, leaf.public_key)
        if public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) == public_key:
            break
    else:
        _refuse(option, "its private key does not belong to its certificate")
    for one in certificates:
        _check_strength(option, one)
    chain = _chain(leaf, [one for one in certificates if one is not leaf])
    text = b"".join(one.public_bytes(Encoding.PEM) for one in chain)
    return Secret(text + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _key(option: str, material: SecretMaterial) -> _ServerKey:
    # Without a separate private key, the text of the certificate may contain the key.
    text = material.private_key or material.text
    block = next(_blocks(text, *_KEYS), None)
    if block is None:
        _refuse(option, "it holds no private key in PEM format")
    passphrase = material.passphrase.reveal().rstrip(b"\r\n") if material.passphrase is not None else None
    for password in (passphrase or None, None):
        # A secret may contain a passphrase for an unencrypted key, so the key is loaded with and without the
        # passphrase.
        with contextlib.suppress(*_LIBRARY_ERRORS):
            # The option skips the check of an RSA key's primes, which takes 0.1 s. The later comparison with the
            # certificate suffices.
            key = load_pem_private_key(block, password, unsafe_skip_rsa_key_validation=True)
            break
    else:
        _refuse(option, "its private key is not readable, or is encrypted with another passphrase")
    if isinstance(key, rsa.RSAPrivateKey):
        if key.key_size < _SHORTEST_RSA:
            _refuse(option, f"its RSA key has {key.key_size} bits, less than {_SHORTEST_RSA}")
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey):
        if key.curve.key_size < _SHORTEST_CURVE:
            _refuse(option, f"the elliptic curve of its key, {key.curve.name}, is too small")
        return key
    if not isinstance(key, (ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey)):
        _refuse(option, "its private key is neither an RSA nor an elliptic-curve key")
    return key


def _check_strength(option: str, certificate: x509.Certificate) -> None:
    public = _parse(option, certificate.public_key)
    weak = (
        (isinstance(public, rsa.RSAPublicKey) and public.key_size < _SHORTEST_RSA)
        or (isinstance(public, ec.EllipticCurvePublicKey) and public.curve.key_size < _SHORTEST_CURVE)
        or isinstance(public, dsa.DSAPublicKey)
    )
    if weak:
        _refuse(option, "a certificate in its chain has a key that is too short")
    if certificate.issuer == certificate.subject:
        # OpenSSL does not verify the signature of a self-signed certificate. So the driver accepts a weak hash in this
        # signature.
        return
    signed_with = None
    with contextlib.suppress(*_LIBRARY_ERRORS):
        signed_with = certificate.signature_hash_algorithm
    if isinstance(signed_with, _BROKEN_HASHES):
        _refuse(option, f"a certificate in its chain was signed with {signed_with.name.upper()}, which is insecure")


def _chain(leaf: x509.Certificate, others: list[x509.Certificate]) -> list[x509.Certificate]:
    """Return the leaf, then the issuer of each certificate, then the other certificates in their order."""
    chain = [leaf]
    left = list(others)
    while True:
        issuer = next((one for one in left if one.subject == chain[-1].issuer), None)
        if issuer is None:
            return chain + left
        left.remove(issuer)
        chain.append(issuer)


def _authorities(option: str, text: Secret) -> list[x509.Certificate]:
    found = _certificates(option, list(_blocks(text, b"CERTIFICATE")))
    for one in found:
        # Users may list the self-signed certificate of a member in place of a CA, so such a certificate is accepted.
        if one.issuer != one.subject and not _may_sign(one):
            _refuse(option, "a certificate in it does not belong to a certificate authority")
    return found


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        # X.509 version 1 has no Basic Constraints extension, so every such certificate counts as a CA.
        return certificate.version is x509.Version.v1
    except (*_LIBRARY_ERRORS, x509.DuplicateExtension):
        return False


def _revocations(option: str, text: Secret) -> list[x509.CertificateRevocationList]:
    blocks = list(_blocks(text, b"X509 CRL"))
    if not blocks:
        _refuse(option, "it holds no certificate revocation list in PEM format")
    return [_parse(option, partial(x509.load_pem_x509_crl, block)) for block in blocks]


def _signed(revocations: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    if revocations.issuer != authority.subject:
        return False
    try:
        return bool(revocations.is_signature_valid(authority.public_key()))  # type: ignore[arg-type]
    except (*_LIBRARY_ERRORS, InvalidSignature):
        return False


def _certificates(option: str, blocks: Sequence[bytes]) -> list[x509.Certificate]:
    if not blocks:
        _refuse(option, "it holds no certificate in PEM format")
    found: list[x509.Certificate] = []
    for block in blocks:
        one = _parse(option, partial(x509.load_pem_x509_certificate, block))
        # The library parses the names in a certificate on first access, which may raise an error. So `_parse` accesses
        # the names and handles the error here.
        _parse(option, partial(attrgetter("subject", "issuer"), one))
        if one not in found:
            found.append(one)
    return found


def _blocks(text: Secret, *labels: bytes) -> Iterator[bytes]:
    """Return the complete blocks with one of these labels, in order."""
    data = text.reveal()
    begun: re.Match[bytes] | None = None
    for found in _BOUNDARY.finditer(data):
        if found.group(1) is not None:
            begun = found
            continue
        if begun is not None and begun.group(1) == found.group(2) and found.group(2) in labels:
            yield data[begun.start() : found.end()] + b"\n"
        begun = None


def _parse(option: str, read: Callable[[], _T]) -> _T:
    with contextlib.suppress(*_LIBRARY_ERRORS):
        return read()
    # The original exception is dropped, because the parser's message can quote the secret.
    raise _refusal(option, "one of its PEM blocks is not valid")


def _refusal(option: str, happened: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"use the secret of {option}", happened, "Correct the content of the secret and try again."
    )


def _refuse(option: str, happened: str) -> NoReturn:
    raise _refusal(option, happened)
