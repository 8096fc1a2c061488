# SPDX-License-Identifier: Apache-2.0
"""A pair through Octavia's API: the load balancer serves through the failure of either amphora."""

import json
import socket
import ssl
import time

import authorities
import long_connections
import pytest
import sqlalchemy as sa
from client_traffic import Traffic, holder, of

from amphora_driver import config
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.database.tables import amphora, job, object_status, request
from amphora_driver.database.vault import Vault
from amphora_driver.host import namespaces
from amphora_driver.maintenance.housekeeping import Housekeeping
from amphora_driver.network.local import LocalNetwork
from amphora_driver.store import amphorae
from sandbox import topology

pytestmark = pytest.mark.root

# Seconds between advertisements: a standby takes over after less than a second, on a machine that is not overloaded.
FAST = 0.2


@pytest.fixture
def pairs(cloud):
    """A flavor of pairs, deleted after the test."""
    data = {"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": FAST}
    profile = cloud.balancers.create_flavor_profile(name="pairs", provider_name="haproxy", flavor_data=json.dumps(data))
    made = cloud.balancers.create_flavor(name="pairs", flavor_profile_id=profile.id, is_enabled=True)
    yield made.id
    cloud.clean()
    cloud.balancers.delete_flavor(made)
    cloud.balancers.delete_flavor_profile(profile)


@pytest.fixture
def compute(settings, database):
    conf = config.load([str(settings.driver_configuration)])
    return NetnsCompute(conf, LocalNetwork(conf, database))


def served(cloud, address, names, port=80):
    """Wait until exactly these members answer."""
    cloud.until(lambda: set(cloud.answers(address, 8, port)) == set(names), f"{names} answer", 30)


def test_a_pair_from_its_creation_to_its_deletion(cloud, pairs, compute):
    more = [{"subnet_id": topology.VIP_SUBNET_6}]
    balancer = cloud.served("pair", flavor_id=pairs, additional_vips=more)
    pair = of(cloud, balancer)
    assert set(pair) == {"MASTER", "BACKUP"}
    for address in (balancer.vip_address, *(one["ip_address"] for one in balancer.additional_vips)):
        served(cloud, address, ("member1", "member2"))
    generation = cloud.database.read(lambda c: c.execute(sa.select(job.c.generation)).scalar())
    assert {one.confirmed for one in pair.values()} == {generation}
    assert generation == 1, "both were pushed once"
    first = holder(cloud, balancer)
    cloud.online(balancer.id)

    pool = cloud.pool_of(balancer)
    third = cloud.balancers.create_member(pool, **cloud.member("member3"))
    cloud.active(balancer.id)
    served(cloud, balancer.vip_address, ("member1", "member2", "member3"))
    cloud.balancers.delete_member(third, pool)
    cloud.active(balancer.id)
    served(cloud, balancer.vip_address, ("member1", "member2"))
    assert holder(cloud, balancer).id == first.id, "no change moves the VIPs"

    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)
    assert compute.booted() == []


def test_a_killed_vip_holder_returns_or_is_replaced(cloud, pairs, compute):
    balancer = cloud.served("dies", flavor_id=pairs)
    served(cloud, balancer.vip_address, ("member1", "member2"))
    first = holder(cloud, balancer)
    with Traffic(cloud, balancer.vip_address) as traffic:
        compute.power_off(first.id)
        traffic.more()
    # Three advertisements and a fraction (RFC 9568, 6.1); the rest is for a busy machine.
    assert traffic.gap < 5, traffic.answers
    assert holder(cloud, balancer, but=(first.id,)).id != first.id
    cloud.online(balancer.id)

    # A degraded pair serves a user's change, but becomes ACTIVE only when both amphorae have it.
    cloud.balancers.create_member(cloud.pool_of(balancer), **cloud.member("member3"))
    served(cloud, balancer.vip_address, ("member1", "member2", "member3"))
    assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "PENDING_UPDATE"
    assert compute.power_on(first.id)
    cloud.active(balancer.id)
    second = holder(cloud, balancer)
    assert second.id != first.id, "a returning amphora does not take the VIPs"
    served(cloud, balancer.vip_address, ("member1", "member2", "member3"))

    before = cloud.amphorae(balancer)
    compute.power_off(second.id)
    holder(cloud, balancer, but=(second.id,))
    with Traffic(cloud, balancer.vip_address) as traffic:
        cloud.balancers.failover_load_balancer(balancer.id)
        cloud.active(balancer.id)
        cloud.until(
            lambda: len(now := cloud.amphorae(balancer)) == 2 and now.isdisjoint(before), "both amphorae are replaced"
        )
        traffic.more()
    assert traffic.gap < 5, traffic.answers
    settled(cloud, balancer)


def handshake(cloud, context, address, session=None):
    """Connect and send a request; return the new session, and whether `session` was resumed."""

    def go():
        with (
            socket.create_connection((address, 443), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="one", session=session) as secured,
        ):
            secured.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b" 200 " in secured.recv(4096).split(b"\r\n")[0]
            return secured.session, secured.session_reused

    return namespaces.run_inside(namespaces.path(cloud.settings.host(topology.CLIENT)), go)


def test_a_tls_session_resumes_after_a_takeover_and_a_key_rotation(cloud, pairs, compute, settings, database):
    authorities.keep_all(settings)
    secured = {
        "protocol": "TERMINATED_HTTPS",
        "protocol_port": 443,
        "default_tls_container_ref": "one",
        "name": "secured-https",
    }
    balancer = cloud.served("secured", ("member1",), flavor_id=pairs, listener=secured)
    served_by = holder(cloud, balancer)
    context = ssl.create_default_context(cadata=authorities.ROOT.pem)
    context.check_hostname = False
    # A TLS 1.2 session is complete after the handshake; TLS 1.3 sends tickets later.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    address = balancer.vip_address
    session, reused = handshake(cloud, context, address)
    assert not reused

    # Housekeeping rotates the ticket keys: amphorae are pushed, and no status changes.
    heard = database.read(lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.version)).all())
    database.write(lambda c: c.execute(job.update().values(tickets_due=1.0)))
    conf = config.load([str(settings.driver_configuration)])
    vault = Vault.load(conf.amp_database.encryption_key_file)
    cloud.until(
        lambda: Housekeeping(conf, database, None, "a test", vault).rotate_ticket_keys(),
        "housekeeping rotates the keys",
    )
    generation = database.read(lambda c: c.execute(sa.select(job.c.generation)).scalar())
    cloud.until(
        lambda: {one.confirmed for one in of(cloud, balancer).values()} == {generation}, "both amphorae have the keys"
    )
    assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"
    provisioned = [row for row in heard if row.object_id == balancer.id]
    now = database.read(lambda c: c.execute(sa.select(object_status.c.object_id, object_status.c.version)).all())
    assert [row for row in now if row.object_id == balancer.id] == provisioned
    assert handshake(cloud, context, address, session)[1], "the amphora still accepts the former key"

    compute.power_off(served_by.id)
    holder(cloud, balancer, but=(served_by.id,))
    assert cloud.until(lambda: handshake_result(cloud, context, address, session), "the standby serves", 10)[1]


def handshake_result(cloud, context, address, session):
    try:
        return handshake(cloud, context, address, session)
    except OSError:
        return None


def listener(name, port, *members):
    """Return a listener with its own pool, for a load balancer's request."""
    pool = {"name": name, "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": list(members)}
    return {"name": name, "protocol": "HTTP", "protocol_port": port, "default_pool": pool}


def test_fail_over_on_request_replaces_both(cloud, pairs, compute):
    balancer = cloud.load_balancer(
        "failover",
        flavor_id=pairs,
        listeners=[
            listener("usual", 80, cloud.member("member1"), cloud.member("member2")),
            listener("lasting", 81, cloud.member("member3", protocol_port=9000)),
        ],
    )
    served(cloud, balancer.vip_address, ("member1", "member2"))
    before = cloud.amphorae(balancer)
    old = holder(cloud, balancer)
    with (
        long_connections.Member(cloud.settings, "member3", 9000) as member,
        Traffic(cloud, balancer.vip_address) as traffic,
    ):
        download, *sockets = member.visits(cloud.settings, balancer.vip_address, 81)
        cloud.balancers.failover_load_balancer(balancer.id)
        cloud.active(balancer.id)
        now = cloud.amphorae(balancer) - {old.id}
        assert len(now) == 2
        assert now.isdisjoint(before), "the new amphorae serve before ACTIVE"
        connections_go_on(cloud, balancer, old, (download, *sockets))

        # One connection ends by itself, the other exceeds the drain time.
        member.finish()
        assert download.rest() == member.sent
        sockets.pop().close()
        assert old.id in cloud.amphorae(balancer), "one connection is open"
        cloud.database.write(lambda c: c.execute(amphora.update().where(amphora.c.id == old.id).values(drains_until=1)))
        cloud.until(lambda: cloud.amphorae(balancer) == now, "the old amphora is deleted")
        assert sockets.pop().is_cut(15)
        traffic.more()
    # No request fails; an overloaded machine may answer late.
    assert traffic.failed <= 2, traffic.answers
    assert traffic.gap < 5, traffic.answers
    assert set(of(cloud, balancer)) == {"MASTER", "BACKUP"}
    holder(cloud, balancer)
    settled(cloud, balancer)
    assert set(compute.booted()) == cloud.amphorae(balancer)


def connections_go_on(cloud, balancer, old, visits):
    """Connections continue over the former VIP holder, and a user's change does not wait for them."""
    for visit in visits:
        visit.goes_on()
    since = time.monotonic()
    pool = next(one for one in cloud.balancers.pools(loadbalancer_id=balancer.id) if one.name == "lasting")
    cloud.balancers.update_pool(pool, name="renamed")
    cloud.active(balancer.id)
    cloud.balancers.create_member(pool, **cloud.member("member2"))
    cloud.active(balancer.id)
    # The drain time is 300 s; a second or two is usual.
    assert time.monotonic() - since < 30
    knows_all = {one.id for one in of(cloud, balancer).values()}
    cloud.until(
        lambda: {one.id for one in row_of(cloud, balancer, old).partners} == knows_all,
        "the old amphora knows both partners",
    )
    for visit in visits:
        visit.goes_on()
    assert old.id in cloud.amphorae(balancer)
    assert holder(cloud, balancer).id != old.id


def row_of(cloud, balancer, one):
    found = cloud.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
    return next(each for each in found if each.id == one.id)


def settled(cloud, balancer):
    """Wait until each amphora has exactly the other one as its partner, in a later generation."""

    def ask():
        pair = of(cloud, balancer)
        return all(
            {one.id for one in each.partners} == {*cloud.amphorae(balancer)} - {each.id} for each in pair.values()
        )

    cloud.until(ask, "each amphora is the partner of the other", 30)
    rows = cloud.database.read(lambda c: c.execute(sa.select(request.c.action)).scalars().all())
    assert "failover loadbalancer" in rows
    assert cloud.balancers.get_load_balancer(balancer.id).provisioning_status == "ACTIVE"
