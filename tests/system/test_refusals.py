# SPDX-License-Identifier: Apache-2.0
"""Invalid requests get the right status code and a clear message, and leave no partial objects.

The cases include requests that Octavia's API itself refuses, if a user expects the provider to serve them. The user
sees one message, from the driver or from Octavia.
"""

import json

import pytest
import sqlalchemy as sa
from authorities import keep_all
from cloud import Cloud

from amphora_driver.database import tables
from sandbox import topology

pytestmark = pytest.mark.root

OURS, OCTAVIAS, TAKEN = 501, 400, 409
"""Status codes: the provider does not support it; the request is invalid; it conflicts with an object."""
OCTAVIAS_TABLES = {
    **dict.fromkeys(
        ("load_balancer", "listener", "pool", "member", "health_monitor", "l7policy", "l7rule"), "provisioning_status"
    ),
    "flavor_profile": "flavor_data",
}
TLS = {"protocol": "TERMINATED_HTTPS", "default_tls_container_ref": "one"}
MASK = {"type": "SOURCE_IP", "persistence_timeout": 60}
PATTERN = {"type": "PATH", "compare_type": "REGEX"}
URL = {"action": "REDIRECT_TO_URL"}

LISTENERS = [
    ({"protocol": "UDP", "insert_headers": {"X-Forwarded-For": "true"}}, OCTAVIAS, "UDP protocol listener"),
    ({"protocol": "UDP", "default_tls_container_ref": "one"}, OCTAVIAS, "UDP protocol listener does not support TLS"),
    ({"protocol": "UDP", "hsts_max_age": 5}, OCTAVIAS, "HSTS feature can only be used for listeners using"),
    ({"connection_limit": 0}, OURS, "connection_limit 0: it is not a whole number from 1 to"),
    ({"connection_limit": -2}, OCTAVIAS, "connection_limit"),
    ({"protocol_port": 80}, TAKEN, "already using protocol HTTP and protocol_port 80"),
    ({"protocol": "TCP", "protocol_port": 80}, TAKEN, "protocol_port 80"),
    ({"insert_headers": {"X-Forwarded-For": "maybe"}}, OURS, "'X-Forwarded-For': 'maybe' is neither true nor false"),
    ({"insert_headers": {"X-Colour": "true"}}, OCTAVIAS, "X-Colour"),
    ({"protocol": "TCP", "insert_headers": {"X-Forwarded-For": "true"}}, OCTAVIAS, "TCP protocol listener"),
    ({"insert_headers": {"X-SSL-Client-DN": "true"}}, OCTAVIAS, "X-SSL-Client-DN"),
    ({"hsts_max_age": 5}, OCTAVIAS, "HSTS feature can only be used for listeners using the TERMINATED_HTTPS"),
    ({"allowed_cidrs": ["2001:db8::/32"]}, OCTAVIAS, "2001:db8::/32 IP version incompatible"),
    ({"protocol": "TERMINATED_HTTPS"}, OCTAVIAS, "default certificate container reference must be provided"),
    ({**TLS, "default_tls_container_ref": "unknown"}, OCTAVIAS, "Could not retrieve certificate: ['unknown']"),
    ({**TLS, "tls_versions": ["SSLv3"]}, OURS, "tls_versions 'SSLv3': this TLS version is unknown"),
    ({**TLS, "tls_ciphers": "!aNULL"}, OURS, "tls_ciphers '!aNULL': it selects no cipher"),
    ({**TLS, "tls_ciphers": "TLS_AES_128_GCM_SHA256", "tls_versions": ["TLSv1.2"]}, OURS, "need TLSv1.3"),
    ({**TLS, "client_authentication": "MANDATORY"}, OCTAVIAS, "requires a client CA"),
]
LEAST = {"protocol": "UDP", "lb_algorithm": "LEAST_CONNECTIONS", "session_persistence": {"type": "SOURCE_IP"}}
POOLS = [
    (
        LEAST,
        OURS,
        "lb_algorithm 'LEAST_CONNECTIONS': for UDP with session_persistence the client's address selects the member",
    ),
    ({"protocol": "SCTP", "tls_enabled": True}, OURS, "tls_enabled True: SCTP pools do not support TLS"),
    ({"protocol": "UDP", "session_persistence": {"type": "HTTP_COOKIE"}}, OCTAVIAS, "is not supported for UDP/SCTP"),
    (
        {"protocol": "UDP", "session_persistence": {**MASK, "persistence_granularity": "255.0.255.0"}},
        OURS,
        "persistence_granularity '255.0.255.0': a mask must begin with at least one 1 bit",
    ),
    ({"lb_algorithm": "RANDOM"}, OCTAVIAS, "lb_algorithm"),
    (
        {"protocol": "TCP", "session_persistence": {"type": "HTTP_COOKIE"}},
        OURS,
        "session_persistence 'HTTP_COOKIE': HAProxy does not read cookies for a TCP pool. Use SOURCE_IP",
    ),
    (
        {"protocol": "HTTPS", "session_persistence": {"type": "APP_COOKIE", "cookie_name": "x"}},
        OURS,
        "session_persistence 'APP_COOKIE': HAProxy does not read cookies for a HTTPS pool",
    ),
    ({"session_persistence": {"type": "APP_COOKIE"}}, OCTAVIAS, "cookie_name"),
    ({"session_persistence": {"type": "APP_COOKIE", "cookie_name": "a/b"}}, OCTAVIAS, "cookie_name"),
    ({"session_persistence": {"type": "SOURCE_IP", "persistence_timeout": 5}}, OCTAVIAS, "only for UDP and SCTP"),
    (
        {"tls_enabled": True, "tls_versions": ["TLSv1.1", "TLSv1.3"]},
        OURS,
        "tls_versions 'TLSv1.1, TLSv1.3': HAProxy would also negotiate TLSv1.2",
    ),
    ({"tls_enabled": True, "crl_container_ref": "lost"}, OCTAVIAS, "CA certificate reference is required"),
]
MONITORS = [
    ({"type": "UDP-CONNECT", "delay": 5}, OCTAVIAS, "UDP-CONNECT type is only supported for pools of type UDP/SCTP"),
    ({"type": "SCTP"}, OCTAVIAS, "SCTP type is only supported for pools of type UDP/SCTP"),
    ({"delay": 0}, OURS, "health monitor option delay 0: it is not a whole number from 1"),
    ({"timeout": 0}, OURS, "health monitor option timeout 0: it is not a whole number from 1"),
    ({"max_retries": 11}, OCTAVIAS, "max_retries"),
    ({"expected_codes": "999"}, OURS, "expected_codes '999': it is not a list of HTTP status codes"),
    ({"expected_codes": "204-200"}, OURS, "expected_codes '204-200': it is not a list of HTTP status codes"),
    ({"url_path": "/ä"}, OURS, "url_path '/\\xe4': it is not the path of a URL"),
    ({"url_path": "/a b"}, OCTAVIAS, "url_path"),
    ({"domain_name": "x.example.com", "http_version": 1.0}, OCTAVIAS, "HTTP 1.1 domain name health check"),
]
MEMBERS = [
    ({"address": "192.0.2.11", "protocol_port": 8080}, TAKEN, "already using ip 192.0.2.11 on protocol_port 8080"),
    # Octavia compares addresses as text.
    ({"address": "2001:0DB8:2::0:11"}, OURS, "2001:0DB8:2::0:11 and port 80: a pool can contain a server only once"),
    ({"address": "127.0.0.1"}, OURS, "address '127.0.0.1': a loopback, link-local"),
    ({"address": "::ffff:127.0.0.1"}, OURS, "address '::ffff:127.0.0.1': a loopback, link-local"),
    ({"address": "169.254.169.254"}, OCTAVIAS, "169.254.169.254 is not a valid option for member address"),
    ({"address": "255.255.255.255"}, OURS, "address '255.255.255.255': a reserved address cannot be a member"),
    ({"monitor_address": "0.0.0.0"}, OURS, "monitor_address '0.0.0.0': a loopback, link-local"),
    ({"request_sriov": True}, OCTAVIAS, "does not allow SR-IOV"),
    ({"weight": 257}, OCTAVIAS, "weight"),
]
RULES = [
    (
        {**PATTERN, "value": "(a+)+$"},
        OURS,
        "value of an L7 rule of type PATH: '(a+)+$': its effort grows exponentially",
    ),
    ({**PATTERN, "value": "(a"}, OCTAVIAS, "Unable to parse regular expression"),
    ({**PATTERN, "value": r"(a)\1"}, OURS, "reference to non-existent subpattern (at character 4)"),
    ({"type": "FILE_TYPE", "compare_type": "EQUAL_TO", "value": "a/b"}, OURS, "'a/b': no file extension matches it"),
    ({"type": "FILE_TYPE", "compare_type": "CONTAINS", "value": "j"}, OCTAVIAS, "invalid comparison type"),
    ({"type": "HEADER", "compare_type": "EQUAL_TO", "key": "a b", "value": "x"}, OCTAVIAS, "Invalid characters in key"),
    ({"type": "PATH", "compare_type": "EQUAL_TO", "value": "a\nb"}, OCTAVIAS, "value"),
    ({"type": "SSL_CONN_HAS_CERT", "compare_type": "EQUAL_TO", "value": "False"}, OCTAVIAS, "not a boolean True"),
]
POLICIES = [
    ({**URL, "redirect_url": "nowhere"}, OCTAVIAS, "redirect_url"),
    ({**URL, "redirect_url": "http://x/\r\nSet-Cookie: a=b"}, OCTAVIAS, "redirect_url"),
    ({**URL, "redirect_url": "http://x/", "redirect_http_code": 418}, OCTAVIAS, "301, 302, 303, 307, 308"),
    ({"action": "REDIRECT_TO_POOL"}, OCTAVIAS, "redirect_pool_id"),
]
LOAD_BALANCERS = [
    ({"vip_address": "203.0.113.77"}, OURS, "203.0.113.77"),
    ({"vip_qos_policy_id": topology.VIP_SUBNET}, OCTAVIAS, "qos_policy"),
    ({"vip_sg_ids": [topology.VIP_SUBNET]}, OCTAVIAS, "Security Group"),
    (
        {"pools": [{"name": "x", **LEAST}]},
        OURS,
        "lb_algorithm 'LEAST_CONNECTIONS'",
    ),
    (
        {
            "pools": [
                {
                    "name": "x",
                    "protocol": "HTTP",
                    "lb_algorithm": "ROUND_ROBIN",
                    "members": [{"address": "127.0.0.1", "protocol_port": 80}],
                }
            ]
        },
        OURS,
        "address '127.0.0.1'",
    ),
]
FLAVORS = [
    ({"loadbalancer_topology": "ACTIVE_ACTIVE"}, "it must be one of SINGLE, ACTIVE_STANDBY"),
    ({"sriov_vip": True}, "'sriov_vip': this provider does not support it"),
    ({"allow_member_sriov": True}, "'allow_member_sriov': this provider does not support it"),
    ({"colour": "blue"}, "'colour': this key is unknown"),
    ({"loadbalancer_topology": 1}, "'loadbalancer_topology' with the value 1: it must be of type string"),
]


def one_by_one(*lists):
    """Return each case as a parameter, with its request as the id."""
    return [pytest.param(*case, id=json.dumps(case[0])[:60]) for cases in lists for case in cases]


class InvalidRequests:
    """An unchanged load balancer, and the API for invalid requests."""

    def __init__(self, cloud):
        self.cloud = cloud
        self._octavia = sa.create_engine(cloud.settings.octavia_database_url)
        self.balancer = cloud.served("refusing", ("member1",))
        self.listener, self.pool = cloud.listener_of(self.balancer), cloud.pool_of(self.balancer)
        self.bare = cloud.balancers.create_pool(
            name="bare", protocol="HTTP", lb_algorithm="ROUND_ROBIN", loadbalancer_id=self.balancer.id
        )
        cloud.active(self.balancer.id)
        six = {"address": "2001:db8:2::11", "protocol_port": 80, "subnet_id": topology.MEMBER_SUBNET_6}
        cloud.balancers.create_member(self.pool, **six)
        cloud.active(self.balancer.id)
        self.policy = cloud.balancers.create_l7_policy(listener_id=self.listener.id, action="REJECT")
        cloud.active(self.balancer.id)

    def refused(self, method, path, body, status, sentence):
        """Assert the answer to a request, and that no row changes."""
        before = self._inventory()
        answer = getattr(self.cloud.balancers, method)(self.cloud.url(path), json=body)
        assert (answer.status_code, sentence in answer.json()["faultstring"]) == (status, True), answer.text
        assert self._inventory() == before

    def _inventory(self):
        """Return Octavia's objects with their statuses, and the provider's rows of requested objects.

        The API would need a call for each kind of object, before and after each refusal.
        """
        with self._octavia.connect() as connection:
            shown = {
                table: sorted(map(tuple, connection.execute(sa.text(f"SELECT id, {column} FROM {table}"))))
                for table, column in OCTAVIAS_TABLES.items()
            }
        work, wanted, request = tables.job.c, tables.desired_object.c, tables.request.c
        queries = (
            sa.select(work.load_balancer_id, work.generation),
            sa.select(wanted.id, wanted.body),
            sa.select(request.load_balancer_id, request.generation),
            sa.select(tables.local_port.c.id),
            sa.select(tables.secret.c.object_id),
        )
        rows = self.cloud.database.read(lambda c: [sorted(map(tuple, c.execute(query))) for query in queries])
        return shown, rows

    def close(self):
        self._octavia.dispose()


@pytest.fixture(scope="module")
def place(settings, connection, database):
    keep_all(settings)
    cloud = Cloud(settings, connection, database)
    made = InvalidRequests(cloud)
    yield made
    made.close()
    cloud.clean()


@pytest.mark.parametrize(("asked", "status", "sentence"), one_by_one(LISTENERS))
def test_listeners(place, asked, status, sentence):
    values = {"protocol": "HTTP", "protocol_port": 81, "loadbalancer_id": place.balancer.id, **asked}
    place.refused("post", "listeners", {"listener": values}, status, sentence)


@pytest.mark.parametrize(("asked", "status", "sentence"), one_by_one(POOLS))
def test_pools(place, asked, status, sentence):
    values = {"protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "loadbalancer_id": place.balancer.id, **asked}
    place.refused("post", "pools", {"pool": values}, status, sentence)


@pytest.mark.parametrize(("asked", "status", "sentence"), one_by_one(MONITORS))
def test_health_monitors(place, asked, status, sentence):
    values = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "pool_id": place.bare.id, **asked}
    place.refused("post", "healthmonitors", {"healthmonitor": values}, status, sentence)


@pytest.mark.parametrize(("asked", "status", "sentence"), one_by_one(MEMBERS))
def test_members(place, asked, status, sentence):
    values = {"address": "192.0.2.99", "protocol_port": 80, **asked}
    place.refused("post", f"pools/{place.pool.id}/members", {"member": values}, status, sentence)


@pytest.mark.parametrize(
    ("addresses", "status", "sentence"),
    [
        (["192.0.2.50", "192.0.2.50"], TAKEN, "192.0.2.50"),
        (["2001:db8:2::50", "2001:0db8:2::0:50"], OURS, "a pool can contain a server only once"),
        (["192.0.2.50", "127.0.0.1"], OURS, "address '127.0.0.1'"),
    ],
)
def test_batches_of_members(place, addresses, status, sentence):
    members = [{"address": one, "protocol_port": 80} for one in addresses]
    place.refused("put", f"pools/{place.pool.id}/members", {"members": members}, status, sentence)


@pytest.mark.parametrize(("asked", "status", "sentence"), one_by_one(RULES))
def test_rules(place, asked, status, sentence):
    place.refused("post", f"l7policies/{place.policy.id}/rules", {"rule": asked}, status, sentence)


@pytest.mark.parametrize(("asked", "status", "sentence"), one_by_one(POLICIES))
def test_policies(place, asked, status, sentence):
    place.refused("post", "l7policies", {"l7policy": {"listener_id": place.listener.id, **asked}}, status, sentence)


@pytest.mark.parametrize(("asked", "status", "sentence"), one_by_one(LOAD_BALANCERS))
def test_load_balancers(place, asked, status, sentence):
    values = {"name": "refused", "vip_subnet_id": topology.VIP_SUBNET, **asked}
    place.refused("post", "loadbalancers", {"loadbalancer": values}, status, sentence)


def test_an_address_in_use(place):
    values = {"vip_subnet_id": topology.VIP_SUBNET, "vip_address": place.balancer.vip_address}
    place.refused("post", "loadbalancers", {"loadbalancer": values}, TAKEN, place.balancer.vip_address)


@pytest.mark.parametrize(
    ("asked", "status", "sentence"),
    [
        ({"vip_qos_policy_id": topology.VIP_SUBNET}, OCTAVIAS, "qos_policy"),
        ({"vip_sg_ids": [topology.VIP_SUBNET]}, OCTAVIAS, "Security Group"),
    ],
)
def test_changes_of_a_load_balancer(place, asked, status, sentence):
    place.refused("put", f"loadbalancers/{place.balancer.id}", {"loadbalancer": asked}, status, sentence)


@pytest.mark.parametrize(
    ("asked", "status", "sentence"),
    [
        ({"connection_limit": 0}, OURS, "connection_limit 0"),
        ({"insert_headers": {"X-Real-IP": "yes"}}, OURS, "'X-Real-IP': 'yes' is neither true nor false"),
        ({"default_tls_container_ref": "one"}, OCTAVIAS, "not allowed on HTTP protocol listeners"),
    ],
)
def test_changes_of_a_listener(place, asked, status, sentence):
    place.refused("put", f"listeners/{place.listener.id}", {"listener": asked}, status, sentence)


@pytest.mark.parametrize(("asked", "sentence"), one_by_one(FLAVORS))
def test_flavors(place, asked, sentence):
    values = {"name": "odd", "provider_name": "haproxy", "flavor_data": json.dumps(asked)}
    place.refused("post", "flavorprofiles", {"flavorprofile": values}, OURS, sentence)


def test_existing_objects_still_serve(place):
    """After all refusals, Octavia's API shows no refused object; a policy without a rule never matches."""
    assert place.cloud.answers(place.balancer.vip_address, 1) == {"member1": 1}
    assert place.cloud.active(place.balancer.id)
    shown = {
        kind: [one["id"] for one in place.cloud.balancers.get(place.cloud.url(kind)).json()[kind]]
        for kind in ("loadbalancers", "listeners", "pools", "healthmonitors", "l7policies", "flavorprofiles")
    }
    assert {kind: len(ids) for kind, ids in shown.items() if kind != "pools"} == {
        "loadbalancers": 1,
        "listeners": 1,
        "healthmonitors": 0,
        "l7policies": 1,
        "flavorprofiles": 0,
    }
    assert set(shown["pools"]) == {place.pool.id, place.bare.id}
