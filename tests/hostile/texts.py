# SPDX-License-Identifier: Apache-2.0
"""Generated text: any characters, and combinations of hostile pieces."""

from __future__ import annotations

from corpus import STRINGS
from hypothesis import strategies as st

SPECIAL = "ab0 \t\n\r\0'\"\\#$%{}[]()-_./:@,;|&~<>*+?^!=\x7f\x85\u2028\ud800\u00e9\U0001f600"
PIECES = [text for text in STRINGS if 0 < len(text) < 40]
PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]

anything = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=SPECIAL, max_size=40),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join),
)
"""Most fields refuse most of these texts."""

printable = st.one_of(
    st.text(alphabet=PRINTABLE, min_size=1, max_size=40),
    st.text(alphabet=st.characters(min_codepoint=0x20, exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=40),
    st.lists(st.sampled_from([text for text in PIECES if text.isascii() and text.isprintable()]), max_size=4).map(
        "".join
    ),
)
"""Fields with free text accept most of these texts."""
