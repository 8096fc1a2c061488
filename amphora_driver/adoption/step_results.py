# SPDX-License-Identifier: Apache-2.0
"""What a step of an adoption returns to the adopter."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from amphora_driver.adoption.records import Step

Change = Callable[[sa.Connection], object]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """The next step with its reason, the columns to set, and a change in the same transaction."""

    step: Step
    reason: str | None = None
    values: dict[str, object] = {}
    change: Change | None = None


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The step is not finished; None if nothing is wrong."""

    reason: str | None = None
