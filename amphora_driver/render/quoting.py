# SPDX-License-Identifier: Apache-2.0
"""Quoting: the only way of a value into a template.

Invariant: HAProxy's configuration parser reads the result of each function as one word with exactly the given value;
otherwise the function raises `QuotingError`. `finalize` makes the template fail if it prints a value that this module
did not quote.

Source: HAProxy 2.6 configuration manual, sections 2.2 (quoting), 2.5 (time), 8.2.4 (log-format, where `%` is
special).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn, cast

from amphora_driver.errors import QuotingError
from amphora_driver.validation import addresses

# HAProxy's proxy and server names (manual section 2.1: letters, digits, - _ . :). The colon is left out
# because it separates pool and listener in backend names.
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_WEIGHT = "(?:[1-9]?[0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-6])"
_ORDINARY_SERVER = re.compile(
    rf"server {_IDENTIFIER.pattern} {addresses.PLAIN_MEMBER_ADDRESS}:{_PORT} weight {_WEIGHT}"
)
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/+-]{0,127}")
# Keywords, flags and sample fetches of our own, in a row.
_KEYWORD = r"(?:[A-Za-z0-9.][A-Za-z0-9_.,:()/+-]*|-[a-z]|--|[{}]|%\[[a-z0-9_.,()]+\])"
_KEYWORDS = re.compile(f"{_KEYWORD}(?: {_KEYWORD})*")
# What OpenSSL's lists of ciphers are made of; HAProxy's parser gives none of these characters a meaning.
_CIPHERS = re.compile(r"[A-Za-z0-9+!:@=_.-]{1,4096}")
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?")
# C0 and C1 controls, DEL, and the Unicode line and paragraph separators, which tools downstream take for line
# ends; lone surrogates have no bytes at all.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

MAX_TEXT = 2048
"""Longest value in bytes: far above every column of the API, far below HAProxy's 16 KiB buffers."""

MAX_INTEGER = 2**31 - 1
"""HAProxy reads numbers and milliseconds into signed 32-bit integers (manual section 2.5)."""


class Quoted(str):
    """A word that is safe to print into the configuration. Only the functions of this module can make one."""

    __slots__ = ()

    def __init__(self, *_args: object) -> None:
        """Refuse: a Quoted is the result of quoting, not a way around it."""
        raise TypeError("a Quoted value comes from amphora_driver.render.quoting only")


# `str.__new__` does not call `__init__`: the one way to make a Quoted.
_quoted: Callable[[str], Quoted] = partial(str.__new__, Quoted)
_PRINTABLE = frozenset({Quoted, int})


def _refuse(where: str, value: object, reason: str, object_id: str | None) -> NoReturn:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    raise QuotingError(
        f"write {where} {shown} into HAProxy's configuration",
        reason,
        "Change this value.",
        object_id=object_id,
    )


def finalize(value: object) -> str:
    """What Jinja2 calls with the value of every expression a template prints.

    Args:
        value: what the expression came to.

    Returns:
        The text to print.

    Raises:
        TypeError: the value is neither `Quoted` nor a plain integer. This is a mistake in our template or
            renderer, never a user's, so it is loud.
    """
    kind = type(value)
    if kind is Quoted:
        return value  # type: ignore[return-value]
    if kind is int:
        return str(value)
    raise TypeError(f"a template may not print the unquoted {kind.__name__} {value!r}")


def identifier(value: str, where: str, object_id: str | None = None) -> Quoted:
    """An id that names a section or a server.

    Args:
        value: letters, digits, `_`, `.`, `-`; at most 64. Octavia's UUIDs are of this kind.
        where: what the value is, for the error message.
        object_id: the object at fault, for the error.

    Raises:
        QuotingError: any other value.
    """
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        _refuse(where, value, "an identifier is made of letters, digits, '_', '.' and '-' only", object_id)
    return _quoted(value)


def words(parts: Iterable[Quoted | int]) -> Quoted:
    """Several words as one piece of a line, with a space between them.

    Raises:
        TypeError: one of them is neither `Quoted` nor an integer.
    """
    printed = parts if isinstance(parts, tuple) else tuple(parts)
    kinds = set(map(type, printed))
    if not kinds <= _PRINTABLE:
        raise TypeError(f"only quoted words and integers can be joined, not {printed!r}")
    return _quoted(" ".join(map(str, printed) if int in kinds else cast("Iterable[str]", printed)))


def ordinary_servers(beginnings: Iterable[str], tail: Quoted | None) -> list[Quoted | None]:
    """Quote server lines with common values only: an id, an IPv4 address, numbers.

    One match for each line, instead of one for each value, because there are thousands of lines. No other value passes:
    none of the patterns contains a blank.

    Args:
        beginnings: `server <id> <address>:<port> weight <weight>`, from unchecked values.
        tail: further words of each line.

    Returns:
        The lines; None for a line whose values must be quoted or refused one by one.
    """
    if type(tail) not in (Quoted, type(None)):
        raise TypeError("lines are made of quoted words")
    match, end = _ORDINARY_SERVER.fullmatch, "" if tail is None else f" {tail}"
    return [_quoted(f"{beginning}{end}") if match(beginning) else None for beginning in beginnings]


def keywords(text: str) -> Quoted:
    """Words that this program itself wrote, as one piece of a line.

    Raises:
        QuotingError: anything that is more than plain words; a mistake of ours.
    """
    if not _KEYWORDS.fullmatch(text):
        _refuse("keywords", text, "these are not plain words", None)
    return _quoted(text)


def lines(parts: Iterable[Quoted], tail: Quoted | None = None) -> Quoted:
    """Several lines of a section, each indented, each with the same words at its end.

    Raises:
        TypeError: one of them is not `Quoted`.
    """
    rows = list(parts)
    if set(map(type, rows)) - {Quoted} or type(tail) not in (Quoted, type(None)):
        raise TypeError("lines are made of quoted words")
    if not rows:
        return _quoted("")
    end = "\n" if tail is None else f" {tail}\n"
    return _quoted(f"    {f'{end}    '.join(rows)}{end}")


def ciphers(value: str, where: str, object_id: str | None = None) -> Quoted:
    """A list of ciphers with OpenSSL's operators: one plain word.

    Raises:
        QuotingError: any other character, or more than 4096 of them.
    """
    if not isinstance(value, str) or not _CIPHERS.fullmatch(value):
        _refuse(where, value, "it is not a list of ciphers", object_id)
    return _quoted(value)


def host_name(value: str, where: str, object_id: str | None = None) -> Quoted:
    """A DNS name: one plain word, also as the argument of a sample fetch.

    Raises:
        QuotingError: anything else.
    """
    if not isinstance(value, str) or not _HOST_NAME.fullmatch(value):
        _refuse(where, value, "it is not a host name", object_id)
    return _quoted(value)


def call(function: Quoted, argument: Quoted) -> Quoted:
    """A sample fetch with one argument that needs no quotes: `str(www.example.com)`.

    Raises:
        QuotingError: the argument is more than a host name.
    """
    name = host_name(str(argument), f"the argument of {function}")
    return _quoted(f"{keywords(function)}({name})")


def sample(fetch: str, argument: str, converters: str, where: str, object_id: str | None = None) -> Quoted:
    """Return a sample fetch with a string argument and converters as one word.

    Example: `'req.cook("it''s"),sha1'`.

    Inside double quotes HAProxy's second parser, the one for arguments, gives a meaning to `"` and the backslash only
    (manual section 2.2 and 7.1).

    Args:
        fetch: the name of the fetch, ours.
        argument: text; not with `"` or a backslash.
        converters: what follows, ours; begins with a comma or is empty.

    Raises:
        QuotingError: the argument has no form here.
    """
    if isinstance(argument, str) and ('"' in argument or "\\" in argument):
        _refuse(where, argument, "it contains a double quote or a backslash", object_id)
    text(argument, where, object_id)
    return text(f'{fetch}("{argument}"){converters}', where, object_id)


def backend_name(pool_id: Quoted, listener_id: Quoted) -> Quoted:
    """The name of the backend that serves a pool behind one listener."""
    if type(pool_id) is not Quoted or type(listener_id) is not Quoted:
        raise TypeError("a backend is named with quoted identifiers")
    return _quoted(f"{pool_id}:{listener_id}")


def token(value: str, where: str, object_id: str | None = None) -> Quoted:
    """A bare word: a method, a version, a list of status codes.

    Args:
        value: letters, digits and `_ . : / + -`; begins with a letter or digit, so never a flag; at most 128.
        where: what the value is, for the error message.
        object_id: the object at fault, for the error.

    Raises:
        QuotingError: any other value.
    """
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        _refuse(where, value, "only a plain word can stand here", object_id)
    return _quoted(value)


def integer(value: int, where: str, *, low: int, high: int = MAX_INTEGER, object_id: str | None = None) -> int:
    """A number between `low` and `high`, both included.

    Raises:
        QuotingError: not an integer (a bool is none), or out of range.
    """
    if type(value) is not int or not low <= value <= high:
        _refuse(where, value, f"a whole number from {low} to {high} is needed", object_id)
    return value


def port(value: int, where: str, object_id: str | None = None) -> int:
    """A TCP port, 1 to 65535. Zero would be "the client's own port" on a server line (manual section 5.2)."""
    return integer(value, where, low=1, high=65535, object_id=object_id)


def milliseconds(value: int, where: str, object_id: str | None = None) -> Quoted:
    """A time in milliseconds, with its unit (manual section 2.5). Zero, HAProxy's "for ever", is refused."""
    return _quoted(f"{integer(value, where, low=1, object_id=object_id)}ms")


def seconds(value: int, where: str, object_id: str | None = None) -> Quoted:
    """A time in seconds, with its unit; at most what fits HAProxy's milliseconds (24 days)."""
    return _quoted(f"{integer(value, where, low=1, high=MAX_INTEGER // 1000, object_id=object_id)}s")


def address(value: str, where: str, object_id: str | None = None) -> Quoted:
    """An IP address in canonical form, IPv6 in brackets: else its last group would be taken for a port.

    Args:
        value: IPv4 or IPv6 in text form, without port, prefix or scope.
        where: what the value is, for the error message.
        object_id: the object at fault, for the error.

    Raises:
        QuotingError: not an address, with a scope (`fe80::1%eth0`), or the unspecified address, which HAProxy
            reads as "wherever the client wanted to go" (manual section 5.2).
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
    """Address and port as one word: `198.51.100.5:80`, `[2001:db8::5]:80`."""
    number = port(port_number, f"the port of {where}", object_id)
    return _quoted(f"{address(host, where, object_id)}:{number}")


def text(
    value: str, where: str, object_id: str | None = None, *, flag_position: bool = False, longest: int = MAX_TEXT
) -> Quoted:
    """Any string, in single quotes: inside them HAProxy interprets nothing (manual section 2.2).

    A single quote itself has no form inside single quotes; it is written by closing, an escaped quote,
    opening again.

    Args:
        value: printable text, up to `longest` bytes of UTF-8.
        where: what the value is, for the error message.
        object_id: the object at fault, for the error.
        flag_position: True where HAProxy would take a word beginning with `-` for a flag; such values are
            refused.
        longest: more than `MAX_TEXT` is for what this program made of a value of that length. A line of
            configuration has no limit of its own in HAProxy (2.6 grows its buffer).

    Raises:
        QuotingError: empty (HAProxy takes an empty word for the end of the line and ignores what follows),
            too long, with control characters or line separators, or flag-like where that matters.
    """
    if not isinstance(value, str) or not value:
        _refuse(where, value, "it is empty", object_id)
    if value.isascii() and value.isprintable() and len(value) <= longest and value[0] != "-" and "'" not in value:
        # Nearly every value: everything below is about what these are not.
        return _quoted(f"'{value}'")
    if _FORBIDDEN.search(value):
        _refuse(where, value, "it contains control characters", object_id)
    if len(value.encode()) > longest:
        _refuse(where, value, f"it is longer than {longest} bytes", object_id)
    if flag_position and value.startswith("-"):
        _refuse(where, value, "it begins with '-' and would be read as a flag", object_id)
    return _quoted("'" + value.replace("'", "'\\''") + "'")


def log_format(value: str, where: str, object_id: str | None = None) -> Quoted:
    """Any string where HAProxy expands `%x` and `%[...]` (manual 8.2.4): as `text`, with `%` doubled."""
    if isinstance(value, str):
        value = value.replace("%", "%%")
    return text(value, where, object_id)


def substituted(fetch: str, pattern: str, flags: str, where: str, object_id: str | None = None) -> Quoted:
    """A sample fetch without what a regular expression finds in it: `'path,regsub("^/x","","i")'`.

    The pattern passes two parsers: inside the single quotes of the first nothing has a meaning, inside the double
    quotes of the second, the one for arguments, the double quote and the backslash do (manual sections 2.2 and 7.3.1).

    Args:
        fetch: a sample expression, ours.
        pattern: any regular expression.
        flags: of `regsub`, ours.
        where: what the pattern is, for the error message.
        object_id: the object at fault, for the error.
    """
    inner = pattern.replace("\\", "\\\\").replace('"', '\\"')
    return text(f'{fetch},regsub("{inner}","","{flags}")', where, object_id, longest=4 * MAX_TEXT)


def negated(name: Quoted) -> Quoted:
    """A named ACL that must not match: `!name`."""
    if type(name) is not Quoted:
        raise TypeError("an ACL is named with a quoted identifier")
    return _quoted(f"!{name}")


def argument_of(function: Quoted, backend: Quoted) -> Quoted:
    """A sample fetch with the name of a backend as its argument: `str(<pool>:<listener>)`."""
    if type(function) is not Quoted or type(backend) is not Quoted:
        raise TypeError("a fetch and its backend are quoted")
    return _quoted(f"{function}({backend})")
