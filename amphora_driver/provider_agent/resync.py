# SPDX-License-Identifier: Apache-2.0
"""Resynchronizes load balancers: reads them from Octavia and reports all statuses again, on request.

Invariant: Octavia accepts provisioning statuses again only while the load balancer is PENDING. So the resync first sets
the load balancer to PENDING_UPDATE. That call waits for the end of a running change, and blocks new changes. The last
report, the status of the load balancer itself, permits changes again. The resync waits while changes are open, and
starts again after a request that the driver accepted before that call. If Octavia's answer is unusable, the resync
reports the recorded statuses again. So only an unreachable Octavia or database keeps a load balancer PENDING.

Octavia returns load balancers by id only, and without statuses. So the resync cannot find unrecorded load balancers or
wrong statuses in Octavia, and reports all statuses of the named load balancers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from typing import Any

import msgspec
import sqlalchemy as sa
from octavia_lib.api.drivers import exceptions as octavia_errors
from octavia_lib.api.drivers.driver_lib import DriverLibrary
from oslo_config.cfg import ConfigOpts

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, object_status
from amphora_driver.errors import AmphoraDriverError, StoreError
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import Kind, Provisioning
from amphora_driver.model.loadbalancer import LoadBalancer, Node
from amphora_driver.model.secret_refs import SecretName
from amphora_driver.provider_agent import octavia_audit, octavia_reader, sync_transactions
from amphora_driver.provider_agent.octavia_reader import OctaviaReader
from amphora_driver.queue import local_socket, notifier
from amphora_driver.store import desired_objects, generations, resyncs, status_outbox
from amphora_driver.store.generations import Op
from amphora_driver.store.resyncs import ResyncOutcome
from amphora_driver.store.sealed_secrets import SealedSecret

LOG = logging.getLogger(__name__)
# A resync is tried again after _BUSY_DELAY seconds if the load balancer has unfinished changes, and after _RETRY_DELAY
# seconds if an error occurred.
_BUSY_DELAY, _RETRY_DELAY = 1.0, 15.0
_BUSY = "waits until all requests of its users are served and reported to Octavia"
_CREATING = "waits until Octavia has committed its creation"
# Maximum number of deletions in one call. Octavia needs up to 0.5 s for a deletion, and the time-out of a call is 30 s.
_MAX_DELETED = 15
# Maximum number of characters in the database column for the result.
_MAX_DETAIL = 2000


class _OctaviaState(msgspec.Struct, frozen=True, kw_only=True):
    """A tree from Octavia, its differences from the desired state, and the secrets of a differing tree."""

    tree: LoadBalancer
    differences: tuple[str, ...]
    contents: dict[SecretName, SealedSecret]


class Resyncer:
    """Executes resync requests one by one, in the executor or else in the caller's thread."""

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        library: Callable[[], DriverLibrary],
        reader: OctaviaReader,
        holds_duty: Callable[[], bool],
        executor: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._library = library
        self._reader = reader
        self._holds_duty = holds_duty
        self._executor = executor
        self._lock = threading.Lock()
        self._running = False
        # Monotonic times of the next attempts, by load balancer.
        self._not_before: dict[str, float] = {}

    def run_due(self) -> None:
        """Start the due requests, unless earlier ones still run."""
        with self._lock:
            if self._running or not (due := self._list_due()):
                return
            self._running = True
        if self._executor is None:
            self._run(due)
        else:
            self._executor.submit(self._run, due)

    def _list_due(self) -> list[Any]:
        requests = self._database.read(resyncs.list_open_resyncs)
        self._not_before = {one.load_balancer_id: self._not_before.get(one.load_balancer_id, 0.0) for one in requests}
        now = time.monotonic()
        return [one for one in requests if self._not_before[one.load_balancer_id] <= now]

    def _run(self, due: list[Any]) -> None:
        try:
            for one in due:
                if not self._holds_duty():
                    return
                self._attempt(one)
        finally:
            with self._lock:
                self._running = False

    def _attempt(self, request: Any) -> None:
        load_balancer_id = request.load_balancer_id
        try:
            waiting = self.resync(request)
            delay = 0.0 if waiting is None else _BUSY_DELAY
        except Exception as error:  # noqa: BLE001 - a failure must not block the requests of other load balancers
            failed = "the provider agent could not resynchronize load balancer %s and tries again in %.0f s: %s"
            LOG.warning(failed, load_balancer_id, _RETRY_DELAY, error)
            waiting, delay = f"failed, next attempt in {_RETRY_DELAY:.0f} s: {error}", _RETRY_DELAY
        self._not_before[load_balancer_id] = time.monotonic() + delay
        if waiting is not None and waiting != request.detail:
            try:
                self._database.write(lambda c: resyncs.set_resync_detail(c, load_balancer_id, waiting))
            except AmphoraDriverError as error:
                failed = (
                    "the provider agent could not record the resync state of load balancer %s, but continues the "
                    "resync: %s"
                )
                LOG.warning(failed, load_balancer_id, error)

    def resync(self, request: Any) -> str | None:
        """Execute a row of the table `resync`, and return None if it is finished, or the reason to wait."""
        load_balancer_id = request.load_balancer_id
        row = self._database.read(lambda connection: connection.execute(_ROW, {"of": load_balancer_id}).first())
        found, unread = self._read(load_balancer_id)
        if row is None:
            self._finish_unrecorded(request, found, unread)
            return None
        if row.op == Op.DELETE:
            self._finish(request, ResyncOutcome.GOING)
            return None
        if not row.committed:
            return _CREATING
        if found is None and unread is None:
            self._finish_unknown(request)
            return None
        # A resync sets the load balancer to PENDING_UPDATE, and Octavia then refuses requests of users. All checks come
        # before this status, so that an impossible resync blocks no users.
        before = self._database.read(lambda connection: sync_transactions.load_settled(connection, load_balancer_id))
        if before is None:
            return _BUSY
        if found is not None:
            _, unread = self._convert(before, found)
        self._library().update_loadbalancer_status(
            {"loadbalancers": [{"id": load_balancer_id, "provisioning_status": "PENDING_UPDATE"}]}
        )
        if unread is None:
            found, unread = self._read(load_balancer_id)
        if unread is not None or found is None:
            return self._finish_unread(request, before[0], unread or "Octavia has deleted it meanwhile")
        converted, unread = self._convert(before, found)
        if converted is None:
            return self._finish_unread(request, before[0], unread or "")
        return self._finish_adopted(request, before, converted)

    def _read(self, load_balancer_id: str) -> tuple[Any, str | None]:
        """Return Octavia's load balancer (None if unknown) and the reason if Octavia did not answer."""
        try:
            return self._library().get_loadbalancer(load_balancer_id), None
        except octavia_errors.DriverAgentTimeout:
            # For an unknown load balancer, Octavia answers at once. So a time-out proves that Octavia knows the load
            # balancer.
            return None, octavia_reader.UNREADABLE

    def _convert(
        self, before: tuple[Any, LoadBalancer, set[str]], found: Any
    ) -> tuple[_OctaviaState | None, str | None]:
        """Return Octavia's state with its differences, or the reason why the answer is unusable."""
        _, recorded, removed = before
        try:
            tree = octavia_audit.without_objects(from_octavia.load_balancer(found), removed)
            differences = tuple(octavia_audit.describe_differences(recorded, tree))
            secrets = from_octavia.read_secrets(Kind.LOAD_BALANCER, found) if differences else {}
            contents = self._reader.seal_secrets(secrets)
        except StoreError:
            raise
        except Exception as error:
            if not isinstance(error, AmphoraDriverError):
                LOG.exception(
                    "the provider agent cannot use Octavia's answer for load balancer %s and keeps the recorded "
                    "configuration",
                    recorded.id,
                )
            return None, f"Octavia's answer cannot be used: {error}"[:_MAX_DETAIL]
        return _OctaviaState(tree=tree, differences=differences, contents=contents), None

    def _finish_adopted(
        self, request: Any, before: tuple[Any, LoadBalancer, set[str]], converted: _OctaviaState
    ) -> str | None:
        row, recorded, _ = before
        tree, differences, contents = converted.tree, converted.differences, converted.contents
        ours, theirs = octavia_audit.nodes_by_id(recorded), octavia_audit.nodes_by_id(tree)
        gone, changed = ours.keys() - theirs.keys(), octavia_audit.changed_objects(recorded, tree)
        now = self._database.now()

        def write(connection: sa.Connection) -> bool:
            if differences:
                if not sync_transactions.adopt_octavia_tree(connection, row, tree, contents, gone):
                    return False
                # The load balancer and its changed objects must not become ACTIVE before the amphorae serve the new
                # configuration.
                waiting = [(Kind.LOAD_BALANCER, tree.id), *((kind, one) for one, kind in changed.items())]
                status_outbox.expect_confirmation(connection, tree.id, row.generation + 1, waiting)
            elif not sync_transactions.is_unchanged(connection, row):
                return False
            _expect_missing_statuses(connection, tree.id, row.generation, bumped=bool(differences))
            resyncs.report_again(connection, tree.id)
            detail = "; ".join(differences)[:_MAX_DETAIL] or None
            return resyncs.finish_resync(connection, request, ResyncOutcome.DONE, now, detail)

        found = "; ".join(differences) or "no differences"
        return self._commit(tree.id, write, found)

    def _finish_unread(self, request: Any, row: Any, reason: str) -> str | None:
        """Report the recorded statuses again, because the load balancer is PENDING and its users wait."""
        now = self._database.now()

        def write(connection: sa.Connection) -> bool:
            if not sync_transactions.is_unchanged(connection, row):
                return False
            resyncs.report_again(connection, row.load_balancer_id)
            return resyncs.finish_resync(connection, request, ResyncOutcome.UNREAD, now, reason)

        return self._commit(row.load_balancer_id, write, reason)

    def _commit(self, load_balancer_id: str, write: Callable[[sa.Connection], bool], found: str) -> str | None:
        if not self._database.write(write):
            return _BUSY
        LOG.info(
            "the resync of load balancer %s is complete, and the provider agent reports all statuses of its objects "
            "again. Result of the comparison with Octavia: %s",
            load_balancer_id,
            found,
        )
        self._notify(load_balancer_id)
        return None

    def _finish_unknown(self, request: Any) -> None:
        """Finish the request for a load balancer that exists only in the driver's database."""
        load_balancer_id = request.load_balancer_id
        if not request.remove_unknown:
            LOG.warning(
                "the resync does not delete load balancer %s, which Octavia does not know: only a resync with "
                "--remove-unknown deletes it",
                load_balancer_id,
            )
            detail = "it is recorded and served; --remove-unknown deletes it in the driver"
            self._finish(request, ResyncOutcome.UNKNOWN, detail)
            return
        LOG.warning(
            "load balancer %s is unknown to Octavia, so the resync deletes it, as the operator requested",
            load_balancer_id,
        )
        self._database.write(lambda connection: sync_transactions.delete_unknown(connection, load_balancer_id))
        self._finish(request, ResyncOutcome.REMOVED)
        self._notify(load_balancer_id)

    def _finish_unrecorded(self, request: Any, found: Any, unread: str | None) -> None:
        """Finish the request for a load balancer that is not in the driver's database."""
        load_balancer_id = request.load_balancer_id
        if found is None and unread is None:
            self._finish(request, ResyncOutcome.NOWHERE)
            return
        if request.remove_unknown and found is not None:
            LOG.warning(
                "the resync deletes load balancer %s from Octavia as requested, because the driver has no record of it",
                load_balancer_id,
            )
            # Octavia refuses to delete an object with children, so the children are first.
            gone = list(reversed([*octavia_audit.nodes_by_id(from_octavia.load_balancer(found)).values()]))
            for start in range(0, len(gone), _MAX_DELETED):
                self._library().update_loadbalancer_status(_deleted(gone[start : start + _MAX_DELETED]))
            self._finish(request, ResyncOutcome.REMOVED, "deleted from Octavia")
            return
        LOG.warning(
            "the resync keeps load balancer %s in Octavia, although the driver has no record of it: only a resync with "
            "--remove-unknown deletes it",
            load_balancer_id,
        )
        name = f"name {found.name}, VIP {found.vip_address}; " if found is not None else ""
        detail = f"{name}it is not served; --remove-unknown deletes it from Octavia"
        self._finish(request, ResyncOutcome.UNRECORDED, detail)

    def _finish(self, request: Any, outcome: ResyncOutcome, detail: str | None = None) -> None:
        now = self._database.now()
        self._database.write(lambda connection: resyncs.finish_resync(connection, request, outcome, now, detail))

    def _notify(self, load_balancer_id: str) -> None:
        local_socket.wake_role(self._conf.amp_queue.socket_dir, local_socket.REPORTER)
        notifier.notify(self._conf, local_socket.CONTROLLER, load_balancer_id)


_ROW = sa.select(job.c.op, job.c.committed).where(job.c.load_balancer_id == sa.bindparam("of"))


def _deleted(gone: Iterable[Node]) -> dict[str, list[dict[str, str]]]:
    """Return octavia_lib's status document that reports these objects as DELETED."""
    document: dict[str, list[dict[str, str]]] = {}
    for node in gone:
        entry = {"id": node.id, "provisioning_status": Provisioning.DELETED.value}
        document.setdefault(desired_objects.kind_of(node).value, []).append(entry)
    return document


def _expect_missing_statuses(
    connection: sa.Connection, load_balancer_id: str, generation: int, *, bumped: bool
) -> None:
    """Make objects without a status, and the load balancer, wait for the generation after the given one.

    This transaction may have started that generation already (`bumped`).
    """
    without_status = sa.select(object_status.c.object_id).where(
        object_status.c.load_balancer_id == load_balancer_id,
        object_status.c.provisioning.is_(None),
        object_status.c.pending.is_(None),
    )
    found: Collection[str] = connection.execute(without_status).scalars().all()
    if not found:
        return
    if not bumped:
        generations.bump_generation(connection, load_balancer_id, generation)
    waiting = object_status.update().where(object_status.c.object_id.in_([*found, load_balancer_id]))
    connection.execute(waiting.values(pending=generation + 1))
    sync_transactions.update_due_job(connection, load_balancer_id)
