# SPDX-License-Identifier: Apache-2.0
"""Refusal of an option or its value, with the reason and the remedy.

Invariant: the message has one line and a limited length for every value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from amphora_driver.errors import UnsupportedOption

NOT_SUPPORTED = "this provider does not support it"
_MAX_VALUE = 80


def refuse(option: str, value: object, reason: str, remedy: str) -> NoReturn:
    """Raise UnsupportedOption for a value of an option."""
    shown = ascii(value)
    if len(shown) > _MAX_VALUE:
        shown = f"{shown[: _MAX_VALUE - 3]}..."
    raise UnsupportedOption(f"use {option} {shown}", reason, remedy)


def require_one_of(option: str, value: object, supported: Collection[object]) -> None:
    """Refuse a value that is not supported."""
    if value not in supported:
        refuse(option, str(value), NOT_SUPPORTED, f"Use one of {', '.join(map(str, supported))}.")


def require_absent(option: str, value: object, reason: str = NOT_SUPPORTED) -> None:
    """Refuse any value except None, False and empty ones."""
    if value:
        refuse(option, value, reason, "Remove this option.")


def require_between(option: str, value: object, low: int, high: int) -> None:
    """Refuse a value that is not a whole number of this range. A bool is no number."""
    if type(value) is not int or not low <= value <= high:
        refuse(option, value, f"it is not a whole number from {low} to {high}", "Use a value in this range.")
