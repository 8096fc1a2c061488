# SPDX-License-Identifier: Apache-2.0
"""TLS with clients and members: the keywords of `bind` and `server` lines, and their files.

Invariant: the name of a file derives from its object and purpose, not from its content. Two listeners share no file,
and a replaced certificate does not change the text.
"""

from __future__ import annotations

import functools
import hashlib

import msgspec

from amphora_driver.model.enums import ClientAuthentication
from amphora_driver.model.loadbalancer import Listener, Pool
from amphora_driver.model.secret_refs import Purpose, SecretName, ticket_secret_name
from amphora_driver.render import quoting
from amphora_driver.render.effective_defaults import Defaults
from amphora_driver.render.quoting import Quoted
from amphora_driver.validation import tls

_VERIFY = {
    ClientAuthentication.OPTIONAL: quoting.keywords("verify optional"),
    ClientAuthentication.MANDATORY: quoting.keywords("verify required"),
}
_word = functools.cache(quoting.keywords)


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the text names: its content, or the name of its secret."""

    name: str
    content: str | None = None
    secret: SecretName | None = None


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS keywords of a `bind` line, the excluded versions inside its range, and its files."""

    words: Quoted
    gaps: tuple[Quoted, ...]
    files: tuple[File, ...]


def bind(listener: Listener, settings: Defaults, shared_tickets: str | None = None) -> Bind | None:
    """Return the TLS part of a listener; None without TLS.

    The first certificate is for clients without SNI or with an unknown name: the default container, or else the first
    SNI container. Its file name is fixed, so that the agent can replace the certificate in place.

    With client certificates HAProxy resumes no session, because a resumption would not verify the certificate after a
    revocation. The machine's part of the configuration has no session cache for the same reason.

    Args:
        shared_tickets: the id of the load balancer with shared ticket keys; None if each process creates its keys.
    """
    if not tls.terminates(listener):
        return None
    agreed = tls.listener_negotiation(listener, settings.tls_minimum_version, settings.tls_ciphers)
    listed, certificates = _certificates(listener)
    files = [listed, *certificates]
    words = [_word("ssl"), _word("crt-list"), _name(listed)]
    verify = _VERIFY.get(listener.client_authentication) if listener.client_authentication else None
    if verify is not None:
        authority = _secret(listener.id, "client_ca.pem", Purpose.CA, listener.client_ca_tls_container_ref or "")
        words += [_word("ca-file"), _name(authority), verify, _word("no-tls-tickets")]
        files.append(authority)
        if listener.client_crl_container_ref:
            revoked = _secret(listener.id, "client_crl.pem", Purpose.CRL, listener.client_crl_container_ref)
            words += [_word("crl-file"), _name(revoked)]
            files.append(revoked)
    elif shared_tickets is not None:
        keys = File(name=f"tls/{shared_tickets}/ticket.keys", secret=ticket_secret_name(shared_tickets))
        words += [_word("tls-ticket-keys"), _name(keys)]
        files.append(keys)
    words += _negotiated(agreed)
    if listener.alpn_protocols:
        words += [_word("alpn"), quoting.keywords(",".join(listener.alpn_protocols))]
    gaps = tuple(quoting.keywords(gap) for gap in agreed.versions.gaps) if agreed.versions.gaps else ()
    return Bind(words=quoting.words(words), gaps=gaps, files=tuple(files))


def _certificates(listener: Listener) -> tuple[File, list[File]]:
    named = (listener.default_tls_container_ref, *(listener.sni_container_refs or ()))
    refs = list(dict.fromkeys(ref for ref in named if ref))
    files = [_secret(listener.id, "default.pem", Purpose.CERTIFICATE, ref) for ref in refs[:1]]
    for ref in refs[1:]:
        digest = hashlib.sha256(ref.encode(errors="backslashreplace")).hexdigest()[:16]
        files.append(_secret(listener.id, f"sni-{digest}.pem", Purpose.CERTIFICATE, ref))
    listed = "".join(f"{file.name}\n" for file in files)
    return File(name=f"tls/{listener.id}/certificates.list", content=listed), files


def server(pool: Pool, settings: Defaults, name: Quoted | None) -> tuple[Quoted, tuple[File, ...]] | None:
    """Return the TLS keywords of all server lines of a pool, and its files; None without TLS.

    HAProxy verifies a member's certificate against the CA of the pool and, if given, against `name`. HAProxy verifies
    against the name that it sends, so with a CA it sends `name` or no name, but not the client's SNI.
    """
    if not pool.tls_enabled:
        return None
    agreed = tls.pool_negotiation(pool, settings.tls_minimum_version, settings.tls_ciphers)
    files = []
    words = [_word("ssl")]
    if pool.tls_container_ref:
        files.append(_secret(pool.id, "client.pem", Purpose.CERTIFICATE, pool.tls_container_ref))
        words += [_word("crt"), _name(files[-1])]
    if pool.ca_tls_container_ref:
        files.append(_secret(pool.id, "ca.pem", Purpose.CA, pool.ca_tls_container_ref))
        words += [_word("verify required"), _word("ca-file"), _name(files[-1])]
        if pool.crl_container_ref:
            files.append(_secret(pool.id, "crl.pem", Purpose.CRL, pool.crl_container_ref))
            words += [_word("crl-file"), _name(files[-1])]
        if name is not None:
            words += [_word("sni"), quoting.call(_word("str"), name), _word("verifyhost"), name]
    else:
        words.append(_word("verify none"))
    return quoting.words([*words, *_negotiated(agreed)]), tuple(files)


def for_route(pool: Pool, name: Quoted | None, *, http: bool, behind_tls: bool) -> list[Quoted]:
    """Return the keywords that depend on the listener: the client's SNI, and the offered ALPN protocols.

    Behind a TCP listener the client's protocol is unknown, so HAProxy offers no ALPN protocol.
    """
    words: list[Quoted] = []
    if not pool.ca_tls_container_ref:
        if behind_tls:
            words.append(_word("sni ssl_fc_sni"))
        elif name is not None:
            words += [_word("sni"), quoting.call(_word("str"), name)]
    if http and pool.alpn_protocols:
        words += [_word("alpn"), quoting.keywords(",".join(pool.alpn_protocols))]
    return words


def _negotiated(agreed: tls.Negotiation) -> list[Quoted]:
    words = [
        _word("ssl-min-ver"),
        quoting.token(agreed.versions.low, "the TLS version"),
        _word("ssl-max-ver"),
        quoting.token(agreed.versions.high, "the TLS version"),
    ]
    if agreed.ciphers is not None:
        words += [_word("ciphers"), quoting.ciphers(agreed.ciphers, "the ciphers")]
    if agreed.suites is not None:
        words += [_word("ciphersuites"), quoting.ciphers(agreed.suites, "the ciphers")]
    return words


def _secret(object_id: str, file: str, purpose: Purpose, ref: str) -> File:
    return File(name=f"tls/{object_id}/{file}", secret=SecretName(object_id, purpose, ref))


def _name(file: File) -> Quoted:
    return quoting.token(file.name, "the name of a file")
