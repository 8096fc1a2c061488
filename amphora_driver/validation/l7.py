# SPDX-License-Identifier: Apache-2.0
"""Validation of L7 policies and rules, and the parser of their values.

Invariant: HAProxy's configuration can express every accepted policy and rule with the meaning that the user intended.
Each check raises `UnsupportedOption` for all others.

The checks ignore attributes of another type or action: a HEADER rule that becomes a PATH rule keeps its key, because
Octavia's API cannot remove the key.
"""

from __future__ import annotations

import re

from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType
from amphora_driver.model.loadbalancer import L7Policy, L7Rule
from amphora_driver.validation import regex
from amphora_driver.validation.unsupported import refuse, require_one_of

MAX_RULES = 50
"""Largest number of rules of a policy, as in Octavia. HAProxy accepts 64 words per line, and an action needs seven."""

REDIRECT_CODES = (301, 302, 303, 307, 308)
DEFAULT_REDIRECT_CODE = 302

COMPARISONS: dict[L7RuleType, tuple[L7Compare, ...]] = {
    **dict.fromkeys(L7RuleType, tuple(L7Compare)),
    L7RuleType.SSL_CONN_HAS_CERT: (L7Compare.EQUAL_TO,),
    L7RuleType.SSL_VERIFY_RESULT: (L7Compare.EQUAL_TO,),
}
"""Accepted comparisons. Octavia's API accepts FILE_TYPE with EQUAL_TO and REGEX only."""

MAX_VERIFY_RESULT = 2**31 - 1

_VALUE = {kind: f"value of an L7 rule of type {kind}:" for kind in L7RuleType}

_MAX_BYTES = 2048
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,255}")
"""The name of a header (RFC 9110, 5.6.2) or a cookie (RFC 6265, 4.1.1)."""
_DN_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,254}")
_KEYS = {L7RuleType.HEADER: TOKEN, L7RuleType.COOKIE: TOKEN, L7RuleType.SSL_DN_FIELD: _DN_FIELD}
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that tools read as line ends (C0, C1, DEL, Unicode separators), and surrogates, which have no bytes."""
_NUMBER = re.compile(r"[0-9]{1,10}")


def check_l7policy(policy: L7Policy) -> None:
    """Check the options of a policy without its rules."""
    if policy.action is L7Action.REDIRECT_TO_POOL:
        if not policy.redirect_pool_id:
            reason = "the action REDIRECT_TO_POOL needs a pool"
            refuse("L7 policy option redirect_pool_id", None, reason, "Set redirect_pool_id.")
    elif policy.action is not L7Action.REJECT:
        check_redirect_target(policy)
        if policy.redirect_http_code is not None:
            require_one_of("L7 policy option redirect_http_code", policy.redirect_http_code, REDIRECT_CODES)


def check_redirect_target(policy: L7Policy) -> str:
    """Return the target of a redirecting policy without any change.

    HAProxy sends the text in a Location header. The function refuses characters that a header cannot contain, but not
    characters that a URI reference (RFC 3986) does not permit, such as a space.
    """
    name = "redirect_url" if policy.action is L7Action.REDIRECT_TO_URL else "redirect_prefix"
    option, value = f"L7 policy option {name}", getattr(policy, name)
    if not value:
        refuse(option, value, f"the action {policy.action} needs it", f"Set {name}.")
    _check_text(option, value)
    if value.strip() != value:
        refuse(option, value, "a header does not keep white space at its start or end", "Remove it, or write %20.")
    return str(value)


def check_l7rule(rule: L7Rule) -> None:
    """Check the options of a rule. Raise ConfigurationError for a pattern on a host without PCRE2."""
    if rule.compare_type not in COMPARISONS[rule.type]:
        require_one_of(f"compare_type of an L7 rule of type {rule.type}:", rule.compare_type, COMPARISONS[rule.type])
    keys = _KEYS.get(rule.type)
    if keys is not None and not keys.fullmatch(rule.key or ""):
        is_dn = rule.type is L7RuleType.SSL_DN_FIELD
        reason = "it is not a field of a distinguished name" if is_dn else "it is not a valid name"
        refuse(f"key of an L7 rule of type {rule.type}:", rule.key, reason, "Use letters, digits and '-'.")
    option = _VALUE[rule.type]
    _check_text(option, rule.value)
    if rule.type is L7RuleType.SSL_CONN_HAS_CERT:
        if rule.value.lower() != "true":
            refuse(option, rule.value, "the only valid value is True", "Set invert for the opposite.")
    elif rule.type is L7RuleType.SSL_VERIFY_RESULT:
        parse_verify_result(rule)
    elif rule.compare_type is L7Compare.REGEX:
        check_rule_pattern(rule)
    elif rule.type is L7RuleType.FILE_TYPE:
        parse_extension(rule)


def check_rule_pattern(rule: L7Rule) -> regex.PatternFacts:
    """Check the regular expression of a rule, and return its properties."""
    return regex.check_pattern(_VALUE[rule.type], rule.value, caseless=rule.type is L7RuleType.HOST_NAME)


def parse_verify_result(rule: L7Rule) -> int:
    """Return the number of an SSL_VERIFY_RESULT rule."""
    option = _VALUE[rule.type]
    if not _NUMBER.fullmatch(rule.value) or int(rule.value) > MAX_VERIFY_RESULT:
        reason = "it is not the number of a verification result"
        refuse(option, rule.value, reason, f"Use a number from 0 to {MAX_VERIFY_RESULT}.")
    return int(rule.value)


def parse_extension(rule: L7Rule) -> str:
    """Return the extension of a FILE_TYPE rule without a dot at its start: `jpg` for `.jpg`.

    Only EQUAL_TO can contain a dot (`tar.gz`), because other comparisons see the part after the last dot only.
    """
    value = rule.value.removeprefix(".")
    inner = "/" if rule.compare_type is L7Compare.EQUAL_TO else "/."
    if not value or any(character in value for character in inner):
        refuse(_VALUE[rule.type], rule.value, "no file extension matches it", "Use an extension such as jpg or tar.gz.")
    return value


def list_spellings(value: str) -> tuple[str, ...]:
    """Return the value and its percent-encoded forms in a URI (RFC 3986, 2.1).

    All clients encode characters that a request line cannot contain, as octets of UTF-8. Most clients encode the other
    characters outside of the grammar. Hexadecimal digits have upper or lower case.
    """
    if value.isascii() and not _OUTSIDE.search(value):
        return (value,)
    upper = [outside.sub(_percent, value) for outside in (_IMPOSSIBLE, _OUTSIDE)]
    lower = [outside.sub(lambda found: _percent(found).lower(), value) for outside in (_IMPOSSIBLE, _OUTSIDE)]
    return tuple(dict.fromkeys((value, *upper, *lower)))


_IMPOSSIBLE = re.compile(r"[ #\x80-\U0010ffff]")
_OUTSIDE = re.compile(r"[ #\"<>\\^`{|}\x80-\U0010ffff]")


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{octet:02X}" for octet in found[0].encode())


def _check_text(option: str, value: str) -> None:
    if value and value.isascii() and value.isprintable() and len(value) <= _MAX_BYTES:
        # Nearly all values are short printable ASCII texts, which need no further checks.
        return
    if not value:
        refuse(option, value, "it is empty", "Set a value.")
    if FORBIDDEN.search(value):
        refuse(option, value, "it contains control characters", "Remove them.")
    if len(value.encode()) > _MAX_BYTES:
        refuse(option, value, f"it is longer than {_MAX_BYTES} bytes", "Use a shorter value.")
