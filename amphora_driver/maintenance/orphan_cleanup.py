# SPDX-License-Identifier: Apache-2.0
"""Removing what a crash between two systems left, and what nobody will ever ask for.

Invariant: a backend is asked first and the rows are read after that, so that nothing that is being made looks like
nobody's. Only what this deployment made is listed at all, and only what was nobody's for the whole grace is removed:
ids are never used again, so that nobody can come to own it then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.store import orphans
from amphora_driver.store.orphans import OrphanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.network.interface import Network
    from amphora_driver.plugins import Catalogue

LOG = logging.getLogger(__name__)
# So many things of one kind that belong to nobody are believed, or a tenth of all; and all there is only if it is one.
_MOST = 2


class Sweeper:
    """Looks for machines, ports and VIPs that belong to nobody.

    Args:
        conf: our options.
        database: where the rows are.
        catalogue: the backends.
    """

    def __init__(self, conf: ConfigOpts, database: Database, catalogue: Catalogue) -> None:
        self._grace: float = conf.controller.orphan_grace
        self._database = database
        self._catalogue = catalogue

    def sweep(self) -> int:
        """Note what belongs to nobody, and remove what has for long; returns how many were removed.

        A backend that is away is asked next time, and holds up no other.
        """
        removed = 0
        for name, compute in self._catalogue.computes().items():
            removed += self._look(OrphanKind.MACHINE, name, compute.machines, compute.destroy)
        for name, network in self._catalogue.networks().items():
            removed += self._look_at(name, network)
        self._database.write(orphans.delete_stale_rows)
        return removed

    def _look_at(self, name: str, network: Network) -> int:
        def remove_ports(amphora_id: str) -> None:
            for port in network.ports(amphora_id):
                network.delete_port(port.id)

        return self._look(OrphanKind.PORTS, name, lambda: network.owners().amphorae, remove_ports) + self._look(
            OrphanKind.VIP, name, lambda: network.owners().load_balancers, network.release_vip
        )

    def _look(
        self, thing: OrphanKind, backend: str, ask: Callable[[], Collection[str]], remove: Callable[[str], None]
    ) -> int:
        removed = 0
        try:
            there = ask()
            for one in self._due(thing, backend, there):
                LOG.warning("%s %s (%s) belongs to nobody: it is removed", thing.value, one, backend)
                remove(one)
                removed += 1
        except AmphoraDriverError as error:
            LOG.warning("housekeeping: %s", error)
        return removed

    def _due(self, thing: OrphanKind, backend: str, there: Collection[str]) -> list[str]:
        """Those that have belonged to nobody for long enough."""
        found, noted = self._database.read(
            lambda connection: (
                orphans.find_unowned(connection, thing, there),
                orphans.read_orphans(connection, thing, backend),
            )
        )
        if not (found or noted):
            # Nearly always: looking costs less than locking.
            return []
        for one in sorted(found - noted.keys()):
            LOG.warning("%s %s (%s) belongs to nobody; it goes in %.0f s", thing.value, one, backend, self._grace)
        now = self._database.now()
        due = self._database.write(
            lambda connection: orphans.update_orphans(connection, thing, backend, found, now, self._grace)
        )
        if self._database.seconds_since_clock_jump() < self._grace:
            # By a clock that was set since, what was found a moment ago is old.
            return []
        if _believable(len(due), len(there)):
            return due
        LOG.error(
            "%d of %d of %s (%s) belong to nobody: none is removed. Look whether rows were lost (an empty database, "
            "one from a backup) or another deployment uses the same place; if neither, remove some by hand",
            len(due), len(there), thing.value, backend,
        )  # fmt: skip
        return []


def _believable(due: int, there: int) -> bool:
    """Whether so many can be a crash's: it leaves one thing now and then. More is somebody else's, or rows are lost."""
    return due <= max(_MOST, there // 10) and (due < there or due <= 1)
