# SPDX-License-Identifier: Apache-2.0
"""The lines of L7 policies, checked by HAProxy. tests/dataplane/test_l7_policies.py tests their effect."""

from __future__ import annotations

import itertools
import random
import subprocess
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from amphora_driver.errors import ConfigurationError, ModelError
from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType, ListenerProtocol
from amphora_driver.model.loadbalancer import L7Policy, L7Rule, Listener
from amphora_driver.render import l7, quoting
from amphora_driver.validation import regex
from amphora_driver.validation.l7 import COMPARISONS

KEYS = {L7RuleType.HEADER: "X-!#$%&'*+-.^_`|~", L7RuleType.COOKIE: "a'b", L7RuleType.SSL_DN_FIELD: "CN"}
VALUES = {L7RuleType.SSL_CONN_HAS_CERT: "True", L7RuleType.SSL_VERIFY_RESULT: "2"}
NASTY = (
    "-f",
    "--",
    "-m",
    "-i",
    "a b",
    "a#b",
    "it's",
    '"q"',
    "%[src]",
    "$HOME",
    "${HOME}",
    "a\\",
    "\\ b",
    "é",
    "{",
    "}",
    "!a",
)
TARGETS = ("https://example.com/?a=1&b='2'#c", "https://example.com/%20%[src]$HOME", "https://example.com/a b/é\\")
_COUNT = itertools.count()


def rule(kind: str = "PATH", compare: str = "EQUAL_TO", value: str | None = None, **more) -> L7Rule:
    kind = L7RuleType(kind)
    more = {"id": f"r{next(_COUNT)}", "key": KEYS.get(kind), **more}
    value = VALUES.get(kind, "/x") if value is None else value
    return L7Rule(l7policy_id="p", type=kind, compare_type=L7Compare(compare), value=value, **more)


def policy(action: str = "REJECT", position: int = 1, *rules: L7Rule, **more) -> L7Policy:
    more = {"id": f"p{position}", **more}
    return L7Policy(listener_id="l", action=L7Action(action), position=position, rules=rules, **more)


def made(*policies: L7Policy) -> l7.L7:
    listener = Listener(
        id="l", loadbalancer_id="b", protocol=ListenerProtocol.HTTP, protocol_port=80, l7policies=policies
    )
    return l7.policies(listener, backend_of)


def backend_of(pool_id: str):
    if pool_id == "unknown":
        raise ModelError("find the pool", "it is not recorded", object_id="l")
    return None if pool_id == "off" else quoting.backend_name(*map(quoting.keywords, (pool_id, "l")))


def haproxy_takes(frontends: Iterable[l7.L7], folder) -> None:
    """All rules in one file, without a warning."""
    lines = ["defaults", "    mode http", "    timeout client 1s", "    timeout server 1s", "    timeout connect 1s"]
    for number, each in enumerate(frontends):
        lines += [f"frontend f{number}", f"    bind unix@{folder}/s{number}"]
        lines += [f"    {line}" for line in (*each.acls, *each.rules)]
    lines += [f"backend {pool}:l" for pool in ("a", "b")]
    configuration = folder / "haproxy.cfg"
    configuration.write_text("\n".join([*lines, ""]))
    run = subprocess.run(["haproxy", "-c", "-dW", "-f", configuration], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# -- conditions ----------------------------------------------------------------------------------------------------


def test_haproxy_accepts_every_type_and_comparison(tmp_path):
    frontends = []
    more = {"redirect_pool_id": "a", "redirect_url": TARGETS[0], "redirect_prefix": TARGETS[1]}
    for kind, compare in itertools.product(L7RuleType, L7Compare):
        if compare not in COMPARISONS[kind]:
            continue
        nasty = map(regex_of, NASTY) if compare is L7Compare.REGEX else NASTY
        values = (None,) if kind in VALUES else ("x", *nasty)
        for value, invert, action in itertools.product(values, (False, True), L7Action):
            frontends.append(made(policy(action, 1, rule(kind, compare, value, invert=invert), **more)))
    assert len(frontends) > 4000
    haproxy_takes(frontends, tmp_path)


def regex_of(text: str) -> str:
    """A pattern for a text, with classes and escapes."""
    return "^(?:" + "".join(f"[{each}]" if each not in "\\^" else f"\\{each}" for each in text) + r")\d?,?\)?$"


PIECES = (
    *"ab.^$|()[]*+?{}\\\"'#%, -",
    "é",
    "(?:",
    "(?<n>",
    "\\k<n>",
    "[^",
    "\\d",
    "{2}",
    "(?i)",
    "\\Q",
    "\\E",
    "(*",
    "(?=",
    "|^",
)


def test_haproxy_accepts_every_accepted_pattern(tmp_path):
    """The lines for one value in upper and lower case."""
    chance = random.Random(1)
    frontends, refused = [], 0
    for _ in range(3000):
        pattern = "".join(chance.choices(PIECES, k=chance.randint(1, 9)))
        kind = chance.choice(("HOST_NAME", "PATH", "COOKIE"))
        try:
            frontends += [
                made(policy("REJECT", 1, rule(kind, "REGEX", pattern, invert=each))) for each in (False, True)
            ]
        except ModelError:
            refused += 1
    assert refused > 500
    assert len(frontends) > 1000
    haproxy_takes(frontends, tmp_path)


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [
        (rule("PATH", "STARTS_WITH", "/a", id="r"), ["acl r path -m beg -- '/a'"]),
        (
            rule("HOST_NAME", "EQUAL_TO", "A.example", id="r"),
            [
                "acl r req.fhdr(host) -i -m str -- 'A.example'",
                "acl r req.fhdr(host),host_only -i -m str -- 'A.example'",
            ],
        ),
        (rule("FILE_TYPE", "EQUAL_TO", ".jpg", id="r"), ["acl r var(txn.extension) -m str -- 'jpg'"]),
        (rule("FILE_TYPE", "EQUAL_TO", "tar.gz", id="r"), ["acl r path -m end -- '.tar.gz'"]),
        (
            rule("HEADER", "ENDS_WITH", "a", key="X-It's", id="r"),
            [
                "acl r 'req.fhdr(\"X-It'\\''s\")' -m end -- 'a'",
                "acl r 'req.hdr(\"X-It'\\''s\")' -m end -- 'a'",
            ],
        ),
        (rule("HEADER", "CONTAINS", "a", key="X", id="r"), ["acl r 'req.fhdr(\"X\")' -m sub -- 'a'"]),
        (rule("COOKIE", "EQUAL_TO", "-f", key="k", id="r"), ["acl r 'req.cook(\"k\")' -m str -- '-f'"]),
        (rule("SSL_CONN_HAS_CERT", id="r"), ["acl r ssl_c_used"]),
        (rule("SSL_VERIFY_RESULT", value="010", id="r"), ["acl r ssl_c_verify -m int -- 10"]),
        (rule("SSL_DN_FIELD", "CONTAINS", "a b", key="OU", id="r"), ["acl r ssl_c_s_dn(OU) -m sub -- 'a b'"]),
        (rule("PATH", "EQUAL_TO", "/é", id="r"), ["acl r path -m str -- '/é' '/%C3%A9' '/%c3%a9'"]),
    ],
    ids=lambda value: f"{value.type}-{value.value}" if isinstance(value, L7Rule) else "",
)
def test_rules_are_rendered(wanted, lines):
    assert list(made(policy("REJECT", 1, wanted)).acls) == lines


def test_an_aborted_regex_search_counts_as_a_match():
    """A rejected client stays rejected: a search without a result counts as a match."""
    steps = regex.MATCH_LIMIT
    narrow = f"acl r path -m reg -- '(*LIMIT_MATCH={steps})^/a'"
    wide = f'acl r \'path,regsub("(*LIMIT_MATCH={steps})(?n)\\\\A(?!(?:^/a\\\\E))[\\\\s\\\\S]*","","")\' -m len 1:'
    for action, invert, line in (
        ("REJECT", False, wide),
        ("REJECT", True, narrow),
        ("REDIRECT_TO_POOL", False, narrow),
        ("REDIRECT_TO_POOL", True, wide),
    ):
        wanted = rule("PATH", "REGEX", "^/a", id="r", invert=invert)
        assert list(made(policy(action, 1, wanted, redirect_pool_id="a")).acls) == [line]


def test_an_empty_value_is_rendered_as_a_pattern_without_match():
    acls = made(policy("REJECT", 1, rule("COOKIE", "REGEX", "^x?$", key="k", id="r"))).acls
    assert acls[1:] == ("acl r 'req.cook(\"k\")' -m len 0",)


def test_rules_are_combined_and_the_most_expensive_is_last():
    rules = (rule(compare="REGEX", value="^/", id="r1"), rule(id="r3", invert=True), rule(id="r2"))
    for order in itertools.permutations(rules):
        assert made(policy("REJECT", 1, *order)).rules == ("http-request deny deny_status 403 if r2 !r3 r1",)


def test_the_file_extension_is_computed_once():
    wanted = made(policy("REJECT", 1, rule("FILE_TYPE", value="a")), policy("REJECT", 2, rule("FILE_TYPE", value="b")))
    assert [line.split()[1] for line in wanted.rules] == ["set-var(txn.extension)", "deny", "deny"]


@pytest.mark.parametrize("action", L7Action)
def test_fifty_rules_are_rendered(action, tmp_path):
    rules = tuple(rule(value=f"/{n}", id=f"52cf5fb1-5a1e-4f0c-93a5-{n:012}", invert=True) for n in range(50))
    more = {"redirect_pool_id": "a", "redirect_url": TARGETS[0], "redirect_prefix": TARGETS[0]}
    # A policy of another kind after it gives the longest line for a policy to a pool.
    frontend = made(policy(action, 1, *rules, redirect_http_code=308, **more), policy("REJECT", 2, rule()))
    haproxy_takes([frontend], tmp_path)
    with pytest.raises(ModelError, match="51 rules") as caught:
        made(policy(action, 1, *rules, rule(), **more))
    assert caught.value.object_id == "p1"


def test_the_longest_values_fit_in_a_line(tmp_path):
    long = "é" * 1023
    targets = {"redirect_url": "%" * 1024, "redirect_prefix": "https://e/" + "x" * 2000}
    policies = [
        policy("REDIRECT_TO_URL", 1, rule(value=f"/{long}"), **targets),
        policy("REDIRECT_PREFIX", 2, rule("HEADER", "CONTAINS", long, key="k" * 255), **targets),
        policy("REJECT", 3, rule("HOST_NAME", "REGEX", "\\\\" * 1000), rule("HEADER", "REGEX", '"' * 2048)),
    ]
    haproxy_takes([made(*policies)], tmp_path)


# -- actions -------------------------------------------------------------------------------------------------------


def test_no_policies_render_nothing():
    assert made() == l7.L7()
    assert made(policy("REJECT", 1)) == l7.L7()


def test_disabled_policies_render_nothing():
    off = rule(id="off", admin_state_up=False, value="\n")
    assert made(policy("REJECT", 1, off)) == l7.L7()
    assert made(policy("REJECT", 1, rule(), admin_state_up=False)) == l7.L7()
    assert made(policy("REJECT", 1, off, rule(id="on"))).rules == ("http-request deny deny_status 403 if on",)


@pytest.mark.parametrize(
    ("action", "more", "line"),
    [
        ("REDIRECT_TO_URL", {}, "location 'https://e/%%20'"),
        ("REDIRECT_PREFIX", {}, "prefix 'https://e'"),
        ("REDIRECT_PREFIX", {"redirect_prefix": "https://e//"}, "prefix 'https://e'"),
        ("REDIRECT_PREFIX", {"redirect_prefix": "https://e/a/"}, "prefix 'https://e/a'"),
        ("REDIRECT_PREFIX", {"redirect_prefix": "https://e/?to=/"}, "prefix 'https://e/?to=/'"),
        ("REDIRECT_PREFIX", {"redirect_prefix": "/"}, "prefix '/'"),
    ],
)
@pytest.mark.parametrize("code", [None, 301, 302, 303, 307, 308])
def test_redirects_are_rendered(action, more, line, code):
    more = {"redirect_url": "https://e/%20", "redirect_prefix": "https://e/", "redirect_http_code": code, **more}
    (written,) = made(policy(action, 1, rule(id="r"), **more)).rules
    assert written == f"http-request redirect {line} code {code or 302} if r"


def to_pool(position: int, pool: str = "a") -> L7Policy:
    return policy("REDIRECT_TO_POOL", position, rule(id=f"r{position}"), redirect_pool_id=pool)


def reject(position: int) -> L7Policy:
    return policy("REJECT", position, rule(id=f"r{position}"))


CHOSEN = "http-request allow if { var(txn.pool) -m found }"
USE_CHOSEN = "use_backend %[var(txn.pool)] if { var(txn.pool) -m found }"


@pytest.mark.parametrize(
    ("policies", "lines", "pools"),
    [
        ([to_pool(1), to_pool(2, "b")], ["use_backend a:l if r1", "use_backend b:l if r2"], ("a", "b")),
        ([reject(1), to_pool(2)], ["http-request deny deny_status 403 if r1", "use_backend a:l if r2"], ("a",)),
        (
            [to_pool(1), reject(2), to_pool(3, "b"), to_pool(4)],
            [
                "http-request set-var(txn.pool) str(a:l) if r1",
                CHOSEN,
                "http-request deny deny_status 403 if r2",
                USE_CHOSEN,
                "use_backend b:l if r3",
                "use_backend a:l if r4",
            ],
            ("a", "b"),
        ),
        (
            [to_pool(1), to_pool(2, "off"), to_pool(3)],
            [
                "http-request set-var(txn.pool) str(a:l) if r1",
                CHOSEN,
                "http-request deny deny_status 503 if r2",
                USE_CHOSEN,
                "use_backend a:l if r3",
            ],
            ("a",),
        ),
        ([to_pool(1, "off")], ["http-request deny deny_status 503 if r1"], ()),
    ],
)
def test_positions_order_the_policies(policies, lines, pools, tmp_path):
    wanted = made(*policies)
    assert (list(wanted.rules), wanted.pools) == (lines, pools)
    haproxy_takes([wanted], tmp_path)


def test_the_order_of_reading_does_not_matter():
    chance = random.Random(1)
    actions = [*map(str, L7Action)] * 6
    more = {"redirect_pool_id": "a", "redirect_url": TARGETS[0], "redirect_prefix": TARGETS[0]}
    policies = [policy(action, n, rule(id=f"r{n}a"), rule(id=f"r{n}b"), **more) for n, action in enumerate(actions)]
    wanted = made(*policies)
    for _ in range(5):
        mixed = [replace(each, rules=tuple(chance.sample(each.rules, 2))) for each in policies]
        assert made(*chance.sample(mixed, len(mixed))) == wanted


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "at_fault", "named"),
    [
        (policy("REJECT", 1, rule(value="", id="r")), "r", "PATH"),
        (policy("REJECT", 1, rule("HEADER", key="a b", id="r")), "r", "not a valid name"),
        (policy("REJECT", 1, rule(compare="REGEX", value="(", id="r")), "r", "parenthesis"),
        (policy("REJECT", 1, rule(compare="REGEX", value="(a+)+$", id="r")), "r", "grows exponentially"),
        (policy("REJECT", 1, rule(id="or")), "or", "word of its own"),
        (policy("REJECT", 1, rule(id="OR")), "OR", "word of its own"),
        (policy("REJECT", 1, rule(id="a b")), "a b", "identifier"),
        (policy("REDIRECT_TO_POOL", 1, rule(), redirect_pool_id="unknown"), "p1", "not recorded"),
        (policy("REDIRECT_TO_POOL", 1, rule()), "p1", "redirect_pool_id"),
        (policy("REDIRECT_TO_URL", 1, rule(), redirect_url="a\nb"), "p1", "control"),
        (policy("REJECT", 1, rule(id="twice"), rule(id="twice")), "p1", "twice"),
    ],
)
def test_errors_name_the_unrenderable_rules(wrong, at_fault, named):
    with pytest.raises(ModelError, match=named) as caught:
        made(policy("REJECT", 2, rule()), wrong)
    assert caught.value.object_id == at_fault


def test_equal_rule_ids_in_two_policies_are_refused():
    with pytest.raises(ModelError, match="twice") as caught:
        made(policy("REJECT", 1, rule(id="twice")), policy("REJECT", 2, rule(id="twice")))
    assert caught.value.object_id == "p2"


def test_without_pcre2_rendering_fails_without_a_faulty_object(monkeypatch):
    regex._library.cache_clear()
    monkeypatch.setattr(regex, "LIBRARY", "libnothing-at-all.so.0")
    try:
        with pytest.raises(ConfigurationError):
            made(policy("REJECT", 1, rule(compare="REGEX", value="^never seen before$")))
    finally:
        regex._library.cache_clear()


def test_unchanged_policies_come_from_the_cache(monkeypatch):
    policies = [policy("REJECT", n, rule(compare="REGEX", value=f"^/{n}", id=f"r{n}")) for n in range(20)]
    before = made(*policies)
    written = []
    real = l7._searches
    monkeypatch.setattr(l7, "_searches", lambda *args, **more: written.append(args[0].id) or real(*args, **more))
    policies[7] = policy("REJECT", 7, rule(compare="REGEX", value="^/other", id="r7"))
    after = made(*policies)
    assert written == ["r7"]
    assert [n for n in range(20) if before.acls[n] != after.acls[n]] == [7]
