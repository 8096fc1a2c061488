# SPDX-License-Identifier: Apache-2.0
"""A pool in memory with several groups, servers that change, a user that interferes, and a controller that crashes.

The pool behaves as Octavia's: one member for an address and port, a batch of additions and changes, single deletions,
and no changes while the load balancer is PENDING. Each step that a pass applies is checked against the rules of the
plan.
"""

from collections import Counter

import msgspec
from cluster_data import STATISTICS_AGE, address, group, member, moment, pool, server

from amphora_cluster.members import GONE, endpoint_of, wanted_members
from amphora_cluster.model import Criterion, NodeState, Request, RequestKind, StepKind, Weight, WeightKind
from amphora_cluster.plan import NOT_SHOWN, plan
from amphora_cluster.requests import apply_request, outcome, serving

STATUSES = ("ACTIVE", "ACTIVE", "ACTIVE", "BUILD", "SHUTOFF", "ERROR", "DELETED")


class PoolSimulation:
    """Octavia, Nova, the records of the groups, and the clock."""

    def __init__(self, rng):
        self.rng, self.now, self.made = rng, 10_000.0, 0
        self.has_monitor, self.addresses = rng.random() < 0.7, rng.choice([5, 200])
        self.groups = {f"g{number}": self._group(f"g{number}") for number in range(rng.randint(1, 3))}
        self.sources = {one: [] for one in self.groups}
        self.nodes = dict.fromkeys(self.groups, ())
        self.requests = []
        self.servers, self.members, self.drained_since = {}, {}, {}
        self.busy, self.connections = 0, None

    def _group(self, group_id):
        rng = self.rng
        ports = rng.choice([(80,), (80, 81), (8080,)])
        kind = rng.choice(list(WeightKind))
        return group(
            group_id,
            ports=ports,
            template={
                "weight": Weight(kind=kind, key="weight", number=rng.choice([0, 1, 5])),
                "backup": rng.random() < 0.2,
            },
            drain_seconds=rng.choice([0, 5, 30]),
            drain_on_idle=rng.random() < 0.5,
            minimum=rng.choice([0, 1, 2]),
            join_timeout=60,
        )

    # Nova and the user.

    def disturb(self):
        """One random event."""
        events = [
            self._boot,
            self._boot,
            self._change_status,
            self._change_address,
            self._drift,
            self._delete_member,
            self._foreign_member,
            self._lose_tag,
            self._request,
            self._request,
            self._busy,
            self._connections,
            self._leave_source,
            self._return_to_source,
        ]
        self.rng.choice(events)()

    def _boot(self):
        self.made += 1
        name = f"s{self.made}"
        self.servers[name] = server(
            name,
            self._number(),
            status=self.rng.choice(["ACTIVE", "ACTIVE", "BUILD"]),
            created_at=self.now,
            vcpus=self.rng.choice([None, 2, 4]),
            metadata=self.rng.choice([{}, {"weight": "3"}, {"weight": "x"}]),
        )
        for one in self.rng.sample(list(self.groups), self.rng.randint(1, len(self.groups))):
            self.sources[one].append(name)

    def _number(self):
        # Few addresses in some worlds, so that servers also take over an address, or have the same one.
        return self.rng.randint(1, self.addresses)

    def _some_server(self):
        return self.rng.choice(sorted(self.servers)) if self.servers else None

    def _change(self, **changes):
        if (name := self._some_server()) is not None:
            self.servers[name] = msgspec.structs.replace(self.servers[name], **changes)

    def _change_status(self):
        self._change(status=self.rng.choice(STATUSES))

    def _change_address(self):
        self._change(addresses=self.rng.choice([(), (address(self._number()),), (address(self._number()),)]))

    def _leave_source(self):
        if (name := self._some_server()) is not None:
            for source in self.sources.values():
                if name in source:
                    source.remove(name)

    def _return_to_source(self):
        """The source shows a server again, in one of the groups."""
        if (name := self._some_server()) is not None:
            source = self.sources[self.rng.choice(sorted(self.groups))]
            if name not in source:
                source.append(name)

    def _some_member(self):
        return self.members.get(self.rng.choice(sorted(self.members))) if self.members else None

    def _drift(self):
        if found := self._some_member():
            changes = self.rng.choice([{"weight": 0}, {"weight": 9}, {"name": "renamed"}, {"monitor_port": 7}])
            self._put(msgspec.structs.replace(found, **changes))

    def _delete_member(self):
        if found := self._some_member():
            del self.members[found.id]

    def _lose_tag(self):
        if found := self._some_member():
            self._put(msgspec.structs.replace(found, tags=()))

    def _foreign_member(self):
        made = member("foreign", self._number(), port=self.rng.choice([80, 81]), tags=("other",))
        self._create(made)

    def _busy(self):
        self.busy = self.rng.randint(1, 3)

    def _connections(self):
        self.connections = self.rng.choice([None, 0, 0, 5])

    def _request(self):
        one = self.rng.choice(sorted(self.groups))
        named = self.rng.sample(self.sources[one], min(len(self.sources[one]), self.rng.randint(0, 2)))
        kind = self.rng.choice([RequestKind.JOIN, RequestKind.LEAVE, RequestKind.LEAVE, RequestKind.SYNC])
        request = Request(
            id=f"r{len(self.requests)}",
            group_id=one,
            kind=kind,
            servers=tuple(named),
            count=self.rng.randint(1, 2),
            criterion=self.rng.choice(list(Criterion)),
            created_at=self.now,
        )
        before = self.nodes[one]
        applied = apply_request(self.groups[one], request, self.shown(one), before, self.now, self.rng)
        changed = {node.server_id: node for node in before} | {node.server_id: node for node in applied.nodes}
        self.nodes[one] = tuple(changed.values())
        self.requests.append(applied.request)
        if kind is RequestKind.LEAVE:
            assert serving(self.nodes[one]) >= min(serving(before), self.groups[one].minimum)
        if applied.request.refusal:
            assert self.nodes[one] == before

    # Octavia.

    def _create(self, made):
        taken = {endpoint_of(one) for one in self.members.values()}
        if endpoint_of(made) not in taken:
            self.made += 1
            self._put(msgspec.structs.replace(made, id=f"m{self.made}"))

    def _put(self, changed):
        if changed.weight:
            self.drained_since.pop(changed.id, None)
        else:
            self.drained_since.setdefault(changed.id, self.now)
        self.members[changed.id] = changed

    def pool(self):
        """Octavia's answer. A member is ONLINE if an ACTIVE server has its address."""
        alive = {one.ip for each in self.servers.values() if each.status == "ACTIVE" for one in each.addresses}
        shown = []
        for one in self.members.values():
            status = "NO_MONITOR"
            if self.has_monitor:
                status = "ERROR" if one.address not in alive else "ONLINE" if one.weight else "DRAINING"
            shown.append(msgspec.structs.replace(one, operating_status=status))
        return pool(
            *shown,
            has_monitor=self.has_monitor,
            changeable=self.busy == 0,
            active_connections=self.connections,
        )

    def shown(self, group_id):
        """The servers that the source of a group shows."""
        return tuple(self.servers[name] for name in self.sources[group_id] if name in self.servers)

    # The controller.

    def one_pass(self, group_id, *, crash=False):
        """Plan, record, apply. A crash ends the pass before one of the calls to Octavia."""
        made = self.groups[group_id]
        foreign = self._foreign(made)
        at = moment(self.now)
        result = plan(made, self.shown(group_id), self.pool(), self.nodes[group_id], at)
        self.nodes[group_id] = result.nodes
        self.requests = [
            outcome(made, one, result.nodes, at) if one.group_id == group_id else one for one in self.requests
        ]
        calls = self._calls(result.steps)
        for call in calls[: self.rng.randint(0, len(calls))] if crash else calls:
            for step, change in call:
                self._apply(made, step, change)
        assert self._foreign(made) == foreign, "the plan touches foreign members"
        return result

    def _foreign(self, made):
        return {one.id: one for one in self.members.values() if made.tag not in one.tags}

    @staticmethod
    def _calls(steps):
        """One batch, then single deletions."""
        batch = [(step, one) for step in steps if step.kind is not StepKind.LEAVE for one in step.members]
        endpoints = [endpoint_of(one) for _, one in batch]
        assert len(endpoints) == len(set(endpoints)), "Octavia refuses a batch that names a member twice"
        single = [[(step, one)] for step in steps if step.kind is StepKind.LEAVE for one in step.members]
        return ([batch] if batch else []) + single

    def _apply(self, made, step, change):
        if step.kind is StepKind.LEAVE:
            self._check_removal(made, step, self.members[change.member_id])
            del self.members[change.member_id]
            return
        properties = {
            "name": change.name,
            "weight": change.weight,
            "monitor_port": change.monitor_port,
            "backup": change.backup,
        }
        if step.kind is StepKind.JOIN:
            assert change.member_id is None
            new = msgspec.structs.replace(
                member(port=change.port, tags=(made.tag,)), address=change.address, **properties
            )
            assert endpoint_of(new) not in {endpoint_of(one) for one in self.members.values()}
            self._create(new)
        else:
            present = self.members[change.member_id]
            assert endpoint_of(present) == endpoint_of(change)
            self._put(msgspec.structs.replace(present, **properties))

    def _check_removal(self, made, step, removed):
        assert made.tag in removed.tags, "the plan removes a foreign member"
        shown = {one.id: one for one in self.shown(made.id) if one.status not in GONE}
        if step.server_id not in shown:
            return
        node = next(one for one in self.nodes[made.id] if one.server_id == step.server_id)
        if not node.leaving:
            wanted = wanted_members(made, shown[step.server_id])
            assert not isinstance(wanted, str)
            assert endpoint_of(removed) not in {endpoint_of(one) for one in wanted}, "the plan removes a wanted member"
            return
        if made.drain_seconds == 0:
            return
        assert removed.weight == 0, "the plan removes a member with a weight"
        drained = self.now - self.drained_since[removed.id]
        idle = made.drain_on_idle and self.connections == 0 and drained >= STATISTICS_AGE
        assert idle or drained >= made.drain_seconds, "the plan removes a member before its drain ended"

    def settle(self, most_passes=400):
        """Repeat passes without events until all groups are complete and all requests ended. Return the last plans."""
        for _ in range(most_passes):
            self.busy = max(0, self.busy - 1)
            results = [self.one_pass(one) for one in self.groups]
            ended = all(one.ended_at is not None for one in self.requests)
            if ended and all(result.complete and not result.steps for result in results):
                return results
            times = [result.again_at for result in results if result.again_at is not None]
            self.now = min([*times, self.now + 5.0])
        raise AssertionError(f"no end after {most_passes} passes: {results}")

    # The state at the end.

    def check_end(self):
        """Assert that each server has its members or a reason."""
        taken = {endpoint_of(one): one for one in self.members.values()}
        for one, made in self.groups.items():
            shown = {each.id: each for each in self.shown(one) if each.status not in GONE}
            own = [each for each in self.members.values() if made.tag in each.tags]
            nodes = {node.server_id: node for node in self.nodes[one]}
            assert set(nodes) >= set(shown)
            for node in nodes.values():
                if node.server_id not in shown:  # A request named it in vain. The next pass forgets it.
                    assert (node.state, node.reason) == (NodeState.FAILED, NOT_SHOWN)
                    continue
                self._check_node(made, shown[node.server_id], node, taken, self._shared(made, shown))
            used = {endpoint_of(change) for each in shown.values() for change in self._changes(made, each)}
            for each in own:
                if endpoint_of(each) not in used:
                    assert self._explained(made, shown[each.name], nodes[each.name])
        for request in self.requests:
            assert request.ended_at is not None, request
            assert request.refusal or set(request.outcome) == set(request.servers)

    @staticmethod
    def _changes(made, one):
        wanted = wanted_members(made, one)
        return () if isinstance(wanted, str) else wanted

    def _explained(self, made, one, node):
        """Whether an own member stays at an old address, because the server cannot serve at a new one."""
        return one.status != "ACTIVE" or not self._changes(made, one) or node.state is not NodeState.SERVING

    def _shared(self, made, shown):
        """The endpoints that several servers want. One of them has the member."""
        wanted = Counter(endpoint_of(change) for each in shown.values() for change in self._changes(made, each))
        return {endpoint for endpoint, number in wanted.items() if number > 1}

    def _check_node(self, made, one, node, taken, shared):
        changes = self._changes(made, one)
        members = [taken.get(endpoint_of(change)) for change in changes]
        own = [each for each in members if each and made.tag in each.tags and each.name == one.id]
        assert node.state in {NodeState.SERVING, NodeState.UNHEALTHY, NodeState.LEFT, NodeState.FAILED}
        if node.leaving:
            assert node.state in {NodeState.LEFT, NodeState.FAILED}
            assert not own
        if node.state in {NodeState.UNHEALTHY, NodeState.FAILED}:
            assert node.reason
        if node.state is NodeState.SERVING and changes and one.status == "ACTIVE":
            assert len(own) == len(members)
            for present, change in zip(own, changes, strict=True):
                assert (present.weight, present.backup) == (change.weight, change.backup)
                assert present.monitor_port == change.monitor_port
        free = len(own) == len(members) or all(each is None for each in members)
        alone = not shared & {endpoint_of(change) for change in changes}
        if not node.leaving and one.status == "ACTIVE" and changes and free and alone:
            assert node.state is NodeState.SERVING
