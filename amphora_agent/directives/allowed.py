# SPDX-License-Identifier: Apache-2.0
"""The directives that a load balancer's configuration may contain, with the syntax of their arguments.

Invariant: pure. An accepted line makes HAProxy open only files of the bundle and of this machine, and only sockets of
listeners, members and checks. HAProxy runs no program. A directive that is new in this project's template
(`amphora_driver/render`) or in Octavia's (`docs/reference/amphora-api-v1.md`) needs an entry here first. Source:
HAProxy manual, sections 4, 5 and 7.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

from amphora_agent.directives.expressions import CONDITION, EXPRESSION, IDENTIFIER, LOG_FORMAT, MATCH, WORD

_NUMBER = r"[0-9]{1,10}"
_TIME = rf"{_NUMBER}(?:us|ms|s|m|h|d)?"
# HAProxy would resolve an IPv4 address with leading zeros as a host name, so the pattern accepts no leading zeros.
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
# HAProxy would resolve a text with fewer than two colons as a host name, so the pattern requires two colons.
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*"
_ADDRESS = rf"(?:{_IPV4}|{_IPV6}|\[{_IPV6}\])"
_PORT = r"[1-9][0-9]{0,4}"
_ENDPOINT = re.compile(rf"(?:({_IPV4})|\[({_IPV6})\]|({_IPV6})):{_PORT}")
# No part of the path may begin with a dot. So the path contains no "..", and cannot leave the directory of TLS files.
FILE = r"tls/[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*"
_CIPHERS = r"[A-Za-z0-9+!:@=_.-]+"
_PROTOCOLS = r"[A-Za-z0-9./,-]+"
_VERSION = r"(?:SSLv3|TLSv1\.[0-3])"
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = r"[^\n\"'(),\\%{}]+"
_VARIABLE = r"(?:sess|txn|req|res)\.[A-Za-z0-9_.]+"
_WHEN = rf"{CONDITION}?"
_BACKEND = rf"(?!amphora:(?!metrics\n|metrics$)){IDENTIFIER}"
_CODE = r"[1-5][0-9]{2}"
_TLS = {
    **dict.fromkeys(("ca-file", "crl-file", "crt"), FILE),
    **dict.fromkeys(("ciphers", "ciphersuites"), _CIPHERS),
    **dict.fromkeys(("ssl-min-ver", "ssl-max-ver"), _VERSION),
    **dict.fromkeys(("ssl", "no-sslv3", "no-tlsv10", "no-tlsv11", "no-tlsv12", "no-tlsv13", "no-tls-tickets"), ""),
    "alpn": _PROTOCOLS,
}
_BIND: Mapping[str, str] = {
    **_TLS,
    **dict.fromkeys(("crt-list", "tls-ticket-keys"), FILE),
    "verify": "(?:none|optional|required)",
}
_SERVER: Mapping[str, str] = {
    **_TLS,
    **dict.fromkeys(("backup", "check", "check-send-proxy", "check-ssl", "disabled"), ""),
    **dict.fromkeys(("send-proxy", "send-proxy-v2", "send-proxy-v2-ssl", "send-proxy-v2-ssl-cn"), ""),
    **dict.fromkeys(("fall", "id", "maxconn", "maxqueue", "rise", "weight"), _NUMBER),
    **dict.fromkeys(("inter", "fastinter", "downinter", "slowstart"), _TIME),
    **dict.fromkeys(("check-sni", "verifyhost"), _HOST),
    "addr": _ADDRESS,
    "check-alpn": _PROTOCOLS,
    "cookie": IDENTIFIER,
    "port": _PORT,
    "proto": "h[12]",
    "sni": EXPRESSION,
    "verify": "(?:none|required)",
}


def _keywords(table: Mapping[str, str]) -> str:
    """Return the pattern of the keywords of a table, each with its value."""
    shapes: dict[str, list[str]] = {}
    for word, shape in table.items():
        shapes.setdefault(shape, []).append(re.escape(word).replace(r"\-", "-"))
    return "|".join(f"(?:{'|'.join(words)})" + (f" {shape}" if shape else "") for shape, words in shapes.items())


def _compile(shape: str) -> re.Pattern[str]:
    return re.compile(shape.replace(" ", "\n"))


_SET = rf"{_NAME} {LOG_FORMAT}{_WHEN}"
_RETURN = (
    rf"return(?: status {_CODE})?(?: content-type {WORD})?(?: string {WORD})?(?: hdr {_NAME} {LOG_FORMAT})*{_WHEN}"
)
_REDIRECT = rf"(?:code 30[1-8] )?(?:(?:location|prefix) {LOG_FORMAT}|scheme https?)(?: code 30[1-8])?{_WHEN}"
_SIZES = rf"size {_NUMBER}[kmg]?(?: expire {_TIME})?(?: peers amphora)?"

# Allowed HAProxy directives, with a pattern of their arguments.
_ARGUMENTS: Mapping[str, str] = {
    "acl": rf"{IDENTIFIER} {MATCH}",
    "backend": IDENTIFIER,
    "balance": rf"(?:roundrobin|static-rr|leastconn|source|first|random|uri|hdr\([A-Za-z0-9-]+\)|hash {EXPRESSION})",
    "bind": rf"\S+(?: (?:{_keywords(_BIND)}))*",
    "cookie": (
        rf"{WORD} insert indirect(?: nocache)?(?: dynamic)?(?: httponly)?(?: attr SameSite=[A-Za-z]+)?(?: secure)?"
    ),
    "default_backend": _BACKEND,
    "defaults": rf"(?:{IDENTIFIER})?",
    "dynamic-cookie-key": IDENTIFIER,
    "frontend": IDENTIFIER,
    "fullconn": _NUMBER,
    "hash-type": "(?:consistent|map-based)(?: (?:sdbm|djb2|wt6|crc32))?(?: avalanche)?",
    "http-after-response": f"set-header {_SET}",
    "http-check": (
        rf"(?:send(?: meth [A-Z]+)?(?: uri {WORD}| uri-lf {LOG_FORMAT})?(?: ver HTTP/[0-9.]+)?"
        rf"(?: hdr {_NAME} {LOG_FORMAT})*"
        rf"|expect (?:status|rstatus) {WORD})"
    ),
    "http-request": (
        rf"(?:(?:deny|reject)(?: deny_status {_CODE})?{_WHEN}|allow{_WHEN}|{_RETURN}|redirect {_REDIRECT}"
        rf"|(?:set|add)-header {_SET}|del-header {_NAME}{_WHEN}"
        rf"|set-var\({_VARIABLE}\) {EXPRESSION}{_WHEN}|set-var-fmt\({_VARIABLE}\) {LOG_FORMAT}{_WHEN})"
    ),
    "http-response": f"set-header {_SET}",
    "http-reuse": "(?:never|safe|aggressive|always)",
    "load-server-state-from-file": "global",
    "log": "(?:global|stdout format raw local0 info)",
    "log-format": LOG_FORMAT,
    "maxconn": _NUMBER,
    "mode": "(?:http|tcp)",
    "no": "log",
    "option": (
        r"(?:allbackups|dontlognull|forwardfor|http-ignore-probes|http-keep-alive|idle-close-on-response|httplog|tcplog"
        rf"|redispatch(?: {_NUMBER})?|splice-(?:auto|request|response)|tcpka"
        rf"|httpchk(?: [A-Z]+(?: [^\n-][^\n]*(?: HTTP/[0-9.]+)?)?)?)"
    ),
    "redirect": _REDIRECT,
    "retries": _NUMBER,
    "server": rf"{IDENTIFIER} \S+(?: (?:{_keywords(_SERVER)}))*",
    "stick": rf"(?:on|match|store-request|store-response) {EXPRESSION}",
    "stick-table": rf"type (?:ip|ipv6|integer|(?:string|binary) len {_NUMBER}) {_SIZES}",
    "tcp-request": (
        rf"(?:inspect-delay {_TIME}|(?:session|content|connection) (?:reject|accept){_WHEN}"
        rf"|content set-var(?:\({_VARIABLE}\) {EXPRESSION}|-fmt\({_VARIABLE}\) {LOG_FORMAT}){_WHEN})"
    ),
    "timeout": (rf"(?:check|client|connect|http-keep-alive|http-request|queue|server|tunnel) {_TIME}"),
    "use_backend": rf"(?:{_BACKEND}|%\[var\({_VARIABLE}\)\]){_WHEN}",
}
_PATTERNS = {first: _compile(shape) for first, shape in _ARGUMENTS.items()}
_CRT_LIST_LINE = re.compile(
    rf"[ \t]*(?:{FILE}(?:[ \t]+\[[ \t]*alpn[ \t]+[A-Za-z0-9./,-]+[ \t]*\])?(?:[ \t]+[!A-Za-z0-9*._-]+)*[ \t]*)?(?:#.*)?"
)
_OPTIONS = {"bind": (2, _BIND), "server": (3, _SERVER)}
# An error message names these directives with two words, because the first word alone is ambiguous.
_COMPOUND = {
    "http-after-response", "http-check", "http-request", "http-response", "no", "option", "stick", "tcp-request",
    "timeout",
}  # fmt: skip


def refusal(words: Sequence[str]) -> str | None:
    """Return why a line of one or more words is refused, with its directive; None for an accepted line."""
    first, *others = words
    allowed = _PATTERNS.get(first)
    if allowed is None or allowed.fullmatch("\n".join(others)) is None:
        return f"{name_directive(words)} is not among the directives and arguments that an amphora accepts"
    if first in _OPTIONS:
        endpoint = others[_OPTIONS[first][0] - 2]
        if not _is_endpoint(endpoint):
            return f"the address of '{first}' is not the IP address of another machine or a VIP, with a port"
    return None


def refused_crt_list_line(text: str) -> int | None:
    """Return the number of the first refused line of a crt-list; None if all are accepted.

    An accepted crt-list (HAProxy manual, "crt-list") names certificates of the bundle only, and sets no option except
    ALPN.
    """
    refused = (
        number for number, line in enumerate(text.split("\n"), start=1) if _CRT_LIST_LINE.fullmatch(line) is None
    )
    return next(refused, None)


def name_directive(words: Sequence[str]) -> str:
    """Return the refused directive, or the refused keyword of a `bind` or `server` line, without values."""
    first = words[0]
    if first in _OPTIONS:
        begin, table = _OPTIONS[first]
        rest = list(words[begin:])
        while rest and rest[0] in table:
            value = table[rest[0]]
            if value and (len(rest) < 2 or _compile(value).fullmatch(rest[1]) is None):
                return f"'{first} … {rest[0]}' with its value"
            rest = rest[2 if value else 1 :]
        return f"'{first} … {_shown(rest[0])}'" if rest else f"'{first}'"
    if first in _COMPOUND and len(words) > 1:
        return f"'{first} {_shown(words[1])}'"
    return f"'{_shown(first)}'"


def _shown(word: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-].*", "…", word[:40], flags=re.DOTALL) or "…"


def _is_endpoint(word: str) -> bool:
    """Whether a word is an IP address with a port, and no name, path, descriptor or loopback address."""
    found = _ENDPOINT.fullmatch(word)
    if found is None or int(word.rpartition(":")[2]) > 65535:
        return False
    if found[1] is not None:
        return not found[1].startswith(("0.", "127."))
    try:
        address = ipaddress.IPv6Address(found[2] or found[3])
    except ValueError:
        return False
    local = address.ipv4_mapped or address
    return not (local.is_unspecified or local.is_loopback)
