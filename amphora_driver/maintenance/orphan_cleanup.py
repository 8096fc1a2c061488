# SPDX-License-Identifier: Apache-2.0
"""Removes orphaned machines, ports and VIPs that a crash between two systems left.

Invariant: the backend is listed before the rows are read, so that an object in creation never looks like an orphan.
The lists hold only objects of this deployment. An object is removed only after it had no owner for the whole grace
period. Ids are never reused, so that a removed object cannot get an owner.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.store import orphans
from amphora_driver.store.orphans import OrphanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.compute.interface import Compute
    from amphora_driver.database.engine import Database
    from amphora_driver.network.interface import Network
    from amphora_driver.plugins import Catalogue

LOG = logging.getLogger(__name__)
# Number of orphans of a kind that crashes can explain. More orphans than this number and than a tenth of all objects
# indicate lost rows of the database, so the cleanup removes nothing. The same is true if all of several objects are
# orphans.
_MOST = 2
_FAILED = (
    "the removal of unused objects (orphans) from backend %s failed, and the controller "
    "repeats the removal in the next round: %s"
)


class OrphanCleaner:
    """Finds and removes machines, ports and VIPs without an owner."""

    def __init__(self, conf: ConfigOpts, database: Database, catalogue: Catalogue) -> None:
        self._grace: float = conf.amp_controller.orphan_grace
        self._database = database
        self._catalogue = catalogue
        self._listed_at: dict[tuple[str, str], float] = {}

    def clean_up(self) -> int:
        """Record orphans and remove old ones; return the number of removed objects.

        A backend that is not available does not stop the others; the next call asks it again.
        """
        removed = 0
        for name, compute in self._catalogue.computes().items():
            removed += self._clean_compute(name, compute)
        for name, network in self._catalogue.networks().items():
            removed += self._clean_network(name, network)
        stale = self._database.read(orphans.find_stale_rows)
        if stale.amphora_ids or stale.load_balancer_ids:
            self._database.write(lambda connection: orphans.delete_stale_rows(connection, stale))
        return removed

    def _clean_compute(self, name: str, compute: Compute) -> int:
        """Clean up machines, if the last list of this backend is older than its interval."""
        now = time.monotonic()

        def list_machines() -> frozenset[str]:
            found = compute.machines()
            self._listed_at["compute", name] = now
            return found

        if not self._is_due("compute", name, compute.listing_interval, now):
            return 0
        return self._clean(OrphanKind.MACHINE, name, list_machines, compute.destroy)

    def _is_due(self, kind: str, name: str, interval: float, now: float) -> bool:
        return now - self._listed_at.get((kind, name), -math.inf) >= interval

    def _clean_network(self, name: str, network: Network) -> int:
        """Clean up ports and VIPs, if the last list of this backend is older than its interval."""

        def remove_ports(amphora_id: str) -> None:
            for port in network.ports(amphora_id):
                network.delete_port(port.id)

        now = time.monotonic()
        if not self._is_due("network", name, network.listing_interval, now):
            return 0
        try:
            owners = network.owners()
        except AmphoraDriverError as error:
            LOG.warning(_FAILED, name, error)
            return 0
        self._listed_at["network", name] = now
        return self._clean(OrphanKind.PORTS, name, lambda: owners.amphorae, remove_ports) + self._clean(
            OrphanKind.VIP, name, lambda: owners.load_balancers, network.release_load_balancer
        )

    def _clean(
        self, kind: OrphanKind, backend: str, list_ids: Callable[[], Collection[str]], remove: Callable[[str], None]
    ) -> int:
        removed = 0
        try:
            existing = list_ids()
            for one in self._removable(kind, backend, existing):
                LOG.warning(
                    "the controller removes the %s %s from backend %s, because no row in the database refers to this "
                    "object",
                    kind.value,
                    one,
                    backend,
                )
                remove(one)
                removed += 1
        except AmphoraDriverError as error:
            LOG.warning(_FAILED, backend, error)
        return removed

    def _removable(self, kind: OrphanKind, backend: str, existing: Collection[str]) -> list[str]:
        """Return the objects without an owner for the whole grace period."""
        found, noted = self._database.read(
            lambda connection: (
                orphans.find_unowned(connection, kind, existing),
                orphans.read_orphans(connection, kind, backend),
            )
        )
        if not (found or noted):
            # Without orphans, the usual case, the cleanup starts no write transaction, because a write transaction
            # locks rows.
            return []
        for one in sorted(found - noted.keys()):
            LOG.warning(
                "the controller will remove the %s %s from backend %s in %.0f s, because no row in the "
                "database refers to this object",
                kind.value,
                one,
                backend,
                self._grace,
            )
        now = self._database.now()
        due = self._database.write(
            lambda connection: orphans.update_orphans(connection, kind, backend, found, now, self._grace)
        )
        if self._database.seconds_since_clock_jump() < self._grace:
            # A jump of the database clock makes the ages of orphans unreliable. No orphan is removed until the grace
            # period after the jump has passed.
            return []
        if _is_plausible(len(due), len(existing)):
            return due
        LOG.error(
            "the orphan cleanup found %d of %d objects (kind: %s) of backend %s without an owner, and removes no "
            "object, because crashes cannot explain so many. Check whether the database has lost rows, and whether "
            "another deployment has the same name. If neither is true, remove objects without an owner manually",
            len(due), len(existing), kind.value, backend,
        )  # fmt: skip
        return []


def _is_plausible(orphans: int, existing: int) -> bool:
    """Whether crashes can explain the number of orphans; more indicate lost rows or another deployment."""
    return orphans <= max(_MOST, existing // 10) and (orphans < existing or orphans <= 1)
