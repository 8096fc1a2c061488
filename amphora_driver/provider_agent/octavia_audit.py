# SPDX-License-Identifier: Apache-2.0
"""Compares the desired state with Octavia's records, and adopts Octavia's records where they differ.

Invariant: Octavia's records define the desired state. An Octavia transaction can fail after the answer of the driver,
for example when octavia-api crashes, and Octavia does not report such a failure. So the auditor compares every changed
load balancer once, some seconds after its last change. A load balancer with an open change, deletion or read, or with
unreported statuses, is compared later. Barriers and other reads never wait for a comparison.

The auditor compares one load balancer at a time, and an interval between two comparisons limits the cost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor
from typing import Any

import msgspec
from octavia_lib.api.drivers.driver_lib import DriverLibrary
from oslo_config.cfg import ConfigOpts

from amphora_driver.database.engine import Database
from amphora_driver.model import from_octavia, l7policy_positions
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Node, Pool
from amphora_driver.provider_agent import sync_transactions
from amphora_driver.provider_agent.octavia_reader import OctaviaReader
from amphora_driver.queue import local_socket, notifier
from amphora_driver.store import desired_objects

LOG = logging.getLogger(__name__)
# A new reporter compares the load balancers that changed within this number of seconds before its start. The previous
# reporter may not have finished these comparisons.
_LOOK_BACK = 600.0
# Shortest and longest delay in seconds after a failed comparison. The delay limits the load, because a read without an
# answer blocks Octavia for half a minute.
_FIRST_BACKOFF, _MAX_BACKOFF = 15.0, 600.0
# Fields with child objects, which a comparison of two objects ignores.
_CHILDREN: dict[type, dict[str, Any]] = {
    LoadBalancer: {"listeners": (), "pools": ()},
    Listener: {"l7policies": ()},
    L7Policy: {"rules": ()},
    Pool: {"members": (), "healthmonitor": None},
}
# Fields of a load balancer that Octavia does not know, or sends only at the creation. A comparison ignores these
# fields.
_LOCAL_FIELDS = ("profile", "flavor", "availability_zone", "vip", "additional_vips")


class OctaviaAuditor:
    """Compares changed load balancers with Octavia, in the executor or else in the caller's thread."""

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        library: Callable[[], DriverLibrary],
        reader: OctaviaReader,
        executor: Executor | None = None,
    ) -> None:
        self._conf = conf
        self._database = database
        self._library = library
        self._reader = reader
        self._executor = executor
        self._lock = threading.Lock()
        # For each load balancer: the monotonic time of the next comparison, and the delay in seconds after a failed
        # comparison.
        self._due: dict[str, float] = {}
        self._backoffs: dict[str, float] = {}
        self._next = 0.0
        self._loaded = False
        self._comparing = False

    def reset(self) -> None:
        """Discard the schedule, after another process has held the reporter duty."""
        with self._lock:
            self._loaded = False
            self._due.clear()
            self._backoffs.clear()

    def schedule(self, load_balancer_ids: Iterable[str]) -> None:
        """Schedule the comparison of load balancers after their Octavia transactions have ended."""
        at = time.monotonic() + self._conf.amp_octavia.audit_after
        with self._lock:
            self._due.update((one, at + self._backoffs.get(one, 0.0)) for one in load_balancer_ids)

    def run_due(self) -> None:
        now = time.monotonic()
        if not self._loaded:
            self._loaded = True
            since = time.time() - _LOOK_BACK
            self.schedule(self._database.read(lambda c: sync_transactions.list_recently_changed(c, since)))
        with self._lock:
            chosen = min(self._due, key=lambda one: self._due[one], default=None)
            if self._comparing or now < self._next or chosen is None or time.monotonic() < self._due[chosen]:
                return
            del self._due[chosen]
            self._next = now + self._conf.amp_octavia.audit_interval
            self._comparing = True
        if self._executor is None:
            self._compare_with_retry(chosen)
        else:
            self._executor.submit(self._compare_with_retry, chosen)

    def _compare_with_retry(self, load_balancer_id: str) -> None:
        try:
            self.compare(load_balancer_id)
        except Exception as error:  # noqa: BLE001 - a failure must not block the comparison of other load balancers
            with self._lock:
                backoff = min(2 * self._backoffs.get(load_balancer_id, _FIRST_BACKOFF / 2), _MAX_BACKOFF)
                self._backoffs[load_balancer_id] = backoff
            failed = "the provider agent could not compare load balancer %s with Octavia and tries again in %.0f s: %s"
            LOG.warning(failed, load_balancer_id, backoff, error)
            self.schedule([load_balancer_id])
        else:
            with self._lock:
                self._backoffs.pop(load_balancer_id, None)
        finally:
            with self._lock:
                self._comparing = False

    def verify_member_batches(self, row: Any) -> bool:
        """Return whether Octavia has kept the batches that removed members; restore the members otherwise.

        Octavia shows a member in deletion without a mark, and deletes the member after the DELETED report, which makes
        a restoration impossible. So this check precedes the report. A batch is one transaction, so one of its created
        or changed members shows whether Octavia has kept the whole batch.
        """
        load_balancer_id = row.load_balancer_id
        lost: list[str] = []
        for batch in self._database.read(lambda connection: sync_transactions.list_member_batches(connection, row)):
            found = self._library().get_member(batch.sample.id)
            if found is None or (not batch.created and _differing_fields(batch.sample, from_octavia.member(found))):
                lost += batch.removed
        if not lost:
            self._database.write(lambda connection: sync_transactions.mark_committed(connection, [row]))
            return True
        dropped = (
            "Octavia rolled back the removal of members from load balancer %s, so the provider agent "
            "restores these members: %s"
        )
        LOG.warning(dropped, load_balancer_id, ", ".join(lost))
        # Only the removed members are restored here. A later comparison with Octavia corrects the members that the
        # batch created or changed.
        if self._database.write(lambda connection: sync_transactions.restore_members(connection, row, lost)):
            self.schedule([load_balancer_id])
            notifier.notify(self._conf, local_socket.CONTROLLER, load_balancer_id)
        return False

    def compare(self, load_balancer_id: str) -> bool:
        """Adopt Octavia's tree of a load balancer if it differs. Return True after an adoption."""
        before = self._database.read(lambda connection: sync_transactions.load_settled(connection, load_balancer_id))
        if before is None:
            if self._database.read(lambda connection: sync_transactions.is_present(connection, load_balancer_id)):
                self.schedule([load_balancer_id])
                # This comparison sent no request to Octavia, so the next comparison may follow without a delay.
                self._next = 0.0
            return False
        row, recorded, removed = before
        found = self._library().get_loadbalancer(load_balancer_id)
        if found is None:
            unknown = (
                "Octavia does not know load balancer %s, but the driver still has a record of the load balancer. To "
                "delete the load balancer, run `amphoractl loadbalancer resync --remove-unknown`"
            )
            LOG.warning(unknown, load_balancer_id)
            return False
        # Octavia shows a removed object until Octavia receives the status DELETED, so removed objects are not compared.
        tree = without_objects(from_octavia.load_balancer(found), removed)
        differences = describe_differences(recorded, tree)
        if not differences:
            return False
        contents = self._reader.seal_secrets(from_octavia.read_secrets(Kind.LOAD_BALANCER, found))
        gone = nodes_by_id(recorded).keys() - nodes_by_id(tree).keys()
        adopted = self._database.write(
            lambda connection: sync_transactions.adopt_octavia_tree(connection, row, tree, contents, gone)
        )
        if adopted:
            differs = (
                "load balancer %s in Octavia differs from the driver's record, so the provider agent "
                "takes over Octavia's version: %s"
            )
            LOG.warning(differs, load_balancer_id, "; ".join(differences))
            notifier.notify(self._conf, local_socket.CONTROLLER, load_balancer_id)
        return adopted


def without_objects(tree: LoadBalancer, removed: Collection[str]) -> LoadBalancer:
    """Return a tree without the removed objects, their children and references, and with new L7 positions."""
    replace = msgspec.structs.replace

    def kept(reference: str | None) -> str | None:
        return None if reference in removed else reference

    def policy(one: L7Policy) -> L7Policy:
        rules = tuple(rule for rule in one.rules if rule.id not in removed)
        return replace(one, rules=rules, redirect_pool_id=kept(one.redirect_pool_id))

    def listener(one: Listener) -> Listener:
        policies = l7policy_positions.renumber(policy(each) for each in one.l7policies if each.id not in removed)
        return replace(one, l7policies=policies, default_pool_id=kept(one.default_pool_id))

    def pool(one: Pool) -> Pool:
        members = tuple(member for member in one.members if member.id not in removed)
        monitor = one.healthmonitor if one.healthmonitor and one.healthmonitor.id not in removed else None
        return replace(one, members=members, healthmonitor=monitor)

    return replace(
        tree,
        listeners=tuple(listener(one) for one in tree.listeners if one.id not in removed),
        pools=tuple(pool(one) for one in tree.pools if one.id not in removed),
    )


def describe_differences(recorded: LoadBalancer, kept: LoadBalancer) -> list[str]:
    """Return one sentence for each object of the desired state that differs in Octavia's tree."""
    ours, theirs = _comparable_nodes(recorded), _comparable_nodes(kept)
    found = [f"{_describe(ours[one])} is missing in Octavia" for one in sorted(ours.keys() - theirs.keys())]
    found += [f"{_describe(theirs[one])} exists only in Octavia" for one in sorted(theirs.keys() - ours.keys())]
    differing = _differing_nodes(ours, theirs).items()
    return found + [f"{_describe(ours[one])} differs in {', '.join(fields)}" for one, fields in differing]


def changed_objects(recorded: LoadBalancer, kept: LoadBalancer) -> dict[str, Kind]:
    """Return the kinds of the objects that exist in both trees and differ, by id."""
    theirs = _comparable_nodes(kept)
    return {one: desired_objects.kind_of(theirs[one]) for one in _differing_nodes(_comparable_nodes(recorded), theirs)}


def _differing_nodes(ours: Mapping[str, Node], theirs: Mapping[str, Node]) -> dict[str, list[str]]:
    compared = {one: _differing_fields(ours[one], theirs[one]) for one in sorted(ours.keys() & theirs.keys())}
    return {one: fields for one, fields in compared.items() if fields}


def nodes_by_id(tree: LoadBalancer) -> Mapping[str, Node]:
    """Return every object of a tree, without its children, by id."""
    return {
        node.id: msgspec.structs.replace(node, **_CHILDREN[type(node)]) if type(node) in _CHILDREN else node
        for node in desired_objects.iter_subtree(tree)
    }


def _comparable_nodes(tree: LoadBalancer) -> Mapping[str, Node]:
    # Octavia and the driver may give L7 policies different positions, although the order is equal. So `without_objects`
    # renumbers the policies before the comparison.
    return nodes_by_id(without_objects(tree, ()))


def _differing_fields(ours: Node, theirs: Node) -> list[str]:
    """Return the names of the fields that differ, without their values, which may be confidential."""
    if type(ours) is not type(theirs):
        return ["kind"]
    mine, others = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    omitted = _LOCAL_FIELDS if isinstance(ours, LoadBalancer) else ()
    return [one for one, value in mine.items() if one not in omitted and _normalize(value) != _normalize(others[one])]


def _normalize(value: Any) -> Any:
    """Return a value without irrelevant differences: the order of names, and empty values."""
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return frozenset(value) or None
    return value if value != "" else None


def _describe(node: Node) -> str:
    return f"{desired_objects.kind_of(node).value[:-1]} {node.id}"
