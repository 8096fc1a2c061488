# SPDX-License-Identifier: Apache-2.0
"""Validation and parser of TLS versions, ciphers and ALPN of listeners and pools.

Invariant: the renderer prints the parsed values, never the text of the user. HAProxy negotiates only versions and
ciphers that the user selected.

HAProxy 2.6 with OpenSSL 3 supports one range of versions: with a gap, its `no-tlsv1x` options also serve the versions
of the gap, and keep TLS 1.2 as the lowest version. For a listener, the frontend closes connections with a version of
the gap after the handshake. For a pool, a gap is refused.
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
"""HAProxy's names of versions by the API's names, oldest first."""
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
"""All suites of TLS 1.3. OpenSSL ignores unknown names beside one of these, and refuses a list without any."""
OLD = ("TLSv1", "TLSv1.1")
ALPN_PROTOCOLS = ("h2", "http/1.1", "http/1.0")
MAX_CIPHERS = 2048
"""Longest list of ciphers in characters: the width of Octavia's column."""

# The characters that the API accepts: names and OpenSSL's operators.
_CIPHERS = re.compile(r"[A-Za-z0-9+!:@=_.-]+")
# OpenSSL 3 signs the handshakes of TLS 1.0 and 1.1 with SHA-1, which its security levels above 0 forbid.
_ANY_STRENGTH = "@SECLEVEL=0"

TERMINATING = (ListenerProtocol.TERMINATED_HTTPS, ListenerProtocol.PROMETHEUS)


class Versions(NamedTuple):
    """A range of versions in HAProxy's names; `gaps` are its versions that the user did not select."""

    low: str
    high: str
    gaps: tuple[str, ...]


class Ciphers(NamedTuple):
    """OpenSSL's two lists: ciphers up to TLS 1.2, and suites of TLS 1.3. None means OpenSSL's default."""

    ciphers: str | None
    suites: str | None


class Negotiation(NamedTuple):
    """The versions and ciphers that HAProxy negotiates."""

    versions: Versions
    ciphers: Ciphers


def terminates(listener: Listener) -> bool:
    """Whether a listener uses TLS with its clients: it has a default certificate or certificates for SNI."""
    return listener.protocol in TERMINATING and bool(listener.default_tls_container_ref or listener.sni_container_refs)


def listener_negotiation(listener: Listener, minimum: str | None, ciphers: str | None) -> Negotiation:
    """Return the versions and ciphers for the clients of a listener.

    Args:
        listener: a listener that terminates TLS.
        minimum: the oldest version that the load balancer's profile allows.
        ciphers: the default if the listener has no list.

    Raises:
        UnsupportedOption: no version or cipher remains, or a value is not supported.
    """
    return _negotiation("listener", listener, minimum, ciphers)


def pool_negotiation(pool: Pool, minimum: str | None, ciphers: str | None) -> Negotiation:
    """Return the versions and ciphers for the members of a pool; arguments as for `listener_negotiation`.

    Raises:
        UnsupportedOption: no version or cipher remains, a value is not supported, or the versions have a gap.
    """
    found = _negotiation("pool", pool, minimum, ciphers)
    if found.versions.gaps:
        refuse(
            "pool option tls_versions",
            ", ".join(pool.tls_versions or ()),
            f"HAProxy would also negotiate {', '.join(found.versions.gaps)}",
            "Select versions without a gap.",
        )
    return found


def _negotiation(kind: str, owner: Listener | Pool, minimum: str | None, default_ciphers: str | None) -> Negotiation:
    chosen = _selected_versions(f"{kind} option tls_versions", owner.tls_versions or DEFAULT_VERSIONS, minimum)
    text = owner.tls_ciphers or default_ciphers
    ciphers, suites = _split_ciphers(f"{kind} option tls_ciphers", text)
    if ciphers is None and suites is not None:
        # All selected ciphers belong to TLS 1.3; for older versions OpenSSL would use its default list.
        chosen = [version for version in chosen if version == MODERN]
        if not chosen:
            _refuse_contradiction(kind, text, "all of these ciphers need TLSv1.3, which tls_versions does not contain")
    if suites is None and ciphers is not None and chosen == [MODERN] and owner.tls_ciphers:
        _refuse_contradiction(kind, text, "TLSv1.3 is the only version and has none of these ciphers")
    if chosen == [MODERN]:
        ciphers = None
    elif chosen[0] in OLD and "@SECLEVEL" not in (ciphers or ""):
        ciphers = f"{ciphers or 'DEFAULT'}:{_ANY_STRENGTH}"
    return Negotiation(_range(chosen), Ciphers(ciphers, suites if MODERN in chosen else None))


def _refuse_contradiction(kind: str, text: str | None, reason: str) -> None:
    refuse(f"{kind} option tls_ciphers", text, reason, "Change tls_ciphers or tls_versions.")


def _selected_versions(option: str, versions: tuple[str, ...], minimum: str | None) -> list[str]:
    known = list(VERSIONS)
    for version in versions:
        if version not in VERSIONS:
            refuse(option, version, "this TLS version is unknown", f"Use one of {', '.join(known)}.")
    if minimum is not None and minimum not in VERSIONS:
        refuse("tls_minimum_version", minimum, "this TLS version is unknown", f"Use one of {', '.join(known)}.")
    allowed = known[known.index(minimum) :] if minimum else known
    chosen = [version for version in allowed if version in versions]
    if not chosen:
        refuse(option, ", ".join(versions), f"the oldest allowed version is {minimum}", f"Add {allowed[0]} or newer.")
    return chosen


def _range(chosen: list[str]) -> Versions:
    known = list(VERSIONS)
    span = known[known.index(chosen[0]) : known.index(chosen[-1]) + 1]
    gaps = tuple(VERSIONS[version] for version in span if version not in chosen)
    return Versions(VERSIONS[chosen[0]], VERSIONS[chosen[-1]], gaps)


def _split_ciphers(option: str, text: str | None) -> Ciphers:
    """Return the two lists in the user's order, with the operators unchanged."""
    if not text:
        return Ciphers(None, None)
    if len(text) > MAX_CIPHERS or not _CIPHERS.fullmatch(text):
        refuse(option, text, "it is not a list of ciphers", "Use OpenSSL's names of ciphers with ':' between them.")
    names = [name for name in text.split(":") if name]
    suites = [name for name in names if name.startswith("TLS_")]
    older = [name for name in names if not name.startswith("TLS_")]
    if not any(name[0] not in "!-+@" for name in older):
        # Operators alone select no cipher.
        older = []
    if not names or not (older or suites):
        refuse(option, text, "it selects no cipher", "Name at least one cipher, or remove this option.")
    if suites and not MODERN_SUITES & set(suites):
        refuse(option, text, "TLS 1.3 has none of these ciphers", f"Use one of {', '.join(sorted(MODERN_SUITES))}.")
    if older and not _selects(":".join(older)):
        refuse(option, text, "OpenSSL finds no cipher in it, or cannot parse it", "Use OpenSSL's names of ciphers.")
    return Ciphers(":".join(older) or None, ":".join(suites) or None)


@lru_cache(maxsize=1024)
def _selects(ciphers: str) -> bool:
    """Whether OpenSSL accepts a list of ciphers, by the function that HAProxy also calls."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(ciphers)
    except ssl.SSLError:
        return False
    return True


def check_alpn(option: str, protocols: tuple[str, ...] | None) -> None:
    """Refuse ALPN protocols that HAProxy cannot offer.

    Raises:
        UnsupportedOption: HAProxy cannot offer a protocol.
    """
    for protocol in protocols or ():
        if protocol not in ALPN_PROTOCOLS:
            refuse(option, protocol, "HAProxy cannot offer this protocol", f"Use one of {', '.join(ALPN_PROTOCOLS)}.")


def check_listener_tls(listener: Listener) -> None:
    """Check the TLS options of a listener; without TLS they are ignored.

    Raises:
        UnsupportedOption: an option or its value is not supported.
    """
    if listener.protocol is ListenerProtocol.TERMINATED_HTTPS and not terminates(listener):
        refuse(
            "listener option default_tls_container_ref",
            listener.default_tls_container_ref,
            "a TERMINATED_HTTPS listener needs a certificate",
            "Set default_tls_container_ref or sni_container_refs.",
        )
    if not terminates(listener):
        return
    check_alpn("listener option alpn_protocols", listener.alpn_protocols)
    listener_negotiation(listener, None, None)
    mode = listener.client_authentication
    if mode not in (None, ClientAuthentication.NONE) and not listener.client_ca_tls_container_ref:
        refuse(
            "listener option client_authentication",
            str(mode),
            "the listener has no certificate authority for client certificates",
            "Set client_ca_tls_container_ref.",
        )
    if listener.client_crl_container_ref and not listener.client_ca_tls_container_ref:
        refuse(
            "listener option client_crl_container_ref",
            listener.client_crl_container_ref,
            "a revocation list needs its certificate authority",
            "Set client_ca_tls_container_ref.",
        )


def check_pool_tls(pool: Pool) -> None:
    """Check the TLS options of a pool; without tls_enabled they are ignored.

    Raises:
        UnsupportedOption: an option or its value is not supported.
    """
    if not pool.tls_enabled:
        return
    if pool.protocol in (PoolProtocol.UDP, PoolProtocol.SCTP):
        refuse(
            "pool option tls_enabled",
            pool.tls_enabled,
            f"{pool.protocol} pools do not support TLS",
            "Remove this option.",
        )
    check_alpn("pool option alpn_protocols", pool.alpn_protocols)
    pool_negotiation(pool, None, None)
    if pool.crl_container_ref and not pool.ca_tls_container_ref:
        refuse(
            "pool option crl_container_ref",
            pool.crl_container_ref,
            "a revocation list needs its certificate authority",
            "Set ca_tls_container_ref.",
        )
