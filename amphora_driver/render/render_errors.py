# SPDX-License-Identifier: Apache-2.0
"""Errors of objects that cannot be rendered.

Invariant: each error is a `ModelError` that names its object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from amphora_driver.errors import ModelError, UnsupportedOption
from amphora_driver.model.enums import PoolProtocol
from amphora_driver.model.loadbalancer import Listener

REASONS = (ModelError, UnsupportedOption)

_Made = TypeVar("_Made")


def refused_object(object_id: str, reason: str, remedy: str = "") -> ModelError:
    """Return the error for an object that cannot be rendered."""
    return ModelError(f"render {object_id}", reason, remedy, object_id=object_id)


def protocol_mismatch(protocol: PoolProtocol, pool_id: str, listener: Listener) -> str:
    """Return the reason for a pool whose protocol does not fit its listener."""
    return f"a pool of protocol {protocol} ({pool_id}) cannot stand behind a listener of {listener.protocol}"


def policies_without_http(listener: Listener) -> ModelError:
    """Return the error for enabled L7 policies of a listener that does not read HTTP."""
    reason = f"it has L7 policies, which need HTTP, on a listener of {listener.protocol}"
    return refused_object(listener.id, reason, "Remove them, or disable them.")


def as_refusal(error: ModelError | UnsupportedOption, object_id: str) -> ModelError:
    """Return an exception as the error of this object, unless the exception names another object.

    The result has no traceback, because a cached traceback would keep all its frames in memory.
    """
    if not isinstance(error, ModelError):
        return ModelError(error.wanted, error.happened, error.remedy, object_id=object_id)
    if error.object_id is None:
        error.object_id = object_id
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def try_render(make: Callable[[], _Made], object_id: str, refused: list[ModelError]) -> _Made | None:
    """Return the result of `make`. Add an error to `refused` and return None."""
    try:
        return make()
    except REASONS as error:
        refused.append(as_refusal(error, object_id))
    return None
