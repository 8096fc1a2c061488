# SPDX-License-Identifier: Apache-2.0
"""Periodic cleanup: orphans, TLS ticket keys, certificates, notifications, old history.

Invariant: one controller at a time holds the duty `housekeeping`. An object is removed only after it has had no owner
for a long time. Every operation may be interrupted at any point and repeated.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts

from amphora_driver.certificates.renewal import CertificateMaintenance, renew_certificates
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.maintenance.duty_loop import run_duty
from amphora_driver.maintenance.notification_purge import purge_notifications
from amphora_driver.maintenance.orphan_cleanup import OrphanCleaner
from amphora_driver.maintenance.tls_expiry import record_tls_expiries
from amphora_driver.model.secret_refs import ticket_secret_name as tickets_of
from amphora_driver.queue.jobs import acquire_duty, release_duty
from amphora_driver.reconcile import tls_tickets
from amphora_driver.store import failovers, generations, process_registry, rotations, sealed_secrets, vip_claims

if TYPE_CHECKING:
    from amphora_driver.plugins import Catalogue

LOG = logging.getLogger(__name__)
_DUTY = "housekeeping"
# Maximum number of load balancers that get new TLS ticket keys in one round. The limit bounds the number of pushes,
# because new keys cause a push.
_MOST_ROTATED = 200
# Maximum number of transactions that purge old fail-overs in one round. The next round purges the rest.
_MOST_CHUNKS = 100


class Housekeeping:
    """Releases unused VIPs, removes orphans, rotates TLS ticket keys and purges old history."""

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        backends: Catalogue,
        owner: str,
        vault: Vault,
        certificates: CertificateMaintenance | None = None,
    ) -> None:
        self._certificates = certificates
        self._vault = vault
        self._conf = conf
        self._database = database
        self._backends = backends
        self._orphans = OrphanCleaner(conf, database, backends)
        self._owner = owner

    def run(self, stopping: threading.Event, draining: threading.Event) -> None:
        every: float = self._conf.amp_controller.housekeeping_interval

        def work() -> None:
            if not acquire_duty(self._database, _DUTY, self._owner, 2 * every):
                return
            if self._certificates is not None:
                # The certificates are renewed first, because an error of a backend in a later task could end the round.
                renew_certificates(self._certificates)
            self.purge_notifications()
            self.release_unused_vips()
            self._orphans.clean_up()
            self.rotate_ticket_keys()
            record_tls_expiries(self._database, self._vault)
            self.purge_history()

        run_duty(_DUTY, every, stopping, draining, work=work, release=self.release)

    def release(self) -> None:
        release_duty(self._database, _DUTY, self._owner)

    def release_unused_vips(self) -> None:
        """Release VIPs of load balancers that were not created within [amp_controller] forget_vip_after."""
        grace: float = self._conf.amp_controller.forget_vip_after
        before = self._database.now() - grace
        # A jump of the database clock makes the ages of VIP claims unreliable. No VIP is released until `grace` seconds
        # after the jump.
        if self._database.seconds_since_clock_jump() < grace:
            return
        orphans, served = self._database.read(lambda c: vip_claims.list_settled_claims(c, before))
        done = [*served, *(one.load_balancer_id for one in orphans if self._release_vip(one))]
        if done:
            self._database.write(lambda c: vip_claims.delete_claims(c, done))

    def rotate_ticket_keys(self) -> int:
        """Give load balancers their next TLS ticket keys; return the number of load balancers.

        The load balancers become due and are pushed. Octavia receives no status, because no user-visible attribute
        changes.
        """
        now = self._database.now()
        due = self._database.read(lambda c: generations.list_due_tickets(c, now, _MOST_ROTATED))
        if not due:
            return 0
        following = [(one, self._next_ticket_keys(one)) for one in due]
        period = self._conf.amp_tls.ticket_key_period
        return self._database.write(lambda c: generations.rotate_tickets(c, following, now, period))

    def purge_notifications(self) -> None:
        """Purge notifications if this controller sends none; otherwise, the sender purges them.

        octavia-api may record notifications although no controller has the option on.
        """
        if not self._conf.amp_notifications.enabled:
            purge_notifications(self._database, float(self._conf.amp_notifications.max_age))

    def purge_history(self) -> None:
        """Delete rows of dead processes, old rotations and old fail-overs."""
        now, age = self._database.now(), float(self._conf.amp_failover.keep_history)

        def write(connection: sa.Connection) -> None:
            process_registry.purge_silent_processes(connection, now)
            rotations.purge_old_rotations(connection, now - age)

        self._database.write(write)
        for _ in range(_MOST_CHUNKS):
            if not self._database.write(lambda c: failovers.purge_old_failovers(c, now - age)):
                break

    def _next_ticket_keys(self, one: generations.DueTickets) -> bytes | None:
        """Return the next sealed seed; None if the present seed is unusable: the next push creates one."""
        if one.sealed is None:
            return None
        place = sealed_secrets.secret_location(tickets_of(one.load_balancer_id))
        try:
            return self._vault.seal(tls_tickets.rotate_ticket_state(self._vault.open(one.sealed, place)), place)
        except StoreError as error:
            LOG.warning(
                "the controller cannot read the TLS ticket keys of load balancer %s. The next push replaces all of "
                "them, and clients then need a full TLS handshake: %s",
                one.load_balancer_id,
                error,
            )
            return None

    def _release_vip(self, orphan: vip_claims.OrphanedClaim) -> bool:
        """Release the addresses; return False on an error, which must not stop the other releases."""
        LOG.info(
            "Octavia requested the VIPs of load balancer %s but never created the load balancer; the controller "
            "releases the VIPs",
            orphan.load_balancer_id,
        )
        try:
            self._backends.network(orphan.network).release_load_balancer(orphan.load_balancer_id)
        except AmphoraDriverError as error:
            LOG.warning(
                "the controller could not release the VIPs of load balancer %s and tries again in the next round: %s",
                orphan.load_balancer_id,
                error,
            )
            return False
        return True
