# SPDX-License-Identifier: Apache-2.0
"""Request bodies of the programs that create load balancers for Kubernetes, as their sources build them.

The sources are cloud-provider-openstack at c453fb7c9 (`pkg/openstack/loadbalancer.go`,
`pkg/ingress/controller/controller.go`) and cluster-api-provider-openstack at e52de58ab
(`pkg/cloud/services/loadbalancer/loadbalancer.go`). Fields without a value are absent, as gophercloud encodes them.
"""

from sandbox import topology

CLUSTER = "kubernetes"
NODES = tuple(topology.MEMBERS)
"""The nodes: the members of the sandbox."""


def name_of(service):
    """Return the name of the load balancer of a service; it is its tag too."""
    return f"kube_service_{CLUSTER}_default_{service}"


# --- openstack-cloud-controller-manager -------------------------------------------------------------------------------


def service_head(name, provider, **more):
    """`createOctaviaLoadBalancer`, without the listeners."""
    service = name.rpartition("_")[2]
    return {
        "name": name,
        "description": f"Kubernetes external service default/{service} from cluster {CLUSTER}",
        "vip_subnet_id": topology.VIP_SUBNET,
        "provider": provider,
        "tags": [name],
        **more,
    }


def service_listener(name, index, port, protocol="TCP", **more):
    """`buildListenerCreateOpt` with the default values of the annotations."""
    return {
        "protocol": protocol,
        "protocol_port": port,
        "name": f"listener_{index}_{name}",
        "connection_limit": -1,
        "timeout_client_data": 50000,
        "timeout_member_data": 50000,
        "timeout_member_connect": 5000,
        "timeout_tcp_inspect": 0,
        "tags": [name],
        **more,
    }


def service_pool(name, index, protocol="TCP", **more):
    """`buildPoolCreateOpt`."""
    return {"lb_algorithm": "ROUND_ROBIN", "protocol": protocol, "name": f"pool_{index}_{name}", **more}


def service_monitor(name, index, kind="TCP", **more):
    """`buildMonitorCreateOpts`; an HTTP monitor asks the health check port of the node."""
    http = {"url_path": "/healthz", "http_method": "GET", "expected_codes": "200"} if kind == "HTTP" else {}
    return {
        "type": kind,
        "delay": 5,
        "timeout": 3,
        "max_retries": 1,
        "max_retries_down": 3,
        "name": f"monitor_{index}_{name}",
        **http,
        **more,
    }


def node(name, port, *, subnet=topology.MEMBER_SUBNET, **more):
    """`buildBatchUpdateMemberOpts`: a node with its node port."""
    found = {"address": f"192.0.2.{topology.MEMBERS[name]}", "protocol_port": port, "name": name, **more}
    return {**found, "subnet_id": subnet} if subnet else found


# --- Cluster API ------------------------------------------------------------------------------------------------------

CONTROL_PLANE = "k8s-clusterapi-cluster-default-capi-kubeapi"
TAGS = ["capi", "test"]


def control_plane(provider):
    """`getOrCreateAPILoadBalancer`."""
    return {
        "name": CONTROL_PLANE,
        "description": "Created by cluster-api-provider-openstack cluster default-capi",
        "vip_subnet_id": topology.VIP_SUBNET,
        "vip_network_id": topology.VIP_NETWORK,
        "provider": provider,
        "tags": TAGS,
    }


def control_plane_listener(load_balancer_id, port, allowed):
    """`getOrCreateListener`."""
    return {
        "loadbalancer_id": load_balancer_id,
        "protocol": "TCP",
        "protocol_port": port,
        "name": f"{CONTROL_PLANE}-{port}",
        **({"allowed_cidrs": allowed} if allowed else {}),
        "tags": TAGS,
    }


def control_plane_pool(listener_id, port):
    """`getOrCreatePool`."""
    return {
        "lb_algorithm": "ROUND_ROBIN",
        "protocol": "TCP",
        "listener_id": listener_id,
        "name": f"{CONTROL_PLANE}-{port}",
        "tags": TAGS,
    }


def control_plane_monitor(pool_id, port):
    """`ensureMonitor` with its default values."""
    return {
        "pool_id": pool_id,
        "type": "TCP",
        "delay": 10,
        "timeout": 5,
        "max_retries": 5,
        "max_retries_down": 3,
        "name": f"{CONTROL_PLANE}-{port}",
    }


def control_plane_member(machine, port):
    """`ReconcileLoadBalancerMember`; the load balancer has another network than the machines."""
    return {
        "address": f"192.0.2.{topology.MEMBERS[machine]}",
        "protocol_port": port,
        "name": f"{CONTROL_PLANE}-{port}-{machine}",
        "subnet_id": topology.MEMBER_SUBNET,
        "tags": TAGS,
    }


# --- octavia-ingress-controller ---------------------------------------------------------------------------------------

INGRESS = f"kube_ingress_{CLUSTER}_default_web"


def ingress_head(provider):
    """`EnsureLoadBalancer`."""
    return {
        "name": INGRESS,
        "description": f"Kubernetes ingress web in namespace default from cluster {CLUSTER}",
        "vip_subnet_id": topology.VIP_SUBNET,
        "provider": provider,
    }


def ingress_listener(load_balancer_id):
    """`EnsureListener` without TLS and with the default of the source ranges."""
    return {
        "loadbalancer_id": load_balancer_id,
        "protocol": "HTTP",
        "protocol_port": 80,
        "name": INGRESS,
        "allowed_cidrs": ["0.0.0.0/0"],
    }


def ingress_pool(name, **place):
    """`ensureIngress`: the default pool belongs to the listener, others to the load balancer."""
    return {"lb_algorithm": "ROUND_ROBIN", "protocol": "HTTP", "name": name, **place}


def ingress_policy(listener_id, pool_id):
    """`CreateResources`."""
    return {
        "listener_id": listener_id,
        "action": "REDIRECT_TO_POOL",
        "description": "Created by kubernetes ingress",
        "redirect_pool_id": pool_id,
    }


def ingress_rules(host, path):
    """`ensureIngress`: two rules for each path."""
    escaped = host.replace(".", "\\.")
    return [
        {"type": "HOST_NAME", "compare_type": "REGEX", "value": f"^{escaped}(:80)?$"},
        {"type": "PATH", "compare_type": "STARTS_WITH", "value": path},
    ]
