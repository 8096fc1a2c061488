# SPDX-License-Identifier: Apache-2.0
"""The work that the checks of one request may cost.

Invariant: work is counted in steps of PCRE2 and in octets, not in seconds, so that a request has the same answer on
every machine. All that one request may use takes less than a tenth of a second of a processor (docs/reference/l7.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ONE_PATTERN = 1_600_000
"""Steps for the check of one regular expression."""

ONE_REQUEST = 2_000_000
"""Steps for all regular expressions of one request. A pattern that was checked before costs nothing."""

ONE_REQUEST_OCTETS = 384 << 10
"""Octets that are searched for all regular expressions of one request."""


class Exhausted(Exception):
    """The steps of this request are used up."""


class _Allowance:
    def __init__(self) -> None:
        self.steps = ONE_REQUEST
        self.octets = ONE_REQUEST_OCTETS


_current: ContextVar[_Allowance | None] = ContextVar("allowance of a request", default=None)


@contextmanager
def one_request() -> Iterator[None]:
    """All checks within the block share one allowance. Outside of such a block, checks are limited one by one."""
    token = _current.set(_Allowance())
    try:
        yield
    finally:
        _current.reset(token)


def spend(steps: int, octets: int) -> None:
    """Take the limit of a search, and the length of its text, from the allowance of the current request.

    Raises:
        Exhausted: fewer are left.
    """
    allowance = _current.get()
    if allowance is None:
        return
    if steps > allowance.steps or octets > allowance.octets:
        raise Exhausted
    allowance.steps -= steps
    allowance.octets -= octets
