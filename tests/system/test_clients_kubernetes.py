# SPDX-License-Identifier: Apache-2.0
"""The requests of the programs that create load balancers for Kubernetes, in their order and with their waits."""

import http.client
import json
from contextlib import ExitStack

import kubernetes_requests as requests
import pytest
from agreement import assert_agreed
from client_session import ClientSession
from echo import answering
from kubernetes_requests import NODES, node

from amphora_driver.host import namespaces
from sandbox import demo_hosts, topology

pytestmark = pytest.mark.root

PORT = demo_hosts.MEMBER_PORT
PROXIED, ECHO = 8088, 8089
"""Node ports of the echo members with and without PROXY headers."""
PROVIDER = "haproxy"
# octavia-ingress-controller and Magnum recognise load balancers by their description.
FROM_CLUSTER = f"from cluster {requests.CLUSTER}"


@pytest.fixture
def session(cloud):
    return ClientSession(cloud)


def created(cloud, session, body):
    """Create a load balancer, wait as the clients do, and return it."""
    made = session.send("POST", "loadbalancers", {"loadbalancer": body})
    return cloud.active(made["id"])


def changed(cloud, session, balancer, method, path, body=None):
    """Send a change and wait until the load balancer is ACTIVE; return the object in the answer."""
    answer = session.send(method, path, body)
    cloud.active(balancer.id)
    return answer


def deleted(cloud, session, balancer):
    """Delete a load balancer with all objects, as every program for Kubernetes does."""
    session.send("DELETE", f"loadbalancers/{balancer.id}?cascade=true")
    cloud.gone(balancer.id)
    assert session.shown(f"loadbalancers/{balancer.id}") is None
    for kind in ("listeners", "pools", "healthmonitors", "l7policies"):
        assert session.listed(kind) == []


def batch(cloud, session, balancer, pool, members):
    """Replace all members of a pool with one request."""
    answer = session.send("PUT", f"pools/{pool}/members", {"members": members})
    assert answer is None
    cloud.active(balancer.id)


def asked(cloud, balancer, port, path="/", **headers):
    """Return the member's record of a request: name, headers, PROXY header."""

    def ask():
        connection = http.client.HTTPConnection(balancer.vip_address, port, timeout=10)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    status, body = namespaces.run_inside(namespaces.path(cloud.settings.host(topology.CLIENT)), ask)
    assert status == 200, body
    return json.loads(body)


def complete(name, index, port, node_port, *, protocol="TCP", pool=None, monitor="TCP", nodes=NODES, **more):
    """Return a listener with its pool, as one request for all objects contains it."""
    behind = requests.service_pool(name, index, pool or protocol)
    behind["members"] = [node(one, node_port) for one in nodes]
    behind["healthmonitor"] = requests.service_monitor(name, index, monitor)
    return {**requests.service_listener(name, index, port, protocol), "default_pool": behind, **more}


def test_a_service_is_one_request_and_one_deletion(cloud, session):
    name = requests.name_of("web")
    body = requests.service_head(name, PROVIDER)
    body["listeners"] = [
        complete(name, 0, 80, PORT, allowed_cidrs=["198.51.100.0/24", "203.0.113.7/32"]),
        complete(name, 1, 53, 5353, protocol="UDP", monitor="UDP-CONNECT"),
    ]
    assert session.listed(f"loadbalancers?name={name}") == []
    balancer = created(cloud, session, body)
    assert_agreed(cloud, balancer)
    cloud.balanced(balancer.vip_address, dict.fromkeys(NODES, 1))
    assert not reaches(cloud, balancer, NODES[0]), "allowed_cidrs excludes the nodes"
    (found,) = session.listed(f"loadbalancers?name={name}&tags={name}")
    assert (found["id"], found["tags"]) == (balancer.id, [name])
    assert {one["name"]: one["tags"] for one in session.listed(f"listeners?load_balancer_id={balancer.id}")} == {
        f"listener_0_{name}": [name],
        f"listener_1_{name}": [name],
    }
    deleted(cloud, session, balancer)


def reaches(cloud, balancer, host):
    """Return whether a host gets a connection."""
    try:
        cloud.get(balancer.vip_address, host=host)
    except OSError:
        return False
    return True


@pytest.fixture
def echoes(settings):
    """Nodes that answer with the request and with the PROXY header of its connection."""
    with ExitStack() as stack:
        for one in NODES:
            stack.enter_context(answering(settings, one, PROXIED, proxied=True))
            stack.enter_context(answering(settings, one, ECHO))
        yield


@pytest.mark.extended
def test_a_service_with_the_proxy_protocol_changes_its_version(cloud, session, echoes):
    name = requests.name_of("proxied")
    body = requests.service_head(name, PROVIDER)
    body["listeners"] = [complete(name, 0, 80, PROXIED, pool="PROXY")]
    balancer = created(cloud, session, body)
    client = "198.51.100.2"
    assert asked(cloud, balancer, 80)["proxied"] == {"version": 1, "source": client}
    # A change of the annotation: `ensureOctaviaPool` deletes the pool, and creates another one.
    (listener,) = session.listed(f"listeners?load_balancer_id={balancer.id}")
    changed(cloud, session, balancer, "DELETE", f"pools/{listener['default_pool_id']}")
    pool = requests.service_pool(name, 0, "PROXYV2", listener_id=listener["id"])
    made = changed(cloud, session, balancer, "POST", "pools", {"pool": pool})
    batch(cloud, session, balancer, made["id"], [node(one, PROXIED) for one in NODES])
    monitor = requests.service_monitor(name, 0, pool_id=made["id"])
    changed(cloud, session, balancer, "POST", "healthmonitors", {"healthmonitor": monitor})
    assert asked(cloud, balancer, 80)["proxied"] == {"version": 2, "source": client}
    assert_agreed(cloud, balancer)


@pytest.mark.extended
def test_the_later_requests_of_a_service(cloud, session, echoes):
    name = requests.name_of("later")
    body = requests.service_head(name, PROVIDER)
    headers = {"X-Forwarded-For": "true"}
    body["listeners"] = [
        complete(name, 0, 80, ECHO, protocol="HTTP", nodes=NODES[:2], insert_headers=headers, connection_limit=100)
    ]
    balancer = created(cloud, session, body)
    assert asked(cloud, balancer, 80)["headers"]["x-forwarded-for"] == "198.51.100.2"
    (listener,) = session.listed(f"listeners?load_balancer_id={balancer.id}")
    pool = listener["default_pool_id"]

    # Another port of the service, with the affinity ClientIP: `ensureOctaviaListener`, `ensureOctaviaPool`.
    second = requests.service_listener(name, 1, 8000, loadbalancer_id=balancer.id)
    second = changed(cloud, session, balancer, "POST", "listeners", {"listener": second})
    affine = {"session_persistence": {"type": "SOURCE_IP"}, "listener_id": second["id"]}
    affine = {"pool": requests.service_pool(name, 1, **affine)}
    affine = changed(cloud, session, balancer, "POST", "pools", affine)
    batch(cloud, session, balancer, affine["id"], [node(one, ECHO) for one in NODES])
    assert len({asked(cloud, balancer, 8000)["member"] for _ in range(6)}) == 1

    # A node joins, another one leaves, and the traffic policy changes to Local: an HTTP monitor at another port.
    batch(cloud, session, balancer, pool, [node(one, ECHO, monitor_port=PORT) for one in NODES[1:]])
    assert {asked(cloud, balancer, 80)["member"] for _ in range(6)} == set(NODES[1:])
    (monitor,) = (one for one in session.listed("healthmonitors") if one["pools"][0]["id"] == pool)
    changed(cloud, session, balancer, "DELETE", f"healthmonitors/{monitor['id']}")
    local = requests.service_monitor(name, 0, "HTTP", pool_id=pool)
    local = changed(cloud, session, balancer, "POST", "healthmonitors", {"healthmonitor": local})
    slower = {"name": local["name"], "delay": 6, "timeout": 3, "max_retries": 2, "max_retries_down": 3}
    changed(cloud, session, balancer, "PUT", f"healthmonitors/{local['id']}", {"healthmonitor": slower})

    # Changed annotations: `ensureOctaviaListener`, `UpdateLoadBalancerTags`, another algorithm.
    update = {"connection_limit": -1, "insert_headers": {}, "timeout_client_data": 60000, "timeout_tcp_inspect": 1}
    update |= {"allowed_cidrs": ["198.51.100.0/24"], "tags": [name, "other"]}
    changed(cloud, session, balancer, "PUT", f"listeners/{listener['id']}", {"listener": update})
    changed(cloud, session, balancer, "PUT", f"pools/{pool}", {"pool": {"lb_algorithm": "LEAST_CONNECTIONS"}})
    tags = {"loadbalancer": {"tags": [name, requests.name_of("shared")]}}
    changed(cloud, session, balancer, "PUT", f"loadbalancers/{balancer.id}", tags)
    assert_agreed(cloud, balancer)
    assert "x-forwarded-for" not in asked(cloud, balancer, 80)["headers"]

    # The port is removed: `deleteListeners`, and the pool before it.
    changed(cloud, session, balancer, "DELETE", f"pools/{affine['id']}")
    changed(cloud, session, balancer, "DELETE", f"listeners/{second['id']}")
    assert_agreed(cloud, balancer)
    deleted(cloud, session, balancer)


@pytest.mark.extended
def test_cluster_api_creates_a_control_plane(cloud, session):
    assert PROVIDER in {one["name"] for one in session.listed("providers")}
    allowed = ["198.51.100.0/24"]
    balancer = created(cloud, session, requests.control_plane(PROVIDER))
    pools = {}
    for port in (PORT, 6443):
        body = requests.control_plane_listener(balancer.id, port, allowed)
        listener = changed(cloud, session, balancer, "POST", "listeners", {"listener": body})
        pool = {"pool": requests.control_plane_pool(listener["id"], port)}
        pools[port] = changed(cloud, session, balancer, "POST", "pools", pool)["id"]
        monitor = {"healthmonitor": requests.control_plane_monitor(pools[port], port)}
        changed(cloud, session, balancer, "POST", "healthmonitors", monitor)
    # Each machine joins the pool of each port, and waits for the member itself.
    for machine in NODES:
        for port, pool in pools.items():
            member = {"member": requests.control_plane_member(machine, port)}
            path = f"pools/{pool}/members"
            made = session.send("POST", path, member)
            session.await_object(f"{path}/{made['id']}")
            cloud.active(balancer.id)
    assert cloud.answers(balancer.vip_address, 6, PORT) == dict.fromkeys(NODES, 2)
    # The bastion gets an address: the listener allows it.
    listener = session.listed(f"listeners?name={requests.CONTROL_PLANE}-{PORT}")[0]
    body = {"listener": {"allowed_cidrs": [*allowed, "203.0.113.7/32"]}}
    session.send("PUT", f"listeners/{listener['id']}", body)
    session.await_object(f"listeners/{listener['id']}")
    cloud.active(balancer.id)
    # A machine is replaced.
    (gone,) = session.listed(f"pools/{pools[PORT]}/members?name={requests.CONTROL_PLANE}-{PORT}-{NODES[0]}")
    changed(cloud, session, balancer, "DELETE", f"pools/{pools[PORT]}/members/{gone['id']}")
    assert cloud.answers(balancer.vip_address, 4, PORT) == dict.fromkeys(NODES[1:], 2)
    assert_agreed(cloud, balancer)
    deleted(cloud, session, balancer)


@pytest.mark.extended
def test_octavia_ingress_controller_and_magnum(cloud, session):
    balancer = created(cloud, session, requests.ingress_head(PROVIDER))
    body = requests.ingress_listener(balancer.id)
    listener = changed(cloud, session, balancer, "POST", "listeners", {"listener": body})
    nodes = {"default": NODES[:1], "api": NODES[1:2], "images": NODES[2:]}
    pools = {}
    for name, members in nodes.items():
        place = {"listener_id": listener["id"]} if name == "default" else {"loadbalancer_id": balancer.id}
        pool = {"pool": requests.ingress_pool(name, **place)}
        pools[name] = changed(cloud, session, balancer, "POST", "pools", pool)["id"]
        batch(cloud, session, balancer, pools[name], [node(one, PORT, subnet=None) for one in members])
    policies = {}
    for name, path in (("api", "/api"), ("images", "/images")):
        policy = {"l7policy": requests.ingress_policy(listener["id"], pools[name])}
        policies[name] = changed(cloud, session, balancer, "POST", "l7policies", policy)["id"]
        for rule in requests.ingress_rules("www.example.com", path):
            changed(cloud, session, balancer, "POST", f"l7policies/{policies[name]}/rules", {"rule": rule})
    version = f"Kubernetes Ingress web in namespace default {FROM_CLUSTER}, version: 17"
    described = {"loadbalancer": {"description": version}}
    changed(cloud, session, balancer, "PUT", f"loadbalancers/{balancer.id}", described)

    def member(path, host="www.example.com"):
        return namespaces.run_inside(
            namespaces.path(cloud.settings.host(topology.CLIENT)), lambda: _member(balancer.vip_address, path, host)
        )

    assert [member("/api/1"), member("/images/2"), member("/")] == [NODES[1], NODES[2], NODES[0]]
    assert member("/api/1", "other.example.com") == NODES[0]
    # A path is removed from the ingress: `CleanupResources`.
    changed(cloud, session, balancer, "DELETE", f"l7policies/{policies['api']}")
    changed(cloud, session, balancer, "DELETE", f"pools/{pools['api']}")
    assert member("/api/1") == NODES[0]
    assert_agreed(cloud, balancer)
    # Magnum deletes the load balancers of a cluster, which it finds by their description (`delete_loadbalancers`).
    mine = [one for one in session.listed("loadbalancers") if FROM_CLUSTER in one["description"]]
    assert [one["id"] for one in mine] == [balancer.id]
    deleted(cloud, session, balancer)


def _member(address, path, host):
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().getheader("X-Member")
    finally:
        connection.close()
