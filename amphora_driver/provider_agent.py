# SPDX-License-Identifier: Apache-2.0
"""The part of this provider that lives beside Octavia and speaks to it.

Invariant: Octavia hears of nothing before its own transaction has ended. Its driver methods run inside that
transaction; a status sent then is lost (the row is not there yet) or overwritten (it becomes PENDING_UPDATE
afterwards). So every accepted generation first passes a *barrier*: a status update of the load balancer's own row,
which waits for the row's lock until Octavia has committed. Only then are statuses sent, from the outbox, until
Octavia has taken them.

octavia-driver-agent starts `run` in a process of its own (entry point octavia.driver_agent.provider_agents). One
reporter at a time is enough; the duty moves when it dies.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from octavia_lib.api.drivers import driver_lib
from octavia_lib.api.drivers import exceptions as octavia_errors

from amphora_driver import config
from amphora_driver.capabilities import certificates
from amphora_driver.errors import AmphoraDriverError, UnsupportedOption
from amphora_driver.model import from_octavia
from amphora_driver.model.secrets import used_by, used_in
from amphora_driver.model.vocabulary import Kind, Provisioning
from amphora_driver.queue import doorbell, jobs
from amphora_driver.store import counters, reading_back, secrets, statuses, wanted
from amphora_driver.store.engine import Database
from amphora_driver.store.intents import Op
from amphora_driver.store.secrets import Sealed
from amphora_driver.store.tables import request, work
from amphora_driver.store.vault import Vault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.synchronize import Event

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Pool
    from amphora_driver.model.secrets import Material, SecretName

LOG = logging.getLogger(__name__)

# A deleted row costs Octavia about 34 ms, but for a member it loads the whole pool: half a second among a thousand on a
# busy machine. A call is given up after 30 s, while Octavia goes on with it: to try again then doubles its work. Others
# cost about 2 ms.
_MOST_DELETED = 15
_MOST_ROWS = 300
# What it means that Octavia is away for now: its agent is not there, does not answer, or hangs up. octavia_lib raises
# the same error for "not reached" and for "refused"; only the latter names an object.
_AWAY = (
    AmphoraDriverError,
    octavia_errors.DriverAgentNotFound,
    octavia_errors.DriverAgentTimeout,
    octavia_errors.DriverError,
    octavia_errors.UpdateStatusError,
    octavia_errors.UpdateStatisticsError,
    OSError,
)
# How long a load balancer waits for a child whose status Octavia refuses, in seconds: longer is no passing trouble.
_CHILD_FIRST = 2.0
# How long reading back may fail, as the pause after a failure, in seconds: what does not come then does not come.
_READ_PATIENCE = 2.0
_NOT_GIVEN = "Octavia handed nothing over under a reference: look whether the secret is there and can be read"
_DUTY = "reporter"
_DUTY_SECONDS = 10.0
# How long Octavia may take to commit a load balancer it has handed over, before we believe that it never will.
_COMMIT_PATIENCE = 120.0


def run(exit_event: Event) -> None:
    """Report to Octavia until told to stop.

    Args:
        exit_event: set when octavia-driver-agent ends.
    """
    conf = config.shared()
    Reporter(conf, Database(conf.store.connection, durable=False)).run(exit_event)


class Reporter:
    """Passes barriers, reads trees back, and empties the outbox."""

    def __init__(self, conf: ConfigOpts, database: Database) -> None:
        self._conf = conf
        self._database = database
        self._name = jobs.process_name()
        self._library: driver_lib.DriverLibrary | None = None
        self._vault: Vault | None = None
        self._held_until = 0.0
        self._ended = threading.Event()
        # Load balancers that could not be read back: not tried again before this time (seconds, monotonic).
        self._unread: dict[str, tuple[float, float]] = {}
        # Objects Octavia would not take: not tried again before this time (seconds, monotonic).
        self._refused: dict[str, tuple[float, float]] = {}
        # The load balancer that was reported last.
        self._turn = ""

    def run(self, exit_event: Event) -> None:
        """Work whenever somebody rings, and now and then anyway."""
        # Statistics have a socket of their own, and a call takes a tenth of a second: nobody's ACTIVE waits for them.
        counting = threading.Thread(target=self._count, name="statistics", daemon=True)
        counting.start()
        with doorbell.Doorbell(self._conf.queue.doorbell_dir, doorbell.REPORTER) as bell:
            pause = 0.0
            while not exit_event.is_set():
                # Short enough for the end to be noticed soon: an Event of another process cannot be selected on.
                bell.wait(min(pause, 0.5))
                try:
                    pause = self.turn()
                except _AWAY as error:
                    LOG.warning("Octavia could not be told, trying again: %s", error)
                    pause = self._conf.queue.poll_interval
        self._ended.set()
        counting.join()
        jobs.drop_duty(self._database, _DUTY, self._name)

    def _count(self) -> None:
        while not self._ended.wait(self._conf.queue.poll_interval):
            try:
                if time.monotonic() < self._held_until:
                    self.report_statistics()
            except _AWAY as error:
                LOG.warning("Octavia could not be told of statistics, trying again: %s", error)

    def turn(self) -> float:
        """Do all that is due; returns after how many seconds to look again if nobody rings."""
        if not self._on_duty():
            return float(self._conf.queue.poll_interval)
        waiting = self._pass_barriers()
        while self._report_statuses():
            pass
        return 0.05 if waiting else float(self._conf.queue.poll_interval)

    @property
    def library(self) -> driver_lib.DriverLibrary:
        """octavia_lib's client, made when the sockets are first needed."""
        if self._library is None:
            octavia = self._conf.octavia
            self._library = driver_lib.DriverLibrary(
                status_socket=octavia.status_socket, stats_socket=octavia.stats_socket, get_socket=octavia.get_socket
            )
        return self._library

    def _on_duty(self) -> bool:
        now = time.monotonic()
        if now < self._held_until:
            return True
        if not jobs.hold_duty(self._database, _DUTY, self._name, _DUTY_SECONDS):
            return False
        self._held_until = now + _DUTY_SECONDS / 2
        return True

    # --- barriers ---------------------------------------------------------------------------------------------------

    def _pass_barriers(self) -> bool:
        """Wait for Octavia's transactions; True if one of them is still open."""
        now = time.monotonic()
        rows = [
            row
            for row in self._database.read(_uncommitted)
            if self._unread.get(row.load_balancer_id, (0.0, 0.0))[0] <= now
        ]
        if not rows:
            return False
        operating = self._database.read(
            lambda connection: statuses.operating_of(connection, [row.load_balancer_id for row in rows])
        )
        barriers = {
            row.load_balancer_id: {
                "id": row.load_balancer_id,
                "operating_status": operating[row.load_balancer_id].value,
            }
            for row in rows
        }
        held = self._barrier(barriers)
        waited = [row for row in rows if row.load_balancer_id not in held]
        # Those that need no reading first: one that cannot be read takes half a minute to say so.
        passed = [(row.load_balancer_id, row.generation) for row in waited if row.committed and not row.read_back]
        self._database.write(lambda connection: _mark_committed(connection, passed))
        new = [row for row in waited if not row.committed or row.read_back]
        created = [(row.load_balancer_id, row.generation) for row in new if self._readable(row)]
        if created:
            self._database.write(lambda connection: _mark_committed(connection, created))
        return len(passed) + len(created) < len(rows)

    def _readable(self, row: Any) -> bool:
        """`_known`, but what goes wrong with one load balancer holds up no other."""
        try:
            known = self._known(row)
        except (AmphoraDriverError, octavia_errors.DriverAgentTimeout, octavia_errors.DriverError) as error:
            pause = min(2 * self._unread.get(row.load_balancer_id, (0.0, 0.5))[1], 60.0)
            self._unread[row.load_balancer_id] = (time.monotonic() + pause, pause)
            LOG.warning("load balancer %s could not be read: %s; again in %.0f s", row.load_balancer_id, error, pause)
            if row.read_back and pause >= _READ_PATIENCE:
                self._give_up_reading(row)
            return False
        self._unread.pop(row.load_balancer_id, None)
        return known

    def _give_up_reading(self, row: Any) -> None:
        """Octavia does not hand it over, perhaps because a secret is not there any more: go on with what is known.

        Without its single objects the rest can be served; without its tree a load balancer cannot. That one is in
        ERROR, so that its user can do something, and is read again and again.
        """
        reason = "Octavia could not hand it over: look whether every secret it refers to can be read"
        if reading_back.objects_of(row.reread) is None:
            self._database.write(lambda connection: _fail(connection, row, reason))
        else:
            self._database.write(lambda connection: _take_objects(connection, row, [], {}, reason))
            self._unread.pop(row.load_balancer_id, None)

    def _barrier(self, barriers: dict[str, dict[str, str]]) -> set[str]:
        """Wait on the rows of these load balancers; returns those whose row could not be waited on."""
        try:
            self.library.update_loadbalancer_status({"loadbalancers": list(barriers.values())})
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None or len(barriers) == 1:
                raise
            LOG.warning("Octavia refused a barrier (%s): waiting on the load balancers one by one", error.fault_string)
        else:
            return set()
        held = set()
        for load_balancer_id, barrier in barriers.items():
            try:
                self.library.update_loadbalancer_status({"loadbalancers": [barrier]})
            except octavia_errors.UpdateStatusError as error:
                LOG.warning("no barrier for load balancer %s: %s", load_balancer_id, error.fault_string)
                held.add(load_balancer_id)
        return held

    def _known(self, row: Any) -> bool:
        """Whether Octavia has committed, and what arrived incomplete has been read."""
        objects = reading_back.objects_of(row.reread)
        if row.committed and objects is not None:
            return self._reread(row, objects)
        found = self.library.get_loadbalancer(row.load_balancer_id)
        if found is None:
            if not row.committed and time.time() - row.accepted_at > _COMMIT_PATIENCE:
                LOG.warning("Octavia never committed load balancer %s: removing it", row.load_balancer_id)
                self._database.write(lambda connection: _abandon(connection, row.load_balancer_id))
                doorbell.ring(self._conf.queue.doorbell_dir, doorbell.CONTROLLER)
            return False
        if row.read_back:
            tree = from_octavia.load_balancer(found)
            contents = self._sealed(from_octavia.secrets(Kind.LOAD_BALANCER, found))
            self._database.write(lambda connection: _take_tree(connection, row.generation, tree, contents))
            doorbell.ring(self._conf.queue.doorbell_dir, doorbell.CONTROLLER)
        return True

    def _reread(self, row: Any, objects: Sequence[tuple[Kind, str]]) -> bool:
        """Read single listeners and pools: that costs nothing for a large tree, and needs no other secrets."""
        get = {Kind.LISTENER: self.library.get_listener, Kind.POOL: self.library.get_pool}
        nodes: list[Listener | Pool] = []
        contents: dict[SecretName, Sealed] = {}
        for kind, object_id in objects:
            found = get[kind](object_id)
            if found is not None:
                nodes.append(from_octavia.listener(found) if kind is Kind.LISTENER else from_octavia.pool(found))
                contents |= self._sealed(from_octavia.secrets(kind, found))
        self._database.write(lambda connection: _take_objects(connection, row, nodes, contents, _NOT_GIVEN))
        doorbell.ring(self._conf.queue.doorbell_dir, doorbell.CONTROLLER)
        return True

    def _sealed(self, given: Mapping[SecretName, Material]) -> dict[SecretName, Sealed]:
        """What a table may hold of these secrets; the user's request is over, so what is wrong with one is noted."""
        found: dict[SecretName, Sealed] = {}
        if not given:
            return found
        if self._vault is None:
            self._vault = Vault.load(self._conf.store.encryption_key_file)
        for name, material in given.items():
            try:
                secret = certificates.pem(name.purpose, material)
            except UnsupportedOption as error:
                found[name] = Sealed(reason=str(error))
            else:
                found[name] = Sealed(content=self._vault.seal(secret))
        return found

    # --- the outbox ---------------------------------------------------------------------------------------------------

    def _report_statuses(self) -> bool:
        """Send one call's worth of statuses; True if there may be more."""
        found = self._database.read(lambda connection: statuses.due(connection, _MOST_ROWS, self._turn))
        reports = _one_call([one for one in found if self._due(one)])
        if not reports:
            return False
        # One that has more to say than fits into a call lets the others go first next time.
        self._turn = reports[-1].load_balancer_id
        try:
            self.library.update_loadbalancer_status(document(reports))
            accepted = list(reports)
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None:
                raise
            LOG.warning("Octavia refused a status (%s): sending them one by one", error.fault_string)
            accepted = [report for report in reports if self._due(report) and self._report_alone(report)]
        self._database.write(lambda connection: statuses.taken(connection, accepted))
        return True

    def _due(self, report: statuses.Due) -> bool:
        until, _ = self._refused.get(report.object_id, (0.0, 0.0))
        if until > time.monotonic():
            return False
        if until and report.kind is Kind.LOAD_BALANCER:
            self._refused.pop(report.object_id)
        return True

    def _report_alone(self, report: statuses.Due) -> bool:
        try:
            self.library.update_loadbalancer_status(document([report]))
        except octavia_errors.UpdateStatusError as error:
            if error.status_object_id is None:
                raise
            if report.kind is Kind.LOAD_BALANCER and self.library.get_loadbalancer(report.object_id) is None:
                # Nothing is there to be told about: deleted before, or never committed.
                return report.provisioning is Provisioning.DELETED
            pause = min(2 * self._refused.get(report.object_id, (0.0, 0.125))[1], 60.0)
            LOG.warning(
                "Octavia refused %s %s (%s): again in %.0f s", report.kind, report.object_id, error.fault_string, pause
            )
            self._refused[report.object_id] = (time.monotonic() + pause, pause)
            if pause <= _CHILD_FIRST:
                # The load balancer stays PENDING, and so closed to the next request, until its child is told.
                self._refused.setdefault(report.load_balancer_id, (time.monotonic() + pause, 0.125))
            return False
        self._refused.pop(report.object_id, None)
        return True

    def report_statistics(self) -> None:
        """Send the totals of listeners that changed since they were sent last."""
        totals = self._database.read(lambda connection: counters.due(connection, _MOST_ROWS))
        if not totals:
            return
        self.library.update_listener_statistics({"listeners": [one.document() for one in totals]})
        self._database.write(lambda connection: counters.taken(connection, totals))


def document(reports: Sequence[statuses.Due]) -> dict[str, list[dict[str, str]]]:
    """The status document of octavia_lib for these reports."""
    found: dict[str, list[dict[str, str]]] = {}
    for report in reports:
        entry = {"id": report.object_id}
        if report.provisioning is not None:
            entry["provisioning_status"] = report.provisioning.value
        if report.operating is not None and report.provisioning is not Provisioning.DELETED:
            entry["operating_status"] = report.operating.value
        found.setdefault(report.kind.value, []).append(entry)
    return found


def _one_call(reports: Sequence[statuses.Due]) -> list[statuses.Due]:
    """The first reports that fit into one call."""
    chosen: list[statuses.Due] = []
    deleted = 0
    for report in reports:
        deleted += report.provisioning is Provisioning.DELETED
        if deleted > _MOST_DELETED:
            break
        chosen.append(report)
    return chosen


def _uncommitted(connection: sa.Connection) -> Sequence[Any]:
    """Load balancers with a generation whose transaction in Octavia may still be open."""
    accepted = (
        sa.select(sa.func.min(request.c.accepted_at))
        .where(request.c.load_balancer_id == work.c.load_balancer_id)
        .scalar_subquery()
    )
    return connection.execute(
        sa.select(
            work.c.load_balancer_id,
            work.c.generation,
            work.c.committed,
            work.c.read_back,
            work.c.reread,
            accepted.label("accepted_at"),
        ).where(sa.or_(work.c.committed < work.c.generation, work.c.read_back))
    ).all()


def _mark_committed(connection: sa.Connection, passed: Sequence[tuple[str, int]]) -> None:
    for load_balancer_id, generation in passed:
        connection.execute(
            work.update()
            .where(work.c.load_balancer_id == load_balancer_id, work.c.committed < generation)
            .values(committed=generation)
        )


def _take_tree(
    connection: sa.Connection, generation: int, tree: LoadBalancer, contents: Mapping[SecretName, Sealed]
) -> None:
    """The tree Octavia has now is the wanted one; its new objects wait for the same generation."""
    added = wanted.replace_tree(connection, generation, tree)
    statuses.expect(connection, tree.id, generation, [(wanted.kind_of(node), node.id) for node in added])
    secrets.drop_load_balancer(connection, tree.id)
    lost = Sealed(reason=_NOT_GIVEN)
    secrets.put(connection, tree.id, {name: contents.get(name, lost) for name in dict.fromkeys(used_in(tree))})
    reading_back.done(connection, tree.id)


def _take_objects(
    connection: sa.Connection,
    row: Any,
    nodes: Sequence[Listener | Pool],
    contents: Mapping[SecretName, Sealed],
    reason: str,
) -> None:
    """What Octavia has of these objects is wanted; secrets of which nothing is known are missing for this reason."""
    for node in nodes:
        if wanted.refresh(connection, row.generation, node):
            used = used_by(node)
            secrets.settle(connection, row.load_balancer_id, node.id, used, contents)
    tree = wanted.load_tree(connection, row.load_balancer_id)
    recorded = secrets.of_load_balancer(connection, row.load_balancer_id)
    lost = {name: Sealed(reason=reason) for name in dict.fromkeys(used_in(tree)) if name not in recorded}
    secrets.put(connection, row.load_balancer_id, lost)
    reading_back.done(connection, row.load_balancer_id)
    _mark_committed(connection, [(row.load_balancer_id, row.generation)])


def _fail(connection: sa.Connection, row: Any, reason: str) -> None:
    """Octavia has committed what it will not hand over: its user is told."""
    statuses.fail(connection, row.load_balancer_id, row.generation, reason)
    _mark_committed(connection, [(row.load_balancer_id, row.generation)])


def _abandon(connection: sa.Connection, load_balancer_id: str) -> None:
    """Octavia rolled the creation back: everything made for it goes again."""
    generation = connection.execute(
        sa.select(work.c.generation).where(work.c.load_balancer_id == load_balancer_id)
    ).scalar_one()
    everything = [(Kind.LOAD_BALANCER, load_balancer_id), *wanted.below(connection, [load_balancer_id])]
    wanted.remove(connection, generation + 1, [object_id for _, object_id in everything])
    statuses.expect(connection, load_balancer_id, generation + 1, everything)
    connection.execute(
        work.update()
        .where(work.c.load_balancer_id == load_balancer_id)
        .values(op=Op.DELETE, generation=generation + 1, committed=generation + 1, dirty=True, free_at=0.0)
    )
