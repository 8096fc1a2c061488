# SPDX-License-Identifier: Apache-2.0
"""Updates through Octavia's API: a new value, null (back to the default), and an absent field.

After each change, Octavia and the provider record the same state of the object. After the last change of an object,
they record the same state of every object of the load balancer. An update changes many fields at once; a failure names
the fields that differ.
"""

import pytest
import whole_model
from agreement import assert_agreed, assert_object_agreed
from authorities import keep_all

from amphora_driver.store import desired_objects

pytestmark = [pytest.mark.root, pytest.mark.extended]

KEPT = ...
"""Octavia chooses a value, or keeps the former value."""
WORDS = {"pools": "pool", "members": "member", "listeners": "listener", "l7policies": "l7policy", "rules": "rule"}
WORDS |= {"healthmonitors": "healthmonitor", "loadbalancers": "loadbalancer"}

# Object name, requested fields, and Octavia's view afterwards where it differs.
LOAD_BALANCER = [
    ("updates", {"name": "changed", "description": "another one", "tags": ["x", "y"]}, {}),
    ("updates", {"admin_state_up": False}, {}),
    ("updates", {"admin_state_up": True}, {}),
    ("updates", {"name": None, "description": None, "tags": None}, {"name": "", "description": "", "tags": KEPT}),
]
_TIMEOUTS = ("timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tcp_inspect")
LISTENERS = [
    (
        "web",
        {
            "description": "changed",
            "tags": [],
            "connection_limit": 77,
            **{name: number for number, name in enumerate(_TIMEOUTS, start=1001)},
            "allowed_cidrs": ["198.51.100.0/25", "2001:db8:1::/112"],
            "insert_headers": {"X-Forwarded-For": "false", "X-Client-IP": "true"},
            "default_pool_id": "sealed",
        },
        {},
    ),
    ("web", {"admin_state_up": False}, {}),
    (
        "web",
        {
            "admin_state_up": True,
            "description": None,
            "connection_limit": None,
            **dict.fromkeys(_TIMEOUTS),
            "allowed_cidrs": None,
            "insert_headers": None,
            "default_pool_id": None,
        },
        {"description": "", "connection_limit": -1, **dict.fromkeys(_TIMEOUTS, 0), "insert_headers": {}},
    ),
    (
        "tls",
        {
            "default_tls_container_ref": "three",
            "sni_container_refs": ["one"],
            "client_authentication": "MANDATORY",
            "tls_versions": ["TLSv1.3"],
            "tls_ciphers": "TLS_AES_128_GCM_SHA256",
            "alpn_protocols": ["http/1.1"],
            "hsts_max_age": 5,
            "hsts_include_subdomains": False,
            "hsts_preload": False,
        },
        {},
    ),
    ("tls", {"client_crl_container_ref": None}, {}),
    (
        "tls",
        {
            "client_ca_tls_container_ref": None,
            "client_authentication": None,
            "tls_versions": None,
            "tls_ciphers": None,
            "alpn_protocols": None,
            "hsts_max_age": None,
            "hsts_include_subdomains": None,
            "hsts_preload": None,
        },
        {
            "client_authentication": "NONE",
            "tls_versions": ["TLSv1.2", "TLSv1.3"],
            "tls_ciphers": KEPT,
            "alpn_protocols": ["h2", "http/1.1", "http/1.0"],
            "hsts_include_subdomains": False,
            "hsts_preload": False,
        },
    ),
    ("tls", {"client_ca_tls_container_ref": "clients", "client_crl_container_ref": "revoked"}, {}),
    ("tls", {"default_tls_container_ref": None, "name": "renamed"}, {}),
    ("tls", {"default_tls_container_ref": "two", "sni_container_refs": []}, {}),
    ("tls", {"name": None}, {"name": ""}),
]
POOLS = [
    (
        "app",
        {"lb_algorithm": "SOURCE_IP", "session_persistence": {"type": "SOURCE_IP"}, "description": "x", "tags": []},
        {"session_persistence": KEPT},
    ),
    ("app", {"session_persistence": {"type": "APP_COOKIE", "cookie_name": "abc"}}, {"session_persistence": KEPT}),
    ("app", {"session_persistence": {"type": "HTTP_COOKIE"}, "admin_state_up": False}, {"session_persistence": KEPT}),
    (
        "app",
        {"session_persistence": None, "name": None, "description": None, "admin_state_up": True},
        {"name": "", "description": ""},
    ),
    (
        "sealed",
        {
            "tls_versions": ["TLSv1.3"],
            "tls_ciphers": "TLS_AES_128_GCM_SHA256",
            "alpn_protocols": ["h2"],
            "tls_container_ref": "three",
        },
        {},
    ),
    ("sealed", {"crl_container_ref": None}, {}),
    (
        "sealed",
        {
            "ca_tls_container_ref": None,
            "tls_container_ref": None,
            "tls_versions": None,
            "tls_ciphers": None,
            "alpn_protocols": None,
        },
        {"tls_versions": ["TLSv1.2", "TLSv1.3"], "tls_ciphers": KEPT},
    ),
    ("sealed", {"tls_enabled": False}, {}),
    ("sealed", {"tls_enabled": True, "ca_tls_container_ref": "authorities", "crl_container_ref": "lost"}, {}),
]
MEMBERS = [
    (
        "app-1",
        {
            "name": "renamed",
            "weight": 9,
            "backup": True,
            "monitor_address": "192.0.2.11",
            "monitor_port": 8080,
            "admin_state_up": False,
            "tags": ["one", "two"],
        },
        {},
    ),
    (
        "app-1",
        {
            "name": None,
            "weight": None,
            "backup": None,
            "monitor_address": None,
            "monitor_port": None,
            "admin_state_up": True,
        },
        {"name": "", "weight": 1, "backup": False},
    ),
]
MONITORS = [
    (
        "HTTP monitor",
        {
            "delay": 2,
            "timeout": 2,
            "max_retries": 2,
            "max_retries_down": 4,
            "http_method": "HEAD",
            "url_path": "/x",
            "expected_codes": "200,201",
            "domain_name": "b.example.com",
            "tags": ["changed"],
        },
        {},
    ),
    (
        "HTTP monitor",
        {
            "max_retries_down": None,
            "http_method": None,
            "url_path": None,
            "expected_codes": None,
            "domain_name": None,
            "name": None,
        },
        {"max_retries_down": 3, "http_method": "GET", "url_path": "/", "expected_codes": "200", "name": ""},
    ),
    ("HTTP monitor", {"http_version": 1.0}, {}),
    ("HTTP monitor", {"http_version": None, "admin_state_up": False}, {}),
]
L7 = [
    (
        "moved",
        {
            "description": "changed",
            "redirect_url": "http://x.example.com/?%20=1&2",
            "redirect_http_code": 303,
            "position": 1,
            "tags": ["changed"],
        },
        {},
    ),
    (
        "moved",
        {"redirect_http_code": None, "description": None, "name": None, "admin_state_up": False},
        {"description": "", "name": ""},
    ),
    ("moved", {"action": "REDIRECT_TO_POOL", "redirect_pool_id": "app"}, {}),
    ("moved", {"action": "REJECT"}, {}),
    ("moved/PATH", {"value": "^/z$", "invert": True, "tags": ["changed"]}, {}),
    ("moved/PATH", {"type": "HEADER", "compare_type": "EQUAL_TO", "key": "X-Y", "value": "1"}, {}),
    ("moved/PATH", {"type": "PATH", "key": None, "invert": None}, {"invert": False}),
    ("moved/PATH", {"admin_state_up": False}, {}),
]


@pytest.fixture
def balancer(cloud, settings):
    keep_all(settings)
    return whole_model.in_one_request(cloud, "updates")


def paths(tree):
    """Return the API path of each object by name."""
    found = {tree.name: f"loadbalancers/{tree.id}"}
    for listener in tree.listeners:
        found[listener.name] = f"listeners/{listener.id}"
        for policy in listener.l7policies:
            found[policy.name] = f"l7policies/{policy.id}"
            found |= {f"{policy.name}/{rule.type}": f"l7policies/{policy.id}/rules/{rule.id}" for rule in policy.rules}
    for pool in tree.pools:
        found[pool.name] = f"pools/{pool.id}"
        found[pool.healthmonitor.name] = f"healthmonitors/{pool.healthmonitor.id}"
        found |= {member.name: f"pools/{pool.id}/members/{member.id}" for member in pool.members}
    return found


@pytest.mark.feature(
    "lb.name",
    "lb.description",
    "lb.admin_state_up",
    "listener.name",
    "listener.description",
    "listener.tags",
    "pool.name",
    "pool.description",
    "pool.tags",
    "member.name",
    "member.tags",
    "healthmonitor.name",
    "healthmonitor.tags",
    "l7policy.name",
    "l7policy.description",
    "l7policy.tags",
    "l7rule.tags",
)
@pytest.mark.lasts(900)
def test_every_field_with_a_value_and_without(cloud, balancer):
    tree = cloud.database.read(lambda connection: desired_objects.load_tree(connection, balancer.id))
    known = paths(tree)
    ids = {"sealed": known["sealed"].split("/")[1], "app": known["app"].split("/")[1]}
    assert_agreed(cloud, balancer)
    changes = (*LOAD_BALANCER, *LISTENERS, *POOLS, *MEMBERS, *MONITORS, *L7)
    following = [name for name, _, _ in changes[1:]]
    for (name, asked, otherwise), following_name in zip(changes, [*following, None], strict=True):
        path = known[name]
        word = WORDS[path.split("/")[-2]]
        # Pools have names in the table and ids in the API.
        body = {field: ids[value] if field.endswith("_pool_id") and value else value for field, value in asked.items()}
        cloud.put(path, {word: body})
        cloud.active(balancer.id)
        shown = cloud.balancers.get(cloud.url(path)).json()[word]
        expected = {field: value for field, value in {**body, **otherwise}.items() if value is not KEPT}
        assert {field: shown[field] for field in expected} == expected, name
        assert_object_agreed(cloud, balancer, shown, path.split("/")[1])
        if name != following_name:
            assert_agreed(cloud, balancer)
    assert {one.provisioning_status for one in cloud.balancers.listeners()} == {"ACTIVE"}
