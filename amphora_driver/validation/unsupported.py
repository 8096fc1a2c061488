# SPDX-License-Identifier: Apache-2.0
"""How an option, or a value of it, is refused: by name, with the value, the reason and what to do instead.

Invariant: the sentence has one line and a bounded length, whatever the value is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from amphora_driver.errors import UnsupportedOption

NOT_YET = "this provider does not serve it yet"

_LONGEST = 80


def refuse(option: str, value: object, reason: str, remedy: str) -> NoReturn:
    """Refuse a value of an option.

    Raises:
        UnsupportedOption: always.
    """
    shown = ascii(value)
    if len(shown) > _LONGEST:
        shown = f"{shown[: _LONGEST - 3]}..."
    raise UnsupportedOption(f"use {option} {shown}", reason, remedy)


def one_of(option: str, value: object, served: Collection[object]) -> None:
    """Refuse a value that is not served."""
    if value not in served:
        refuse(option, str(value), NOT_YET, f"Use one of {', '.join(map(str, served))}.")


def absent(option: str, value: object, reason: str = NOT_YET) -> None:
    """Refuse any value but those that say nothing: None, False, empty."""
    if value:
        refuse(option, value, reason, "Leave it out.")


def between(option: str, value: object, low: int, high: int) -> None:
    """Refuse what is not a whole number of this range; a bool is none."""
    if type(value) is not int or not low <= value <= high:
        refuse(option, value, f"it is not a whole number from {low} to {high}", "Choose a value in that range.")
