# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType
from amphora_driver.model.loadbalancer import L7Policy, L7Rule
from amphora_driver.validation import l7

KEYS = {L7RuleType.HEADER: "X-Key", L7RuleType.COOKIE: "key", L7RuleType.SSL_DN_FIELD: "CN"}
VALUES = {L7RuleType.SSL_CONN_HAS_CERT: "True", L7RuleType.SSL_VERIFY_RESULT: "0"}


def rule(kind: str, compare: str = "EQUAL_TO", value: str | None = None, **more) -> L7Rule:
    kind = L7RuleType(kind)
    more.setdefault("key", KEYS.get(kind))
    value = VALUES.get(kind, "value") if value is None else value
    return L7Rule(id="r", l7policy_id="p", type=kind, compare_type=L7Compare(compare), value=value, **more)


def policy(action: str, **more) -> L7Policy:
    return L7Policy(id="p", listener_id="l", action=L7Action(action), position=1, **more)


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("compare", L7Compare)
@pytest.mark.parametrize("kind", L7RuleType)
def test_types_and_comparisons_are_validated(kind, compare, invert):
    wanted = rule(kind, compare, invert=invert)
    if compare in l7.COMPARISONS[kind]:
        l7.check_l7rule(wanted)
    else:
        with pytest.raises(UnsupportedOption, match=f"compare_type of an L7 rule of type {kind}: '{compare}'"):
            l7.check_l7rule(wanted)


def test_numbers_and_booleans_need_equal_to():
    few = {kind for kind, comparisons in l7.COMPARISONS.items() if len(comparisons) < len(L7Compare)}
    assert few == {L7RuleType.SSL_CONN_HAS_CERT, L7RuleType.SSL_VERIFY_RESULT}


@pytest.mark.parametrize("kind", [L7RuleType.HEADER, L7RuleType.COOKIE])
@pytest.mark.parametrize("key", ["X", "x-y", "!#$%&'*+-.^_`|~09azAZ", "k" * 255])
def test_valid_keys_are_accepted(kind, key):
    l7.check_l7rule(rule(kind, key=key))


@pytest.mark.parametrize("kind", [L7RuleType.HEADER, L7RuleType.COOKIE])
@pytest.mark.parametrize(
    "key", [None, "", "a b", "a,b", "a:b", "a(b", "a)b", 'a"b', "a\\b", "é", "a\n", "a\0", "k" * 256]
)
def test_keys_that_are_no_tokens_are_refused(kind, key):
    with pytest.raises(UnsupportedOption, match=f"key of an L7 rule of type {kind}:"):
        l7.check_l7rule(rule(kind, key=key))


@pytest.mark.parametrize("key", [None, "", "1a", "C N", "CN\n", "C,N", "-CN"])
def test_keys_that_are_no_distinguished_name_fields_are_refused(key):
    with pytest.raises(UnsupportedOption, match="key of an L7 rule of type SSL_DN_FIELD:"):
        l7.check_l7rule(rule("SSL_DN_FIELD", key=key))


def test_an_unused_key_is_ignored():
    l7.check_l7rule(rule("PATH", key="left over\n"))


@pytest.mark.parametrize("compare", L7Compare)
@pytest.mark.parametrize("kind", ["HOST_NAME", "PATH", "FILE_TYPE", "HEADER", "COOKIE", "SSL_DN_FIELD"])
@pytest.mark.parametrize("value", ["", "a\nb", "a\rb", "a\0b", "a\tb", "\x7f", "\x85", "\u2028", "\ud800", "x" * 2049])
def test_impossible_values_are_refused(kind, compare, value):
    with pytest.raises(UnsupportedOption, match=f"value of an L7 rule of type {kind}:"):
        l7.check_l7rule(rule(kind, compare, value))


@pytest.mark.parametrize("value", ["true", "True", "TRUE"])
def test_ssl_conn_has_cert_is_validated(value):
    l7.check_l7rule(rule("SSL_CONN_HAS_CERT", value=value))


@pytest.mark.parametrize("value", ["False", "1", "yes", "True\u00a0"])
def test_a_missing_certificate_needs_invert(value):
    with pytest.raises(UnsupportedOption, match="SSL_CONN_HAS_CERT"):
        l7.check_l7rule(rule("SSL_CONN_HAS_CERT", value=value))


@pytest.mark.parametrize(("value", "number"), [("0", 0), ("007", 7), ("2147483647", 2147483647)])
def test_verify_results_are_validated(value, number):
    wanted = rule("SSL_VERIFY_RESULT", value=value)
    l7.check_l7rule(wanted)
    assert l7.parse_verify_result(wanted) == number


@pytest.mark.parametrize("value", ["-1", "1.0", "x", "2147483648", "9" * 300, "\u0662", "\u00b2", "1 2", "0:9"])
def test_verify_results_that_are_no_numbers(value):
    with pytest.raises(UnsupportedOption, match="SSL_VERIFY_RESULT"):
        l7.check_l7rule(rule("SSL_VERIFY_RESULT", value=value))


@pytest.mark.parametrize(
    ("compare", "value", "compared"),
    [
        ("EQUAL_TO", "jpg", "jpg"),
        ("EQUAL_TO", ".jpg", "jpg"),
        ("EQUAL_TO", "tar.gz", "tar.gz"),
        ("STARTS_WITH", ".jp", "jp"),
    ],
)
def test_file_extensions_are_validated(compare, value, compared):
    wanted = rule("FILE_TYPE", compare, value)
    l7.check_l7rule(wanted)
    assert l7.parse_extension(wanted) == compared


@pytest.mark.parametrize(
    ("compare", "value"),
    [("EQUAL_TO", "."), ("EQUAL_TO", "a/jpg"), ("CONTAINS", "r.g"), ("ENDS_WITH", "a/b"), ("STARTS_WITH", "..a")],
)
def test_impossible_file_extensions_are_refused(compare, value):
    with pytest.raises(UnsupportedOption, match="FILE_TYPE"):
        l7.check_l7rule(rule("FILE_TYPE", compare, value))


def test_all_encodings_of_a_path_are_listed():
    assert l7.list_spellings("/plain%20-_.~!$&'()*+,;=:@[]?") == ("/plain%20-_.~!$&'()*+,;=:@[]?",)
    assert l7.list_spellings("/é b") == ("/é b", "/%C3%A9%20b", "/%c3%a9%20b")
    assert l7.list_spellings("/{ }") == ("/{ }", "/{%20}", "/%7B%20%7D", "/%7b%20%7d")
    assert l7.list_spellings("/A#") == ("/A#", "/A%23")


@pytest.mark.parametrize("kind", ["HOST_NAME", "PATH", "FILE_TYPE", "HEADER", "COOKIE", "SSL_DN_FIELD"])
def test_regular_expressions_are_checked(kind):
    with pytest.raises(UnsupportedOption, match=f"type {kind}: .*missing closing parenthesis"):
        l7.check_l7rule(rule(kind, "REGEX", "(a"))


@pytest.mark.parametrize(
    ("action", "more"),
    [
        ("REJECT", {}),
        ("REJECT", {"redirect_url": "left over\n", "redirect_http_code": 999}),
        ("REDIRECT_TO_POOL", {"redirect_pool_id": "x"}),
        ("REDIRECT_TO_URL", {"redirect_url": "https://example.com/?a=b&c='d'#e%20{}[]é"}),
        ("REDIRECT_PREFIX", {"redirect_prefix": "https://example.com/"}),
        *(("REDIRECT_TO_URL", {"redirect_url": "/", "redirect_http_code": code}) for code in (301, 302, 303, 307, 308)),
    ],
)
def test_policies_are_validated(action, more):
    l7.check_l7policy(policy(action, **more))


@pytest.mark.parametrize(
    ("action", "more", "named"),
    [
        ("REDIRECT_TO_POOL", {}, "redirect_pool_id None"),
        ("REDIRECT_TO_URL", {}, "redirect_url None"),
        ("REDIRECT_TO_URL", {"redirect_url": ""}, "redirect_url ''"),
        ("REDIRECT_PREFIX", {"redirect_url": "/"}, "redirect_prefix None"),
        ("REDIRECT_TO_URL", {"redirect_url": "/\r\nSet-Cookie: a=b"}, "control characters"),
        ("REDIRECT_TO_URL", {"redirect_url": "/ "}, "white space"),
        ("REDIRECT_PREFIX", {"redirect_prefix": "\u3000/"}, "white space"),
        ("REDIRECT_PREFIX", {"redirect_prefix": "x" * 2049}, "longer than 2048"),
        ("REDIRECT_TO_URL", {"redirect_url": "/", "redirect_http_code": 304}, "redirect_http_code '304'"),
    ],
)
def test_invalid_policies_are_refused(action, more, named):
    with pytest.raises(UnsupportedOption, match=named):
        l7.check_l7policy(policy(action, **more))
