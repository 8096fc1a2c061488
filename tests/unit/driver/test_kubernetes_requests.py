# SPDX-License-Identifier: Apache-2.0
"""The requests of openstack-cloud-controller-manager for a service, as octavia-api passes them to the driver.

The values follow `createOctaviaLoadBalancer` and its functions in `pkg/openstack/loadbalancer.go` of
cloud-provider-openstack 1.36: one request for all objects, a name for each pool, the three time-outs in each listener.
"""

import pytest
from octavia_lib.api.drivers import data_models
from octavia_objects import LB, MONITOR, POOL, SUBNET, listener, load_balancer, member, pool

from amphora_driver.model.enums import MonitorType, PoolProtocol
from amphora_driver.render import haproxy
from amphora_driver.store import desired_objects

NAME = "kube_service_cluster_default_web"


def service(protocol="TCP", pool_protocol=None, monitor="TCP", flavor=None, **more):
    """A service of type LoadBalancer with one port and two nodes."""
    nodes = [
        member(number, name=f"node_0_{number}", protocol_port=31000 + number, subnet_id=SUBNET) for number in (1, 2)
    ]
    check = data_models.HealthMonitor(
        healthmonitor_id=MONITOR,
        pool_id=POOL,
        project_id="demo",
        name=f"monitor_0_{NAME}",
        type=monitor,
        delay=5,
        timeout=3,
        max_retries=1,
        max_retries_down=3,
        admin_state_up=True,
        **({"url_path": "/healthz", "http_method": "GET", "expected_codes": "200"} if monitor == "HTTP" else {}),
    )
    behind = pool(
        name=f"pool_0_{NAME}", protocol=pool_protocol or protocol, members=nodes, healthmonitor=check, listener_id=None
    )
    values = {"name": f"listener_0_{NAME}", "protocol": protocol, "protocol_port": 443, "default_pool_id": POOL}
    front = listener(**{**values, **more})
    return load_balancer(
        name=NAME,
        description="Kubernetes external service default/web from cluster cluster",
        flavor=flavor or {},
        listeners=[front],
        pools=[behind],
    )


def recorded(database):
    return database.read(lambda connection: desired_objects.load_tree(connection, LB))


def rendered(database):
    found = haproxy.render(recorded(database))
    assert found.refused == ()
    return [line.strip() for line in found.text.splitlines()]


@pytest.mark.parametrize(("wanted", "sent"), [("PROXY", "send-proxy"), ("PROXYV2", "send-proxy-v2")])
def test_a_service_with_the_proxy_protocol_is_served(provider, database, wanted, sent):
    provider.loadbalancer_create(service(pool_protocol=wanted))
    tree = recorded(database)
    assert tree.name == NAME
    (found,) = tree.pools
    assert (found.protocol, len(found.members), found.healthmonitor.type) == (PoolProtocol(wanted), 2, MonitorType.TCP)
    servers = [line.split() for line in rendered(database) if line.startswith("server ")]
    assert len(servers) == 2
    assert all(sent in words for words in servers)


def test_permitted_networks_of_a_service_are_recorded(provider, database):
    provider.loadbalancer_create(service(allowed_cidrs=["192.0.2.0/24", "198.51.100.7/32"]))
    assert recorded(database).listeners[0].allowed_cidrs == ("192.0.2.0/24", "198.51.100.7/32")


def test_a_udp_service_with_an_http_check_of_the_node_is_accepted(provider, database):
    """externalTrafficPolicy Local: the check asks the node for its health, over HTTP."""
    provider.loadbalancer_create(service("UDP", monitor="HTTP"))
    assert recorded(database).pools[0].healthmonitor.type is MonitorType.HTTP


def test_a_flavor_raises_the_timeouts_that_the_service_always_sends(provider, database):
    limits = {"timeout_client_data_minimum": 600_000, "timeout_member_data_minimum": 600_000}
    provider.loadbalancer_create(service(flavor=limits))
    assert recorded(database).listeners[0].timeout_client_data == 50_000, "Octavia shows the value of the user"
    found = rendered(database)
    assert "timeout client 600000ms" in found
    assert "timeout server 600000ms" in found
    assert "timeout connect 5000ms" in found


def test_a_flavor_lowers_the_timeouts_that_the_service_always_sends(provider, database):
    limits = {"client_data": 20_000, "member_data": 30_000, "member_connect": 1_000}
    provider.loadbalancer_create(service(flavor={f"timeout_{name}_maximum": value for name, value in limits.items()}))
    found = rendered(database)
    assert {"timeout client 20000ms", "timeout server 30000ms", "timeout connect 1000ms"} <= set(found)


def test_the_default_of_a_flavor_does_not_replace_them(provider, database):
    provider.loadbalancer_create(service(flavor={"timeout_client_data": 600_000}))
    assert "timeout client 50000ms" in rendered(database)
