# SPDX-License-Identifier: Apache-2.0
"""Members through Octavia's real API: batches with tags, foreign members, pending load balancers, policies."""

from collections import Counter

import msgspec
import pytest

from amphora_cluster.cloud.errors import Busy, CloudError, Missing
from amphora_cluster.cloud.octavia import OctaviaPools
from amphora_cluster.members import unchanged
from amphora_cluster.model import MemberChange, Step, StepKind
from sandbox import topology

pytestmark = pytest.mark.root
NEW = MemberChange(
    member_id=None, name="", address="", port=8080, weight=1, subnet_id=topology.MEMBER_SUBNET, monitor_port=None,
    backup=False,
)  # fmt: skip


def change(name, **more):
    values = {"name": f"server-of-{name}", "address": f"192.0.2.{topology.MEMBERS[name]}", **more}
    return msgspec.structs.replace(NEW, **values)


def step(kind, server, *members):
    return Step(kind=kind, server_id=server, members=members)


def join(name, **more):
    return step(StepKind.JOIN, f"server-of-{name}", change(name, **more))


class Calls:
    """The requests of a connection since the last look."""

    def __init__(self, connection):
        self._calls = connection.calls

    def taken(self):
        found = {method: number for (method, _), number in self._calls.items()}
        self._calls.clear()
        return found


@pytest.fixture(params=["haproxy", "noop_driver"])
def served(request, cloud):
    """A load balancer with a foreign member, for each provider."""
    if request.param == "noop_driver":
        request.getfixturevalue("other_provider")
    monitor = {"type": "TCP", "delay": 1, "timeout": 1, "max_retries": 1}
    balancer = cloud.served("cluster", ("member1",), provider=request.param, monitor=monitor)
    return balancer, cloud.pool_of(balancer)


def by_name(pool):
    return {one.name: one for one in pool.members}


class TestMembers:
    def test_join_drain_and_leave(self, cloud, served, make_connection, make_group):
        connection = make_connection()
        pools, calls, group = OctaviaPools(connection), Calls(connection), make_group(*served)
        # Before the first check, the status of the member is NO_MONITOR, and the monitor is read too.
        cloud.until(lambda: pools.read_pool(group).members[0].operating_status != "NO_MONITOR", "the member is checked")
        calls.taken()
        before = pools.read_pool(group)
        assert calls.taken() == {"GET": 3}
        assert (before.has_monitor, before.changeable, before.active_connections) == (True, True, None)
        [foreign] = before.members
        assert (foreign.name, foreign.address, foreign.tags) == ("member1", "192.0.2.11", ())

        applied = pools.apply(group, [join("member2"), join("member3", weight=3, monitor_port=8080)])
        assert (applied.changes, applied.refused) == (1, {})
        # One read of the members, one of the API versions for the first batch, one batch.
        assert calls.taken() == {"GET": 2, "PUT": 1}
        cloud.active(group.load_balancer_id)
        joined = by_name(pools.read_pool(group))
        assert set(joined) == {"member1", "server-of-member2", "server-of-member3"}
        assert joined["member1"] == msgspec.structs.replace(
            foreign, operating_status=joined["member1"].operating_status
        )
        third = joined["server-of-member3"]
        assert (third.tags, third.weight, third.monitor_port, third.subnet_id) == (
            (group.tag,), 3, 8080, topology.MEMBER_SUBNET,
        )  # fmt: skip

        calls.taken()
        assert pools.apply(group, [join("member2")]).changes == 0
        assert calls.taken() == {"GET": 1}

        drain = msgspec.structs.replace(unchanged(third), weight=0)
        assert pools.apply(group, [step(StepKind.DRAIN, third.name, drain)]).changes == 1
        cloud.active(group.load_balancer_id)
        drained = by_name(pools.read_pool(group, connections=True))[third.name]
        assert (drained.weight, drained.monitor_port, drained.tags, drained.id) == (0, 8080, (group.tag,), third.id)

        calls.taken()
        # The second deletion waits until the load balancer accepts changes again.
        steps = [step(StepKind.LEAVE, one.name, unchanged(one)) for name, one in joined.items() if name != "member1"]
        assert pools.apply(group, steps).changes == 2
        assert calls.taken()["DELETE"] >= 2
        cloud.active(group.load_balancer_id)
        assert set(by_name(pools.read_pool(group))) == {"member1"}
        assert pools.apply(group, steps).changes == 0

    def test_no_step_touches_a_foreign_member(self, cloud, served, pools, make_group):
        group, other = make_group(*served), make_group(*served)
        pools.apply(other, [join("member2")])
        cloud.active(group.load_balancer_id)
        before = by_name(pools.read_pool(group))
        mine, theirs = before["member1"], before["server-of-member2"]
        steps = [
            step(StepKind.JOIN, "a", msgspec.structs.replace(change("member1"), weight=7)),
            step(StepKind.JOIN, "b", msgspec.structs.replace(change("member2"), weight=7)),
            step(StepKind.DRAIN, "c", msgspec.structs.replace(unchanged(mine), weight=0)),
            step(StepKind.LEAVE, "d", unchanged(theirs)),
            join("member3"),
        ]
        applied = pools.apply(group, steps)
        assert applied.changes == 1
        assert {one: text.split()[1] for one, text in applied.refused.items()} == {"a": mine.id, "b": theirs.id}
        cloud.active(group.load_balancer_id)
        after = by_name(pools.read_pool(group))
        assert [unchanged(after[one]) for one in before] == [unchanged(before[one]) for one in before]
        assert after["server-of-member3"].tags == (group.tag,)

    def test_an_update_keeps_what_the_group_does_not_set(self, cloud, served, pools, make_group):
        group = make_group(*served)
        pools.apply(group, [join("member2")])
        cloud.active(group.load_balancer_id)
        one = by_name(pools.read_pool(group))["server-of-member2"]
        cloud.balancers.put(
            f"/lbaas/pools/{group.pool_id}/members/{one.id}",
            json={"member": {"admin_state_up": False, "monitor_address": "192.0.2.12", "tags": [group.tag, "theirs"]}},
        )
        cloud.active(group.load_balancer_id)
        repaired = msgspec.structs.replace(unchanged(one), weight=5, name="renamed")
        assert pools.apply(group, [step(StepKind.REPAIR, one.name, repaired)]).changes == 1
        cloud.active(group.load_balancer_id)
        found = cloud.balancers.get_member(one.id, group.pool_id)
        assert (found.weight, found.name, found.is_admin_state_up, found.monitor_address) == (
            5, "renamed", False, "192.0.2.12",
        )  # fmt: skip
        assert set(found.tags) == {group.tag, "theirs"}

    def test_a_refused_member_does_not_stop_the_others(self, cloud, served, pools, make_group):
        group = make_group(*served)
        wrong = join("member2", subnet_id=topology.derive_id("missing"))
        applied = pools.apply(group, [wrong, join("member3"), join("member1", port=9090)])
        assert (applied.changes, set(applied.refused)) == (1, {"server-of-member2"})
        assert topology.derive_id("missing") in applied.refused["server-of-member2"]
        cloud.active(group.load_balancer_id)
        assert set(by_name(pools.read_pool(group))) == {"member1", "server-of-member3", "server-of-member1"}

    def test_pages(self, cloud, served, make_connection, make_group):
        connection = make_connection()
        connection.settings = msgspec.structs.replace(connection.settings, page_size=2)
        pools, group = OctaviaPools(connection), make_group(*served)
        pools.apply(group, [join("member2"), join("member3"), join("member1", port=9090)])
        cloud.active(group.load_balancer_id)
        found = Counter((one.address, one.port) for one in pools.read_pool(group).members)
        assert sorted(found) == [("192.0.2.11", 8080), ("192.0.2.11", 9090), ("192.0.2.12", 8080), ("192.0.2.13", 8080)]
        assert set(found.values()) == {1}

    def test_a_member_is_deleted_between_two_pages(self, cloud, served, make_connection, make_group):
        connection, other = make_connection(), OctaviaPools(make_connection())
        connection.settings = msgspec.structs.replace(connection.settings, page_size=1)
        group = make_group(*served)
        other.apply(group, [join("member2"), join("member3")])
        cloud.active(group.load_balancer_id)
        send, deleted = connection.request, []

        def delete_after_the_second_page(*words, **more):
            found = send(*words, **more)
            if "marker" in dict(more["params"]) and not deleted:
                deleted.extend(found.members)
                other.apply(group, [step(StepKind.LEAVE, "one", change("member1", member_id=deleted[0].id))])
                cloud.active(group.load_balancer_id)
            return found

        connection.request = delete_after_the_second_page
        found = [one.address for one in OctaviaPools(connection).read_pool(group).members]
        wanted = {"192.0.2.11", "192.0.2.12", "192.0.2.13"} - {deleted[0].address}
        assert sorted(found) == sorted(wanted)


class TestPending:
    def test_a_pending_load_balancer_is_busy(self, cloud, other_provider, make_connection, make_group):
        balancer = cloud.served("pending", ("member1",), provider="noop_driver")
        group = make_group(balancer, cloud.pool_of(balancer))
        pools = OctaviaPools(make_connection(), patience=0.3)
        other_provider.held.set()
        assert pools.apply(group, [join("member2")]).changes == 1
        assert not pools.read_pool(group).changeable
        with pytest.raises(Busy) as caught:
            pools.apply(group, [join("member3"), step(StepKind.JOIN, "a", change("member1"))])
        assert set(caught.value.refused) == {"a"}
        other_provider.held.clear()
        cloud.active(balancer.id)
        assert pools.apply(group, [join("member3")]).changes == 1

    def test_missing_objects(self, cloud, pools, make_group):
        balancer = cloud.served("missing", ("member1",))
        pool = cloud.pool_of(balancer)
        group = make_group(balancer, pool)
        unknown = topology.derive_id("unknown")
        for changed in (
            msgspec.structs.replace(group, pool_id=unknown),
            msgspec.structs.replace(group, load_balancer_id=unknown),
        ):
            with pytest.raises(Missing) as caught:
                pools.read_pool(changed)
            assert (caught.value.final, unknown in caught.value.happened) == (True, True)
        assert pools.load_balancer_status(unknown) == "DELETED"

    def test_the_load_balancer_of_a_pool(self, cloud, pools, make_group):
        balancer, other = (cloud.served(name, ("member1",)) for name in ("one", "two"))
        mixed = make_group(other, cloud.pool_of(balancer))
        assert pools.read_pool(mixed).load_balancer_id == balancer.id


class TestPolicies:
    @pytest.mark.parametrize("provider", ["haproxy", "noop_driver"])
    def test_create_and_delete(self, request, cloud, pools, provider):
        if provider == "noop_driver":
            request.getfixturevalue("other_provider")
        pool = {
            "name": "pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN",
            "healthmonitor": {"type": "TCP", "delay": 1, "timeout": 1, "max_retries": 1},
        }  # fmt: skip
        listener = {"name": "listener", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
        body = {
            "name": "policy", "vip_subnet_id": topology.VIP_SUBNET, "listeners": [listener], "provider": provider,
            "project_id": "sandbox",
        }  # fmt: skip
        made = pools.create_load_balancer("one", body)
        assert None not in msgspec.structs.astuple(made)
        # A repetition, for example after a crash, finds the first one.
        assert made.created
        assert pools.create_load_balancer("one", body) == msgspec.structs.replace(made, created=False)
        with pytest.raises(CloudError, match="does not have the tag"):
            pools.delete_load_balancer("two", made.load_balancer_id)
        cloud.active(made.load_balancer_id)
        assert not pools.delete_load_balancer("one", made.load_balancer_id)
        cloud.until(lambda: pools.delete_load_balancer("one", made.load_balancer_id), "the load balancer is deleted")
        assert pools.load_balancer_status(made.load_balancer_id) == "DELETED"
