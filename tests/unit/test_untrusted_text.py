# SPDX-License-Identifier: Apache-2.0
"""Text from amphorae becomes valid for every database and log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amphora_driver.untrusted_text import printable


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ""),
        ("as it is", "as it is"),
        ("one\n  two\r\n\nthree\n", "one; two; three"),
        ("a\x00b", r"a\x00b"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\U0001f600", r"\U0001f600"),
        ("é", r"\xe9"),
        ("x" * 40, "x" * 40),
        ("x" * 41, "x" * 34 + " (cut)"),
        ("\x00" * 40, r"\x00" * 8 + r"\x" + " (cut)"),
        ("x" * 5_000_000, "x" * 34 + " (cut)"),
    ],
)
def test_untrusted_text_is_cleaned(text, wanted):
    assert printable(text, 40) == wanted


@given(st.text(), st.integers(min_value=6, max_value=100))
def test_any_text_is_valid_for_databases_and_logs(text, most):
    found = printable(text, most)
    assert len(found) <= most
    assert found.isascii()
    assert found.isprintable()
