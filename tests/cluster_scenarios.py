# SPDX-License-Identifier: Apache-2.0
"""What cluster membership must do on each cloud: the scenarios of the load-balancing policy, and failures around them.

`tests/cluster` runs them with a stub of Nova and two providers, `tests/openstack` with a real Nova. Each function gets
the group `web` as its caller sees it, the cluster of its servers, and the id of a first server that serves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

WEB = "web"
_STEPS = 8
_MEMBER = ("id", "address", "weight", "tags", "is_admin_state_up", "backup", "monitor_port")


class Cluster(ABC):
    """The servers of a user, and the load balancer in front of them.

    Args:
        balancers: openstacksdk's client of the user.
        balancer: the load balancer.
        pool_id: its pool.
    """

    def __init__(self, balancers, balancer, pool_id):
        self.balancers, self.balancer, self.pool_id = balancers, balancer, pool_id

    @abstractmethod
    def create(self, number=1, *, tag=WEB):
        """Create servers that answer requests before they have this tag; return their ids, which are never repeated."""

    @abstractmethod
    def delete(self, *server_ids):
        """Delete servers; return when Nova has deleted them."""

    @abstractmethod
    def add_tag(self, server_id, tag):
        """Add a tag to a server."""

    @abstractmethod
    def member_of(self, server_id):
        """Return address, port and subnet of a member for a server, as arguments of the SDK."""

    @abstractmethod
    def answers(self, number=12):
        """Return the servers that answer this number of requests of a client."""

    @abstractmethod
    def traffic(self, **more):
        """Return a `RequestStream` of a client."""

    @abstractmethod
    def active(self):
        """Wait until the load balancer is ACTIVE."""

    def members(self):
        """Return the members of the pool by name: what a user sees."""
        found = self.balancers.members(self.pool_id)
        return {one.name: {name: getattr(one, name) for name in _MEMBER} for one in found}


class Outage(NamedTuple):
    """An API that a test stops and starts; `reason` is a part of the error that the group reports meanwhile."""

    stop: Callable[[], object]
    start: Callable[[], object]
    reason: str

    @contextmanager
    def begun(self):
        """Stop the API until the end of the block."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def _steps(web, cluster, first):
    """Run the scenarios S1 to S7; yield the servers that must serve after each step.

    A cluster creates its servers before they join, and deletes them after they left.
    """
    # S7, NODE_CREATE: one server is created, then joins.
    [second] = cluster.create()
    assert web.done("join", {"server": second})["succeeded"] == [second]
    yield first, second

    # S4, CLUSTER_SCALE_OUT: new servers are created; the group finds them by itself, and the caller waits.
    [third] = cluster.create()
    assert web.done("sync", {"servers": [third]})["kind"] == "sync"
    web.reaches({first: "serving", second: "serving", third: "serving"})
    yield first, second, third

    # S1, CLUSTER_SCALE_IN: one server is chosen and leaves, then is deleted.
    scale_in = {"count": 1, "criterion": "youngest"}
    [left] = web.done("leave", scale_in, key="scale-in-1")["succeeded"]
    rest = {first, second, third} - {left}
    yield tuple(rest)
    # The caller repeats its request after a lost answer: no second server leaves.
    assert web.done("leave", scale_in, key="scale-in-1")["succeeded"] == [left]
    # S5, CLUSTER_ADD_NODES: the server is added again instead.
    assert web.done("join", {"servers": [left]})["succeeded"] == [left]
    yield first, second, third

    # S2, CLUSTER_DEL_NODES: the caller names the servers.
    assert web.done("leave", {"servers": [second]})["succeeded"] == [second]
    yield first, third
    cluster.delete(second)
    web.reaches({first: "serving", third: "serving"})

    # S3, CLUSTER_RESIZE that shrinks: the number of servers is given.
    [left] = web.done("leave", {"count": 1}, key="resize-1")["succeeded"]
    [stays] = {first, third} - {left}
    yield (stays,)
    cluster.delete(left)

    # S7, NODE_DELETE, refused: the last server must not leave.
    status, refused = web.post("leave", {"servers": [stays]})
    assert (status, "minimum of the group is 1" in refused["happened"], set(refused["failed"])) == (409, True, {stays})
    yield (stays,)

    # S6, CLUSTER_RESIZE that expands: several servers at once.
    made = cluster.create(2)
    assert set(web.done("join", {"servers": made})["succeeded"]) == set(made)
    yield (stays, *made)


def run_scenarios(web, cluster, first, check=lambda _: None):
    """Run the scenarios. After each step the pool has exactly the serving servers, and `check` is called with them."""
    number = 0
    for servers in _steps(web, cluster, first):
        assert {name: one["weight"] for name, one in cluster.members().items()} == dict.fromkeys(servers, 1)
        check(set(servers))
        number += 1
    assert number == _STEPS


def no_request_fails(web, cluster, first):
    """Run the scenarios under traffic: exactly the serving servers answer, and no request fails.

    Return the numbers of requests by result, of a client with fast requests and of one with slow requests.
    """
    # The slow requests take longer than a pass, so that they run while their server drains.
    with cluster.traffic() as fast, cluster.traffic(path="/slow/0.7", timeout=5.0) as slow:

        def check(servers):
            fast.more(30)
            assert cluster.answers() == servers
            assert (fast.failed, slow.failed) == (0, 0), (fast.answers, slow.answers)

        run_scenarios(web, cluster, first, check)
    assert (fast.failed, slow.failed) == (0, 0), (fast.answers, slow.answers)
    assert slow.answers["200"] > 10
    return fast.answers, slow.answers


def foreign_member_is_untouched(web, cluster, first):
    """A member without the tag of the group stays as its user wants it, also if its server joins by mistake."""
    [second] = cluster.create(tag="other")
    made = cluster.balancers.create_member(cluster.pool_id, name="mine", **cluster.member_of(second))
    cluster.active()
    # A user changes the member while the group works; the group never changes it back.
    cluster.balancers.update_member(made.id, cluster.pool_id, weight=7, tags=["mine"])
    cluster.active()
    wanted = cluster.members()["mine"]
    [third] = cluster.create()
    web.done("join", {"server": third})
    cluster.add_tag(second, WEB)
    # The server fails with the reason, and the others continue.
    status, refused = web.post("join", {"servers": [second, third]})
    assert (status, set(refused["failed"]), refused["request"]["succeeded"]) == (409, {second}, [third])
    assert made.id in refused["failed"][second]
    web.done("leave", {"servers": [first, third]})
    # A leave of the server of the foreign member is refused: it still receives requests.
    status, refused = web.post("leave", {"server": second})
    assert (status, "still receives requests" in refused["failed"][second]) == (409, True)
    web.deleted()
    assert cluster.members() == {"mine": wanted}


def groups_share_a_pool(web, blue, cluster, first):
    """Two groups in one pool change their own members only; the deletion of the group `blue` fails no request."""
    [second] = cluster.create(tag="blue")
    blue.done("join", {"server": second})
    with cluster.traffic() as traffic:
        both = cluster.members()
        assert {name: one["tags"] for name, one in both.items()} == {first: [web.tag], second: [blue.tag]}
        blue.done("join", {"servers": cluster.create(tag="blue")})
        web.done("leave", {"server": first})
        assert cluster.members()[second] == both[second]
        web.done("join", {"server": first})
        blue.deleted()
        traffic.more()
        assert set(cluster.members()) == {first}
    assert traffic.failed == 0, traffic.answers


def deleted_server_leaves(web, cluster, first):
    """The member of a server that is deleted without a request is removed."""
    [second] = cluster.create()
    web.reaches({first: "serving", second: "serving"})
    cluster.delete(second)
    web.reaches({first: "serving"})
    web.until(lambda: set(cluster.members()) == {first}, "the member is removed")


def outages_change_no_member(web, cluster, first, nova, octavia):
    """Nova's API is away, then Octavia's: the members stay, and a leave that was requested meanwhile follows."""
    [second] = cluster.create()
    web.done("join", {"server": second})
    before = cluster.members()
    with cluster.traffic() as traffic:
        with ExitStack() as outages:
            with nova.begun():
                web.post("sync", wait=0)
                web.fails(nova.reason)
                assert cluster.members() == before
                status, _ = web.post("leave", {"server": second}, wait=1)
                assert status == 202
                outages.enter_context(octavia.begun())
            web.fails(octavia.reason)
        web.reaches({first: "serving", second: "left"})
        assert web.shown()["error"] is None
        traffic.more()
    assert set(cluster.members()) == {first}
    assert traffic.failed == 0, traffic.answers
