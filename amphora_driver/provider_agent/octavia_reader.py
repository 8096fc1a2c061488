# SPDX-License-Identifier: Apache-2.0
"""Reads from Octavia the objects that a driver call did not contain completely.

Invariant: a read without an answer times out after half a minute, and delays neither barriers and reports nor the reads
of other load balancers. Each load balancer has at most one read at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec
from octavia_lib.api.drivers import exceptions as octavia_errors
from octavia_lib.api.drivers.driver_lib import DriverLibrary
from oslo_config.cfg import ConfigOpts

from amphora_driver import failpoints
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError, UnsupportedOption
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Pool
from amphora_driver.model.secret_refs import SecretMaterial, SecretName, secrets_of_object
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.queue import local_socket, notifier
from amphora_driver.store import desired_objects, resyncs
from amphora_driver.store.sealed_secrets import SealedSecret, secret_location
from amphora_driver.validation import certificates

_Object = LoadBalancer | Listener | Pool

LOG = logging.getLogger(__name__)
GIVE_UP_BACKOFF = 2.0
"""At this back-off in seconds the reader continues with the readable parts of a tree."""
_FIRST_BACKOFF, _MAX_BACKOFF = 0.5, 60.0
# Seconds before the reader repeats the read of a load balancer that Octavia does not know yet. Octavia usually commits
# the load balancer soon.
_UNKNOWN_DELAY = 0.05
UNREADABLE = "Octavia could not hand it over. Check that every secret it refers to can be read"
"""The reason after a time-out of Octavia, which users see."""
_FAILED = (AmphoraDriverError, octavia_errors.DriverAgentTimeout, octavia_errors.DriverError, OSError)


class OctaviaReader:
    """Reads load balancers, listeners and pools, in the executor or else in the caller's thread."""

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        library: Callable[[], DriverLibrary],
        executor: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._library = library
        self._executor = executor
        self._vault: Vault | None = None
        self._lock = threading.Lock()
        # Load balancers that are being read from Octavia.
        self._busy: set[str] = set()
        # For each load balancer: the monotonic time of the next read, and the back-off in seconds after a failed read.
        self.retries: dict[str, tuple[float, float]] = {}
        # Times of Octavia's first negative answer about each unknown load balancer.
        self._unknown: dict[str, float] = {}

    def can_read(self, load_balancer_id: str) -> bool:
        """Return whether no read of this load balancer runs and its back-off is over."""
        with self._lock:
            until, _ = self.retries.get(load_balancer_id, (0.0, 0.0))
            return load_balancer_id not in self._busy and until <= time.monotonic()

    def read(self, row: Any, verify: Callable[[Any], bool]) -> bool:
        """Start a read of a load balancer after its barrier, and return whether no read is pending any more.

        `verify` replaces the read if only the member batches need a check.
        """
        load_balancer_id = row.load_balancer_id
        with self._lock:
            if load_balancer_id in self._busy:
                return False
            self._busy.add(load_balancer_id)

        def work() -> bool:
            try:
                return self._read_with_retry(row, verify)
            except Exception:
                # Without a back-off, the next poll would repeat a read that fails each time.
                self.retries[load_balancer_id] = (time.monotonic() + _MAX_BACKOFF, _MAX_BACKOFF)
                LOG.exception(
                    "the provider agent could not read load balancer %s from Octavia because of an unexpected error "
                    "and tries again in %.0f s",
                    load_balancer_id,
                    _MAX_BACKOFF,
                )
                return False
            finally:
                with self._lock:
                    self._busy.discard(load_balancer_id)

        def work_and_wake() -> None:
            if work():
                # The read may have added statuses to the outbox. So the reporter, which sends them to Octavia, is
                # woken.
                local_socket.wake_role(self._conf.amp_queue.socket_dir, local_socket.REPORTER)

        if self._executor is None:
            return work()
        self._executor.submit(work_and_wake)
        return False

    def _read_with_retry(self, row: Any, verify: Callable[[Any], bool]) -> bool:
        """Read or verify a load balancer. An error delays only the next read of this load balancer."""
        try:
            complete = self._read_missing(row) if row.read_back or not row.committed else verify(row)
        except _FAILED as error:
            backoff = min(2 * self.retries.get(row.load_balancer_id, (0.0, _FIRST_BACKOFF))[1], _MAX_BACKOFF)
            self.retries[row.load_balancer_id] = (time.monotonic() + backoff, backoff)
            failed = "the provider agent could not read load balancer %s from Octavia and tries again in %.0f s: %s"
            LOG.warning(failed, row.load_balancer_id, backoff, error)
            return backoff >= GIVE_UP_BACKOFF and self._continue_without(row, error)
        if complete:
            self.retries.pop(row.load_balancer_id, None)
        else:
            backoff = self.retries.get(row.load_balancer_id, (0.0, _FIRST_BACKOFF))[1]
            self.retries[row.load_balancer_id] = (time.monotonic() + _UNKNOWN_DELAY, backoff)
        return complete

    def _read_missing(self, row: Any) -> bool:
        """Read the missing objects, and return whether Octavia has committed and returned all of them."""
        objects = resyncs.decode_objects(row.reread)
        if row.committed and objects is not None:
            return self._read_objects(row, objects)
        found = self._library().get_loadbalancer(row.load_balancer_id)
        if found is None:
            if row.committed:
                return False
            since = self._unknown.setdefault(row.load_balancer_id, time.monotonic())
            if time.monotonic() - since > self._conf.amp_octavia.commit_timeout:
                self._unknown.pop(row.load_balancer_id)
                LOG.warning(
                    "Octavia has not committed the creation of load balancer %s in time; the driver deletes the load "
                    "balancer",
                    row.load_balancer_id,
                )
                self._database.write(lambda c: sync_transactions.delete_unknown(c, row.load_balancer_id))
                self._notify_controller(row.load_balancer_id)
            return False
        self._unknown.pop(row.load_balancer_id, None)
        if row.read_back:
            tree = from_octavia.load_balancer(found)
            contents = self.seal_secrets(from_octavia.read_secrets(Kind.LOAD_BALANCER, found))
            failpoints.reach(failpoints.Point.TREE_READ)
            return self._store(lambda connection: sync_transactions.store_tree(connection, row, tree, contents))
        self._database.write(lambda connection: sync_transactions.mark_committed(connection, [row]))
        return True

    def _read_objects(self, row: Any, objects: Sequence[tuple[Kind, str]]) -> bool:
        """Read single objects, which is cheaper in a large tree and needs no secrets of other objects."""
        nodes: list[LoadBalancer | Listener | Pool] = []
        contents: dict[SecretName, SealedSecret] = {}
        for kind, object_id in objects:
            node, sealed = self._read_object(kind, object_id)
            if node is not None:
                nodes.append(node)
                contents |= sealed
        failpoints.reach(failpoints.Point.TREE_READ)
        return self._store(lambda connection: sync_transactions.store_objects(connection, row, nodes, contents))

    def _store(self, write: Callable[[Any], bool]) -> bool:
        stored = self._database.write(write)
        failpoints.reach(failpoints.Point.TREE_TAKEN)
        self._notify_controller()
        return stored

    def _read_object(self, kind: Kind, object_id: str) -> tuple[_Object | None, dict[SecretName, SealedSecret]]:
        """Return a listener or pool with its secrets, or a load balancer; None if Octavia does not know it."""
        library = self._library()
        if kind is Kind.LOAD_BALANCER:
            whole = library.get_loadbalancer(object_id)
            return (None if whole is None else from_octavia.load_balancer(whole)), {}
        found = (library.get_listener if kind is Kind.LISTENER else library.get_pool)(object_id)
        if found is None:
            return None, {}
        node = from_octavia.listener(found) if kind is Kind.LISTENER else from_octavia.pool(found)
        return node, self.seal_secrets(from_octavia.read_secrets(kind, found))

    def _continue_without(self, row: Any, error: Exception) -> bool:
        """Continue with the readable parts of a load balancer, and return whether its read is finished.

        Octavia does not answer, for example because a secret is deleted. The rest does not need unreadable single
        objects. Of a whole tree, the reader reads each listener and pool separately. If the readable parts are not
        enough to serve, the load balancer becomes ERROR, so that its user can change it, and the reads continue.
        """
        if not row.read_back:
            # For an unknown load balancer, Octavia answers at once. So a time-out proves that Octavia has committed the
            # load balancer.
            timed_out = isinstance(error, octavia_errors.DriverAgentTimeout)
            if timed_out:
                self._database.write(lambda connection: sync_transactions.mark_committed(connection, [row]))
            return timed_out
        if resyncs.decode_objects(row.reread) is not None:
            stored = self._database.write(lambda c: sync_transactions.store_objects(c, row, [], {}, UNREADABLE))
        else:
            stored = self._read_in_parts(row)
            if not stored:
                self._database.write(lambda connection: sync_transactions.fail_unreadable(connection, row, UNREADABLE))
        if stored:
            self.retries.pop(row.load_balancer_id, None)
            self._notify_controller(row.load_balancer_id)
        return True

    def _read_in_parts(self, row: Any) -> bool:
        """Read each listener and pool separately, and return whether the result is enough to serve."""
        tree = self._database.read(lambda connection: desired_objects.load_tree(connection, row.load_balancer_id))
        contents: dict[SecretName, SealedSecret] = {}
        # A listener with the mark `unread` shows that an earlier call has read each listener separately. That call
        # could read the listeners without the mark, so their recorded state is usable.
        repeated = any(one.unread for one in tree.listeners)
        # Octavia returns a listener together with its pools, so an unreadable secret of a pool makes its listener
        # unreadable.
        pool_unreadable = False

        def read_part(kind: Kind, recorded: Any) -> Any:
            nonlocal pool_unreadable
            try:
                node, sealed = self._read_object(kind, recorded.id)
            except octavia_errors.DriverAgentTimeout:
                if isinstance(recorded, Pool):
                    pool_unreadable = pool_unreadable or bool(secrets_of_object(recorded))
                    # The reader keeps the recorded pool and continues with the other objects. This is safe, because
                    # the configuration of the amphorae omits a pool with unreadable secrets.
                    return recorded if secrets_of_object(recorded) else None
                if repeated and not recorded.unread:
                    return recorded
                # An unread listener must not be served, because its unknown L7 policies may restrict access.
                explained = secrets_of_object(recorded) or (pool_unreadable and not recorded.uses_l4)
                return msgspec.structs.replace(recorded, unread=True) if explained else None
            contents.update(sealed)
            return node

        try:
            pools = [read_part(Kind.POOL, one) for one in tree.pools]
            listeners = [read_part(Kind.LISTENER, one) for one in tree.listeners]
        except _FAILED as error:
            failed = (
                "the provider agent could not read load balancer %s from Octavia object by object, and tries again: %s"
            )
            LOG.warning(failed, row.load_balancer_id, error)
            return False
        if None in listeners or None in pools or not (listeners or pools):
            return False
        whole: LoadBalancer = msgspec.structs.replace(tree, listeners=tuple(listeners), pools=tuple(pools))
        return self._database.write(lambda c: sync_transactions.store_tree(c, row, whole, contents, UNREADABLE))

    def seal_secrets(self, given: Mapping[SecretName, SecretMaterial]) -> dict[SecretName, SealedSecret]:
        """Encrypt secrets for the database. A defective secret gets the reason instead of a content."""
        found: dict[SecretName, SealedSecret] = {}
        for name, material in given.items():
            self._vault = self._vault or Vault.load(self._conf.amp_database.encryption_key_file)
            try:
                secret = certificates.build_pem(name.purpose, material)
            except UnsupportedOption as error:
                found[name] = SealedSecret(reason=str(error))
            else:
                found[name] = SealedSecret(content=self._vault.seal(secret, secret_location(name)))
        return found

    def _notify_controller(self, load_balancer_id: str | None = None) -> None:
        notifier.notify(self._conf, local_socket.CONTROLLER, load_balancer_id)
