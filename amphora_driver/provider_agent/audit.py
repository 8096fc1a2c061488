# SPDX-License-Identifier: Apache-2.0
"""Whether Octavia has kept what we recorded.

Invariant: Octavia's records are the truth about what its users want. Its transaction may fail after our answer (its
process dies, its database does), and nobody tells us: so every load balancer that was changed is compared once, some
seconds after its last change. What is being changed, removed or read at that moment is left alone: it comes again.

Nothing in octavia_lib says which transactions failed, so all are looked at, one load balancer at a time and never more
often than an interval: that is what it costs.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from amphora_driver.model import from_octavia
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Pool
from amphora_driver.model.vocabulary import Kind
from amphora_driver.provider_agent import taking
from amphora_driver.queue import doorbell, hints
from amphora_driver.store import wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from octavia_lib.api.drivers.driver_lib import DriverLibrary
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.model.loadbalancer import Node
    from amphora_driver.provider_agent.reading import Reader
    from amphora_driver.store.engine import Database

LOG = logging.getLogger(__name__)
# Changes so many seconds ago are looked at when a reporter begins: the one before may not have come to it.
_LOOK_BACK = 600.0
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
        reader: does the work, beside all else it reads.
    """

    def __init__(
        self, conf: ConfigOpts, database: Database, library: Callable[[], DriverLibrary], reader: Reader
    ) -> None:
        self._conf = conf
        self._database = database
        self._library = library
        self._reader = reader
        # When load balancers were changed last (seconds, monotonic), in this order.
        self._changed: dict[str, float] = {}
        self._next = 0.0
        self._begun = False

    def changed(self, load_balancer_ids: Iterable[str]) -> None:
        """Something was accepted for these, and Octavia's transactions have ended."""
        now = time.monotonic()
        for one in load_balancer_ids:
            self._changed.pop(one, None)
            self._changed[one] = now

    def turn(self) -> None:
        """Have the next one compared, if it is time."""
        now = time.monotonic()
        if not self._begun:
            self._begun = True
            since = time.time() - _LOOK_BACK
            self.changed(self._database.read(lambda connection: taking.recently_changed(connection, since)))
        oldest = next(iter(self._changed), None)
        if oldest is None or now < self._next or now < self._changed[oldest] + self._conf.octavia.audit_after:
            return
        self._next = now + self._conf.octavia.audit_interval
        if not self._reader.may_read(oldest):
            self.changed([oldest])
            return
        del self._changed[oldest]
        self._reader.do(oldest, lambda: self.compare(oldest))

    def verify(self, row: Any) -> bool:
        """Make sure that Octavia has kept a batch that takes members away, before it is told that they are gone.

        Octavia shows what is being deleted as if it were not, and forgets it when told: after that nothing could be
        brought back. One of the members that came with the batch tells of all of it: it was one transaction.
        """
        member, removed = self._database.read(lambda connection: taking.batch_of(connection, row))
        if member is not None:
            found = self._library().get_member(member.id)
            if found is None or _differing(member, from_octavia.member(found)):
                words = (row.load_balancer_id, ", ".join(removed))
                LOG.warning("load balancer %s: Octavia has not kept the batch that removed members %s", *words)
                if self._database.write(lambda connection: taking.undo(connection, row, removed)):
                    self.compare(row.load_balancer_id)
                return False
        passed = [(row.load_balancer_id, row.generation)]
        self._database.write(lambda connection: taking.mark_committed(connection, passed))
        return True

    def compare(self, load_balancer_id: str) -> bool:
        """Compare one, and want what Octavia has kept; True if that was something else."""
        before = self._database.read(lambda connection: taking.settled(connection, load_balancer_id))
        if before is None:
            # When that is over it is a change again.
            return False
        row, recorded, leaving = before
        found = self._library().get_loadbalancer(load_balancer_id)
        if found is None:
            LOG.warning("Octavia does not know load balancer %s: it stays until somebody deletes it", load_balancer_id)
            return False
        tree = from_octavia.load_balancer(found)
        differing = differences(recorded, tree, leaving)
        if not differing:
            return False
        contents = self._reader.sealed(from_octavia.secrets(Kind.LOAD_BALANCER, found))
        gone = nodes(recorded).keys() - nodes(tree).keys()
        corrected = self._database.write(lambda connection: taking.correct(connection, row, tree, contents, gone))
        if corrected:
            words = "; ".join(differing)
            LOG.warning("load balancer %s: Octavia has kept something else, which is wanted: %s", row[0], words)
            hints.tell(self._conf, doorbell.CONTROLLER, load_balancer_id)
        return corrected


def differences(recorded: LoadBalancer, kept: LoadBalancer, leaving: Collection[str]) -> list[str]:
    """In what these two differ, one sentence for each object.

    Args:
        recorded: what we want.
        kept: what Octavia has.
        leaving: ids of objects that are removed, but that Octavia still has.
    """
    ours, theirs = nodes(recorded), nodes(kept)
    found = [f"{_name(ours[one])} is not there" for one in sorted(ours.keys() - theirs.keys())]
    found += [f"{_name(theirs[one])} is there" for one in sorted(theirs.keys() - ours.keys() - set(leaving))]
    for one in sorted(ours.keys() & theirs.keys()):
        fields = _differing(ours[one], theirs[one])
        if fields:
            found.append(f"{_name(ours[one])} differs in {', '.join(fields)}")
    return found


def nodes(tree: LoadBalancer) -> Mapping[str, Node]:
    """Every object of a tree without its children, by id."""
    return {
        node.id: msgspec.structs.replace(node, **_CHILDREN[type(node)]) if type(node) in _CHILDREN else node
        for node in wanted.flatten(tree)
    }


def _differing(ours: Node, theirs: Node) -> list[str]:
    """Names of the fields in which two objects differ; values may be nobody's business."""
    if type(ours) is not type(theirs):
        return ["kind"]
    mine, others = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    left_out = _OURS if isinstance(ours, LoadBalancer) else ()
    return [name for name, value in mine.items() if name not in left_out and _plain(value) != _plain(others[name])]


def _plain(value: Any) -> Any:
    """A value without what makes no difference: the order of a list of names, and how nothing is said."""
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return frozenset(value) or None
    return value if value != "" else None


def _name(node: Node) -> str:
    return f"{wanted.kind_of(node).value[:-1]} {node.id}"
