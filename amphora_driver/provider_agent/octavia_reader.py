# SPDX-License-Identifier: Apache-2.0
"""Reading from Octavia what it has not handed over, or not completely.

Invariant: a read that is not answered takes half a minute to say so, and delays nobody: neither barriers and reports,
nor what is to be read of other load balancers. Of one load balancer, one thing is read at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
from octavia_lib.api.drivers import exceptions as octavia_errors

from amphora_driver import failpoints
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError, UnsupportedOption
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import Listener, Pool
from amphora_driver.model.secret_refs import secrets_of_object
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.queue import local_socket, notifier
from amphora_driver.store import desired_objects, pending_rereads
from amphora_driver.store.sealed_secrets import SealedSecret, secret_location
from amphora_driver.validation import certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from octavia_lib.api.drivers.driver_lib import DriverLibrary
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.model.secret_refs import SecretMaterial, SecretName

    _Object = LoadBalancer | Listener | Pool

LOG = logging.getLogger(__name__)
# How long reading back may fail, as the pause after a failure, in seconds: what does not come then does not come.
READ_PATIENCE = 2.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 60.0
# Seconds before Octavia is asked again for a load balancer it does not know yet.
_UNKNOWN_PAUSE = 0.05
_UNREAD = "Octavia could not hand it over: look whether every secret it refers to can be read"
_FAILED = (AmphoraDriverError, octavia_errors.DriverAgentTimeout, octavia_errors.DriverError, OSError)


class Reader:
    """Reads load balancers, listeners and pools.

    Args:
        conf: our options.
        database: where what was read goes.
        library: gives octavia_lib's client.
        hands: who reads; without, it is done at once by whoever asks.
    """

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        library: Callable[[], DriverLibrary],
        hands: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._library = library
        self._hands = hands
        self._vault: Vault | None = None
        self._lock = threading.Lock()
        # Load balancers that are being read.
        self._busy: set[str] = set()
        # Load balancers that could not be read: not before this time (seconds, monotonic), and the pause until then.
        self.unread: dict[str, tuple[float, float]] = {}
        # Load balancers Octavia did not know, and since when (seconds, monotonic): clocks of other hosts may be wrong.
        self._unknown: dict[str, float] = {}

    def may_read(self, load_balancer_id: str) -> bool:
        """Whether it is time to read a load balancer."""
        with self._lock:
            until, _ = self.unread.get(load_balancer_id, (0.0, 0.0))
            return load_balancer_id not in self._busy and until <= time.monotonic()

    def read(self, row: Any, verify: Callable[[Any], bool]) -> bool:
        """Have a load balancer read whose transaction in Octavia has ended; True if all is known of it already.

        Args:
            row: what was recorded of it before its barrier.
            verify: looks at one of which nothing is missing.
        """
        load_balancer_id = row.load_balancer_id
        with self._lock:
            if load_balancer_id in self._busy:
                return False
            self._busy.add(load_balancer_id)

        def work() -> bool:
            try:
                return self._readable(row, verify)
            except Exception:
                LOG.exception("load balancer %s could not be read", load_balancer_id)
                return False
            finally:
                with self._lock:
                    self._busy.discard(load_balancer_id)

        if self._hands is None:
            return work()
        self._hands.submit(self._beside, work)
        return False

    def _beside(self, work: Callable[[], bool]) -> None:
        if work():
            # There may be something to say by now.
            local_socket.wake_role(self._conf.queue.doorbell_dir, local_socket.REPORTER)

    # --- what Octavia has committed -----------------------------------------------------------------------------------

    def _readable(self, row: Any, verify: Callable[[Any], bool]) -> bool:
        """`_known`, but what goes wrong with one load balancer holds up no other."""
        try:
            known = self._known(row) if row.read_back or not row.committed else verify(row)
        except _FAILED as error:
            pause = min(2 * self.unread.get(row.load_balancer_id, (0.0, _FIRST_PAUSE))[1], _LONGEST_PAUSE)
            self.unread[row.load_balancer_id] = (time.monotonic() + pause, pause)
            LOG.warning("load balancer %s could not be read: %s; again in %.0f s", row.load_balancer_id, error, pause)
            return pause >= READ_PATIENCE and self._without(row, error)
        if known:
            self.unread.pop(row.load_balancer_id, None)
        else:
            pause = self.unread.get(row.load_balancer_id, (0.0, _FIRST_PAUSE))[1]
            self.unread[row.load_balancer_id] = (time.monotonic() + _UNKNOWN_PAUSE, pause)
        return known

    def _known(self, row: Any) -> bool:
        """Whether Octavia has committed, and what arrived incomplete has been read."""
        objects = pending_rereads.decode_objects(row.reread)
        if row.committed and objects is not None:
            return self._reread(row, objects)
        found = self._library().get_loadbalancer(row.load_balancer_id)
        if found is None:
            if row.committed:
                return False
            since = self._unknown.setdefault(row.load_balancer_id, time.monotonic())
            if time.monotonic() - since > self._conf.octavia.commit_patience:
                self._unknown.pop(row.load_balancer_id)
                LOG.warning("Octavia never committed load balancer %s: removing it", row.load_balancer_id)
                self._database.write(lambda connection: sync_transactions.abandon(connection, row.load_balancer_id))
                self._wake(row.load_balancer_id)
            return False
        self._unknown.pop(row.load_balancer_id, None)
        if row.read_back:
            tree = from_octavia.load_balancer(found)
            contents = self.sealed(from_octavia.read_secrets(Kind.LOAD_BALANCER, found))
            failpoints.reach(failpoints.Point.TREE_READ)
            return self._taken(lambda connection: sync_transactions.take_tree(connection, row, tree, contents))
        self._mark(row)
        return True

    def _mark(self, row: Any) -> None:
        passed = [(row.load_balancer_id, row.generation)]
        self._database.write(lambda connection: sync_transactions.mark_committed(connection, passed))

    def _reread(self, row: Any, objects: Sequence[tuple[Kind, str]]) -> bool:
        """Read single objects: listeners and pools cost nothing in a large tree, and need no other secrets."""
        nodes: list[LoadBalancer | Listener | Pool] = []
        contents: dict[SecretName, SealedSecret] = {}
        for kind, object_id in objects:
            node, given = self._one(kind, object_id)
            if node is not None:
                nodes.append(node)
                contents |= given
        failpoints.reach(failpoints.Point.TREE_READ)
        return self._taken(lambda connection: sync_transactions.take_objects(connection, row, nodes, contents))

    def _taken(self, take: Callable[[Any], bool]) -> bool:
        taken = self._database.write(take)
        failpoints.reach(failpoints.Point.TREE_TAKEN)
        self._wake()
        return taken

    def _one(self, kind: Kind, object_id: str) -> tuple[_Object | None, dict[SecretName, SealedSecret]]:
        """One listener or pool with its secrets, or a load balancer's own options; None if Octavia does not know it."""
        library = self._library()
        if kind is Kind.LOAD_BALANCER:
            whole = library.get_loadbalancer(object_id)
            return (None if whole is None else from_octavia.load_balancer(whole)), {}
        found = (library.get_listener if kind is Kind.LISTENER else library.get_pool)(object_id)
        if found is None:
            return None, {}
        node = from_octavia.listener(found) if kind is Kind.LISTENER else from_octavia.pool(found)
        return node, self.sealed(from_octavia.read_secrets(kind, found))

    # --- what Octavia does not hand over ------------------------------------------------------------------------------

    def _without(self, row: Any, error: Exception) -> bool:
        """Octavia does not hand it over, perhaps because a secret is not there any more: go on with what there is.

        Without its single objects the rest can be served. Of a whole tree, every listener and pool is asked for on its
        own then. What cannot be served without the rest of it is in ERROR as a whole, so that its user can do
        something, and is read again and again.
        """
        if not row.read_back:
            # Nothing is missing of it. What is not there is answered at once: no answer means that it is.
            if isinstance(error, octavia_errors.DriverAgentTimeout):
                self._mark(row)
            return isinstance(error, octavia_errors.DriverAgentTimeout)
        if pending_rereads.decode_objects(row.reread) is not None:
            taken = self._database.write(
                lambda connection: sync_transactions.take_objects(connection, row, [], {}, _UNREAD)
            )
        else:
            taken = self._in_pieces(row)
            if not taken:
                self._database.write(lambda connection: sync_transactions.fail(connection, row, _UNREAD))
        if taken:
            self.unread.pop(row.load_balancer_id, None)
            self._wake(row.load_balancer_id)
        return True

    def _in_pieces(self, row: Any) -> bool:
        """Read listener by listener and pool by pool; False if that was not enough to serve the rest."""
        tree = self._database.read(lambda connection: desired_objects.load_tree(connection, row.load_balancer_id))
        contents: dict[SecretName, SealedSecret] = {}
        # Those were read before, but for the ones that were not.
        again = any(one.unread for one in tree.listeners)
        # A listener is not handed over without its pools, and so not without their secrets.
        closed = False

        def piece(kind: Kind, recorded: Any) -> Any:
            nonlocal closed
            try:
                node, given = self._one(kind, recorded.id)
            except octavia_errors.DriverAgentTimeout:
                if isinstance(recorded, Pool):
                    closed = closed or bool(secrets_of_object(recorded))
                    # It is left out for want of its secrets.
                    return recorded if secrets_of_object(recorded) else None
                if again and not recorded.unread:
                    return recorded
                # It may have policies that keep somebody out, and that nobody knows here.
                explained = secrets_of_object(recorded) or (closed and not recorded.uses_l4)
                return msgspec.structs.replace(recorded, unread=True) if explained else None
            contents.update(given)
            return node

        try:
            pools = [piece(Kind.POOL, one) for one in tree.pools]
            listeners = [piece(Kind.LISTENER, one) for one in tree.listeners]
        except _FAILED as error:
            LOG.warning("load balancer %s could not be read in pieces: %s", row.load_balancer_id, error)
            return False
        if None in listeners or None in pools or not (listeners or pools):
            return False
        whole: LoadBalancer = msgspec.structs.replace(tree, listeners=tuple(listeners), pools=tuple(pools))
        return self._database.write(
            lambda connection: sync_transactions.take_tree(connection, row, whole, contents, _UNREAD)
        )

    # --- secrets ------------------------------------------------------------------------------------------------------

    def sealed(self, given: Mapping[SecretName, SecretMaterial]) -> dict[SecretName, SealedSecret]:
        """What a table may hold of these secrets; the user's request is over, so what is wrong with one is noted."""
        found: dict[SecretName, SealedSecret] = {}
        if not given:
            return found
        if self._vault is None:
            self._vault = Vault.load(self._conf.store.encryption_key_file)
        for name, material in given.items():
            try:
                secret = certificates.build_pem(name.purpose, material)
            except UnsupportedOption as error:
                found[name] = SealedSecret(reason=str(error))
            else:
                found[name] = SealedSecret(content=self._vault.seal(secret, secret_location(name)))
        return found

    def _wake(self, load_balancer_id: str | None = None) -> None:
        notifier.notify(self._conf, local_socket.CONTROLLER, load_balancer_id)
