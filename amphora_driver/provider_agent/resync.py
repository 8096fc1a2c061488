# SPDX-License-Identifier: Apache-2.0
"""Reading load balancers from Octavia, and telling it all about them, because an operator has asked for it.

Invariant: a provisioning status is only said again while Octavia has the load balancer PENDING. So before anything is
said we put it PENDING_UPDATE ourselves: that call waits for whoever is changing it, and after it nobody can, until the
load balancer's own status is said, which is the last one. What was accepted before is in our rows by then, and then
nothing is taken: it is done when that is. A load balancer that users are changing is left alone until it is settled.
What Octavia hands over and we cannot take, whatever the reason, ends with what is recorded being said again: nothing
but Octavia or the database being away keeps a load balancer PENDING.

Octavia hands load balancers over by id only, and says no status: which others it has cannot be asked, and neither can
what it believes of them. So everything is said, of those that are named.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from octavia_lib.api.drivers import exceptions as octavia_errors

from amphora_driver.database.tables import DUE_NOW, status, work
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.provider_agent import octavia_audit, sync_transactions
from amphora_driver.queue import local_socket, notifier
from amphora_driver.store import desired_objects, generations, resyncs, status_outbox
from amphora_driver.store.requests import Op
from amphora_driver.store.resyncs import ResyncOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from concurrent.futures import Executor

    from octavia_lib.api.drivers.driver_lib import DriverLibrary
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.model.loadbalancer import LoadBalancer, Node
    from amphora_driver.model.secret_refs import SecretName
    from amphora_driver.provider_agent.octavia_reader import Reader
    from amphora_driver.store.sealed_secrets import SealedSecret

LOG = logging.getLogger(__name__)
# Seconds before one that waits for its users is looked at again, and one that went wrong.
_BUSY_PAUSE = 1.0
_FAILED_PAUSE = 15.0
_BUSY = "waits until what its users have asked for is done and Octavia has been told"
_CREATING = "waits until Octavia has committed its creation"
# Deletions in one call: each costs Octavia tens of milliseconds, and a call is given up after half a minute.
_MOST_DELETED = 15
# Sentences about what differed that are kept.
_MOST_DETAIL = 2000


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What Octavia has: the tree, what of it differs from what is recorded, and its sealed secrets if anything does."""

    tree: LoadBalancer
    differing: tuple[str, ...]
    contents: dict[SecretName, SealedSecret]


class Resyncer:
    """Does what was asked for, one load balancer at a time.

    Args:
        conf: our options.
        database: where it is asked for, and what is wanted.
        library: gives octavia_lib's client.
        reader: seals secrets.
        on_duty: whether this process is the one that speaks to Octavia.
        hands: who does it; without, whoever takes a turn.
    """

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        library: Callable[[], DriverLibrary],
        reader: Reader,
        on_duty: Callable[[], bool],
        hands: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._library = library
        self._reader = reader
        self._on_duty = on_duty
        self._hands = hands
        self._lock = threading.Lock()
        self._running = False
        # Not before these times (seconds, monotonic).
        self._later: dict[str, float] = {}

    def turn(self) -> None:
        """Have what is due done, beside all else."""
        with self._lock:
            if self._running or not (due := self._due()):
                return
            self._running = True
        if self._hands is None:
            self._run(due)
        else:
            self._hands.submit(self._run, due)

    def _due(self) -> list[Any]:
        asked = self._database.read(resyncs.list_open_resyncs)
        self._later = {one.load_balancer_id: self._later.get(one.load_balancer_id, 0.0) for one in asked}
        now = time.monotonic()
        return [one for one in asked if self._later[one.load_balancer_id] <= now]

    def _run(self, due: list[Any]) -> None:
        try:
            for one in due:
                if not self._on_duty():
                    return
                self._attempt(one)
        finally:
            with self._lock:
                self._running = False

    def _attempt(self, asked: Any) -> None:
        load_balancer_id = asked.load_balancer_id
        try:
            waiting = self.resync(asked)
            pause = 0.0 if waiting is None else _BUSY_PAUSE
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one load balancer, the others come next
            LOG.warning("load balancer %s was not resynchronised: %s", load_balancer_id, error)
            waiting, pause = f"tried again in {_FAILED_PAUSE:.0f} s: {error}", _FAILED_PAUSE
        self._later[load_balancer_id] = time.monotonic() + pause
        if waiting is not None and waiting != asked.detail:
            try:
                self._database.write(
                    lambda connection: resyncs.set_resync_detail(connection, load_balancer_id, waiting)
                )
            except AmphoraDriverError as error:
                LOG.warning("what the resync of load balancer %s waits for was not noted: %s", load_balancer_id, error)

    def resync(self, asked: Any) -> str | None:
        """Do what was asked for; returns what it waits for, None if it is done.

        Args:
            asked: a row of the table `resync`.

        Raises:
            DriverAgentNotFound, UpdateStatusError: Octavia is away.
            StoreError: the database is.
        """
        load_balancer_id = asked.load_balancer_id
        row = self._database.read(lambda connection: connection.execute(_ROW, {"of": load_balancer_id}).first())
        found, unread = self._read(load_balancer_id)
        if row is None:
            self._unrecorded(asked, found, unread)
            return None
        if row.op == Op.DELETE:
            self._end(asked, ResyncOutcome.GOING)
            return None
        if not row.committed:
            return _CREATING
        if found is None and unread is None:
            self._unknown(asked)
            return None
        # Looked at with patience first: while it is PENDING its users wait.
        before = self._database.read(lambda connection: sync_transactions.settled(connection, load_balancer_id))
        if before is None:
            return _BUSY
        if found is not None:
            # Tried before it is locked: what cannot be taken need not be read while users wait.
            _, unread = self._converted(before, found)
        self._library().update_loadbalancer_status(
            {"loadbalancers": [{"id": load_balancer_id, "provisioning_status": "PENDING_UPDATE"}]}
        )
        if unread is None:
            found, unread = self._read(load_balancer_id)
        if unread is not None or found is None:
            return self._said_again(asked, before[0], unread or "Octavia does not know it any more")
        taken, unread = self._converted(before, found)
        if taken is None:
            return self._said_again(asked, before[0], unread or "")
        return self._taken(asked, before, taken)

    def _read(self, load_balancer_id: str) -> tuple[Any, str | None]:
        """What Octavia has, None if it does not know it; and why it did not answer, None if it did."""
        try:
            return self._library().get_loadbalancer(load_balancer_id), None
        except octavia_errors.DriverAgentTimeout:
            # What is not there is answered at once.
            return None, "Octavia could not hand it over: look whether every secret it refers to can be read"

    def _converted(self, before: tuple[Any, LoadBalancer, set[str]], found: Any) -> tuple[_Taken | None, str | None]:
        """What Octavia has, beside what is recorded; and why it cannot be taken, None if it can."""
        _, recorded, leaving = before
        try:
            tree = octavia_audit.remaining(from_octavia.load_balancer(found), leaving)
            differing = tuple(octavia_audit.differences(recorded, tree))
            contents = self._reader.sealed(from_octavia.read_secrets(Kind.LOAD_BALANCER, found)) if differing else {}
        except StoreError:
            raise
        except Exception as error:
            if not isinstance(error, AmphoraDriverError):
                LOG.exception("what Octavia has of load balancer %s cannot be taken", recorded.id)
            return None, f"what Octavia has of it cannot be taken: {error}"[:_MOST_DETAIL]
        return _Taken(tree=tree, differing=differing, contents=contents), None

    def _taken(self, asked: Any, before: tuple[Any, LoadBalancer, set[str]], taken: _Taken) -> str | None:
        row, recorded, _ = before
        tree, differing, contents = taken.tree, taken.differing, taken.contents
        ours, theirs = octavia_audit.nodes(recorded), octavia_audit.nodes(tree)
        gone, changed = ours.keys() - theirs.keys(), octavia_audit.changed(recorded, tree)
        now = self._database.now()

        def write(connection: sa.Connection) -> bool:
            if differing:
                if not sync_transactions.correct(connection, row, tree, contents, gone):
                    return False
                # What is not served yet is not ACTIVE yet, and neither is the whole of it.
                waiting = [(Kind.LOAD_BALANCER, tree.id), *((kind, one) for one, kind in changed.items())]
                status_outbox.expect_confirmation(connection, tree.id, row.generation + 1, waiting)
            elif not sync_transactions.is_as_seen(connection, row):
                return False
            _expect_unsaid(connection, tree.id, row.generation, renewed=bool(differing))
            resyncs.report_again(connection, tree.id)
            return resyncs.finish_resync(
                connection, asked, ResyncOutcome.DONE, now, "; ".join(differing)[:_MOST_DETAIL] or None
            )

        if not self._database.write(write):
            return _BUSY
        words = "; ".join(differing) or "nothing differed"
        LOG.info("load balancer %s was resynchronised with Octavia: %s", tree.id, words)
        self._wake(tree.id)
        return None

    def _said_again(self, asked: Any, row: Any, reason: str) -> str | None:
        """The tree does not come: what is recorded is said again, since its users wait."""
        now = self._database.now()

        def write(connection: sa.Connection) -> bool:
            if not sync_transactions.is_as_seen(connection, row):
                return False
            resyncs.report_again(connection, row.load_balancer_id)
            return resyncs.finish_resync(connection, asked, ResyncOutcome.UNREAD, now, reason)

        if not self._database.write(write):
            return _BUSY
        self._wake(row.load_balancer_id)
        return None

    def _unknown(self, asked: Any) -> None:
        load_balancer_id = asked.load_balancer_id
        if not asked.remove_unknown:
            LOG.warning("Octavia does not know load balancer %s, which is recorded here", load_balancer_id)
            self._end(
                asked, ResyncOutcome.UNKNOWN, "it is recorded and served here; --remove-unknown removes it from here"
            )
            return
        LOG.warning("Octavia does not know load balancer %s: removing it, as asked", load_balancer_id)
        self._database.write(lambda connection: sync_transactions.abandon(connection, load_balancer_id))
        self._end(asked, ResyncOutcome.REMOVED)
        self._wake(load_balancer_id)

    def _unrecorded(self, asked: Any, found: Any, unread: str | None) -> None:
        load_balancer_id = asked.load_balancer_id
        if found is None and unread is None:
            self._end(asked, ResyncOutcome.NOWHERE)
            return
        if asked.remove_unknown and found is not None:
            LOG.warning("load balancer %s is not recorded here: it goes from Octavia, as asked", load_balancer_id)
            # The leaves first: it takes children with nothing below them.
            gone = list(reversed([*octavia_audit.nodes(from_octavia.load_balancer(found)).values()]))
            for start in range(0, len(gone), _MOST_DELETED):
                self._library().update_loadbalancer_status(_deleted(gone[start : start + _MOST_DELETED]))
            self._end(asked, ResyncOutcome.REMOVED, "Octavia was told that it is gone")
            return
        LOG.warning("Octavia knows load balancer %s, and nothing is recorded of it here", load_balancer_id)
        name = f"name {found.name}, VIP {found.vip_address}; " if found is not None else ""
        self._end(
            asked, ResyncOutcome.UNRECORDED, f"{name}nothing here serves it; --remove-unknown removes it from Octavia"
        )

    def _end(self, asked: Any, outcome: ResyncOutcome, detail: str | None = None) -> None:
        now = self._database.now()
        self._database.write(lambda connection: resyncs.finish_resync(connection, asked, outcome, now, detail))

    def _wake(self, load_balancer_id: str) -> None:
        local_socket.wake_role(self._conf.queue.doorbell_dir, local_socket.REPORTER)
        notifier.notify(self._conf, local_socket.CONTROLLER, load_balancer_id)


_ROW = sa.select(work.c.op, work.c.committed).where(work.c.load_balancer_id == sa.bindparam("of"))


def _deleted(gone: Iterable[Node]) -> dict[str, list[dict[str, str]]]:
    """The status document that says that these are gone."""
    document: dict[str, list[dict[str, str]]] = {}
    for node in gone:
        document.setdefault(desired_objects.kind_of(node).value, []).append(
            {"id": node.id, "provisioning_status": Provisioning.DELETED.value}
        )
    return document


def _expect_unsaid(connection: sa.Connection, load_balancer_id: str, generation: int, *, renewed: bool) -> None:
    """What nothing was ever found out about waits for the next generation, and the load balancer with it.

    Args:
        generation: as it was before.
        renewed: the next one is taken already.
    """
    silent = sa.select(status.c.object_id).where(
        status.c.load_balancer_id == load_balancer_id, status.c.provisioning.is_(None), status.c.pending.is_(None)
    )
    found: Collection[str] = connection.execute(silent).scalars().all()
    if not found:
        return
    if not renewed:
        generations.bump_generation(connection, load_balancer_id, generation)
    waiting = {"pending": generation + 1}
    connection.execute(status.update().where(status.c.object_id.in_([*found, load_balancer_id])).values(**waiting))
    due = {"dirty": True, "free_at": DUE_NOW}
    connection.execute(work.update().where(work.c.load_balancer_id == load_balancer_id).values(**due))
