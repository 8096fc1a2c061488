# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of users, checked with the engine that will run them, and bounded.

Invariant: what `check` takes, HAProxy takes: PCRE2 compiled exactly the texts that `matching` and `not_matching` make,
with the options of HAProxy's own call (no UTF, no automatic captures, case folded where the rule says so). Everything
else is refused in PCRE2's words. Nothing here can loop: each trial run has a limit.

A search that would go on for ever is ended by PCRE2 after `STEPS` steps (PCRE2 manual, pcre2pattern: "special start-of-
pattern items") and then counts as "no match". Whoever writes a rule that must not fail open takes `not_matching` and
turns it round: then what could not be decided counts as a match. Patterns whose effort grows exponentially with the
text are refused beforehand, as far as `_probes` finds them.

Without PCRE2's library on this machine nothing can be said about any pattern: `ConfigurationError`, which is an
operator's business. It refuses no object, so what is served stays as it is.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import lru_cache
from weakref import finalize

import msgspec

from amphora_driver.errors import ConfigurationError
from amphora_driver.validation.cost_budget import ONE_PATTERN, Exhausted, spend
from amphora_driver.validation.unsupported import refuse

LIBRARY = "libpcre2-8.so.0"

STEPS = 10_000
"""Steps of one search from one place of the text.

Measured with HAProxy 2.6 and PCRE2 10.42 (JIT), paths of 8 and 14 KB: docs/reference/l7.md."""

LONGEST = 8_192
"""Longer texts have no answer where doubt matters, unless the pattern matches at their beginning only: the effort for
many patterns grows with the square of the length, whatever the limit. Each place of a text is a step there."""

# pcre2.h
_CASELESS = 0x00000008
_NO_AUTO_CAPTURE = 0x00002000
_ANCHORED = 0x80000000
_JIT_COMPLETE = 0x00000001
_INFO_ALLOPTIONS = 0
_INFO_FIRSTCODETYPE = 6
_ERROR_JIT_BADOPTION = -45
_ERROR_MATCHLIMIT = -47
_FIRST_IS_START = 2

# The trial: a text of some 64 characters, and in the end a hundred times the steps that HAProxy gives. Patterns up to
# the fourth power of the length pass (64^4 / 4! is less than a million) if few probes need as much, exponential ones do
# not.
_TRIAL_STEPS = (100, 1_000, 8_000, 60_000, 400_000, 1_000_000)
_TRIAL_LENGTH = 64
# Octets of all texts for one pattern. The limit of steps is for one place of a text, so the length counts too.
_TRIAL_OCTETS = 64 << 10

# The whole pattern as a part of itself; it would take our own additions along.
_WHOLE = re.compile(r"\(\?(?:R|0|&0)\)|\(\?[+-]?0\)|\\g[<'][+-]?0[>']")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a pattern.

    Attributes:
        at_start: it matches at the beginning of a text or not at all (texts here are of one line).
        empty: it matches an empty text.
    """

    at_start: bool
    empty: bool


def matching(pattern: str) -> str:
    """The pattern as HAProxy gets it: found means that it certainly matches."""
    return f"(*LIMIT_MATCH={STEPS}){pattern}"


def not_matching(pattern: str, facts: Facts) -> str:
    """The opposite: a pattern that takes a whole text if the user's certainly does not match anywhere in it."""
    if facts.at_start:
        return f"(*LIMIT_MATCH={STEPS})(?n)\\A(?!(?:{pattern}\\E))[\\s\\S]*"
    short, places = f"(?![\\s\\S]{{{LONGEST + 1}}})", f"[\\s\\S]*?(?:{pattern}\\E)"
    return f"(*LIMIT_MATCH={STEPS + LONGEST})(?n)\\A{short}(?!{places})[\\s\\S]*"


class _Refusal(msgspec.Struct, frozen=True):
    """Why a pattern is refused, and what to do instead."""

    reason: str
    remedy: str = "Correct the regular expression."


def check(option: str, pattern: str, *, caseless: bool = False) -> Facts:
    """Check a pattern of a user.

    Args:
        option: the option that has this value, for the message.
        pattern: Perl-compatible, as HAProxy's PCRE2 reads it.
        caseless: upper and lower case are the same.

    Raises:
        UnsupportedOption: it is not a pattern; or its effort explodes; or the check takes more steps than a pattern
            or a request may have (`effort.py`).
        ConfigurationError: PCRE2 is not installed here.
    """
    try:
        found = _judged(pattern, caseless)
    except Exhausted:
        reason = "the regular expressions of this request take too many steps to check"
        refuse(option, pattern, reason, "Send its rules in several requests.")
    if isinstance(found, _Refusal):
        refuse(option, pattern, found.reason, found.remedy)
    return found


@lru_cache(maxsize=4096)
def _judged(pattern: str, caseless: bool) -> Facts | _Refusal:
    """What is known of a pattern. Refusals are remembered too: a repetition must not cost the same again."""
    if _UNREADABLE.search(pattern):
        return _Refusal("it contains a character that HAProxy cannot read")
    fold = _CASELESS if caseless else 0
    flags = _NO_AUTO_CAPTURE | fold
    try:
        code = _Code(pattern, flags)
    except _Fault as fault:
        return _Refusal(str(fault))
    if _WHOLE.search(pattern):
        return _Refusal("it contains itself as a whole", "Name a group and refer to that.")
    try:
        # Settings count at the very start only: behind anything else they are an error.
        _Code(f"(?:){pattern}", flags)
    except _Fault as fault:
        return _Refusal(f"settings at its start are not the user's: {fault}", "Leave them out.")
    facts = Facts(at_start=code.at_start, empty=_Code(matching(pattern), flags).run(b"") >= 0)
    try:
        _Code(not_matching(pattern, facts), fold)
    except _Fault as fault:
        return _Refusal(f"it cannot be part of another: {fault}", r"Leave out \K, and comments at its end.")
    return _tried(code, pattern) or facts


def _tried(code: _Code, pattern: str) -> _Refusal | None:
    """Search texts that may take long, each with a limit that grows: most need a small part of the last one.

    Raises:
        Exhausted: the request has no steps left.
    """
    steps = octets = 0
    for probe in _probes(pattern):
        text = probe.encode()
        octets += len(text)
        if octets > _TRIAL_OCTETS:
            return None
        for limit in _TRIAL_STEPS:
            steps += limit
            if steps > ONE_PATTERN:
                return _Refusal("it takes too many steps to check", _FEWER)
            spend(limit, len(text))
            if code.run(text, limit) != _ERROR_MATCHLIMIT:
                break
        else:
            return _Refusal(f"its effort explodes, with {probe[:12]!r}... for example", _FASTER)
    return None


# -- texts that a pattern may have trouble with ---------------------------------------------

_FASTER = "Do not repeat what is itself a repetition, or alternatives that begin alike."
_FEWER = "Use fewer repetitions, above all of '.', or a shorter expression."
_UNREADABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_QUANTIFIER = r"[*+?]|\{\d*,?\d*\}"
_PIECE = re.compile(
    r"(?P<literal>\\Q(?P<quoted>.*?)(?:\\E|$))|(?P<escape>\\.)|(?P<set>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])"
    rf"|(?P<group>\((?:\?(?:[:=!>|]|<[=!]|P?<\w+>|'\w+'|[\w^-]*[:)]))?)|(?P<quantifier>{_QUANTIFIER})|(?P<other>.)"
)
# A group that is called elsewhere is repeated without a quantifier.
_RECURSION = re.compile(r"\(\?(?:&|P>|[+-]?[0-9]|R)|\\g[<']|\\[1-9]|\(\?\|")
_CLASSES = {"d": "0", "D": "a", "w": "a", "W": "-", "s": " ", "S": "a", "h": " ", "H": "a", "N": "a", "X": "a", "R": ""}
_SAMPLES = "a0 A/-._=&%,;:@!#$'()*+?[]{}|~\"<>\\^`"


def _probes(pattern: str) -> Iterator[str]:
    """Short texts that begin like the pattern, then repeat something of it, and then do not go on like it."""
    pieces = [(found.lastgroup, found.group()) for found in _PIECE.finditer(pattern)]
    quantifiers = sum(kind == "quantifier" for kind, _ in pieces)
    if not quantifiers or (quantifiers == 1 and not re.search(rf"\)(?:{_QUANTIFIER})", pattern)):
        return
    samples = [_sample(kind, text) for kind, text in pieces]
    whole = "".join(samples)
    marks = [mark for mark, sample in zip(_repeated(pattern, pieces), samples, strict=True) for _ in sample]
    for start in (place for place, mark in enumerate(marks) if mark):
        for width in range(1, min(3, len(whole) - start) + 1):
            unit = whole[start : start + width]
            yield f"{whole[:start]}{unit * (_TRIAL_LENGTH // width)}\x01{whole}\x01"


def _repeated(pattern: str, pieces: list[tuple[str | None, str]]) -> list[bool]:
    """For each piece, whether a quantifier applies to it or to a group around it: only such pieces can explode."""
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
    """Something that a piece of a pattern takes."""
    if kind in {"quoted", "literal"}:
        return text.removeprefix("\\Q").removesuffix("\\E")
    if kind == "escape":
        return _CLASSES.get(text[1], "" if text[1].isalnum() else text[1])
    if kind == "set":
        return _of_set(text)
    if kind == "other":
        return "" if text in "^$|)" else "a" if text == "." else text
    return ""


def _of_set(text: str) -> str:
    try:
        wanted = _Code(text, 0)
    except _Fault:
        return "a"
    return next((one for one in _SAMPLES if wanted.run(one.encode()) >= 0), text.strip("[]^")[:1])


# -- PCRE2 ----------------------------------------------------------------------------------


class _Fault(Exception):
    """PCRE2 does not take a pattern; its own words."""


class _Code:
    """A compiled pattern, translated to machine code where PCRE2 can, as HAProxy does."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._pcre = _library()
        text = pattern.encode()
        error, offset = ctypes.c_int(), ctypes.c_size_t()
        self._code = self._pcre.pcre2_compile_8(text, len(text), flags, error, offset, None)
        if not self._code:
            place = len(text[: offset.value].decode(errors="ignore"))
            raise _Fault(f"{self._said(error.value)} (at character {place})")
        finalize(self, self._pcre.pcre2_code_free_8, self._code)
        jit = self._pcre.pcre2_jit_compile_8(self._code, _JIT_COMPLETE)
        if jit not in (0, _ERROR_JIT_BADOPTION):
            raise _Fault(self._said(jit))
        self._run = self._pcre.pcre2_match_8 if jit else self._pcre.pcre2_jit_match_8

    @property
    def at_start(self) -> bool:
        return bool(self._info(_INFO_ALLOPTIONS) & _ANCHORED) or self._info(_INFO_FIRSTCODETYPE) == _FIRST_IS_START

    def run(self, text: bytes, limit: int | None = None) -> int:
        """PCRE2's answer: negative for "no match" and for all that went wrong.

        Args:
            limit: steps from each place of the text; the pattern's own limit counts too.
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

    def _said(self, error: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._pcre.pcre2_get_error_message_8(error, text, len(text))
        return text.value.decode(errors="replace")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        pcre = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ConfigurationError(
            "check a regular expression", f"{LIBRARY} cannot be loaded: {error}", "Install PCRE2 (libpcre2-8-0, pcre2)."
        ) from error
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
