# SPDX-License-Identifier: Apache-2.0
"""Which L7 policies and rules this provider serves, and what a rule's words mean.

Invariant: what `check_l7policy` and `check_l7rule` take can be written into HAProxy's configuration so that it means
what the user wrote; everything else is refused by name.

What an attribute means only with another type or action is not looked at: a rule that was a HEADER rule keeps its key
when it becomes a PATH rule, and Octavia gives nobody a way to take it out.
"""

from __future__ import annotations

import re

from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType
from amphora_driver.model.loadbalancer import L7Policy, L7Rule
from amphora_driver.validation import regex
from amphora_driver.validation.unsupported import one_of, refuse

MAX_RULES = 50
"""Rules of one policy, as in Octavia. HAProxy takes 64 words a line, of which an action needs up to seven."""

REDIRECT_CODES = (301, 302, 303, 307, 308)
DEFAULT_REDIRECT_CODE = 302

COMPARISONS: dict[L7RuleType, tuple[L7Compare, ...]] = {
    **dict.fromkeys(L7RuleType, tuple(L7Compare)),
    L7RuleType.SSL_CONN_HAS_CERT: (L7Compare.EQUAL_TO,),
    L7RuleType.SSL_VERIFY_RESULT: (L7Compare.EQUAL_TO,),
}
"""Octavia's API has FILE_TYPE with EQUAL_TO and REGEX only; the others mean something too."""

MAX_VERIFY_RESULT = 2**31 - 1

_VALUE = {kind: f"value of an L7 rule of type {kind}:" for kind in L7RuleType}

_LONGEST = 2048
# RFC 9110, 5.6.2: the name of a header is a token; RFC 6265, 4.1.1: that of a cookie too.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,255}")
_DN_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,254}")
_KEYS = {L7RuleType.HEADER: _NAME, L7RuleType.COOKIE: _NAME, L7RuleType.SSL_DN_FIELD: _DN_FIELD}
# Field values have no control characters, and none of these survives a line of configuration.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NUMBER = re.compile(r"[0-9]{1,10}")


def check_l7policy(policy: L7Policy) -> None:
    """Check the options of a policy; its rules have a check of their own.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
    """
    if policy.action is L7Action.REDIRECT_TO_POOL:
        if not policy.redirect_pool_id:
            refuse("L7 policy option redirect_pool_id", None, "the action needs a pool", "Name one.")
    elif policy.action is not L7Action.REJECT:
        redirect_target(policy)
        if policy.redirect_http_code is not None:
            one_of("L7 policy option redirect_http_code", policy.redirect_http_code, REDIRECT_CODES)


def redirect_target(policy: L7Policy) -> str:
    """Where a redirecting policy sends a client, exactly as the user wrote it.

    It becomes the value of a Location header, octet for octet: what a URI reference (RFC 3986) may not hold, like a
    space or a letter that is not ASCII, is what the user chose to send; what a header cannot carry is refused.

    Raises:
        UnsupportedOption: there is none, or it cannot stand in a header.
    """
    name = "redirect_url" if policy.action is L7Action.REDIRECT_TO_URL else "redirect_prefix"
    option, value = f"L7 policy option {name}", getattr(policy, name)
    if not value:
        refuse(option, value, "the action needs it", "Give one.")
    _check_text(option, value)
    if value.strip() != value:
        refuse(option, value, "a header does not keep white space around its value", "Leave it out, or write %20.")
    return str(value)


def check_l7rule(rule: L7Rule) -> None:
    """Check a rule.

    Raises:
        UnsupportedOption: an option, or a value of it, is not served.
        ConfigurationError: it has a regular expression, and there is nothing here to check it with.
    """
    if rule.compare_type not in COMPARISONS[rule.type]:
        one_of(f"compare_type of an L7 rule of type {rule.type}:", rule.compare_type, COMPARISONS[rule.type])
    keys = _KEYS.get(rule.type)
    if keys is not None and not keys.fullmatch(rule.key or ""):
        reason = "it is not a field of a name" if rule.type is L7RuleType.SSL_DN_FIELD else "it is not an HTTP token"
        refuse(f"key of an L7 rule of type {rule.type}:", rule.key, reason, "Use letters, digits, '-'.")
    option = _VALUE[rule.type]
    _check_text(option, rule.value)
    if rule.type is L7RuleType.SSL_CONN_HAS_CERT:
        if rule.value.lower() != "true":
            refuse(option, rule.value, "the only value is True", "Use invert for the opposite.")
    elif rule.type is L7RuleType.SSL_VERIFY_RESULT:
        verify_result(rule)
    elif rule.compare_type is L7Compare.REGEX:
        pattern(rule)
    elif rule.type is L7RuleType.FILE_TYPE:
        extension(rule)


def pattern(rule: L7Rule) -> regex.Facts:
    """Check the regular expression of a rule, and say what is known of it."""
    return regex.check(_VALUE[rule.type], rule.value, caseless=rule.type is L7RuleType.HOST_NAME)


def verify_result(rule: L7Rule) -> int:
    """The number of an SSL_VERIFY_RESULT rule."""
    option = _VALUE[rule.type]
    if not _NUMBER.fullmatch(rule.value) or int(rule.value) > MAX_VERIFY_RESULT:
        refuse(option, rule.value, "it is not the number of a result", f"Use 0 to {MAX_VERIFY_RESULT}.")
    return int(rule.value)


def extension(rule: L7Rule) -> str:
    """What a FILE_TYPE rule compares the extension with: `jpg`, also where the user wrote `.jpg`.

    Only EQUAL_TO can have a dot within (`tar.gz`): the extension proper is what follows the last one.
    """
    value = rule.value.removeprefix(".")
    inner = "/" if rule.compare_type is L7Compare.EQUAL_TO else "/."
    if not value or any(character in value for character in inner):
        refuse(_VALUE[rule.type], rule.value, "no extension can be like it", "Write it as in jpg or tar.gz.")
    return value


def spellings(value: str) -> tuple[str, ...]:
    """A value and what clients make of it where only the characters of a URI can stand (RFC 3986, 2.1).

    Those that no request line can have are percent-encoded, as octets of UTF-8, by every client, and those that are
    not in the grammar by most; hexadecimal digits are of either case.
    """
    if value.isascii() and not _OUTSIDE.search(value):
        return (value,)
    upper = [outside.sub(_percent, value) for outside in (_IMPOSSIBLE, _OUTSIDE)]
    lower = [outside.sub(_percent_lower, value) for outside in (_IMPOSSIBLE, _OUTSIDE)]
    return tuple(dict.fromkeys((value, *upper, *lower)))


_IMPOSSIBLE = re.compile(r"[ #\x80-\U0010ffff]")
_OUTSIDE = re.compile(r"[ #\"<>\\^`{|}\x80-\U0010ffff]")


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{octet:02X}" for octet in found[0].encode())


def _percent_lower(found: re.Match[str]) -> str:
    return _percent(found).lower()


def _check_text(option: str, value: str) -> None:
    if value and value.isascii() and value.isprintable() and len(value) <= _LONGEST:
        # Nearly every value: everything below is about what these are not.
        return
    if not value:
        refuse(option, value, "it is empty", "Give a value.")
    if _FORBIDDEN.search(value):
        refuse(option, value, "it contains control characters", "Leave them out.")
    if len(value.encode()) > _LONGEST:
        refuse(option, value, f"it is longer than {_LONGEST} bytes", "Choose a shorter one.")
