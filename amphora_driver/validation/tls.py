# SPDX-License-Identifier: Apache-2.0
"""TLS versions, ciphers and ALPN of listeners and pools, parsed.

Invariant: the renderer prints what is parsed here, never the text it was parsed from, and never serves more than
what the user chose: a version or cipher that was not chosen is not negotiated.

HAProxy 2.6 with OpenSSL 3 knows one range of versions (its `no-tlsv1x` with a gap in between serve the gap too, and
keep TLS 1.2 as the lowest version): a gap of a listener is closed after the handshake, one of a pool is refused.
"""

from __future__ import annotations

import re
import ssl
from functools import lru_cache
from typing import NamedTuple

from amphora_driver.model.enums import ClientAuthentication, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, Pool
from amphora_driver.validation.unsupported import refuse

VERSIONS = {"TLSv1": "TLSv1.0", "TLSv1.1": "TLSv1.1", "TLSv1.2": "TLSv1.2", "TLSv1.3": "TLSv1.3"}
"""The API's words and HAProxy's, oldest first."""
DEFAULT_VERSIONS = ("TLSv1.2", "TLSv1.3")
MODERN = "TLSv1.3"
MODERN_SUITES = frozenset(
    {
        "TLS_AES_128_GCM_SHA256",
        "TLS_AES_256_GCM_SHA384",
        "TLS_CHACHA20_POLY1305_SHA256",
        "TLS_AES_128_CCM_SHA256",
        "TLS_AES_128_CCM_8_SHA256",
    }
)
"""All there are; OpenSSL ignores other names beside one of them, and refuses a list without."""
OLD = ("TLSv1", "TLSv1.1")
ALPN_PROTOCOLS = ("h2", "http/1.1", "http/1.0")
MAX_CIPHERS = 2048
"""Longest list of ciphers: the width of Octavia's column."""

# What the API itself lets through: names and OpenSSL's operators.
_CIPHERS = re.compile(r"[A-Za-z0-9+!:@=_.-]+")
# OpenSSL 3 signs the handshakes of TLS 1.0 and 1.1 with SHA-1, which its security levels above 0 forbid.
_ANY_STRENGTH = "@SECLEVEL=0"

TERMINATING = (ListenerProtocol.TERMINATED_HTTPS, ListenerProtocol.PROMETHEUS)


class Versions(NamedTuple):
    """One range in HAProxy's words, and what of it was not chosen."""

    low: str
    high: str
    gaps: tuple[str, ...]


class Ciphers(NamedTuple):
    """Two lists, since OpenSSL knows them apart: up to TLS 1.2, and the suites of TLS 1.3. None is its default."""

    ciphers: str | None
    suites: str | None


class Negotiation(NamedTuple):
    """What one side of a connection agrees to."""

    versions: Versions
    ciphers: Ciphers


def terminates(listener: Listener) -> bool:
    """Whether a listener speaks TLS with its clients. Certificates decide, the default one or those for SNI."""
    return listener.protocol in TERMINATING and bool(listener.default_tls_container_ref or listener.sni_container_refs)


def listener_negotiation(listener: Listener, minimum: str | None, ciphers: str | None) -> Negotiation:
    """What a listener's clients may use.

    Args:
        listener: a listener that terminates TLS.
        minimum: the oldest version that the load balancer's profile allows.
        ciphers: what applies where the listener has no list of its own.

    Raises:
        UnsupportedOption: nothing is left, or something cannot be had.
    """
    return _negotiation("listener", listener, minimum, ciphers)


def pool_negotiation(pool: Pool, minimum: str | None, ciphers: str | None) -> Negotiation:
    """What a pool's members may use; as `listener_negotiation`.

    Raises:
        UnsupportedOption: nothing is left, or something cannot be had: for example versions with a gap.
    """
    made = _negotiation("pool", pool, minimum, ciphers)
    if made.versions.gaps:
        refuse(
            "pool option tls_versions",
            ", ".join(pool.tls_versions or ()),
            f"{', '.join(made.versions.gaps)} would be negotiated too",
            "Choose versions without a gap.",
        )
    return made


def _negotiation(kind: str, owner: Listener | Pool, minimum: str | None, default_ciphers: str | None) -> Negotiation:
    chosen = _chosen(f"{kind} option tls_versions", owner.tls_versions or DEFAULT_VERSIONS, minimum)
    text = owner.tls_ciphers or default_ciphers
    ciphers, suites = _split(f"{kind} option tls_ciphers", text)
    if ciphers is None and suites is not None:
        # Every cipher that was chosen belongs to TLS 1.3: OpenSSL would take its own list for what is older.
        chosen = [version for version in chosen if version == MODERN]
        if not chosen:
            _contradiction(kind, text, "all of these ciphers need TLSv1.3, which is not among the versions")
    if suites is None and ciphers is not None and chosen == [MODERN] and owner.tls_ciphers:
        _contradiction(kind, text, "TLSv1.3, the only version, has none of these ciphers")
    if chosen == [MODERN]:
        ciphers = None
    elif chosen[0] in OLD and "@SECLEVEL" not in (ciphers or ""):
        ciphers = f"{ciphers or 'DEFAULT'}:{_ANY_STRENGTH}"
    return Negotiation(_range(chosen), Ciphers(ciphers, suites if MODERN in chosen else None))


def _contradiction(kind: str, text: str | None, reason: str) -> None:
    refuse(f"{kind} option tls_ciphers", text, reason, "Change tls_ciphers or tls_versions.")


def _chosen(option: str, versions: tuple[str, ...], minimum: str | None) -> list[str]:
    known = list(VERSIONS)
    for version in versions:
        if version not in VERSIONS:
            refuse(option, version, "the TLS library has no such version", f"Use {', '.join(known)}.")
    if minimum is not None and minimum not in VERSIONS:
        refuse("tls_minimum_version", minimum, "the TLS library has no such version", f"Use {', '.join(known)}.")
    allowed = known[known.index(minimum) :] if minimum else known
    chosen = [version for version in allowed if version in versions]
    if not chosen:
        refuse(option, ", ".join(versions), f"the oldest version allowed is {minimum}", f"Add {allowed[0]} or newer.")
    return chosen


def _range(chosen: list[str]) -> Versions:
    known = list(VERSIONS)
    span = known[known.index(chosen[0]) : known.index(chosen[-1]) + 1]
    gaps = tuple(VERSIONS[version] for version in span if version not in chosen)
    return Versions(VERSIONS[chosen[0]], VERSIONS[chosen[-1]], gaps)


def _split(option: str, text: str | None) -> Ciphers:
    """The two lists, in the user's order, operators untouched."""
    if not text:
        return Ciphers(None, None)
    if len(text) > MAX_CIPHERS or not _CIPHERS.fullmatch(text):
        refuse(option, text, "it is not a list of ciphers", "Put ':' between the names of OpenSSL's ciphers.")
    names = [name for name in text.split(":") if name]
    suites = [name for name in names if name.startswith("TLS_")]
    older = [name for name in names if not name.startswith("TLS_")]
    if not any(name[0] not in "!-+@" for name in older):
        # Operators alone choose nothing.
        older = []
    if not names or not (older or suites):
        refuse(option, text, "it names no cipher", "Name at least one cipher, or leave it out.")
    if suites and not MODERN_SUITES & set(suites):
        refuse(option, text, "TLS 1.3 has none of these", f"Use one of {', '.join(sorted(MODERN_SUITES))}.")
    if older and not _selects(":".join(older)):
        refuse(option, text, "OpenSSL finds no cipher in it, or does not understand it", "Use OpenSSL's own names.")
    return Ciphers(":".join(older) or None, ":".join(suites) or None)


@lru_cache(maxsize=1024)
def _selects(ciphers: str) -> bool:
    """Whether OpenSSL takes a list of ciphers: HAProxy calls the same function, and refuses its file otherwise."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(ciphers)
    except ssl.SSLError:
        return False
    return True


def check_alpn(option: str, protocols: tuple[str, ...] | None) -> None:
    """Refuse a protocol that cannot be offered.

    Raises:
        UnsupportedOption: there is one.
    """
    for protocol in protocols or ():
        if protocol not in ALPN_PROTOCOLS:
            refuse(option, protocol, "it cannot be offered", f"Use {', '.join(ALPN_PROTOCOLS)}.")


def check_listener(listener: Listener) -> None:
    """Check the TLS options of a listener that terminates TLS; of any other they say nothing.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    if listener.protocol is ListenerProtocol.TERMINATED_HTTPS and not terminates(listener):
        refuse(
            "listener option default_tls_container_ref",
            listener.default_tls_container_ref,
            "a TERMINATED_HTTPS listener needs a certificate",
            "Give it a certificate, or at least one for SNI.",
        )
    if not terminates(listener):
        return
    check_alpn("listener option alpn_protocols", listener.alpn_protocols)
    listener_negotiation(listener, None, None)
    asks = listener.client_authentication
    if asks not in (None, ClientAuthentication.NONE) and not listener.client_ca_tls_container_ref:
        refuse(
            "listener option client_authentication",
            str(asks),
            "there is no certificate authority to check clients against",
            "Set client_ca_tls_container_ref.",
        )
    if listener.client_crl_container_ref and not listener.client_ca_tls_container_ref:
        refuse(
            "listener option client_crl_container_ref",
            listener.client_crl_container_ref,
            "it needs the certificate authority it belongs to",
            "Set client_ca_tls_container_ref.",
        )


def check_pool(pool: Pool) -> None:
    """Check the TLS options of a pool that encrypts; of any other they say nothing.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    if not pool.tls_enabled:
        return
    if pool.protocol in (PoolProtocol.UDP, PoolProtocol.SCTP):
        refuse("pool option tls_enabled", pool.tls_enabled, f"{pool.protocol} carries no TLS", "Leave it out.")
    check_alpn("pool option alpn_protocols", pool.alpn_protocols)
    pool_negotiation(pool, None, None)
    if pool.crl_container_ref and not pool.ca_tls_container_ref:
        refuse(
            "pool option crl_container_ref",
            pool.crl_container_ref,
            "it needs the certificate authority it belongs to",
            "Set ca_tls_container_ref.",
        )
