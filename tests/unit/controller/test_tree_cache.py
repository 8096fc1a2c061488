# SPDX-License-Identifier: Apache-2.0
"""The tree cache returns the recorded load balancer after any sequence of changes."""

import random
import uuid

import migrated
import msgspec
import pytest
import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import desired_object, job
from amphora_driver.model.enums import (
    Algorithm,
    Kind,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    PoolProtocol,
)
from amphora_driver.model.loadbalancer import HealthMonitor, L7Policy, L7Rule, Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.reconcile.tree_cache import TreeCache, count_objects
from amphora_driver.store import desired_objects, resyncs, status_outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(url)
    database = Database(url, durable=False)
    yield database
    database.dispose()


@pytest.fixture
def changes(database):
    return ChangeSequence(database, random.Random(1))


def new_id():
    return str(uuid.uuid4())


class ChangeSequence:
    """User requests for one load balancer, and the controller's work."""

    def __init__(self, database, dice):
        self.database = database
        self.dice = dice
        self.recorder = RequestRecorder(database, lambda node: None)
        self.recorder.create_load_balancer(TREE, read_back=False)
        self.pools, self.listeners, self.policies, self.members = [], [], [], {}

    def row(self):
        return self.database.read(lambda c: c.execute(sa.select(job)).one())

    def recorded(self):
        return self.database.read(lambda c: desired_objects.load_tree(c, "lb"))

    def remembered(self, trees, epoch):
        return self.database.read(lambda c: trees.load(c, c.execute(sa.select(job)).one(), epoch))

    def confirm(self):
        """Confirm all objects, report them, and remove rows of deleted objects."""

        def write(connection):
            generation = connection.execute(sa.select(job.c.generation)).scalar_one()
            connection.execute(job.update().values(applied=generation, committed=generation))
            status_outbox.confirm_generation(connection, "lb", generation, {})
            status_outbox.mark_reported(connection, status_outbox.list_due_reports(connection, 10_000))

        self.database.write(write)

    def read_back(self):
        """Record Octavia's tree under a known generation, with another pool and without a listener."""
        self.database.write(lambda c: c.execute(job.update().values(read_back=True, reread=None)))
        yield
        tree = self.recorded()
        fresh = Pool(id=new_id(), loadbalancer_id="lb", protocol=PoolProtocol.TCP, lb_algorithm=Algorithm.ROUND_ROBIN)
        tree = msgspec.structs.replace(tree, name=new_id(), pools=(*tree.pools, fresh), listeners=tree.listeners[1:])

        def write(connection):
            generation = connection.execute(sa.select(job.c.generation)).scalar_one()
            desired_objects.replace_tree(connection, generation, tree)
            resyncs.finish_reread(connection, "lb")

        self.database.write(write)
        self.pools.append(fresh.id)
        self.members.setdefault(fresh.id, [])
        kept = {listener.id for listener in tree.listeners}
        self.listeners = [one for one in self.listeners if one in kept]
        self.policies = [policy.id for listener in tree.listeners for policy in listener.l7policies]

    def act(self):
        deeds = [self.add_pool, self.add_listener, self.add_member, self.add_member, self.add_policy, self.add_rule]
        deeds += [self.change_member, self.change_pool, self.change_listener, self.set_members, self.set_monitor]
        deeds += [self.drop_member, self.drop_pool, self.drop_listener, self.drop_policy, self.change_root, self.move]
        deeds += [self.bring_back]
        self.dice.choice(deeds)()

    def add_pool(self):
        pool = Pool(id=new_id(), loadbalancer_id="lb", protocol=PoolProtocol.HTTP, lb_algorithm=Algorithm.ROUND_ROBIN)
        self.recorder.create_object(Kind.POOL, pool, for_listener=self.dice.choice([None, *self.listeners]))
        self.pools.append(pool.id)
        self.members[pool.id] = []

    def add_listener(self):
        port = self.dice.randrange(1, 60_000)
        listener = Listener(
            id=new_id(), loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=port,
            default_pool_id=self.dice.choice([None, *self.pools]),
        )  # fmt: skip
        self.recorder.create_object(Kind.LISTENER, listener)
        self.listeners.append(listener.id)

    def add_member(self):
        if self.pools:
            pool = self.dice.choice(self.pools)
            self.members[pool].append(new_id())
            self.recorder.create_object(Kind.MEMBER, self.member(pool, self.members[pool][-1]))

    def member(self, pool, member_id):
        number = self.dice.randrange(1, 200)
        return Member(id=member_id, pool_id=pool, address=f"203.0.113.{number}", protocol_port=number)

    def add_policy(self):
        if self.listeners:
            policy = L7Policy(
                id=new_id(), listener_id=self.dice.choice(self.listeners), action=L7Action.REJECT,
                position=self.dice.randrange(1, 5),
            )  # fmt: skip
            self.recorder.create_object(Kind.L7POLICY, policy)
            self.policies.append(policy.id)

    def add_rule(self):
        if self.policies:
            rule = L7Rule(
                id=new_id(), l7policy_id=self.dice.choice(self.policies), type=L7RuleType.PATH,
                compare_type=L7Compare.STARTS_WITH, value="/x",
            )  # fmt: skip
            self.recorder.create_object(Kind.L7RULE, rule)

    def change_member(self):
        if known := [one.id for pool in self.recorded().pools for one in pool.members]:
            self.recorder.update_object(Kind.MEMBER, self.dice.choice(known), {"weight": self.dice.randrange(100)})

    def change_pool(self):
        if self.pools:
            self.recorder.update_object(Kind.POOL, self.dice.choice(self.pools), {"name": new_id()})

    def change_listener(self):
        if self.listeners:
            self.recorder.update_object(Kind.LISTENER, self.dice.choice(self.listeners), {"name": new_id()})

    def change_root(self):
        # A user's update requests a read-back, which is another test.
        self.recorder.fail_over("lb")

    def move(self):
        if self.policies:
            self.recorder.update_object(
                Kind.L7POLICY, self.dice.choice(self.policies), {"position": self.dice.randrange(1, 4)}
            )

    def set_members(self):
        if self.pools:
            pool = self.dice.choice(self.pools)
            known = [one.id for one in next(one for one in self.recorded().pools if one.id == pool).members]
            kept = self.dice.sample(known, len(known) // 2)
            self.members[pool] = [*kept, new_id(), new_id()]
            self.recorder.set_members(
                pool, [(one, lambda one=one: self.member(pool, one), {"weight": 7}) for one in self.members[pool]]
            )

    def set_monitor(self):
        if not self.pools:
            return
        pool = self.dice.choice(self.recorded().pools)
        if pool.healthmonitor is not None:
            self.recorder.delete_object(Kind.HEALTH_MONITOR, pool.healthmonitor.id)
        if pool.healthmonitor is None or self.dice.random() < 0.5:
            monitor = HealthMonitor(
                id=new_id(), pool_id=pool.id, type=MonitorType.TCP, delay=5, timeout=3, max_retries=2,
                max_retries_down=2,
            )  # fmt: skip
            self.recorder.create_object(Kind.HEALTH_MONITOR, monitor)

    def drop_member(self):
        if known := [one.id for pool in self.recorded().pools for one in pool.members]:
            self.recorder.delete_object(Kind.MEMBER, self.dice.choice(known))

    def bring_back(self):
        """Restore an object that Octavia did not delete under a new generation, as the provider agent does."""

        def write(connection):
            gone = (
                connection.execute(
                    sa.select(desired_object.c.id).where(
                        desired_object.c.removed, desired_object.c.kind == Kind.MEMBER.value
                    )
                )
                .scalars()
                .all()
            )
            generation = connection.execute(sa.select(job.c.generation)).scalar_one() + 1
            connection.execute(job.update().values(generation=generation))
            changed = desired_object.update().where(desired_object.c.id.in_(gone))
            connection.execute(changed.values(removed=False, generation=generation))

        self.database.write(write)

    def drop_pool(self):
        if self.pools and self.dice.random() < 0.3:
            pool = self.pools.pop(self.dice.randrange(len(self.pools)))
            self.recorder.delete_object(Kind.POOL, pool)

    def drop_listener(self):
        if self.listeners and self.dice.random() < 0.3:
            listener = self.listeners.pop(self.dice.randrange(len(self.listeners)))
            self.policies = [
                policy.id for one in self.recorded().listeners if one.id != listener for policy in one.l7policies
            ]
            self.recorder.delete_object(Kind.LISTENER, listener)

    def drop_policy(self):
        if self.policies and self.dice.random() < 0.5:
            self.recorder.delete_object(Kind.L7POLICY, self.policies.pop(self.dice.randrange(len(self.policies))))


@pytest.mark.parametrize("seed", range(5))
def test_the_caches_of_two_controllers_match_the_database(database, seed):
    """The lease alternates between both controllers; rows are removed while the other one works."""
    dice = random.Random(seed)
    changes = ChangeSequence(database, dice)
    controllers = [TreeCache(), TreeCache()]
    for epoch in range(1, 40):
        for _ in range(dice.choice([0, 1, 1, 1, 4])):
            changes.act()
        trees = dice.choice(controllers)
        assert changes.remembered(trees, epoch) == changes.recorded()
        if dice.random() < 0.5:
            changes.confirm()
        if dice.random() < 0.1:
            under_way = changes.read_back()
            next(under_way)
            assert changes.remembered(trees, epoch) == changes.recorded(), "the cached tree is incomplete too"
            next(under_way, None)
        assert changes.remembered(trees, epoch) == changes.recorded()


def statements(database, work_):
    seen = []

    def note(_connection, _cursor, text, *_more):
        if not text.startswith("BEGIN"):
            seen.append(text)

    sa.event.listen(database.engine, "before_cursor_execute", note)
    try:
        result = database.read(work_)
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", note)
    return result, seen


def test_unchanged_objects_come_from_the_cache(database, changes):
    for _ in range(3):
        changes.add_pool()
    for _ in range(30):
        changes.add_member()
    trees = TreeCache()
    before = changes.remembered(trees, 1)
    changed = before.pools[1].id
    # The latest object is read again without a difference.
    changes.remembered(trees, 1)
    changes.recorder.create_object(Kind.MEMBER, changes.member(changed, new_id()))
    row = changes.row()
    after, seen = statements(database, lambda c: trees.load(c, row, 2))
    assert after == changes.recorded()
    assert len(seen) == 1
    assert after.pools[0] is before.pools[0]
    assert [now is then for now, then in zip(after.pools[1].members, before.pools[1].members, strict=False)].count(
        False
    ) == 0
    again, seen = statements(database, lambda c: trees.load(c, row, 2))
    assert again is after
    assert seen == [], "under one lease, a generation has one tree"


def test_trees_removed_elsewhere_leave_the_cache(database, changes):
    changes.add_pool()
    changes.add_member()
    trees = TreeCache()
    assert count_objects(changes.remembered(trees, 1)) == 3
    changes.drop_member()
    changes.confirm()
    assert not database.read(lambda c: c.execute(sa.select(desired_object).where(desired_object.c.removed)).all())
    changes.add_member()
    assert [len(pool.members) for pool in changes.remembered(trees, 3).pools] == [1]
    assert changes.remembered(trees, 3) == changes.recorded()


def test_the_cache_size_is_limited(database, changes):
    changes.add_pool()
    for number in range(3):
        changes.recorder.create_load_balancer(msgspec.structs.replace(TREE, id=f"lb{number}"), read_back=False)
    trees = TreeCache(capacity=3)

    def load(load_balancer_id):
        row = database.read(lambda c: c.execute(sa.select(job).where(job.c.load_balancer_id == load_balancer_id)).one())
        return statements(database, lambda c: trees.load(c, row, 1))

    assert [len(load(f"lb{number}")[1]) for number in (0, 1, 2, 2)] == [1, 1, 1, 0]
    load("lb")
    assert len(load("lb0")[1]) == 1, "the oldest tree is removed"
