# SPDX-License-Identifier: Apache-2.0
"""Generated text in each string field: one value in its place, or refused by name."""

from __future__ import annotations

import corpus
import pytest
from fields import FIELDS
from hypothesis import given
from hypothesis import strategies as st
from outcomes import Unexpected, base, judge
from texts import anything, printable

CIPHERS = {"listener.tls_ciphers", "pool.tls_ciphers", "profile.tls_ciphers"}
OTHER_FORMS = CIPHERS | {"l7rule.value"}
"""Values of these fields may produce other directives: two kinds of ciphers, extensions with and without dots,
regular expressions that match an empty text."""


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_any_text_is_one_value_or_refused(field):
    taken = [case.value for case in corpus.cases(field.corpus) if case.outcome == "as written"]
    known = st.sampled_from(taken or [field.harmless(0)])
    texts = st.one_of(printable, anything, known, st.tuples(known, anything).map("".join))

    @given(texts)
    def try_it(value):
        try:
            judge(field, value)
        except Unexpected as error:
            if field.name not in OTHER_FORMS:
                raise
            new = {line[0] for _, line in error.found} - {line[0] for _, line in base(field)}
        else:
            new = set()
        assert not new, "the value adds a directive"

    try_it()
