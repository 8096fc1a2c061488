# SPDX-License-Identifier: Apache-2.0
"""Describes a load balancer with as much of Octavia's model as possible.

Invariant: creation in steps and in one request use the same description. Names are unique within it, so that results
are compared by name, independent of ids.
"""

import copy
import re

from amphora_driver.store import desired_objects
from sandbox import topology

FENCE = ["198.51.100.0/24", "2001:db8:1::/64"]
CIPHERS = "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES128-GCM-SHA256:TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256"
ECHO, SEALED = 8081, 8443
"""Ports of the echo members, in clear and encrypted."""
PROOF = "one.example.com"
"""The name that the certificate of an encrypted member must have."""


def member(name, number, port=ECHO, **more):
    return {
        "name": name,
        "address": f"192.0.2.{number}",
        "protocol_port": port,
        "subnet_id": topology.MEMBER_SUBNET,
        "tags": [f"tag of {name}"],
        **more,
    }


def monitor(kind, **more):
    return {
        "name": f"{kind} monitor",
        "type": kind,
        "delay": 1,
        "timeout": 1,
        "max_retries": 1,
        "max_retries_down": 2,
        "tags": [f"tag of {kind}"],
        **more,
    }


def rule(kind, comparison, value, **more):
    return {"type": kind, "compare_type": comparison, "value": value, "tags": [f"tag of {kind}"], **more}


def policy(name, action, *rules, **more):
    words = {"name": name, "description": f"says {name}", "action": action, "tags": [f"tag of {name}"]}
    return {**words, "rules": list(rules), **more}


POOLS = [
    {
        "name": "app",
        "description": "the application",
        "protocol": "HTTP",
        "lb_algorithm": "ROUND_ROBIN",
        "session_persistence": {"type": "HTTP_COOKIE"},
        "tags": ["application", "clear"],
        "members": [
            member("app-1", 11, weight=2),
            member("app-2", 12),
            member("app-3", 13, 9999, backup=True, monitor_address="192.0.2.12", monitor_port=ECHO),
            member("app-4", 13, 9998, admin_state_up=False),
        ],
        "healthmonitor": monitor(
            "HTTP",
            http_method="GET",
            url_path="/health?of=app",
            expected_codes="200-204",
            http_version=1.1,
            domain_name="app.example.com",
        ),
    },
    {
        "name": "sealed",
        "protocol": "HTTP",
        "lb_algorithm": "LEAST_CONNECTIONS",
        "session_persistence": {"type": "APP_COOKIE", "cookie_name": "JSESSIONID"},
        "tags": ["encrypted"],
        "tls_enabled": True,
        "tls_container_ref": "two",
        "ca_tls_container_ref": "authorities",
        "crl_container_ref": "lost",
        "tls_versions": ["TLSv1.2", "TLSv1.3"],
        "tls_ciphers": CIPHERS,
        "alpn_protocols": ["http/1.1"],
        "members": [member("sealed-1", 13, SEALED)],
        "healthmonitor": monitor("HTTPS", http_version=1.1, domain_name=PROOF),
    },
    {
        "name": "raw",
        "protocol": "TCP",
        "lb_algorithm": "SOURCE_IP_PORT",
        "session_persistence": {"type": "SOURCE_IP"},
        "members": [
            member("raw-1", 11, 8080),
            member(
                "raw-2",
                12,
                8080,
                address=f"2001:db8:2::{topology.MEMBERS['member2']}",
                subnet_id=topology.MEMBER_SUBNET_6,
            ),
        ],
        "healthmonitor": monitor("TCP"),
    },
    {
        "name": "through",
        "protocol": "HTTPS",
        "lb_algorithm": "SOURCE_IP",
        "members": [member("through-1", 13, SEALED)],
        "healthmonitor": monitor("TLS-HELLO"),
    },
    {
        "name": "proxied",
        "protocol": "PROXYV2",
        "lb_algorithm": "ROUND_ROBIN",
        "members": [member("proxied-1", 11, 8082, weight=256)],
        "healthmonitor": monitor("PING"),
    },
]
LISTENERS = [
    {
        "name": "web",
        "description": "in clear",
        "protocol": "HTTP",
        "protocol_port": 80,
        "default_pool": {"name": "app"},
        "tags": ["public"],
        "connection_limit": 5000,
        "allowed_cidrs": FENCE,
        "insert_headers": {
            "X-Forwarded-For": "true",
            "X-Forwarded-Port": "true",
            "X-Forwarded-Proto": "false",
            "X-Real-IP": "true",
        },
        "timeout_client_data": 31000,
        "timeout_member_connect": 4000,
        "timeout_member_data": 32000,
        "timeout_tcp_inspect": 500,
        "l7policies": [
            policy(
                "to-tls",
                "REDIRECT_PREFIX",
                rule("PATH", "STARTS_WITH", "/account"),
                rule("HOST_NAME", "ENDS_WITH", ".example.com"),
                redirect_prefix="https://secure.example.com/a?b=c&d",
                redirect_http_code=308,
            ),
            policy(
                "moved",
                "REDIRECT_TO_URL",
                rule("PATH", "REGEX", "^/old/[0-9]+$"),
                redirect_url="http://example.com/new?a=1&b=2#three",
                redirect_http_code=301,
            ),
            policy(
                "pictures",
                "REDIRECT_TO_POOL",
                rule("FILE_TYPE", "EQUAL_TO", "png"),
                rule("COOKIE", "EQUAL_TO", "plain&simple", key="choice", invert=True),
                redirect_pool={"name": "sealed"},
            ),
            policy("proxy", "REDIRECT_TO_POOL", rule("PATH", "EQUAL_TO", "/proxy"), redirect_pool={"name": "proxied"}),
            policy("banned", "REJECT", rule("HEADER", "CONTAINS", "bot", key="User-Agent"), position=1),
            policy("asleep", "REJECT", rule("PATH", "STARTS_WITH", "/"), position=1, admin_state_up=False),
            policy("sleepless", "REJECT", rule("PATH", "STARTS_WITH", "/", admin_state_up=False)),
        ],
    },
    {
        "name": "tls",
        "protocol": "TERMINATED_HTTPS",
        "protocol_port": 443,
        "default_pool": {"name": "app"},
        "default_tls_container_ref": "one",
        "sni_container_refs": ["two", "three"],
        "client_authentication": "OPTIONAL",
        "client_ca_tls_container_ref": "clients",
        "client_crl_container_ref": "revoked",
        "tls_versions": ["TLSv1.2", "TLSv1.3"],
        "tls_ciphers": CIPHERS,
        "alpn_protocols": ["h2", "http/1.1"],
        "hsts_max_age": 31536000,
        "hsts_include_subdomains": True,
        "hsts_preload": True,
        "insert_headers": {"X-Forwarded-Proto": "true", "X-SSL-Client-CN": "true", "X-SSL-Client-Has-Cert": "true"},
        "l7policies": [
            policy(
                "members-only",
                "REJECT",
                rule("SSL_CONN_HAS_CERT", "EQUAL_TO", "True", invert=True),
                rule("PATH", "STARTS_WITH", "/members"),
            ),
            policy("not-eve", "REJECT", rule("SSL_DN_FIELD", "EQUAL_TO", "bob", key="CN")),
        ],
    },
    {"name": "tcp", "protocol": "TCP", "protocol_port": 8000, "default_pool": {"name": "raw"}},
    {"name": "https", "protocol": "HTTPS", "protocol_port": 8443, "default_pool": {"name": "through"}},
    {"name": "metrics", "protocol": "PROMETHEUS", "protocol_port": 9100, "allowed_cidrs": FENCE[:1]},
    {"name": "off", "protocol": "HTTP", "protocol_port": 81, "admin_state_up": False},
]


def head(name, **more):
    """Return the load balancer's own fields without children."""
    return {
        "name": name,
        "description": f"everything of {name}",
        "tags": ["whole", name],
        "vip_subnet_id": topology.VIP_SUBNET,
        "additional_vips": [{"subnet_id": topology.VIP_SUBNET_6}],
        **more,
    }


def in_one_request(cloud, name, **more):
    """Create the load balancer by one fully populated POST."""
    body = {**head(name, **more), "listeners": copy.deepcopy(LISTENERS), "pools": copy.deepcopy(POOLS)}
    made = cloud.post("loadbalancers", {"loadbalancer": body})["loadbalancer"]
    return cloud.active(made["id"])


def step_by_step(cloud, name, **more):
    """Create the load balancer by one request per object."""
    made = cloud.post("loadbalancers", {"loadbalancer": head(name, **more)})["loadbalancer"]
    balancer = cloud.active(made["id"])

    def make(path, word, values):
        found = cloud.post(path, {word: values})[word]
        cloud.active(balancer.id)
        return found["id"]

    pools = {}
    for values in copy.deepcopy(POOLS):
        members, check = values.pop("members"), values.pop("healthmonitor")
        pool = pools[values["name"]] = make("pools", "pool", {**values, "loadbalancer_id": balancer.id})
        for one in members:
            make(f"pools/{pool}/members", "member", one)
        make("healthmonitors", "healthmonitor", {**check, "pool_id": pool})
    for values in copy.deepcopy(LISTENERS):
        policies = values.pop("l7policies", ())
        if default := values.pop("default_pool", None):
            values["default_pool_id"] = pools[default["name"]]
        listener = make("listeners", "listener", {**values, "loadbalancer_id": balancer.id})
        for one in policies:
            rules = one.pop("rules")
            if target := one.pop("redirect_pool", None):
                one["redirect_pool_id"] = pools[target["name"]]
            made = make("l7policies", "l7policy", {**one, "listener_id": listener})
            for each in rules:
                make(f"l7policies/{made}/rules", "rule", each)
    return cloud.active(balancer.id)


def in_words(tree, text):
    """Return a rendered text with names instead of ids and addresses, sorted by name.

    The order of sections, of the servers of a backend, and of the conditions of a policy has no effect.
    """
    addresses = [(vip.address, f"vip{number}") for number, vip in enumerate(tree.vips)]
    for old, new in (*names(tree), *addresses):
        text = text.replace(old, new)
    # With a hash algorithm, the server numbers are derived from ids.
    text = re.sub(r"(server .*) id [0-9]+ ", r"\1 ", text)
    sections = []
    for line in text.splitlines():
        if line and not line.startswith((" ", "\t", "#")):
            sections.append([line])
        elif line.strip():
            sections[-1].append(" ".join(_sorted_conditions(line.split())))
    return sorted([head, *_sorted_runs(lines)] for head, *lines in sections)


def names(tree):
    """Return the replacement word of every id."""
    for node in desired_objects.iter_subtree(tree):
        if isinstance(getattr(node, "type", None), str) and hasattr(node, "l7policy_id"):
            parent = next(one.name for each in tree.listeners for one in each.l7policies if one.id == node.l7policy_id)
            yield node.id, f"{parent}/{node.type}"
        else:
            yield node.id, "whole" if node is tree else node.name


def _sorted_conditions(words):
    if "if" not in words:
        return words
    place = words.index("if") + 1
    return words[:place] + sorted(words[place:])


def _sorted_runs(lines):
    """Return the lines, with each run of `server` or `acl` lines in alphabetical order."""
    found, run = [], []
    for line in lines:
        word = line.split()[0]
        if run and word != run[-1].split()[0]:
            found += sorted(run)
            run = []
        if word in ("server", "acl"):
            run.append(line)
        else:
            found.append(line)
    return [*found, *sorted(run)]
