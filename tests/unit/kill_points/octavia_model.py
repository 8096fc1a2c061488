# SPDX-License-Identifier: Apache-2.0
"""Octavia in the test's process: its rows, its transactions, and the three sockets of its driver agent.

Invariant: what a request changes is visible only after its transaction has ended. The transaction ends when a status
of the load balancer waits for its row, or after the second read that does not find a new load balancer. A provisioning
status that arrives before that is noted as said too early: Octavia would lose it. ACTIVE is too early as well while no
amphora serves what was asked for.
"""

import copy

import msgspec
from unit.provider_agent.octavia_sockets import OctaviaSockets

PENDING = ("PENDING_CREATE", "PENDING_UPDATE", "PENDING_DELETE")
_IDS = {
    "listeners": "listener_id",
    "pools": "pool_id",
    "members": "member_id",
    "healthmonitor": "healthmonitor_id",
    "l7policies": "l7policy_id",
    "rules": "l7rule_id",
}

# The transaction of a new load balancer ends after this number of reads that do not find it.
_TIME_LIMIT = 2
# Octavia refuses a status of an unknown object of these kinds, except DELETED. It ignores other kinds.
_REFUSED = ("listeners", "l7policies")
# Octavia processes a call in this order.
_STATUS_ORDER = ("members", "healthmonitors", "pools", "l7rules", "l7policies", "listeners", "loadbalancers")


class Change(msgspec.Struct, kw_only=True):
    """The changes of Octavia's rows that one request makes.

    Attributes:
        load_balancer_id: whose.
        tree: the load balancer afterwards; None where a deletion leaves it as it is until it is told.
        pending: the provisioning status of each object that the request touches.
    """

    load_balancer_id: str
    tree: dict | None
    pending: dict[str, str]


class Octavia(OctaviaSockets):
    """The rows of one Octavia.

    Args:
        folder: where its sockets are.
        served: returns the newest generation that an amphora serves.
    """

    def __init__(self, folder, served):
        super().__init__(folder)
        self._served = served
        self.begin({}, {}, {})

    def begin(self, trees, provisioning, operating):
        """Set the rows; no transaction is open."""
        self.trees = copy.deepcopy(trees)
        self.provisioning, self.operating = dict(provisioning), dict(operating)
        self.early, self.told = [], []
        self._open, self._wanted, self._sought = None, 0, 0

    def rows(self):
        return copy.deepcopy((self.trees, self.provisioning, self.operating))

    # --- transactions -------------------------------------------------------------------------------------------------

    def request(self, change, generation):
        """The driver has recorded this generation and answered; the transaction of the request stays open."""
        self._open, self._wanted, self._sought = change, generation, 0

    def commit(self):
        if self._open is not None:
            change, self._open = self._open, None
            if change.tree is not None:
                self.trees[change.load_balancer_id] = copy.deepcopy(change.tree)
            self.provisioning.update(change.pending)

    def seen_by_heartbeats(self):
        """The load balancers with the changes of the open transaction: amphorae may serve those already."""
        change = self._open
        changed = {} if change is None or change.tree is None else {change.load_balancer_id: change.tree}
        return {**self.trees, **changed}

    def pending(self):
        found = {one: said for one, said in self.provisioning.items() if said in PENDING}
        return found | ({self._open.load_balancer_id: "its transaction is open"} if self._open else {})

    # -- requests to the driver agent ----------------------------------------------------------------------------------

    def _status(self, document):
        change = self._open
        for kind in _STATUS_ORDER:
            for entry in document.get(kind, ()):
                said, object_id = entry.get("provisioning_status"), entry["id"]
                if change is not None and said and object_id in change.pending:
                    self.early.append(entry)
                if change is not None and object_id == change.load_balancer_id and object_id in self.trees:
                    # The status waits for the lock of the row, which is free after the transaction.
                    self.commit()
                if object_id not in self.provisioning:
                    if kind in _REFUSED and said != "DELETED":
                        return {
                            "status_code": 500,
                            "fault_string": "not found",
                            "status_object": kind,
                            "status_object_id": object_id,
                        }
                    continue
                self._take(object_id, said, entry.get("operating_status"))
        return {"status_code": 200}

    def _take(self, object_id, said, operating):
        if operating is not None:
            self.operating[object_id] = operating
        if said is None:
            return
        self.told.append((object_id, said))
        if said == "ACTIVE" and self._served() < self._wanted:
            self.early.append(f"{object_id} is ACTIVE, and no amphora serves generation {self._wanted}")
        if said != "DELETED":
            self.provisioning[object_id] = said
            return
        for gone in _below(self.trees, object_id):
            self.provisioning.pop(gone, None)
            self.operating.pop(gone, None)
        for tree in self.trees.values():
            _remove(tree, object_id)
        self.trees.pop(object_id, None)

    def _get(self, document):
        self.asked.append(document)
        found = next((node for node in _nodes(self.trees.values()) if document["id"] in _names(node)), None)
        if found is None:
            self._sought += 1
            if self._sought == _TIME_LIMIT:
                self.commit()
        return copy.deepcopy(found or {})


def _names(node):
    return {node.get(name) for name in ("loadbalancer_id", *_IDS.values()) if _is_own(node, name)}


def _is_own(node, name):
    """Whether this field is the id of the node itself, and not of a parent or of a reference."""
    own = next((each for each in _ORDER if each in node), None)
    return name == own


# The deepest kind first: a member has the id of its pool too.
_ORDER = (
    *("l7rule_id", "l7policy_id", "member_id", "healthmonitor_id"),
    *("pool_id", "listener_id", "loadbalancer_id"),
)


def _children(node):
    for field in _IDS:
        found = node.get(field)
        yield from [found] if isinstance(found, dict) else found or ()


def _nodes(trees):
    for node in trees:
        yield node
        yield from _nodes(_children(node))


def _below(trees, object_id):
    """The object and all below it, by id."""
    for node in _nodes(trees.values()):
        if object_id in _names(node):
            return {name for each in _nodes([node]) for name in _names(each)}
    return {object_id}


def _remove(node, object_id):
    for field, name in _IDS.items():
        found = node.get(field)
        if isinstance(found, list):
            node[field] = [one for one in found if one.get(name) != object_id]
        elif isinstance(found, dict) and found.get(name) == object_id:
            node[field] = None
    for reference in ("default_pool_id", "redirect_pool_id"):
        if node.get(reference) == object_id:
            node[reference] = None
    for child in _children(node):
        _remove(child, object_id)
