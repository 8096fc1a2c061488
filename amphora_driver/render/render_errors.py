# SPDX-License-Identifier: Apache-2.0
"""Why an object is not in the text.

Invariant: every refusal is a `ModelError` that names its object, whatever was raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from amphora_driver.errors import ModelError, UnsupportedOption

REASONS = (ModelError, UnsupportedOption)

_Made = TypeVar("_Made")


def because(object_id: str, reason: str, remedy: str = "") -> ModelError:
    """A refusal in our own words."""
    return ModelError(f"render {object_id}", reason, remedy, object_id=object_id)


def refusal(error: ModelError | UnsupportedOption, object_id: str) -> ModelError:
    """What was raised, as a refusal of this object unless it names another one.

    Without the stack it was raised on: refusals are remembered, and would keep everything alive.
    """
    if not isinstance(error, ModelError):
        return ModelError(error.wanted, error.happened, error.remedy, object_id=object_id)
    if error.object_id is None:
        error.object_id = object_id
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def attempt(make: Callable[[], _Made], object_id: str, refused: list[ModelError]) -> _Made | None:
    """Make something, or note why it cannot be and return None."""
    try:
        return make()
    except REASONS as error:
        refused.append(refusal(error, object_id))
    return None
