# SPDX-License-Identifier: Apache-2.0
"""Resizes through amphoractl, under traffic: SINGLE to ACTIVE_STANDBY, to a larger pair, and back; TCP and UDP."""

import json
from contextlib import ExitStack, contextmanager

import datagram_members as datagrams
import long_connections
import pytest
import sqlalchemy as sa
from amphoractl import Amphoractl
from client_traffic import Traffic, holder, of
from datagram_members import Flow, answering

from amphora_driver.database.tables import job, object_status, request
from amphora_driver.database.tables_fleet import failover
from amphora_driver.model.enums import Kind

pytestmark = [pytest.mark.root, pytest.mark.extended]

SINGLE = {"loadbalancer_topology": "SINGLE"}
# The standby takes over after less than a second, on a machine that is not overloaded.
PAIR = {"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": 0.2}
LARGE = {**PAIR, "compute_flavor": "large"}


class Resized:
    """One load balancer that an operator resizes; `operating` has every status that it had meanwhile."""

    def __init__(self, cloud, balancer):
        self._cloud, self._balancer = cloud, balancer
        self._ctl = Amphoractl(cloud.settings)
        self.operating = set()

    def to(self, flavor, roles, *, but=()):
        """Resize; wait until only new amphorae with these roles serve, and those in `but`."""
        before = self._cloud.amphorae(self._balancer) - set(but)
        status, out, err = self._ctl.run("loadbalancer", "resize", self._balancer.id, "--flavor", json.dumps(flavor))
        assert status == 0, err
        assert "Octavia continues to show the original flavor" in out
        self.until(
            lambda: sorted(of(self._cloud, self._balancer)) == sorted(roles) and self._settled(), f"{roles} serve"
        )
        return before

    def gone(self, before):
        self.until(
            lambda: self._cloud.amphorae(self._balancer).isdisjoint(before) and self._settled(),
            "the former amphorae are deleted",
        )

    def until(self, question, what):
        def ask():
            self.operating |= set(self._read(sa.select(object_status.c.operating).where(_OBSERVED)))
            return question()

        self._cloud.until(ask, what, 120)

    def _settled(self):
        query = sa.select(job.c.load_balancer_id).where(
            job.c.load_balancer_id == self._balancer.id, job.c.applied < job.c.generation
        )
        return not self._read(query)

    def _read(self, query):
        return self._cloud.database.read(lambda c: c.execute(query).scalars().all())


_OBSERVED = object_status.c.kind.in_([Kind.LOAD_BALANCER.value, Kind.LISTENER.value])


@contextmanager
def traffic_without_failures(cloud, balancer):
    """No request is refused or cut off; an overloaded machine may answer late."""
    with Traffic(cloud, balancer.vip_address) as traffic:
        yield traffic
        traffic.more()
    assert set(traffic.answers) <= {"200", "TimeoutError"}, traffic.answers
    assert traffic.answers["TimeoutError"] <= 2, traffic.answers
    assert traffic.gap < 5, traffic.answers


def listener(cloud, name, port, *members):
    pool = {"name": f"{name}-pool", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": list(members)}
    return {"name": name, "protocol": "HTTP", "protocol_port": port, "default_pool": pool}


def test_a_load_balancer_grows_and_shrinks_under_traffic(cloud):
    balancer = cloud.load_balancer(
        "resized",
        listeners=[
            listener(cloud, "usual", 80, cloud.member("member1"), cloud.member("member2")),
            listener(cloud, "long_connections", 81, cloud.member("member3", protocol_port=9000)),
        ],
    )
    cloud.online(balancer.id)
    resized = Resized(cloud, balancer)

    # A single amphora is replaced as in a planned fail-over: its open connections end, and the VIPs stay reachable.
    with Traffic(cloud, balancer.vip_address) as traffic:
        resized.gone(resized.to(PAIR, ("MASTER", "BACKUP")))
        traffic.more()
    assert traffic.gap < 5, traffic.answers
    assert "ConnectionRefusedError" not in traffic.answers, traffic.answers
    holder(cloud, balancer)

    with traffic_without_failures(cloud, balancer):
        resized.gone(resized.to(LARGE, ("MASTER", "BACKUP")))

    old = holder(cloud, balancer)
    with long_connections.Member(cloud.settings, "member3", 9000) as member, traffic_without_failures(cloud, balancer):
        download, *sockets = member.visits(cloud.settings, balancer.vip_address, 81)
        before = resized.to(SINGLE, ("STANDALONE",))
        for visit in (download, *sockets):
            visit.goes_on()
        assert cloud.amphorae(balancer) & before == {old.id}, "the former holder drains"
        member.finish()
        assert download.rest() == member.sent, "the download has lost no byte"
        for visit in sockets:
            visit.close()
        resized.gone(before)
    (only,) = of(cloud, balancer).values()
    cloud.until(lambda: of(cloud, balancer)["STANDALONE"].holds_vip is None, "it has no VRRP")
    assert (only.role, of(cloud, balancer)["STANDALONE"].partners) == ("STANDALONE", ())

    assert resized.operating == {"ONLINE"}
    shown = cloud.balancers.get_load_balancer(balancer.id)
    assert (shown.provisioning_status, shown.flavor_id) == ("ACTIVE", None), "Octavia shows the original flavor"
    # Other tests of the run use the same sandbox.
    mine = sa.select(request.c.action, request.c.outcome).where(request.c.load_balancer_id == balancer.id)
    actions = cloud.database.read(lambda c: c.execute(mine).all())
    assert [one.outcome for one in actions if one.action == "resize"] == ["served"] * 3
    found = cloud.database.read(
        lambda c: c.execute(sa.select(failover).where(failover.c.load_balancer_id == balancer.id)).all()
    )
    assert {(one.cause, one.outcome) for one in found} == {("resize", "done")}
    assert len(found) == 5


@contextmanager
def flows_without_failures(cloud, balancer, number=4):
    """Each UDP flow gets answers of one member only, without a long gap; a move of the VIPs loses few datagrams."""
    with ExitStack() as running:
        flows = [running.enter_context(Flow(cloud, balancer.vip_address)) for _ in range(number)]
        yield flows
        for flow in flows:
            flow.goes_on()
    assert [len(flow.answers) for flow in flows] == [1] * number, [flow.answers for flow in flows]
    assert max(flow.gap for flow in flows) < 5


def udp_listener(cloud):
    """A UDP listener: a hash of the client's address and port selects the member."""
    members = [cloud.member(one, protocol_port=datagrams.PORT) for one in ("member1", "member2")]
    pool = {"name": "udp-pool", "protocol": "UDP", "lb_algorithm": "SOURCE_IP_PORT", "members": members}
    return {"name": "udp", "protocol": "UDP", "protocol_port": 53, "default_pool": pool}


def test_udp_flows_continue_in_each_resize(cloud):
    """Also while the former VIP holder drains a TCP connection of the same load balancer."""
    listeners = [
        udp_listener(cloud),
        listener(cloud, "long_connections", 81, cloud.member("member3", protocol_port=9000)),
    ]
    with ExitStack() as members:
        for name in ("member1", "member2"):
            members.enter_context(answering(cloud.settings, name))
        lasting_member = members.enter_context(long_connections.Member(cloud.settings, "member3", 9000))
        balancer = cloud.load_balancer("resized-udp", listeners=listeners)
        resized = Resized(cloud, balancer)

        # A single amphora ends with its flows: the new amphorae select the same members.
        with flows_without_failures(cloud, balancer):
            resized.gone(resized.to(PAIR, ("MASTER", "BACKUP")))
        holder(cloud, balancer)

        with flows_without_failures(cloud, balancer):
            resized.gone(resized.to(LARGE, ("MASTER", "BACKUP")))

        old = holder(cloud, balancer)
        with flows_without_failures(cloud, balancer) as flows:
            visits = lasting_member.visits(cloud.settings, balancer.vip_address, 81)
            before = resized.to(SINGLE, ("STANDALONE",))
            assert cloud.amphorae(balancer) & before == {old.id}, "the former holder drains"
            for one in (*flows, *visits):
                one.goes_on()
            assert old.id in cloud.amphorae(balancer)
            for visit in visits:
                visit.close()
            lasting_member.finish()
            resized.gone(before)
    assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"
