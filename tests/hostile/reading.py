# SPDX-License-Identifier: Apache-2.0
"""Splits HAProxy's configuration into words.

The code follows section 2.2 of HAProxy's manual and not the renderer, so an agreement of both is evidence. The test
test_hostile_corpus.py compares it with the tokenizers of newer HAProxy versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEADS = {"defaults", "frontend", "backend"}

Words = tuple[str, ...]


@lru_cache(65536)
def words(line: str) -> Words:  # noqa: C901 - the reader is one state machine
    result: list[str] = []
    word: list[str] | None = None
    quote = ""
    i = 0
    while i < len(line):
        c = line[i]
        if quote:
            if c == quote:
                quote = ""
            elif quote == '"' and c in "\\$":
                raise AssertionError("weak quotes are not used")
            else:
                word.append(c)
        elif c in "'\"":
            quote, word = c, word if word is not None else []
        elif c == "\\":
            i += 1
            assert line[i] != "x", "hexadecimal escapes are not used"
            word = [*(word or []), _ESCAPES.get(line[i], line[i])]
        elif c == "#":
            break
        elif c in " \t":
            if word is not None:
                result.append("".join(word))
            word = None
        else:
            word = [*(word or []), c]
        i += 1
    assert not quote, f"an open quote in {line!r}"
    if word is not None:
        result.append("".join(word))
    return tuple(result)


def directives(text: str | None) -> list[Words]:
    return [found for line in (text or "").split("\n") if (found := words(line))]


def placed(text: str | None) -> Iterator[tuple[Words, Words]]:
    """Yield every line with the head of its section; the head of a head is the head itself."""
    head: Words | None = None
    for found in directives(text):
        if found[0] in _HEADS:
            head = found
        assert head is not None, f"{found} is outside of all sections"
        yield head, found


def counted(text: str | None) -> Counter[tuple[Words, Words]]:
    """Count the lines by section, without their order."""
    return Counter(placed(text))
