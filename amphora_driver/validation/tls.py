# SPDX-License-Identifier: Apache-2.0
"""Validation and parser of TLS versions, ciphers and ALPN of listeners and pools.

Invariant: the renderer prints the parsed values, never the text of the user. HAProxy negotiates only versions and
ciphers that the user selected. Each function raises `UnsupportedOption` for an unsupported value.

HAProxy 2.6 with OpenSSL 3 supports one range of versions: with a gap, its `no-tlsv1x` options also serve the versions
of the gap, and keep TLS 1.2 as the lowest version. The frontend of a listener closes connections with a version of the
gap after the handshake. A pool cannot have a gap.
"""

from __future__ import annotations

import re
import ssl
from functools import lru_cache
from typing import NamedTuple

from amphora_driver.model.enums import ClientAuthentication, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, Pool
from amphora_driver.validation.unsupported import refuse, require_absent

VERSIONS = {"TLSv1": "TLSv1.0", "TLSv1.1": "TLSv1.1", "TLSv1.2": "TLSv1.2", "TLSv1.3": "TLSv1.3"}
"""HAProxy's names of versions by the API's names, oldest first."""
DEFAULT_VERSIONS = ("TLSv1.2", "TLSv1.3")
MODERN = "TLSv1.3"
_COMMON_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
MODERN_SUITES = frozenset((*_COMMON_SUITES, "TLS_AES_128_CCM_SHA256", "TLS_AES_128_CCM_8_SHA256"))
"""All suites of TLS 1.3. OpenSSL ignores unknown names beside one of these suites, and refuses a list without any."""
OLD = ("TLSv1", "TLSv1.1")
ALPN_PROTOCOLS = ("h2", "http/1.1", "http/1.0")
MAX_CIPHERS = 2048
"""Longest list of ciphers in characters: the width of Octavia's column."""

# Names of ciphers and the operators of OpenSSL's cipher lists, such as ! and +.
_CIPHERS = re.compile(r"[A-Za-z0-9+!:@=_.-]+")
# OpenSSL 3 permits SHA-1 signatures, which TLS 1.0 and 1.1 need, only at security level 0.
_ANY_STRENGTH = "@SECLEVEL=0"
_NO_AUTHORITY = "a revocation list needs its certificate authority"

TERMINATING = (ListenerProtocol.TERMINATED_HTTPS, ListenerProtocol.PROMETHEUS)


class Versions(NamedTuple):
    """A range of versions in HAProxy's names. The user did not select the versions in `gaps`."""

    low: str
    high: str
    gaps: tuple[str, ...]


class Negotiation(NamedTuple):
    """The versions, the ciphers up to TLS 1.2, and the suites of TLS 1.3. None means OpenSSL's default."""

    versions: Versions
    ciphers: str | None
    suites: str | None


def terminates(listener: Listener) -> bool:
    """Return whether a listener uses TLS with its clients and has a certificate."""
    return listener.protocol in TERMINATING and bool(listener.default_tls_container_ref or listener.sni_container_refs)


def listener_negotiation(listener: Listener, minimum: str | None, ciphers: str | None) -> Negotiation:
    """Return the versions from `minimum` on, and the ciphers (by default the argument `ciphers`)."""
    return _negotiation("listener", listener, minimum, ciphers)


def pool_negotiation(pool: Pool, minimum: str | None, ciphers: str | None) -> Negotiation:
    """Return the versions and ciphers for the members of a pool; see `listener_negotiation`. Refuse a gap."""
    found = _negotiation("pool", pool, minimum, ciphers)
    if found.versions.gaps:
        reason = f"HAProxy would also negotiate {', '.join(found.versions.gaps)}"
        chosen = ", ".join(pool.tls_versions or ())
        refuse("pool option tls_versions", chosen, reason, "Select versions without a gap.")
    return found


def _negotiation(kind: str, owner: Listener | Pool, minimum: str | None, default_ciphers: str | None) -> Negotiation:
    chosen = _selected_versions(f"{kind} option tls_versions", owner.tls_versions or DEFAULT_VERSIONS, minimum)
    text, option = owner.tls_ciphers or default_ciphers, f"{kind} option tls_ciphers"
    ciphers, suites = _split_ciphers(option, text)
    if ciphers is None and suites is not None:
        # With only ciphers of TLS 1.3, OpenSSL would use default ciphers for older versions. So older versions are
        # disabled.
        chosen = [version for version in chosen if version == MODERN]
        if not chosen:
            reason = "all of these ciphers need TLSv1.3, which tls_versions does not contain"
            refuse(option, text, reason, "Change tls_ciphers or tls_versions.")
    if suites is None and ciphers is not None and chosen == [MODERN] and owner.tls_ciphers:
        reason = "TLSv1.3 is the only version and has none of these ciphers"
        refuse(option, text, reason, "Change tls_ciphers or tls_versions.")
    if chosen == [MODERN]:
        ciphers = None
    elif chosen[0] in OLD and "@SECLEVEL" not in (ciphers or ""):
        ciphers = f"{ciphers or 'DEFAULT'}:{_ANY_STRENGTH}"
    return Negotiation(_range(chosen), ciphers, suites if MODERN in chosen else None)


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


def _split_ciphers(option: str, text: str | None) -> tuple[str | None, str | None]:
    """Return the ciphers up to TLS 1.2 and the suites of TLS 1.3, in the user's order."""
    if not text:
        return None, None
    if len(text) > MAX_CIPHERS or not _CIPHERS.fullmatch(text):
        refuse(option, text, "it is not a list of ciphers", "Use OpenSSL's names of ciphers with ':' between them.")
    names = [name for name in text.split(":") if name]
    suites = [name for name in names if name.startswith("TLS_")]
    older = [name for name in names if not name.startswith("TLS_")]
    if not any(name[0] not in "!-+@" for name in older):
        # The list contains only operators of cipher lists, such as "!". Without a cipher name, the list selects no
        # cipher.
        older = []
    if not names or not (older or suites):
        refuse(option, text, "it selects no cipher", "Name at least one cipher, or remove this option.")
    if suites and not MODERN_SUITES & set(suites):
        refuse(option, text, "TLS 1.3 has none of these ciphers", f"Use one of {', '.join(sorted(MODERN_SUITES))}.")
    if older and not _selects(":".join(older)):
        refuse(option, text, "OpenSSL finds no cipher in it, or cannot parse it", "Use OpenSSL's names of ciphers.")
    return ":".join(older) or None, ":".join(suites) or None


@lru_cache(maxsize=1024)
def _selects(ciphers: str) -> bool:
    """Return whether OpenSSL accepts a list of ciphers. HAProxy calls the same function."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(ciphers)
    except ssl.SSLError:
        return False
    return True


def check_alpn(option: str, protocols: tuple[str, ...] | None) -> None:
    """Refuse ALPN protocols that HAProxy cannot offer."""
    for protocol in protocols or ():
        if protocol not in ALPN_PROTOCOLS:
            refuse(option, protocol, "HAProxy cannot offer this protocol", f"Use one of {', '.join(ALPN_PROTOCOLS)}.")


def check_listener_tls(listener: Listener) -> None:
    """Check the TLS options of a listener that terminates TLS."""
    default, crl = listener.default_tls_container_ref, listener.client_crl_container_ref
    if not terminates(listener):
        if listener.protocol is ListenerProtocol.TERMINATED_HTTPS:
            reason = "a TERMINATED_HTTPS listener needs a certificate"
            remedy = "Set default_tls_container_ref or sni_container_refs."
            refuse("listener option default_tls_container_ref", default, reason, remedy)
        return
    check_alpn("listener option alpn_protocols", listener.alpn_protocols)
    listener_negotiation(listener, None, None)
    if listener.client_ca_tls_container_ref:
        return
    mode, remedy = listener.client_authentication, "Set client_ca_tls_container_ref."
    if mode not in (None, ClientAuthentication.NONE):
        reason = "the listener has no certificate authority for client certificates"
        refuse("listener option client_authentication", str(mode), reason, remedy)
    if crl:
        refuse("listener option client_crl_container_ref", crl, _NO_AUTHORITY, remedy)


def check_pool_tls(pool: Pool) -> None:
    """Check the TLS options of a pool with tls_enabled."""
    if not pool.tls_enabled:
        return
    if pool.protocol in (PoolProtocol.UDP, PoolProtocol.SCTP):
        require_absent("pool option tls_enabled", pool.tls_enabled, f"{pool.protocol} pools do not support TLS")
    check_alpn("pool option alpn_protocols", pool.alpn_protocols)
    pool_negotiation(pool, None, None)
    if pool.crl_container_ref and not pool.ca_tls_container_ref:
        refuse("pool option crl_container_ref", pool.crl_container_ref, _NO_AUTHORITY, "Set ca_tls_container_ref.")
