# SPDX-License-Identifier: Apache-2.0
"""Budget of processor time for the regular expressions of one request.

Invariant: the unit is PCRE2 steps and octets, not seconds, so a request has the same result on every machine. The
budget of one request takes less than 0.1 s of a processor (docs/reference/l7.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

MAX_PATTERN_STEPS = 1_600_000
"""Largest number of steps to check one regular expression."""

MAX_REQUEST_STEPS = 2_000_000
"""Largest number of steps for all regular expressions of one request. Cached results cost nothing."""

MAX_REQUEST_OCTETS = 384 << 10
"""Largest number of searched octets for all regular expressions of one request."""


class BudgetExhausted(Exception):
    """The budget of the request is exhausted."""


class _Budget(msgspec.Struct):
    steps: int = MAX_REQUEST_STEPS
    octets: int = MAX_REQUEST_OCTETS


_current: ContextVar[_Budget | None] = ContextVar("budget of a request", default=None)


@contextmanager
def request_budget() -> Iterator[None]:
    """Give all checks in the block one budget. Without such a block, each check has its own limit."""
    token = _current.set(_Budget())
    try:
        yield
    finally:
        _current.reset(token)


def spend_budget(steps: int, octets: int) -> None:
    """Subtract the limit and the text length of a search from the budget, or raise BudgetExhausted."""
    if (budget := _current.get()) is not None:
        if steps > budget.steps or octets > budget.octets:
            raise BudgetExhausted
        budget.steps -= steps
        budget.octets -= octets
