# SPDX-License-Identifier: Apache-2.0
"""A secret value that no text representation shows.

Invariant: no representation of a `Secret` (repr, str, format, pickle) shows its content; only `reveal()` returns it.
A search for `reveal` therefore finds every place that reads a secret.
"""

from __future__ import annotations

import hmac
from typing import NoReturn


class Secret:
    """Bytes that print as ``***``."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """Return the content."""
        return self._value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled: pass the content of reveal() where it is necessary")
