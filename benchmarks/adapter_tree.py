# SPDX-License-Identifier: Apache-2.0
"""Conversion of the harness's load balancers to the model of this provider, without omissions."""

from amphora_driver.model.enums import (
    Algorithm,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    PoolProtocol,
)
from amphora_driver.model.loadbalancer import (
    HealthMonitor,
    L7Policy,
    L7Rule,
    Listener,
    LoadBalancer,
    Member,
    Pool,
    Vip,
)

_SUITES = ("AES128-GCM-SHA256", "AES256-GCM-SHA384", "CHACHA20-POLY1305")
# Octavia's default, which the harness sets for the incumbent's listeners.
_CIPHERS = ":".join(
    [
        "TLS_AES_128_GCM_SHA256",
        "TLS_AES_256_GCM_SHA384",
        "TLS_CHACHA20_POLY1305_SHA256",
        *(f"ECDHE-{kind}-{cipher}" for cipher in _SUITES for kind in ("ECDSA", "RSA")),
        *(f"DHE-RSA-{cipher}" for cipher in _SUITES),
    ]
)


def tree(spec):
    """Convert a load balancer of the harness."""
    vip = spec["vip"]
    return LoadBalancer(
        id=spec["id"],
        project_id=spec["project_id"],
        name=spec["name"],
        vip=Vip(address=vip["ip"], subnet_id=vip["subnet_id"], network_id=vip["network_id"], port_id=vip["port_id"]),
        listeners=tuple(_listener(spec["id"], one) for one in spec["listeners"]),
        pools=tuple(_pool(spec["id"], one) for one in spec["pools"]),
    )


def _listener(load_balancer_id, one):
    tls = {}
    if one["tls"]:
        tls = {
            "default_tls_container_ref": one["tls_ref"],
            "tls_versions": ("TLSv1.2", "TLSv1.3"),
            "tls_ciphers": _CIPHERS,
            "alpn_protocols": ("h2", "http/1.1"),
        }
    return Listener(
        id=one["id"],
        loadbalancer_id=load_balancer_id,
        name=one["name"],
        protocol=ListenerProtocol(one["protocol"]),
        protocol_port=one["port"],
        connection_limit=one["connection_limit"],
        default_pool_id=one["default_pool_id"],
        insert_headers=tuple(name for name, on in one["insert_headers"].items() if on == "true") or None,
        l7policies=tuple(_policy(one["id"], policy) for policy in one["l7policies"]),
        **tls,
    )


def _policy(listener_id, one):
    return L7Policy(
        id=one["id"],
        listener_id=listener_id,
        name="pol",
        action=L7Action(one["action"]),
        position=one["position"],
        redirect_pool_id=one["redirect_pool_id"],
        redirect_url=one["redirect_url"],
        redirect_prefix=one["redirect_prefix"],
        redirect_http_code=one["redirect_http_code"],
        rules=tuple(_rule(one["id"], rule) for rule in one["rules"]),
    )


def _rule(policy_id, one):
    return L7Rule(
        id=one["id"],
        l7policy_id=policy_id,
        type=L7RuleType(one["type"]),
        compare_type=L7Compare(one["compare_type"]),
        key=one["key"],
        value=one["value"],
        invert=one["invert"],
    )


def _pool(load_balancer_id, one):
    monitor = one["healthmonitor"]
    return Pool(
        id=one["id"],
        loadbalancer_id=load_balancer_id,
        name=one["name"],
        protocol=PoolProtocol(one["protocol"]),
        lb_algorithm=Algorithm(one["algorithm"]),
        members=tuple(
            Member(
                id=member["id"],
                pool_id=one["id"],
                name="m",
                address=member["ip"],
                protocol_port=member["port"],
                weight=member["weight"],
            )
            for member in one["members"]
        ),
        healthmonitor=HealthMonitor(
            id=monitor["id"],
            pool_id=one["id"],
            name="hm",
            type=MonitorType(monitor["type"]),
            delay=monitor["delay"],
            timeout=monitor["timeout"],
            max_retries=monitor["rise"],
            max_retries_down=monitor["fall"],
            http_method=monitor["http_method"],
            url_path=monitor["url_path"],
            expected_codes=monitor["expected_codes"],
        ),
    )
