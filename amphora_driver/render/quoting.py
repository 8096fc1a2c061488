# SPDX-License-Identifier: Apache-2.0
"""Quoting: the only way of a value into a template.

Invariant: HAProxy's configuration parser reads the result of each function as one word with exactly the given value;
otherwise the function raises `QuotingError`. `finalize` makes the template fail if it prints a value that this module
did not quote.

In each function, `where` names the value in error messages, and `object_id` is the object of the error.

Source: HAProxy 2.6 configuration manual, sections 2.2 (quoting), 2.5 (time), 8.2.4 (log-format, where `%` is
special).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn, cast

from amphora_driver.errors import QuotingError
from amphora_driver.validation import addresses, l7

# Characters of names in HAProxy (manual section 2.1), without the colon, which separates the ids in names of backends.
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_WEIGHT = "(?:[1-9]?[0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-6])"
_ORDINARY_SERVER = re.compile(
    rf"server {_IDENTIFIER.pattern} {addresses.PLAIN_MEMBER_ADDRESS}:{_PORT} weight {_WEIGHT}"
)
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/+-]{0,127}")
_KEYWORD = r"(?:[A-Za-z0-9.][A-Za-z0-9_.,:()/+-]*|-[a-z]|--|[{}]|%\[[a-z0-9_.,()]+\])"
_KEYWORDS = re.compile(f"{_KEYWORD}(?: {_KEYWORD})*")
# Cipher lists of OpenSSL need no quotes, because these characters have no special meaning in HAProxy's configuration.
_CIPHERS = re.compile(r"[A-Za-z0-9+!:@=_.-]{1,4096}")
_ARGUMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?")

MAX_TEXT = 2048
"""Longest value in bytes: far above every column of the API, far below HAProxy's 16 KiB buffers."""

MAX_INTEGER = 2**31 - 1
"""HAProxy reads numbers and milliseconds into signed 32-bit integers (manual section 2.5)."""


class Quoted(str):
    """A word that is safe to print into the configuration. Only the functions of this module create one."""

    __slots__ = ()

    def __init__(self, *_args: object) -> None:
        raise TypeError("a Quoted value comes from amphora_driver.render.quoting only")


# Only this function creates Quoted strings. A call of Quoted raises an error in `Quoted.__init__`, which `str.__new__`
# does not call.
_quoted: Callable[[str], Quoted] = partial(str.__new__, Quoted)
_PRINTABLE = frozenset({Quoted, int})


def _refuse(where: str, value: object, reason: str, object_id: str | None) -> NoReturn:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    raise QuotingError(
        f"write {where} {shown} into HAProxy's configuration", reason, "Change this value.", object_id=object_id
    )


def _matching(pattern: re.Pattern[str], value: str, where: str, reason: str, object_id: str | None) -> Quoted:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        _refuse(where, value, reason, object_id)
    return _quoted(value)


def _check_quoted(values: Iterable[object], message: str) -> None:
    if any(type(value) is not Quoted for value in values):
        raise TypeError(message)


def finalize(value: object) -> str:
    """Return the text of a value that a template prints (Jinja2's `finalize`).

    Raise TypeError for a value that is neither `Quoted` nor a plain integer: an error of the template or the renderer.
    """
    kind = type(value)
    if kind is Quoted:
        return value  # type: ignore[return-value]
    if kind is int:
        return str(value)
    raise TypeError(f"a template may not print the unquoted {kind.__name__} {value!r}")


def identifier(value: str, where: str, object_id: str | None = None) -> Quoted:
    """Quote an id that names a section or a server: at most 64 letters, digits, `_`, `.`, `-`."""
    reason = "an identifier is made of letters, digits, '_', '.' and '-' only"
    return _matching(_IDENTIFIER, value, where, reason, object_id)


def words(parts: Iterable[Quoted | int]) -> Quoted:
    """Join words with spaces. Raise TypeError for a part that is neither `Quoted` nor an integer."""
    printed = parts if isinstance(parts, tuple) else tuple(parts)
    kinds = set(map(type, printed))
    if not kinds <= _PRINTABLE:
        raise TypeError(f"only quoted words and integers can be joined, not {printed!r}")
    return _quoted(" ".join(map(str, printed) if int in kinds else cast("Iterable[str]", printed)))


def ordinary_servers(beginnings: Iterable[str], tail: Quoted | None) -> list[Quoted | None]:
    """Quote server lines with common values only: an id, an IPv4 address, numbers.

    One match for each line is faster than one match for each value, and there are thousands of lines. No other value
    passes, because no pattern of a value contains a blank. The result is None for a line whose values the caller must
    quote one by one.

    Args:
        beginnings: `server <id> <address>:<port> weight <weight>`, from unchecked values.
        tail: further words of each line.
    """
    _check_quoted([] if tail is None else [tail], "lines are made of quoted words")
    match, end = _ORDINARY_SERVER.fullmatch, "" if tail is None else f" {tail}"
    return [_quoted(f"{beginning}{end}") if match(beginning) else None for beginning in beginnings]


def keywords(text: str) -> Quoted:
    """Quote keywords, flags and sample fetches that are literals of this program."""
    return _matching(_KEYWORDS, text, "keywords", "these are not plain words", None)


def lines(parts: Iterable[Quoted], tail: Quoted | None = None) -> Quoted:
    """Join indented lines of a section, each with the same words at its end."""
    rows = list(parts)
    if set(map(type, rows)) - {Quoted} or type(tail) not in (Quoted, type(None)):
        raise TypeError("lines are made of quoted words")
    if not rows:
        return _quoted("")
    end = "\n" if tail is None else f" {tail}\n"
    return _quoted(f"    {f'{end}    '.join(rows)}{end}")


def ciphers(value: str, where: str, object_id: str | None = None) -> Quoted:
    """Quote a list of ciphers with OpenSSL's operators, of at most 4096 characters."""
    return _matching(_CIPHERS, value, where, "it is not a list of ciphers", object_id)


def host_name(value: str, where: str, object_id: str | None = None) -> Quoted:
    """Quote a DNS name, which may also be the argument of a sample fetch."""
    return _matching(_HOST_NAME, value, where, "it is not a host name", object_id)


def call(function: Quoted, argument: Quoted) -> Quoted:
    """Return a sample fetch with the name of a host or backend: `str(<pool>:<listener>)`."""
    _check_quoted((function, argument), "a fetch and its argument are quoted")
    name = _matching(_ARGUMENT, argument, f"the argument of {function}", "it is not a name", None)
    return _quoted(f"{keywords(function)}({name})")


def sample(fetch: str, argument: str, converters: str, where: str, object_id: str | None = None) -> Quoted:
    """Return a sample fetch with a string argument and converters as one word: `'req.cook("it''s"),sha1'`.

    The argument must contain neither `"` nor a backslash. Only these characters have a meaning inside double quotes
    (manual section 2.2 and 7.1).
    """
    if isinstance(argument, str) and ('"' in argument or "\\" in argument):
        _refuse(where, argument, "it contains a double quote or a backslash", object_id)
    text(argument, where, object_id)
    return text(f'{fetch}("{argument}"){converters}', where, object_id)


def backend_name(pool_id: Quoted, listener_id: Quoted) -> Quoted:
    """Return the name of the backend that serves a pool for one listener."""
    _check_quoted((pool_id, listener_id), "a backend is named with quoted identifiers")
    return _quoted(f"{pool_id}:{listener_id}")


def token(value: str, where: str, object_id: str | None = None) -> Quoted:
    """Quote a bare word, never a flag: at most 128 letters, digits and `_ . : / + -`."""
    return _matching(_TOKEN, value, where, "only a plain word can stand here", object_id)


def integer(value: int, where: str, *, low: int, high: int = MAX_INTEGER, object_id: str | None = None) -> int:
    """Return a number between `low` and `high`, both included. A bool is no number."""
    if type(value) is not int or not low <= value <= high:
        _refuse(where, value, f"a whole number from {low} to {high} is needed", object_id)
    return value


def port(value: int, where: str, object_id: str | None = None) -> int:
    """Return a port from 1 to 65535. On a server line, 0 means "the client's port" (manual section 5.2)."""
    return integer(value, where, low=1, high=65535, object_id=object_id)


def milliseconds(value: int, where: str, object_id: str | None = None) -> Quoted:
    """Quote a time in milliseconds with its unit (manual section 2.5). Zero would mean "for ever"."""
    return _quoted(f"{integer(value, where, low=1, object_id=object_id)}ms")


def seconds(value: int, where: str, object_id: str | None = None) -> Quoted:
    """Quote a time in seconds with its unit. HAProxy's milliseconds limit the time to 24 days."""
    return _quoted(f"{integer(value, where, low=1, high=MAX_INTEGER // 1000, object_id=object_id)}s")


def address(value: str, where: str, object_id: str | None = None) -> Quoted:
    """Quote an IP address in canonical form. Brackets separate an IPv6 address from its port.

    Refuse a scope (`fe80::1%eth0`), and the unspecified address, which means "the client's destination" (manual
    section 5.2).
    """
    if isinstance(value, str) and addresses.is_plain_member_address(value):
        return _quoted(value)
    try:
        parsed = addresses.parse_address(value)
    except (ValueError, TypeError):
        _refuse(where, value, "it is not an IP address", object_id)
    if parsed.is_unspecified:
        _refuse(where, value, "it is the unspecified address", object_id)
    return _quoted(f"[{parsed.compressed}]" if parsed.version == 6 else str(parsed))


def endpoint(host: str, port_number: int, where: str, object_id: str | None = None) -> Quoted:
    """Quote address and port as one word: `198.51.100.5:80`, `[2001:db8::5]:80`."""
    number = port(port_number, f"the port of {where}", object_id)
    return _quoted(f"{address(host, where, object_id)}:{number}")


def text(
    value: str, where: str, object_id: str | None = None, *, flag_position: bool = False, longest: int = MAX_TEXT
) -> Quoted:
    """Quote any string with single quotes: inside them HAProxy interprets nothing (manual section 2.2).

    Refuse control characters, line separators, and the empty string: HAProxy reads an empty word as the end of the
    line.

    Args:
        flag_position: whether HAProxy would read a word that begins with `-` as a flag, which the function refuses.
        longest: bytes of UTF-8. Only a value that this program has expanded may exceed `MAX_TEXT`, because HAProxy
            has no limit for a line (HAProxy 2.6 grows its buffer).
    """
    if not isinstance(value, str) or not value:
        _refuse(where, value, "it is empty", object_id)
    if value.isascii() and value.isprintable() and len(value) <= longest and value[0] != "-" and "'" not in value:
        # Nearly all values are short ASCII texts without special characters, which need no slower check.
        return _quoted(f"'{value}'")
    if l7.FORBIDDEN.search(value):
        _refuse(where, value, "it contains control characters", object_id)
    if len(value.encode()) > longest:
        _refuse(where, value, f"it is longer than {longest} bytes", object_id)
    if flag_position and value.startswith("-"):
        _refuse(where, value, "it begins with '-' and would be read as a flag", object_id)
    # HAProxy permits no single quote inside single quotes. So the quotes are closed, an escaped quote follows, and new
    # quotes are opened.
    return _quoted("'" + value.replace("'", "'\\''") + "'")


def log_format(value: str, where: str, object_id: str | None = None) -> Quoted:
    """Quote any string where HAProxy expands `%x` and `%[...]` (manual 8.2.4), with `%` doubled."""
    if isinstance(value, str):
        value = value.replace("%", "%%")
    return text(value, where, object_id)


def substituted(fetch: str, pattern: str, flags: str, where: str, object_id: str | None = None) -> Quoted:
    """Return a sample fetch without the matches of a regular expression: `'path,regsub("^/x","","i")'`.

    The pattern passes two parsers. Inside the single quotes of the first parser nothing has a meaning. Inside the
    double quotes of the parser of arguments, `"` and the backslash have one (manual sections 2.2 and 7.3.1).
    """
    inner = pattern.replace("\\", "\\\\").replace('"', '\\"')
    return text(f'{fetch},regsub("{inner}","","{flags}")', where, object_id, longest=4 * MAX_TEXT)


def negated(name: Quoted) -> Quoted:
    """Return the condition that a named ACL does not match: `!name`."""
    _check_quoted((name,), "an ACL is named with a quoted identifier")
    return _quoted(f"!{name}")
