# SPDX-License-Identifier: Apache-2.0
"""The L7 policies of a listener as lines of its frontend.

Invariant: the first enabled policy by position with all rules matching decides, for any action. A policy that cannot be
rendered raises an error, and HAProxy does not serve its listener.

HAProxy runs all `http-request` lines of a frontend before its `use_backend` lines. A redirect to a pool before a policy
of another kind therefore stores its backend in a variable and ends the `http-request` lines with `allow`. Redirects to
pools at the end use `use_backend` only. A disabled pool answers 503, also as default pool.

Each rule is one named ACL: several lines with one name are alternatives (HAProxy 2.6 manual, section 7.1). All values
follow `--`, so that no value is a flag.

A regular expression that reaches its limit gives no result. The rule then counts as true in a rejecting policy and as
false in all others. So the limit never lets a request pass a rejecting policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter

import msgspec

from amphora_driver.errors import ModelError, UnsupportedOption
from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType
from amphora_driver.model.loadbalancer import L7Policy, L7Rule, Listener
from amphora_driver.render import quoting, render_errors
from amphora_driver.render.quoting import Quoted
from amphora_driver.validation import l7, regex

_REMEMBERED = 8_192
# Maximum length of a rendered value of a rule. The limit exceeds the limit of the user's value, because
# percent-encoding can triple the length.
_LONGEST = 4 * quoting.MAX_TEXT

_ACL = quoting.keywords("acl")
_IF = quoting.keywords("if")
_MATCH = {
    L7Compare.STARTS_WITH: quoting.keywords("-m beg --"),
    L7Compare.ENDS_WITH: quoting.keywords("-m end --"),
    L7Compare.CONTAINS: quoting.keywords("-m sub --"),
    L7Compare.EQUAL_TO: quoting.keywords("-m str --"),
    L7Compare.REGEX: quoting.keywords("-m reg --"),
}
_FOLD = quoting.keywords("-i")
_IS_EMPTY = quoting.keywords("-m len 0")
_IS_NOT_EMPTY = quoting.keywords("-m len 1:")
_HAS_CERTIFICATE = quoting.keywords("ssl_c_used")
_VERIFY_RESULT = quoting.keywords("ssl_c_verify -m int --")

# A variable holds the file extension of the path, so HAProxy computes it once for all FILE_TYPE rules.
_WITH_DOT = quoting.keywords(
    "http-request set-var(txn.extension) path,field(-1,/),field(-1,.) if { path,field(-1,/) -m sub"
)
_SET_EXTENSION = quoting.words((_WITH_DOT, quoting.text(".", "a dot"), quoting.keywords("}")))
_DENY = quoting.keywords("http-request deny deny_status 403")
_UNAVAILABLE = quoting.keywords("http-request deny deny_status 503")
_REDIRECT = {
    L7Action.REDIRECT_TO_URL: quoting.keywords("http-request redirect location"),
    L7Action.REDIRECT_PREFIX: quoting.keywords("http-request redirect prefix"),
}
_CODE = {code: quoting.keywords(f"code {code}") for code in l7.REDIRECT_CODES}
_SET_POOL = quoting.keywords("http-request set-var(txn.pool)")
_STRING = quoting.keywords("str")
_CHOSEN = quoting.keywords("http-request allow if { var(txn.pool) -m found }")
_USE_CHOSEN = quoting.keywords("use_backend %[var(txn.pool)] if { var(txn.pool) -m found }")
_USE = quoting.keywords("use_backend")


class L7(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a frontend: `acl` lines, then `http-request` and `use_backend` lines.

    Each of the pools needs its backend for this listener.
    """

    acls: tuple[Quoted, ...] = ()
    rules: tuple[Quoted, ...] = ()
    pools: tuple[str, ...] = ()


class _Condition(msgspec.Struct, frozen=True, kw_only=True):
    """The condition of a policy: its ACLs, and the words after `if`."""

    acls: tuple[Quoted, ...]
    terms: Quoted
    names: tuple[str, ...]
    extension: bool


def policies(listener: Listener, backend_of: Callable[[str], Quoted | None]) -> L7:
    """Return the lines of a listener's policies.

    A policy without an enabled rule never applies. `backend_of` returns the backend of a pool for this listener (None
    for a disabled pool), or raises ModelError for an unrecorded pool.

    Raises:
        ModelError: HAProxy cannot express the policy or rule `object_id`.
        ConfigurationError: PCRE2, which checks regular expressions, is not installed.
    """
    conditions: list[tuple[L7Policy, _Condition]] = []
    pools: dict[str, Quoted | None] = {}
    for policy in sorted(listener.l7policies, key=attrgetter("position", "id")):
        if not policy.admin_state_up:
            continue
        try:
            condition = _condition(policy)
        except UnsupportedOption as error:
            raise render_errors.as_refusal(error, policy.id) from error
        if condition is not None:
            conditions.append((policy, condition))
    _check_distinct(conditions)
    for policy, _ in conditions:
        if policy.action is L7Action.REDIRECT_TO_POOL:
            try:
                pools[str(policy.redirect_pool_id)] = backend_of(str(policy.redirect_pool_id))
            except ModelError as error:
                raise ModelError(error.wanted, error.happened, error.remedy, object_id=policy.id) from error
    rules = [_SET_EXTENSION] if any(condition.extension for _, condition in conditions) else []
    rules += _actions(conditions, pools)
    return L7(
        acls=tuple(line for _, condition in conditions for line in condition.acls),
        rules=tuple(rules),
        pools=tuple(pool_id for pool_id, backend in pools.items() if backend is not None),
    )


def _check_distinct(conditions: list[tuple[L7Policy, _Condition]]) -> None:
    """Refuse a second rule with the same id, because its ACL would be an alternative to the first ACL."""
    seen: set[str] = set()
    for policy, condition in conditions:
        for name in condition.names:
            if name in seen:
                raise ModelError(f"render {policy.id}", f"another rule is called {name!r}", object_id=policy.id)
            seen.add(name)


def _actions(conditions: list[tuple[L7Policy, _Condition]], pools: dict[str, Quoted | None]) -> list[Quoted]:
    to_pool = L7Action.REDIRECT_TO_POOL
    backends = [pools[str(one.redirect_pool_id)] if one.action is to_pool else None for one, _ in conditions]
    # HAProxy applies all `http-request` lines before all `use_backend` lines. To keep the order, only the last
    # policies, which all redirect to pools, become `use_backend` lines.
    plain = len(backends)
    while plain and backends[plain - 1] is not None:
        plain -= 1
    lines: list[Quoted] = []
    used: list[Quoted] = [_USE_CHOSEN] if any(backends[:plain]) else []
    for number, ((policy, condition), backend) in enumerate(zip(conditions, backends, strict=True)):
        if backend is None:
            lines.append(quoting.words((_action(policy), _IF, condition.terms)))
        elif number < plain:
            chosen = quoting.call(_STRING, backend)
            lines += (quoting.words((_SET_POOL, chosen, _IF, condition.terms)), _CHOSEN)
        else:
            used.append(quoting.words((_USE, backend, _IF, condition.terms)))
    return lines + used


@lru_cache(maxsize=_REMEMBERED)
def _action(policy: L7Policy) -> Quoted:
    """Return the action of a policy without a serving pool, without its condition."""
    if policy.action is L7Action.REJECT:
        return _DENY
    if policy.action is L7Action.REDIRECT_TO_POOL:
        return _UNAVAILABLE
    target = l7.check_redirect_target(policy)
    if policy.action is L7Action.REDIRECT_PREFIX and not set("?#") & set(target):
        # HAProxy appends the path to the prefix, and the path begins with a slash. So the prefix must not end with a
        # slash.
        target = target.rstrip("/") or "/"
    code = policy.redirect_http_code or l7.DEFAULT_REDIRECT_CODE
    return quoting.words(
        (_REDIRECT[policy.action], quoting.log_format(target, "where to redirect", policy.id), _CODE[code])
    )


@lru_cache(maxsize=_REMEMBERED)
def _condition(policy: L7Policy) -> _Condition | None:
    """Return the condition of a policy; None without an enabled rule."""
    l7.check_l7policy(policy)
    rules = [rule for rule in policy.rules if rule.admin_state_up]
    if not rules:
        return None
    if len(rules) > l7.MAX_RULES:
        raise UnsupportedOption(
            f"use {len(rules)} rules in one L7 policy", f"at most {l7.MAX_RULES} are served", "Use several policies."
        )
    # HAProxy stops at the first rule that does not match, so the slow regular expressions are last.
    rules.sort(key=lambda rule: (rule.compare_type is L7Compare.REGEX, rule.id))
    acls: list[Quoted] = []
    terms: list[Quoted] = []
    extension = False
    for rule in rules:
        try:
            name = _name(rule)
            acls += _acls(rule, name, doubtful=(policy.action is L7Action.REJECT) is not rule.invert)
        except UnsupportedOption as error:
            raise render_errors.as_refusal(error, rule.id) from error
        terms.append(quoting.negated(name) if rule.invert else name)
        extension = extension or (rule.type is L7RuleType.FILE_TYPE and not _is_suffix(rule))
    return _Condition(
        acls=tuple(acls), terms=quoting.words(terms), names=tuple([rule.id for rule in rules]), extension=extension
    )


def _name(rule: L7Rule) -> Quoted:
    if rule.id.lower() == "or":
        raise ModelError("name an ACL", "'or' is a word of its own in a condition", object_id=rule.id)
    return quoting.identifier(rule.id, "the rule's id", rule.id)


def _acls(rule: L7Rule, name: Quoted, *, doubtful: bool) -> list[Quoted]:
    """Return the ACL of a rule without its inversion. At the step limit the result is `doubtful`."""
    l7.check_l7rule(rule)
    if rule.type is L7RuleType.SSL_CONN_HAS_CERT:
        return [quoting.words((_ACL, name, _HAS_CERTIFICATE))]
    if rule.type is L7RuleType.SSL_VERIFY_RESULT:
        return [quoting.words((_ACL, name, _VERIFY_RESULT, l7.parse_verify_result(rule)))]
    if rule.compare_type is L7Compare.REGEX:
        return _searches(rule, name, doubtful=doubtful)
    compare = L7Compare.ENDS_WITH if _is_suffix(rule) else rule.compare_type
    fold = rule.type is L7RuleType.HOST_NAME
    values = [quoting.text(value, "the value", rule.id, longest=_LONGEST) for value in _values(rule)]
    return [quoting.words((_ACL, name, test, *values)) for test in _tests(_fetches(rule), compare, fold)]


@lru_cache(maxsize=_REMEMBERED)
def _tests(fetches: tuple[str, ...], compare: L7Compare, fold: bool) -> tuple[Quoted, ...]:
    """Return the fetches with their match methods. Thousands of rules have few different ones."""
    how = quoting.words((_FOLD, _MATCH[compare])) if fold else _MATCH[compare]
    return tuple(quoting.words((_word(fetch), how)) for fetch in fetches)


def _values(rule: L7Rule) -> tuple[str, ...]:
    if rule.type is L7RuleType.PATH:
        return l7.list_spellings(rule.value)
    if rule.type is L7RuleType.FILE_TYPE:
        dot = "." if _is_suffix(rule) else ""
        return tuple(f"{dot}{value}" for value in l7.list_spellings(l7.parse_extension(rule)))
    return (rule.value,)


def _is_suffix(rule: L7Rule) -> bool:
    """Return whether a FILE_TYPE rule matches more than the last extension, for example `tar.gz`."""
    equal = rule.type is L7RuleType.FILE_TYPE and rule.compare_type is L7Compare.EQUAL_TO
    return equal and "." in l7.parse_extension(rule)


def _fetches(rule: L7Rule) -> tuple[str, ...]:
    """Return the sample fetches of a rule. The rule is true if one of them matches."""
    fixed = _FIXED.get(rule.type)
    if fixed is not None:
        return _PATH if _is_suffix(rule) else fixed
    # HAProxy parses the arguments of a fetch twice, so the key is in double quotes. `check_l7rule` permits no double
    # quote in a key.
    if rule.type is L7RuleType.HEADER:
        # If one value of a header contains a text, the whole header contains the text too. So CONTAINS needs the whole
        # header only.
        whole, single = f'req.fhdr("{rule.key}")', f'req.hdr("{rule.key}")'
        return (whole,) if rule.compare_type is L7Compare.CONTAINS else (whole, single)
    return (f'req.cook("{rule.key}")',) if rule.type is L7RuleType.COOKIE else (f"ssl_c_s_dn({rule.key})",)


_PATH = ("path",)
_FIXED = {
    L7RuleType.PATH: _PATH,
    # A HOST_NAME rule matches the Host header with and without its port.
    L7RuleType.HOST_NAME: ("req.fhdr(host)", "req.fhdr(host),host_only"),
    L7RuleType.FILE_TYPE: ("var(txn.extension)",),
}


@lru_cache(maxsize=_REMEMBERED)
def _word(fetch: str) -> Quoted:
    return quoting.text(fetch, "the key") if '"' in fetch else quoting.keywords(fetch)


def _searches(rule: L7Rule, name: Quoted, *, doubtful: bool) -> list[Quoted]:
    """Return the ACL of a rule with a regular expression.

    If a doubtful result counts as a match, the ACL removes each value that certainly does not match, and tests for a
    rest. Only this test distinguishes "no match" from "no result" for each of several values. An empty value leaves no
    rest, so PCRE2 has determined whether it matches.
    """
    facts = l7.check_rule_pattern(rule)
    fold = rule.type is L7RuleType.HOST_NAME
    lines, where = [], "the regular expression"
    for fetch in _fetches(rule):
        if not doubtful:
            value = quoting.text(regex.matching_pattern(rule.value), where, rule.id, longest=_LONGEST)
            [test] = _tests((fetch,), L7Compare.REGEX, fold)
            lines.append(quoting.words((_ACL, name, test, value)))
            continue
        inverse = regex.inverse_pattern(rule.value, facts)
        left = quoting.substituted(fetch, inverse, "i" if fold else "", where, rule.id)
        lines.append(quoting.words((_ACL, name, left, _IS_NOT_EMPTY)))
        if facts.empty:
            lines.append(quoting.words((_ACL, name, _word(fetch), _IS_EMPTY)))
    return lines
