# SPDX-License-Identifier: Apache-2.0
"""Certificates, authorities and revocation lists: what HAProxy can serve, and how it wants them.

Invariant: a pure function from what a user's secret holds to the one PEM text HAProxy reads, or a refusal that
names the option and never shows content, not even a library's words about it. What comes out was taken apart and put
together again: nothing but certificates, one key or revocation lists is in it, and no line is empty (HAProxy's
runtime API ends a payload there).

Certificates that have expired, or are not valid yet, are taken: HAProxy serves them, an authority's clock may be ahead
of ours, and a load balancer that refuses to change anything else because of one helps nobody.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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

# What OpenSSL's security level 2 refuses, the level Debian and Ubuntu build with: HAProxy would not start.
_SHORTEST_RSA = 2048
_SHORTEST_CURVE = 224
_BROKEN_HASHES = (hashes.MD5, hashes.SHA1)
# Far more than a chain or a national list of authorities needs, in bytes.
_LARGEST = 1 << 20

# RFC 7468, section 2: the boundaries of a block. Each is looked at once, so that a search takes time in proportion to
# the text, whatever is in it.
_BOUNDARY = re.compile(rb"-----(?:BEGIN ([A-Z0-9 ]{1,40})-----\s|END ([A-Z0-9 ]{1,40})-----)")
_KEYS = (b"PRIVATE KEY", b"RSA PRIVATE KEY", b"EC PRIVATE KEY", b"ENCRYPTED PRIVATE KEY")
_LIBRARY_ERRORS = (ValueError, TypeError, UnsupportedAlgorithm)
_Served = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey
_T = TypeVar("_T")


def contents(given: Mapping[SecretName, SecretMaterial]) -> dict[SecretName, Secret]:
    """What is in all of these secrets, as HAProxy reads them, each checked for itself and with those it belongs to.

    Raises:
        UnsupportedOption: one of them cannot be served.
    """
    found = {name: pem(name.purpose, material) for name, material in given.items()}
    authorities = {name.object_id: secret for name, secret in found.items() if name.purpose is Purpose.CA}
    for name, secret in found.items():
        if name.purpose is Purpose.CRL and name.object_id in authorities:
            check_revocations(given[name].option, secret, authorities[name.object_id])
    return found


def pem(purpose: Purpose, material: SecretMaterial) -> Secret:
    """What is in a secret, as HAProxy reads it.

    Args:
        purpose: what it is to be used for.
        material: as Octavia handed it over.

    Raises:
        UnsupportedOption: it cannot be served.
    """
    option = material.option
    parts = (material.text, *material.intermediates, *((material.private_key,) if material.private_key else ()))
    if sum(len(part.reveal()) for part in parts) > _LARGEST:
        _refuse(option, f"it is larger than {_LARGEST} bytes")
    if purpose is Purpose.CERTIFICATE:
        return _server(option, material)
    if purpose is Purpose.CA:
        return Secret(b"".join(one.public_bytes(Encoding.PEM) for one in _authorities(option, material.text)))
    return Secret(b"".join(one.public_bytes(Encoding.PEM) for one in _revocations(option, material.text)))


def check_revocations(option: str, revocations: Secret, authorities: Secret) -> None:
    """Make sure that every revocation list is one of these authorities'.

    HAProxy would take any list, and then turn every client away, because none of its authority is there.

    Raises:
        UnsupportedOption: one of them was signed by somebody else.
    """
    known = _authorities(option, authorities)
    for one in _revocations(option, revocations):
        if not any(_signed(one, authority) for authority in known):
            _refuse(option, "a revocation list in it was not signed by any of the certificate authorities given")


def _server(option: str, material: SecretMaterial) -> Secret:
    """Certificate, intermediates in order, and key."""
    key = _key(option, material)
    mine = _public(key)
    blocks = [block for part in (material.text, *material.intermediates) for block in _blocks(part, b"CERTIFICATE")]
    certificates = _certificates(option, blocks)
    leaf = next((one for one in certificates if _public_of(option, one) == mine), None)
    if leaf is None:
        _refuse(option, "its private key does not belong to its certificate")
    for one in certificates:
        _check_strength(option, one)
    chain = _chain(leaf, [one for one in certificates if one is not leaf])
    text = b"".join(one.public_bytes(Encoding.PEM) for one in chain)
    return Secret(text + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _key(option: str, material: SecretMaterial) -> _Served:
    # Some keep the key in the same text as the certificate.
    text = material.private_key or material.text
    block = next(_blocks(text, *_KEYS), None)
    if block is None:
        _refuse(option, "it holds no private key in PEM format")
    passphrase = material.passphrase.reveal().rstrip(b"\r\n") if material.passphrase is not None else None
    for password in (passphrase or None, None):
        # A passphrase that a key does not need is no reason to refuse it.
        with contextlib.suppress(*_LIBRARY_ERRORS):
            # Whether it belongs to the certificate is what matters; checking its primes takes a tenth of a second.
            key = load_pem_private_key(block, password, unsafe_skip_rsa_key_validation=True)
            break
    else:
        _refuse(option, "its private key cannot be read, or is encrypted with another passphrase")
    if isinstance(key, rsa.RSAPrivateKey):
        if key.key_size < _SHORTEST_RSA:
            _refuse(option, f"its RSA key has {key.key_size} bits, less than {_SHORTEST_RSA}")
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey):
        if key.curve.key_size < _SHORTEST_CURVE:
            _refuse(option, f"the elliptic curve of its key, {key.curve.name}, is too small")
        return key
    if not isinstance(key, (ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey)):
        _refuse(option, "its private key is neither RSA nor of an elliptic curve")
    return key


def _check_strength(option: str, certificate: x509.Certificate) -> None:
    public = _guarded(option, certificate.public_key)
    weak = (
        (isinstance(public, rsa.RSAPublicKey) and public.key_size < _SHORTEST_RSA)
        or (isinstance(public, ec.EllipticCurvePublicKey) and public.curve.key_size < _SHORTEST_CURVE)
        or isinstance(public, dsa.DSAPublicKey)
    )
    if weak:
        _refuse(option, "a certificate in its chain has a key that is too short")
    if certificate.issuer == certificate.subject:
        # Nobody verifies the signature of a certificate on itself.
        return
    signed_with = None
    with contextlib.suppress(*_LIBRARY_ERRORS):
        signed_with = certificate.signature_hash_algorithm
    if isinstance(signed_with, _BROKEN_HASHES):
        _refuse(option, f"a certificate in its chain was signed with {signed_with.name.upper()}, which is broken")


def _chain(leaf: x509.Certificate, others: list[x509.Certificate]) -> list[x509.Certificate]:
    """The leaf, then each certificate's issuer; what is not part of that chain follows as it came."""
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
        # One that signed itself may always vouch for itself: that is how a member's own certificate is pinned.
        if one.issuer != one.subject and not _may_sign(one):
            _refuse(option, "a certificate in it is not a certificate authority's")
    return found


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        # The first version of X.509 had no way to say it.
        return certificate.version is x509.Version.v1
    except (*_LIBRARY_ERRORS, x509.DuplicateExtension):
        return False


def _revocations(option: str, text: Secret) -> list[x509.CertificateRevocationList]:
    blocks = list(_blocks(text, b"X509 CRL"))
    if not blocks:
        _refuse(option, "it holds no certificate revocation list in PEM format")
    return [_guarded(option, partial(x509.load_pem_x509_crl, block)) for block in blocks]


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
        one = _guarded(option, partial(x509.load_pem_x509_certificate, block))
        # Names are read lazily, and are what the rest of the work compares.
        _guarded(option, partial(_names, one))
        if one not in found:
            found.append(one)
    return found


def _names(certificate: x509.Certificate) -> tuple[x509.Name, x509.Name]:
    return certificate.subject, certificate.issuer


def _public_of(option: str, certificate: x509.Certificate) -> bytes:
    public = _guarded(option, certificate.public_key)
    return public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _public(key: _Served) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _blocks(text: Secret, *labels: bytes) -> Iterator[bytes]:
    """The blocks with one of these labels, in order. A block has no other one inside: what is not ended is left out."""
    data = text.reveal()
    begun: re.Match[bytes] | None = None
    for found in _BOUNDARY.finditer(data):
        if found.group(1) is not None:
            begun = found
            continue
        if begun is not None and begun.group(1) == found.group(2) and found.group(2) in labels:
            yield data[begun.start() : found.end()] + b"\n"
        begun = None


def _guarded(option: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except _LIBRARY_ERRORS:
        # From nothing: what a parser says about a text may quote it.
        refusal = _refusal(option, "something in it is not what it says it is")
    raise refusal


def _refusal(option: str, happened: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"use the secret that {option} names", happened, "Put the right content into the secret and try again."
    )


def _refuse(option: str, happened: str) -> NoReturn:
    raise _refusal(option, happened)
