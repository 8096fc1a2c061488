# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from amphora_driver.errors import ConfigurationError, UnsupportedOption
from amphora_driver.validation import cost_budget, regex


@pytest.mark.parametrize(
    "pattern",
    [
        "foo",
        "^/api/v[0-9]+/users/[0-9]+$",
        r"(?<word>\w+)-\k<word>",
        r"(?P<word>\w+)-(?P=word)",
        r"(?<n>\((?:[^()]|(?&n))*\))",
        "(?i)^/Admin",
        "^(/[a-z0-9-]+)*/x$",
        ".*foo.*bar.*baz$",
        r"\.(?:jpe?g|png|gif)$",
        r"\Qa.b",
        "(*COMMIT)a",
        "ü|é",
        "a\"b'c#d $e ${f} %[g]",
        "^$",
        "(a|b|c)*d",
        r"[]a]+[[:alpha:]]*",
        "x" * 2000,
    ],
)
def test_patterns_that_pcre2_compiles(pattern):
    regex.check_pattern("it", pattern)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", r"missing closing parenthesis \(at character 1\)"),
        ("a)(b", r"unmatched closing parenthesis \(at character 1\)"),
        ("é[z", r"missing terminating \] for character class \(at character 3\)"),
        ("*a", "quantifier does not follow a repeatable item"),
        ("a\\", r"\\ at end of pattern"),
        (r"(a)\1", "non-existent subpattern"),
        ("(?<a>x)(?<a>y)", "two named subpatterns have the same name"),
        ("(?<=a+)b", "lookbehind assertion is not fixed length"),
        ("(*LIMIT_MATCH=9999999)a", "setting"),
        ("(*UTF)a", "setting"),
        ("(*ANYCRLF)(*UCP)a", "setting"),
        ("(?x)a # until the end", "part of another.*comments"),
        (r"a\Kb", r"part of another.*\\K is not allowed in lookarounds"),
        ("a(?R)?b", "refers to itself"),
        (r"a\g<0>?b", "refers to itself"),
        ("a\0b", "contains a control character"),
        ("a\nb", "contains a control character"),
        ("a\ud800b", "contains a control character"),
        ("(?:" + "a" * 1000 + "){60000}", "too large"),
    ],
)
def test_patterns_that_pcre2_refuses(pattern, said):
    with pytest.raises(UnsupportedOption, match=said) as caught:
        regex.check_pattern("the rule", pattern)
    assert "the rule" in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "^/api/(a+)+$",
        "(a|aa)+$",
        "(a|a)*$",
        r"(\w+\s?)+$",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
        r"(\d+|[a-f0-9]+)*z$",
        "(?:(?:a?){20}){20}x",
        "([a-z]+)*[0-9]",
        r"^/(?:[^/]+/?)+\.php$",
        "(x+x+)+y",
    ],
)
def test_patterns_with_exponential_effort_are_refused(pattern):
    with pytest.raises(UnsupportedOption, match="grows exponentially"):
        regex.check_pattern("it", pattern)


@pytest.fixture
def steps(monkeypatch):
    """The limits of all searches with one pattern: their maximum cost."""
    regex._judge.cache_clear()
    run, limits = regex._Code.run, []

    def counted(code, text, limit=None):
        if limit is not None:
            limits.append(limit)
            counted.octets += len(text)
        return run(code, text, limit)

    counted.octets = 0

    monkeypatch.setattr(regex._Code, "run", counted)
    yield limits
    regex._judge.cache_clear()


EXPENSIVE = [f".*.*.*.*=(?:{'z' * length})?(k)*" for length in (100, 150, 236)]


@pytest.mark.parametrize("pattern", EXPENSIVE)
def test_a_check_has_a_total_budget(steps, pattern):
    """Each search of these patterns is allowed, but hundreds of them take seconds."""
    with pytest.raises(UnsupportedOption, match="its check takes too many steps"):
        regex.check_pattern("it", pattern)
    assert 0 < sum(steps) <= cost_budget.MAX_PATTERN_STEPS


def test_a_refusal_is_cached(steps):
    for _ in range(3):
        with pytest.raises(UnsupportedOption, match="too many steps"):
            regex.check_pattern("it", EXPENSIVE[0])
    cost = sum(steps)
    with pytest.raises(UnsupportedOption, match="grows exponentially"):
        regex.check_pattern("it", "(a+)+$")
    with pytest.raises(UnsupportedOption, match=r"another option.*grows exponentially"):
        regex.check_pattern("another option", "(a+)+$")
    assert cost <= cost_budget.MAX_PATTERN_STEPS
    assert sum(steps) - cost <= 2 * max(regex._TRIAL_STEPS)


def check_all(patterns):
    for pattern in patterns:
        regex.check_pattern("it", pattern)


def test_a_request_has_a_total_budget(steps):
    patterns = [f"{number}[^q]{{0,50}}[^q]{{0,50}}=(?:{'x' * 50})?(k)*" for number in range(100)]
    with cost_budget.request_budget():
        with pytest.raises(UnsupportedOption, match=r"this request takes too many steps.*several requests"):
            check_all(patterns)
        regex.check_pattern("it", patterns[0])
        regex.check_pattern("it", "foo")
    assert sum(steps) <= cost_budget.MAX_REQUEST_STEPS
    assert regex._Code.run.octets <= len(regex._TRIAL_STEPS) * cost_budget.MAX_REQUEST_OCTETS
    checked = len(steps)
    # No pattern is refused because of the effort of others.
    for pattern in patterns:
        with cost_budget.request_budget():
            regex.check_pattern("it", pattern)
    assert len(steps) > checked


@pytest.mark.parametrize(
    ("pattern", "at_start", "empty"),
    [
        ("^a", True, False),
        ("^a|^b", True, False),
        (".*a$", True, False),
        ("^", True, True),
        ("a", False, False),
        ("^a|b", False, False),
        ("a*", False, True),
        ("^$|^b", True, True),
        ("(?=.)", False, False),
    ],
)
def test_pattern_facts_are_computed(pattern, at_start, empty):
    facts = regex.check_pattern("it", pattern)
    assert (facts.at_start, facts.empty) == (at_start, empty)


TEXTS = ("", "a", "b", "ba", "xax", "AbA", "aab", "b" * 50 + "a", "\\Q", ")", "é", "a b", "(*F)")
PATTERNS = (
    "^a",
    "a$",
    "^a$",
    ".*a",
    "b.*a$",
    "a|b$",
    "^$|^b",
    "(?<x>.)\\k<x>",
    "(?i)B",
    "\\Qa",
    "[^a]",
    "é",
    "(*FAIL)",
    "(?n)a",
)


@pytest.mark.parametrize("caseless", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_exactly_one_of_a_pattern_and_its_negation_matches(pattern, caseless):
    """For each text, either the pattern or its negation matches."""
    facts = regex.check_pattern("it", pattern, caseless=caseless)
    fold = 8 if caseless else 0
    yes = regex._Code(regex.matching_pattern(pattern), 0x2000 | fold)
    no = regex._Code(regex.inverse_pattern(pattern, facts), fold)
    for text in TEXTS:
        assert (yes.run(text.encode()) >= 0) is not (no.run(text.encode()) >= 0), text


def test_an_aborted_search_matches_neither_pattern():
    pattern = "(?:a|b|ab)(?:.|b)*q"
    facts = regex.check_pattern("it", pattern)
    text = b"/" + b"ab" * 4000
    assert regex._Code(regex.matching_pattern(pattern), 0x2000).run(text) < 0
    assert regex._Code(regex.inverse_pattern(pattern, facts), 0).run(text) < 0
    # The text is too long for the search limit, so there is no result unless only its beginning counts.
    long = b"/" + b"x" * regex.MAX_TEXT
    assert regex._Code(regex.inverse_pattern("foo", regex.check_pattern("it", "foo")), 0).run(long) < 0
    assert regex._Code(regex.inverse_pattern("^foo", regex.check_pattern("it", "^foo")), 0).run(long) >= 0


def test_a_missing_library_is_an_operator_error(monkeypatch):
    """No pattern is judged. The error names the operator's problem and no object."""
    regex._library.cache_clear()
    regex._judge.cache_clear()
    monkeypatch.setattr(regex, "LIBRARY", "libnothing-at-all.so.0")
    try:
        with pytest.raises(ConfigurationError, match="libnothing-at-all"):
            regex.check_pattern("it", "a")
    finally:
        monkeypatch.undo()
        regex._library.cache_clear()
    regex.check_pattern("it", "a")


def test_results_are_cached(monkeypatch):
    regex.check_pattern("it", "remembered")
    monkeypatch.setattr(regex, "_Code", None)
    regex.check_pattern("it", "remembered")


def test_compiled_patterns_are_freed():
    """A leak of a 60 KB pattern, compiled a thousand times, would be visible."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")

    large = "(?:abcdefghij){1500}"
    for _ in range(50):
        regex._Code(large, 0)
    before = resident()
    for _ in range(500):
        regex._Code(large, 0)
    assert resident() - before < 20_000_000
