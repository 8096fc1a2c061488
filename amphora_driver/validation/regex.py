# SPDX-License-Identifier: Apache-2.0
"""Validation of users' regular expressions with PCRE2, and a limit of their effort.

Invariant: HAProxy accepts every pattern that `check_pattern` accepts. PCRE2 compiles the exact texts of
`matching_pattern` and `inverse_pattern` with HAProxy's options: no UTF, no automatic captures, and the rule's case
folding.

PCRE2 ends a search after `MATCH_LIMIT` steps (PCRE2 manual, pcre2pattern: "special start-of-pattern items"). HAProxy
then sees "no match". A rule that must not fail open uses the negated `inverse_pattern`: an unfinished search counts as
a match. `check_pattern` refuses patterns with exponential effort, as far as `_probes` finds them.

On a host without PCRE2's library, `ConfigurationError` informs the operator, and the load balancers stay unchanged.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import lru_cache
from weakref import finalize

import msgspec

from amphora_driver.errors import ConfigurationError
from amphora_driver.validation.cost_budget import MAX_PATTERN_STEPS, BudgetExhausted, spend_budget
from amphora_driver.validation.unsupported import refuse

LIBRARY = "libpcre2-8.so.0"

MATCH_LIMIT = 10_000
"""Limit of PCRE2 steps of one search from one position of the text.

The page docs/reference/l7.md has the measurements."""

MAX_TEXT = 8_192
"""Longest text in octets that `inverse_pattern` searches, except with patterns that match at the start only.

The effort of many patterns grows with the square of the length in spite of the limit, because the limit applies to each
position of the text."""

_CASELESS = 0x00000008
_NO_AUTO_CAPTURE = 0x00002000
_ANCHORED = 0x80000000
_JIT_COMPLETE = 0x00000001
_INFO_ALLOPTIONS = 0
_INFO_FIRSTCODETYPE = 6
_ERROR_JIT_BADOPTION = -45
_ERROR_MATCHLIMIT = -47
_FIRST_IS_START = 2

# Step limits of successive PCRE2 trials. A pattern that exceeds the last limit is refused.
_TRIAL_STEPS = (100, 1_000, 8_000, 60_000, 400_000, 1_000_000)
_TRIAL_LENGTH = 64
# Maximum number of bytes in all trial texts of a pattern; further texts are not tried. PCRE2 counts steps separately
# for each start position, so the step limits alone do not limit the time.
_TRIAL_OCTETS = 64 << 10

# These spellings of `(?R)` are refused. The driver embeds the pattern in a longer pattern, and `(?R)` would repeat the
# whole longer pattern.
_WHOLE = re.compile(r"\(\?(?:R|0|&0)\)|\(\?[+-]?0\)|\\g[<'][+-]?0[>']")


class PatternFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a pattern matches at the start of a text only, and whether it matches an empty text."""

    at_start: bool
    empty: bool


def matching_pattern(pattern: str) -> str:
    """Return the pattern for HAProxy with the step limit."""
    return f"(*LIMIT_MATCH={MATCH_LIMIT}){pattern}"


def inverse_pattern(pattern: str, facts: PatternFacts) -> str:
    """Return a pattern that matches a whole text if the user's pattern certainly matches nowhere in it."""
    if facts.at_start:
        return f"(*LIMIT_MATCH={MATCH_LIMIT})(?n)\\A(?!(?:{pattern}\\E))[\\s\\S]*"
    length, search = f"(?![\\s\\S]{{{MAX_TEXT + 1}}})", f"[\\s\\S]*?(?:{pattern}\\E)"
    return f"(*LIMIT_MATCH={MATCH_LIMIT + MAX_TEXT})(?n)\\A{length}(?!{search})[\\s\\S]*"


class _Refusal(msgspec.Struct, frozen=True):
    reason: str
    remedy: str = "Correct the regular expression."


def check_pattern(option: str, pattern: str, *, caseless: bool = False) -> PatternFacts:
    """Check a user's pattern and return its properties. Raise ConfigurationError without PCRE2.

    Raise UnsupportedOption for an invalid pattern, for exponential effort, or if the check exceeds the limit of a
    pattern or a request (`cost_budget`).
    """
    try:
        found = _judge(pattern, caseless)
    except BudgetExhausted:
        reason = "the check of all regular expressions of this request takes too many steps"
        refuse(option, pattern, reason, "Create the rules in several requests.")
    if isinstance(found, _Refusal):
        refuse(option, pattern, found.reason, found.remedy)
    return found


@lru_cache(maxsize=4096)
def _judge(pattern: str, caseless: bool) -> PatternFacts | _Refusal:
    """Return the properties or the refusal. The cache holds both, so a repetition costs nothing."""
    if _UNREADABLE.search(pattern):
        return _Refusal("it contains a control character or an unpaired surrogate")
    fold = _CASELESS if caseless else 0
    flags = _NO_AUTO_CAPTURE | fold
    try:
        code = _Code(pattern, flags)
    except _CompileError as error:
        return _Refusal(str(error))
    if _WHOLE.search(pattern):
        return _Refusal("it refers to itself as a whole", "Use a named group and refer to that group.")
    try:
        # PCRE2 accepts settings such as (*UTF) only at the start of a pattern. The empty group in front makes PCRE2
        # refuse them.
        _Code(f"(?:){pattern}", flags)
    except _CompileError as error:
        return _Refusal(f"settings at its start are not permitted: {error}", "Remove the settings.")
    facts = PatternFacts(at_start=code.at_start, empty=_Code(matching_pattern(pattern), flags).run(b"") >= 0)
    try:
        _Code(inverse_pattern(pattern, facts), fold)
    except _CompileError as error:
        return _Refusal(f"it cannot be part of another expression: {error}", r"Remove \K and comments at its end.")
    return _try_probes(code, pattern) or facts


def _try_probes(code: _Code, pattern: str) -> _Refusal | None:
    """Search expensive texts with growing limits, because most texts need a small part of the last limit."""
    steps = octets = 0
    for probe in _probes(pattern):
        text = probe.encode()
        octets += len(text)
        if octets > _TRIAL_OCTETS:
            return None
        for limit in _TRIAL_STEPS:
            steps += limit
            if steps > MAX_PATTERN_STEPS:
                return _Refusal("its check takes too many steps", _USE_FEWER)
            spend_budget(limit, len(text))
            if code.run(text, limit) != _ERROR_MATCHLIMIT:
                break
        else:
            return _Refusal(f"its effort grows exponentially, for example with {probe[:12]!r}...", _SIMPLIFY)
    return None


_SIMPLIFY = "Avoid repetitions of repetitions, and of alternatives with the same start."
_USE_FEWER = "Use fewer repetitions, in particular of '.', or a shorter expression."
_UNREADABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_QUANTIFIER = r"[*+?]|\{\d*,?\d*\}"
_PIECE = re.compile(
    r"(?P<literal>\\Q(?P<quoted>.*?)(?:\\E|$))|(?P<escape>\\.)|(?P<set>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])"
    rf"|(?P<group>\((?:\?(?:[:=!>|]|<[=!]|P?<\w+>|'\w+'|[\w^-]*[:)]))?)|(?P<quantifier>{_QUANTIFIER})|(?P<other>.)"
)
# A reference can repeat a group without a quantifier. So in a pattern with references, every part counts as repeated.
_RECURSION = re.compile(r"\(\?(?:&|P>|[+-]?[0-9]|R)|\\g[<']|\\[1-9]|\(\?\|")
_CLASSES = {"d": "0", "D": "a", "w": "a", "W": "-", "s": " ", "S": "a", "h": " ", "H": "a", "N": "a", "X": "a", "R": ""}
_SAMPLES = "a0 A/-._=&%,;:@!#$'()*+?[]{}|~\"<>\\^`"


def _probes(pattern: str) -> Iterator[str]:
    """Yield short texts that start like the pattern, repeat a part of it, and end with a mismatch."""
    pieces = [(found.lastgroup, found.group()) for found in _PIECE.finditer(pattern)]
    quantifiers = sum(kind == "quantifier" for kind, _ in pieces)
    if not quantifiers or (quantifiers == 1 and not re.search(rf"\)(?:{_QUANTIFIER})", pattern)):
        return
    samples = [_sample(kind, text) for kind, text in pieces]
    whole = "".join(samples)
    marks = [mark for mark, sample in zip(_mark_repeated(pattern, pieces), samples, strict=True) for _ in sample]
    for start in (place for place, mark in enumerate(marks) if mark):
        for width in range(1, min(3, len(whole) - start) + 1):
            unit = whole[start : start + width]
            yield f"{whole[:start]}{unit * (_TRIAL_LENGTH // width)}\x01{whole}\x01"


def _mark_repeated(pattern: str, pieces: list[tuple[str | None, str]]) -> list[bool]:
    """Return for each piece whether a quantifier repeats it or its group, which may be expensive."""
    if _RECURSION.search(pattern):
        return [True] * len(pieces)
    marks, begins = [False] * len(pieces), []
    for place, (kind, text) in enumerate(pieces):
        quantified = place + 1 < len(pieces) and pieces[place + 1][0] == "quantifier"
        if kind == "group" and not text.endswith(")"):
            begins.append(place)
        elif text == ")" and kind == "other" and begins:
            begin = begins.pop()
            if quantified:
                marks[begin : place + 1] = [True] * (place + 1 - begin)
        elif quantified:
            marks[place] = True
    return marks


def _sample(kind: str | None, text: str) -> str:
    """Return a text that a piece of a pattern matches."""
    if kind in {"quoted", "literal"}:
        return text.removeprefix("\\Q").removesuffix("\\E")
    if kind == "escape":
        return _CLASSES.get(text[1], "" if text[1].isalnum() else text[1])
    if kind == "set":
        try:
            wanted = _Code(text, 0)
        except _CompileError:
            return "a"
        return next((one for one in _SAMPLES if wanted.run(one.encode()) >= 0), text.strip("[]^")[:1])
    if kind == "other":
        return "" if text in "^$|)" else "a" if text == "." else text
    return ""


class _CompileError(Exception):
    """PCRE2 refuses a pattern. The argument is PCRE2's message."""


class _Code:
    """A compiled pattern. Like HAProxy, the class uses JIT if PCRE2 supports JIT."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._pcre = _library()
        text = pattern.encode()
        error, offset = ctypes.c_int(), ctypes.c_size_t()
        self._code = self._pcre.pcre2_compile_8(text, len(text), flags, error, offset, None)
        if not self._code:
            place = len(text[: offset.value].decode(errors="ignore"))
            raise _CompileError(f"{self._message(error.value)} (at character {place})")
        finalize(self, self._pcre.pcre2_code_free_8, self._code)
        jit = self._pcre.pcre2_jit_compile_8(self._code, _JIT_COMPLETE)
        if jit not in (0, _ERROR_JIT_BADOPTION):
            raise _CompileError(self._message(jit))
        self._run = self._pcre.pcre2_match_8 if jit else self._pcre.pcre2_jit_match_8

    @property
    def at_start(self) -> bool:
        return bool(self._info(_INFO_ALLOPTIONS) & _ANCHORED) or self._info(_INFO_FIRSTCODETYPE) == _FIRST_IS_START

    def run(self, text: bytes, limit: int | None = None) -> int:
        """Return PCRE2's result, which is negative for "no match" and for errors.

        The `limit` of steps applies to each position of the text, in addition to a limit in the pattern.
        """
        pcre = self._pcre
        found = pcre.pcre2_match_data_create_from_pattern_8(self._code, None)
        context = None if limit is None else pcre.pcre2_match_context_create_8(None)
        try:
            if limit is not None:
                pcre.pcre2_set_match_limit_8(context, limit)
            return int(self._run(self._code, text, len(text), 0, 0, found, context))
        finally:
            pcre.pcre2_match_data_free_8(found)
            pcre.pcre2_match_context_free_8(context)

    def _info(self, what: int) -> int:
        value = ctypes.c_uint32()
        self._pcre.pcre2_pattern_info_8(self._code, what, ctypes.byref(value))
        return value.value

    def _message(self, error: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._pcre.pcre2_get_error_message_8(error, text, len(text))
        return text.value.decode(errors="replace")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        pcre = ctypes.CDLL(LIBRARY)
    except OSError as error:
        happened, remedy = f"{LIBRARY} cannot be loaded: {error}", "Install the package libpcre2-8-0 or pcre2."
        raise ConfigurationError("check a regular expression", happened, remedy) from error
    pointer, size, number, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_char_p
    places = [ctypes.POINTER(ctypes.c_int), ctypes.POINTER(size)]
    match = [pointer, text, size, size, number, pointer, pointer]
    for name, result, arguments in (
        ("compile", pointer, [text, size, number, *places, pointer]),
        ("code_free", None, [pointer]),
        ("jit_compile", ctypes.c_int, [pointer, number]),
        ("match", ctypes.c_int, match),
        ("jit_match", ctypes.c_int, match),
        ("match_data_create_from_pattern", pointer, [pointer, pointer]),
        ("match_data_free", None, [pointer]),
        ("match_context_create", pointer, [pointer]),
        ("match_context_free", None, [pointer]),
        ("set_match_limit", ctypes.c_int, [pointer, number]),
        ("pattern_info", ctypes.c_int, [pointer, number, pointer]),
        ("get_error_message", ctypes.c_int, [ctypes.c_int, text, size]),
    ):
        function = getattr(pcre, f"pcre2_{name}_8")
        function.restype, function.argtypes = result, arguments
    return pcre
