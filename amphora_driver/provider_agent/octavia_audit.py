# SPDX-License-Identifier: Apache-2.0
"""Whether Octavia has kept what we recorded.

Invariant: Octavia's records are the truth about what its users want. Its transaction may fail after our answer (its
process dies, its database does), and nobody tells us: so every load balancer that was changed is compared once, some
seconds after its last change. What is being changed, removed or read at that moment is left alone and looked at later,
and so is what Octavia has not been told of. Nobody waits for a comparison, neither barriers nor what else is read.

Nothing in octavia_lib says which transactions failed, so all are looked at, one load balancer at a time and never more
often than an interval: that is what it costs.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from amphora_driver.model import from_octavia, l7policy_positions
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Pool
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.queue import local_socket, notifier
from amphora_driver.store import desired_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from concurrent.futures import Executor

    from octavia_lib.api.drivers.driver_lib import DriverLibrary
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.model.loadbalancer import Node
    from amphora_driver.provider_agent.octavia_reader import Reader

LOG = logging.getLogger(__name__)
# Changes so many seconds ago are looked at when a reporter begins: the one before may not have come to it.
_LOOK_BACK = 600.0
# The pause after a comparison that failed, in seconds: each takes Octavia half a minute not to answer.
_FIRST_PAUSE = 15.0
_LONGEST_PAUSE = 600.0
# Fields that hang below an object, and have objects of their own.
_CHILDREN: dict[type, dict[str, Any]] = {
    LoadBalancer: {"listeners": (), "pools": ()},
    Listener: {"l7policies": ()},
    L7Policy: {"rules": ()},
    Pool: {"members": (), "healthmonitor": None},
}
# What only we know of a load balancer: what its creation chose, and addresses Octavia is told of once.
_OURS = ("profile", "flavor", "availability_zone", "vip", "additional_vips")


class Auditor:
    """Compares load balancers that were changed.

    Args:
        conf: our options.
        database: where what is wanted is recorded.
        library: gives octavia_lib's client.
        reader: seals secrets.
        hands: who compares, one load balancer at a time; without, whoever takes a turn.
    """

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        library: Callable[[], DriverLibrary],
        reader: Reader,
        hands: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._library = library
        self._reader = reader
        self._hands = hands
        self._lock = threading.Lock()
        # When load balancers are to be compared (seconds, monotonic).
        self._due: dict[str, float] = {}
        # The pauses of those that could not be, in seconds.
        self._pauses: dict[str, float] = {}
        self._next = 0.0
        self._begun = False
        self._comparing = False

    def begin(self) -> None:
        """Somebody else may have had the duty: what is known of changes is old."""
        with self._lock:
            self._begun = False
            self._due.clear()
            self._pauses.clear()

    def changed(self, load_balancer_ids: Iterable[str]) -> None:
        """Something was accepted for these, and Octavia's transactions have ended."""
        at = time.monotonic() + self._conf.octavia.audit_after
        with self._lock:
            self._due.update((one, at + self._pauses.get(one, 0.0)) for one in load_balancer_ids)

    def turn(self) -> None:
        """Have the next one compared, if it is time."""
        now = time.monotonic()
        if not self._begun:
            self._begun = True
            since = time.time() - _LOOK_BACK
            self.changed(self._database.read(lambda connection: sync_transactions.recently_changed(connection, since)))
        with self._lock:
            if self._comparing or now < self._next or not self._due:
                return
            chosen = min(self._due, key=lambda one: self._due[one])
            if time.monotonic() < self._due[chosen]:
                return
            del self._due[chosen]
            self._next = now + self._conf.octavia.audit_interval
            self._comparing = True
        if self._hands is None:
            self._compare_next(chosen)
        else:
            self._hands.submit(self._compare_next, chosen)

    def _compare_next(self, load_balancer_id: str) -> None:
        try:
            self.compare(load_balancer_id)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one load balancer, the others come next
            with self._lock:
                pause = min(2 * self._pauses.get(load_balancer_id, _FIRST_PAUSE / 2), _LONGEST_PAUSE)
                self._pauses[load_balancer_id] = pause
            LOG.warning("load balancer %s was not compared: %s; again in %.0f s", load_balancer_id, error, pause)
            self.changed([load_balancer_id])
        else:
            with self._lock:
                self._pauses.pop(load_balancer_id, None)
        finally:
            with self._lock:
                self._comparing = False

    def verify(self, row: Any) -> bool:
        """Make sure that Octavia has kept a batch that takes members away, before it is told that they are gone.

        Octavia shows what is being deleted as if it were not, and forgets it when told: after that nothing could be
        brought back. One of the members that came with a batch tells of all of it, since it was one transaction, and of
        no other batch.
        """
        lost: list[str] = []
        for batch in self._database.read(lambda connection: sync_transactions.batches(connection, row)):
            found = self._library().get_member(batch.sample.id)
            if found is None or (not batch.came and _differing(batch.sample, from_octavia.member(found))):
                words = (row.load_balancer_id, ", ".join(batch.removed))
                LOG.warning("load balancer %s: Octavia has not kept the batch that removed members %s", *words)
                lost += batch.removed
        if lost:
            # What came with them is found when the load balancer is compared.
            if self._database.write(lambda connection: sync_transactions.undo(connection, row, lost)):
                self.changed([row.load_balancer_id])
                notifier.notify(self._conf, local_socket.CONTROLLER, row.load_balancer_id)
            return False
        passed = [(row.load_balancer_id, row.generation)]
        self._database.write(lambda connection: sync_transactions.mark_committed(connection, passed))
        return True

    def compare(self, load_balancer_id: str) -> bool:
        """Compare one, and want what Octavia has kept; True if that was something else."""
        before = self._database.read(lambda connection: sync_transactions.settled(connection, load_balancer_id))
        if before is None:
            if self._database.read(lambda connection: sync_transactions.stays(connection, load_balancer_id)):
                self.changed([load_balancer_id])
                # Octavia was not asked: that has cost nothing.
                self._next = 0.0
            return False
        row, recorded, leaving = before
        found = self._library().get_loadbalancer(load_balancer_id)
        if found is None:
            LOG.warning("Octavia does not know load balancer %s: it stays until somebody deletes it", load_balancer_id)
            return False
        # What was removed before Octavia was asked never comes back: perhaps it hears of that only now.
        tree = remaining(from_octavia.load_balancer(found), leaving)
        differing = differences(recorded, tree)
        if not differing:
            return False
        contents = self._reader.sealed(from_octavia.read_secrets(Kind.LOAD_BALANCER, found))
        gone = nodes(recorded).keys() - nodes(tree).keys()
        corrected = self._database.write(
            lambda connection: sync_transactions.correct(connection, row, tree, contents, gone)
        )
        if corrected:
            words = "; ".join(differing)
            LOG.warning("load balancer %s: Octavia has kept something else, which is wanted: %s", row[0], words)
            notifier.notify(self._conf, local_socket.CONTROLLER, load_balancer_id)
        return corrected


def remaining(tree: LoadBalancer, leaving: Collection[str]) -> LoadBalancer:
    """A tree as it is once these objects are gone: without all below them, references to them, and their places."""
    replace = msgspec.structs.replace

    def policy(one: L7Policy) -> L7Policy:
        rules = tuple(rule for rule in one.rules if rule.id not in leaving)
        return replace(one, rules=rules, redirect_pool_id=_unless(one.redirect_pool_id, leaving))

    def listener(one: Listener) -> Listener:
        policies = l7policy_positions.renumber(policy(each) for each in one.l7policies if each.id not in leaving)
        return replace(one, l7policies=policies, default_pool_id=_unless(one.default_pool_id, leaving))

    def pool(one: Pool) -> Pool:
        members = tuple(member for member in one.members if member.id not in leaving)
        monitor = one.healthmonitor if one.healthmonitor and one.healthmonitor.id not in leaving else None
        return replace(one, members=members, healthmonitor=monitor)

    return replace(
        tree,
        listeners=tuple(listener(one) for one in tree.listeners if one.id not in leaving),
        pools=tuple(pool(one) for one in tree.pools if one.id not in leaving),
    )


def differences(recorded: LoadBalancer, kept: LoadBalancer) -> list[str]:
    """In what these two differ, one sentence for each object.

    Args:
        recorded: what we want.
        kept: what remains of what Octavia has.
    """
    # Policies count in their order, whatever their places are called.
    ours, theirs = nodes(remaining(recorded, ())), nodes(remaining(kept, ()))
    found = [f"{_name(ours[one])} is not there" for one in sorted(ours.keys() - theirs.keys())]
    found += [f"{_name(theirs[one])} is there" for one in sorted(theirs.keys() - ours.keys())]
    for one in sorted(ours.keys() & theirs.keys()):
        fields = _differing(ours[one], theirs[one])
        if fields:
            found.append(f"{_name(ours[one])} differs in {', '.join(fields)}")
    return found


def changed(recorded: LoadBalancer, kept: LoadBalancer) -> dict[str, Kind]:
    """The objects that are in both, and not the same, with their kinds."""
    ours, theirs = nodes(remaining(recorded, ())), nodes(remaining(kept, ()))
    both = ours.keys() & theirs.keys()
    return {one: desired_objects.kind_of(theirs[one]) for one in sorted(both) if _differing(ours[one], theirs[one])}


def nodes(tree: LoadBalancer) -> Mapping[str, Node]:
    """Every object of a tree without its children, by id."""
    return {
        node.id: msgspec.structs.replace(node, **_CHILDREN[type(node)]) if type(node) in _CHILDREN else node
        for node in desired_objects.iter_subtree(tree)
    }


def _differing(ours: Node, theirs: Node) -> list[str]:
    """Names of the fields in which two objects differ; values may be nobody's business."""
    if type(ours) is not type(theirs):
        return ["kind"]
    mine, others = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    left_out = _OURS if isinstance(ours, LoadBalancer) else ()
    return [name for name, value in mine.items() if name not in left_out and _plain(value) != _plain(others[name])]


def _unless(reference: str | None, leaving: Collection[str]) -> str | None:
    return None if reference in leaving else reference


def _plain(value: Any) -> Any:
    """A value without what makes no difference: the order of a list of names, and how nothing is said."""
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return frozenset(value) or None
    return value if value != "" else None


def _name(node: Node) -> str:
    return f"{desired_objects.kind_of(node).value[:-1]} {node.id}"
