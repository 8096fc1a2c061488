# SPDX-License-Identifier: Apache-2.0
"""What a step of an adoption needs, and what it returns to the adopter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from amphora_driver.adoption.records import Step

if TYPE_CHECKING:
    from octavia_lib.api.drivers.driver_lib import DriverLibrary
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.adoption.cloud import OldCloud
    from amphora_driver.adoption.octavia_tables import OctaviaDatabase
    from amphora_driver.agent.client import AgentClient
    from amphora_driver.database.engine import Database
    from amphora_driver.plugins import Catalogue

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


class AdoptionContext(msgspec.Struct, frozen=True, kw_only=True):
    """The clients of the steps. `on_due` is called when a load balancer becomes due."""

    conf: ConfigOpts
    database: Database
    catalogue: Catalogue
    agents: AgentClient
    octavia: OctaviaDatabase
    cloud: OldCloud
    library: Callable[[], DriverLibrary]
    on_due: Callable[[], None]
