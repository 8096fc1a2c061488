# SPDX-License-Identifier: Apache-2.0
"""The L7 policies of a listener as lines of its frontend.

Invariant: the first enabled policy by position with all rules matching decides, for any action. No policy is left out:
a policy that cannot be rendered raises an error, and its listener is not served.

HAProxy runs all `http-request` lines of a frontend before its `use_backend` lines. A redirect to a pool before a policy
of another kind therefore stores its backend in a variable and ends the `http-request` lines with `allow`. Redirects to
pools at the end use `use_backend` only. A disabled pool answers 503, also as default pool.

Each rule is one named ACL: several lines with one name are alternatives (HAProxy 2.6 manual, section 7.1). All values
follow `--`, so that no value is a flag.

A regular expression that reaches its limit gives no result. The rule is then true in a rejecting policy and false in
all others: no request passes a rejecting policy by means of the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter

import msgspec

from amphora_driver.errors import ModelError, UnsupportedOption
from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType
from amphora_driver.model.loadbalancer import L7Policy, L7Rule, Listener
from amphora_driver.render import quoting
from amphora_driver.render.quoting import Quoted
from amphora_driver.validation import l7, regex

_REMEMBERED = 8_192

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

# Worked out once for a request: what follows the last dot of the last part of the path, if there is a dot.
_SET_EXTENSION = quoting.words(
    (
        quoting.keywords(
            "http-request set-var(txn.extension) path,field(-1,/),field(-1,.) if { path,field(-1,/) -m sub"
        ),
        quoting.text(".", "a dot"),
        quoting.keywords("}"),
    )
)
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
    """Lines of a frontend.

    Attributes:
        acls: one `acl` line or more for each rule; to stand before everything that is in `rules`.
        rules: `http-request` lines, then `use_backend` lines, in this order; only `default_backend` may follow.
        pools: the ids of the pools that serve some of it; each needs its backend for this listener.
    """

    acls: tuple[Quoted, ...] = ()
    rules: tuple[Quoted, ...] = ()
    pools: tuple[str, ...] = ()


class _Condition(msgspec.Struct, frozen=True, kw_only=True):
    """When a policy applies: its ACLs, and the words behind `if`."""

    acls: tuple[Quoted, ...]
    terms: Quoted
    names: tuple[str, ...]
    extension: bool


def policies(listener: Listener, backend_of: Callable[[str], Quoted | None]) -> L7:
    """What a listener's policies come to.

    Args:
        listener: with its policies, in any order. Disabled policies and rules say nothing, and a policy without an
            enabled rule never applies.
        backend_of: the backend of a pool for this listener; None if the pool is switched off. It raises `ModelError`
            for a pool that is not recorded.

    Raises:
        ModelError: a policy or rule that cannot be written; `object_id` is always set.
        ConfigurationError: there are regular expressions, and nothing here to check them with.
    """
    wanted = [policy for policy in listener.l7policies if policy.admin_state_up]
    if not wanted:
        return _NOTHING
    conditions = [
        (policy, condition)
        for policy in sorted(wanted, key=attrgetter("position", "id"))
        if (condition := _named(policy)) is not None
    ]
    _distinct(conditions)
    pools: dict[str, Quoted | None] = {}
    for policy, _ in conditions:
        if policy.action is L7Action.REDIRECT_TO_POOL:
            pools[str(policy.redirect_pool_id)] = _backend(policy, backend_of)
    rules = [_SET_EXTENSION] if any(condition.extension for _, condition in conditions) else []
    rules += _actions(conditions, pools)
    return L7(
        acls=tuple(line for _, condition in conditions for line in condition.acls),
        rules=tuple(rules),
        pools=tuple(pool_id for pool_id, backend in pools.items() if backend is not None),
    )


_NOTHING = L7()


def _named(policy: L7Policy) -> _Condition | None:
    """The condition of a policy; its errors say whose they are."""
    try:
        return _condition(policy)
    except UnsupportedOption as error:
        raise ModelError(error.wanted, error.happened, error.remedy, object_id=policy.id) from error


def _backend(policy: L7Policy, backend_of: Callable[[str], Quoted | None]) -> Quoted | None:
    try:
        return backend_of(str(policy.redirect_pool_id))
    except ModelError as error:
        raise ModelError(error.wanted, error.happened, error.remedy, object_id=policy.id) from error


def _distinct(conditions: list[tuple[L7Policy, _Condition]]) -> None:
    """Refuse a second rule of the same name: it would be an alternative to the first."""
    seen: set[str] = set()
    for policy, condition in conditions:
        for name in condition.names:
            if name in seen:
                raise ModelError(f"render {policy.id}", f"another rule is called {name!r}", object_id=policy.id)
            seen.add(name)


# -- actions --------------------------------------------------------------------------------


def _actions(conditions: list[tuple[L7Policy, _Condition]], pools: dict[str, Quoted | None]) -> list[Quoted]:
    """The lines of all policies, in their order."""
    backends = [
        pools[str(policy.redirect_pool_id)] if policy.action is L7Action.REDIRECT_TO_POOL else None
        for policy, _ in conditions
    ]
    # From here on there are only policies to pools: HAProxy's own order is the right one.
    plain = len(backends)
    while plain and backends[plain - 1] is not None:
        plain -= 1
    lines: list[Quoted] = []
    used: list[Quoted] = [_USE_CHOSEN] if any(backends[:plain]) else []
    for number, ((policy, condition), backend) in enumerate(zip(conditions, backends, strict=True)):
        if backend is None:
            lines.append(quoting.words((_action(policy), _IF, condition.terms)))
        elif number < plain:
            chosen = quoting.argument_of(_STRING, backend)
            lines += (quoting.words((_SET_POOL, chosen, _IF, condition.terms)), _CHOSEN)
        else:
            used.append(quoting.words((_USE, backend, _IF, condition.terms)))
    return lines + used


@lru_cache(maxsize=_REMEMBERED)
def _action(policy: L7Policy) -> Quoted:
    """What a policy does that ends a request here, without its condition."""
    if policy.action is L7Action.REJECT:
        return _DENY
    if policy.action is L7Action.REDIRECT_TO_POOL:
        return _UNAVAILABLE
    target = l7.check_redirect_target(policy)
    if policy.action is L7Action.REDIRECT_PREFIX and not set("?#") & set(target):
        # HAProxy puts the request's path behind it, and that begins with a slash.
        target = target.rstrip("/") or "/"
    code = policy.redirect_http_code or l7.DEFAULT_REDIRECT_CODE
    return quoting.words(
        (_REDIRECT[policy.action], quoting.log_format(target, "where to redirect", policy.id), _CODE[code])
    )


# -- conditions -----------------------------------------------------------------------------


@lru_cache(maxsize=_REMEMBERED)
def _condition(policy: L7Policy) -> _Condition | None:
    """When a policy applies, or None for one that has no enabled rule."""
    l7.check_l7policy(policy)
    rules = [rule for rule in policy.rules if rule.admin_state_up]
    if not rules:
        return None
    if len(rules) > l7.MAX_RULES:
        raise UnsupportedOption(
            f"use {len(rules)} rules in one L7 policy", f"at most {l7.MAX_RULES} are served", "Use several policies."
        )
    # HAProxy stops at the first that does not match: what costs most comes last.
    rules.sort(key=lambda rule: (rule.compare_type is L7Compare.REGEX, rule.id))
    acls: list[Quoted] = []
    terms: list[Quoted] = []
    extension = False
    for rule in rules:
        try:
            name = _name(rule)
            acls += _acls(rule, name, doubtful=(policy.action is L7Action.REJECT) is not rule.invert)
        except UnsupportedOption as error:
            raise ModelError(error.wanted, error.happened, error.remedy, object_id=rule.id) from error
        terms.append(quoting.negated(name) if rule.invert else name)
        extension = extension or (rule.type is L7RuleType.FILE_TYPE and not _is_suffix(rule))
    return _Condition(
        acls=tuple(acls),
        terms=quoting.words(terms),
        names=tuple([rule.id for rule in rules]),
        extension=extension,
    )


def _name(rule: L7Rule) -> Quoted:
    """The name of a rule's ACL."""
    if rule.id.lower() == "or":
        raise ModelError("name an ACL", "'or' is a word of its own in a condition", object_id=rule.id)
    return quoting.identifier(rule.id, "the rule's id", rule.id)


def _acls(rule: L7Rule, name: Quoted, *, doubtful: bool) -> list[Quoted]:
    """A rule's ACL, which matches when the rule, not inverted, is true.

    Args:
        rule: the rule.
        name: of the ACL.
        doubtful: what the ACL says where a regular expression has no answer.
    """
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
    """What is compared and how: thousands of rules have few of these."""
    how = quoting.words((_FOLD, _MATCH[compare])) if fold else _MATCH[compare]
    return tuple(quoting.words((_word(fetch), how)) for fetch in fetches)


_LONGEST = 4 * quoting.MAX_TEXT
"""A value of which every octet is percent-encoded is three times as long."""


def _values(rule: L7Rule) -> tuple[str, ...]:
    """All spellings of what the rule looks for."""
    if rule.type is L7RuleType.PATH:
        return l7.list_spellings(rule.value)
    if rule.type is L7RuleType.FILE_TYPE:
        dot = "." if _is_suffix(rule) else ""
        return tuple(f"{dot}{value}" for value in l7.list_spellings(l7.parse_extension(rule)))
    return (rule.value,)


def _is_suffix(rule: L7Rule) -> bool:
    """Whether a FILE_TYPE rule is about more than the last extension, as with `tar.gz`."""
    equal = rule.type is L7RuleType.FILE_TYPE and rule.compare_type is L7Compare.EQUAL_TO
    return equal and "." in l7.parse_extension(rule)


def _fetches(rule: L7Rule) -> tuple[str, ...]:
    """What the rule looks at: one of these has to be as it says."""
    fixed = _FIXED.get(rule.type)
    if fixed is not None:
        return _PATH if _is_suffix(rule) else fixed
    # Keys are tokens (`check_l7rule`): no character of theirs ends the second parser's double quotes.
    if rule.type is L7RuleType.HEADER:
        # The whole line, and each of the values that commas separate; whatever is in a value is in its line too.
        whole, single = f'req.fhdr("{rule.key}")', f'req.hdr("{rule.key}")'
        return (whole,) if rule.compare_type is L7Compare.CONTAINS else (whole, single)
    return (f'req.cook("{rule.key}")',) if rule.type is L7RuleType.COOKIE else (f"ssl_c_s_dn({rule.key})",)


_PATH = ("path",)
_FIXED = {
    L7RuleType.PATH: _PATH,
    # As the client wrote it, with the port, and without.
    L7RuleType.HOST_NAME: ("req.fhdr(host)", "req.fhdr(host),host_only"),
    L7RuleType.FILE_TYPE: ("var(txn.extension)",),
}


@lru_cache(maxsize=_REMEMBERED)
def _word(fetch: str) -> Quoted:
    """Return a sample fetch as a word; its key is quoted for both parsers of HAProxy."""
    return quoting.text(fetch, "the key") if '"' in fetch else quoting.keywords(fetch)


def _searches(rule: L7Rule, name: Quoted, *, doubtful: bool) -> list[Quoted]:
    """A rule with a regular expression.

    Where doubt counts as a match, what certainly does not match is substituted with nothing, and what is left is
    looked at: that is the only way to tell "no" from "no answer" for each of several values. An empty text is left
    empty by that, matching or not; PCRE2 said beforehand which it is.
    """
    facts = l7.check_rule_pattern(rule)
    fold = rule.type is L7RuleType.HOST_NAME
    lines = []
    for fetch in _fetches(rule):
        if not doubtful:
            value = quoting.text(
                regex.matching_pattern(rule.value), "the regular expression", rule.id, longest=_LONGEST
            )
            flags = (_FOLD, _MATCH[L7Compare.REGEX]) if fold else (_MATCH[L7Compare.REGEX],)
            lines.append(quoting.words((_ACL, name, _word(fetch), *flags, value)))
            continue
        left = quoting.substituted(
            fetch, regex.inverse_pattern(rule.value, facts), "i" if fold else "", "the regular expression", rule.id
        )
        lines.append(quoting.words((_ACL, name, left, _IS_NOT_EMPTY)))
        if facts.empty:
            lines.append(quoting.words((_ACL, name, _word(fetch), _IS_EMPTY)))
    return lines
