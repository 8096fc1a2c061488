# SPDX-License-Identifier: Apache-2.0
"""What nobody else would ever clean up.

Invariant: only what has been nobody's for a long while is touched, and one controller at a time does it. Everything
here may be interrupted anywhere and done again.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from amphora_driver.certificates.renewal import attended
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.maintenance.orphan_cleanup import Sweeper
from amphora_driver.model.secret_refs import ticket_secret_name as tickets_of
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.reconcile import tls_tickets
from amphora_driver.store import failovers, generations, process_registry, rotations, sealed_secrets, vip_claims

if TYPE_CHECKING:
    import sqlalchemy as sa
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.certificates.renewal import Certificates
    from amphora_driver.database.engine import Database
    from amphora_driver.database.vault import Vault
    from amphora_driver.plugins import Catalogue

LOG = logging.getLogger(__name__)
_DUTY = "housekeeping"
# Load balancers that take new TLS ticket keys at once: each of them is pushed.
_MOST_ROTATED = 200
# Transactions in which fail-overs of long ago are forgotten, each time; what is left then comes the next time.
_MOST_CHUNKS = 100


class Housekeeping:
    """Releases the VIPs of load balancers that never came, removes orphans, and has TLS ticket keys move on.

    Args:
        conf: our options.
        database: where the claims are.
        backends: where the network backends are that the VIPs were taken from.
        owner: name of this process.
        vault: opens and seals what TLS ticket keys are made from.
        certificates: has certificates renewed, and rotations of authorities move on.
    """

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        backends: Catalogue,
        owner: str,
        vault: Vault,
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._vault = vault
        self._patience: float = conf.controller.forget_vip_after
        self._period: float = conf.tls.ticket_key_period
        self._every: float = conf.controller.housekeeping_interval
        self._history: float = conf.failover.keep_history
        self._database = database
        self._backends = backends
        self._sweeper = Sweeper(conf, database, backends)
        self._owner = owner

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        """Look now and then, until told to stop; while `draining` is set another controller does."""
        while not stopping.wait(self._every):
            try:
                if draining.is_set():
                    self.rest()
                elif acquire_duty(self._database, _DUTY, self._owner, 2 * self._every):
                    if self._certificates is not None:
                        # First: what goes wrong with a backend is not to let certificates expire.
                        attended(self._certificates)
                    self.sweep()
                    self._sweeper.sweep()
                    self.rotate()
                    self.tidy()
            except AmphoraDriverError as error:
                LOG.warning("housekeeping: %s", error)
            except Exception:
                # Without this thread nothing would be cleaned up any more, and nobody would notice.
                LOG.exception("housekeeping failed, and goes on")
        try:
            self.rest()
        except AmphoraDriverError as error:
            LOG.info("the duty of housekeeping runs out: %s", error)

    def rest(self) -> None:
        """Let another controller do it."""
        release_duty(self._database, _DUTY, self._owner)

    def sweep(self) -> None:
        """Release what has waited long enough, and not only by a clock that was set since."""
        before = self._database.now() - self._patience
        if self._database.seconds_since_clock_jump() < self._patience:
            return
        orphans, served = self._database.read(lambda connection: vip_claims.list_settled_claims(connection, before))
        done = [*served, *(one.load_balancer_id for one in orphans if self._released(one))]
        if done:
            self._database.write(lambda connection: vip_claims.delete_claims(connection, done))

    def rotate(self) -> int:
        """Have load balancers take their next TLS ticket keys; returns how many.

        They become due and are pushed like after any change, but nobody is told: nothing of what a user sees changes.
        """
        now = self._database.now()
        due = self._database.read(lambda connection: generations.list_due_tickets(connection, now, _MOST_ROTATED))
        if not due:
            return 0
        following = [(one, self._following(one)) for one in due]
        return self._database.write(
            lambda connection: generations.rotate_tickets(connection, following, now, self._period)
        )

    def tidy(self) -> None:
        """Forget processes that went without a word, and rotations and fail-overs of long ago."""
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            process_registry.purge_silent_processes(connection, now)
            rotations.purge_old_rotations(connection, now - self._history)

        self._database.write(write)
        for _ in range(_MOST_CHUNKS):
            if not self._database.write(
                lambda connection: failovers.purge_old_failovers(connection, now - self._history)
            ):
                break

    def _following(self, one: generations.DueTickets) -> bytes | None:
        """The state after this one, sealed; None if it cannot be used: the next push then makes a new one."""
        if one.sealed is None:
            return None
        place = sealed_secrets.secret_location(tickets_of(one.load_balancer_id))
        try:
            return self._vault.seal(tls_tickets.rotated(self._vault.open(one.sealed, place)), place)
        except StoreError as error:
            LOG.warning("load balancer %s gets new TLS ticket keys: %s", one.load_balancer_id, error)
            return None

    def _released(self, orphan: vip_claims.OrphanedClaim) -> bool:
        """Give its addresses back; what goes wrong with one network backend holds up no other."""
        LOG.info("load balancer %s never came: its VIPs are released", orphan.load_balancer_id)
        try:
            self._backends.network(orphan.network).release_vip(orphan.load_balancer_id)
        except AmphoraDriverError as error:
            LOG.warning("housekeeping: %s", error)
            return False
        return True
