# SPDX-License-Identifier: Apache-2.0
"""The clients and backends that the steps of a job use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts

from amphora_driver.certificates.ca import Authority
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.compute.boot_rate import BootRate
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault

if TYPE_CHECKING:
    from amphora_driver.agent.client import AgentClient
    from amphora_driver.plugins import Catalogue


class ReconcileContext(msgspec.Struct, frozen=True, kw_only=True):
    """The clients and backends of a controller; the catalogue has the compute and network backends.

    `authority` signs certificates if `trust` is None, in tests. `boot_rate` None means no limit.
    """

    conf: ConfigOpts
    database: Database
    catalogue: Catalogue
    agents: AgentClient
    authority: Authority | None
    vault: Vault
    trust: TrustStore | None = None
    boot_rate: BootRate | None = None


class WriteUnderLease(Protocol):
    """Runs a change of the store in a transaction that checks the lease."""

    def __call__(self, change: Callable[[sa.Connection], object], applied: int | None = None) -> None:
        """Run the change; `applied` is the generation that every amphora serves after it."""
