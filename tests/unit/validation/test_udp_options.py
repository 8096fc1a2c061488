# SPDX-License-Identifier: Apache-2.0
"""UDP and SCTP validation: accepted options of listeners, pools, monitors and members, and the refusals."""

from __future__ import annotations

import msgspec
import pytest
from deployments import ELSEWHERE, LOCAL, NETNS, deployment

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.enums import Algorithm, L7Action, ListenerProtocol, MonitorType, PersistenceType, PoolProtocol
from amphora_driver.model.loadbalancer import HealthMonitor, L7Policy, Listener, Member, Pool, SessionPersistence, Vip
from amphora_driver.validation import flavors, options, profile, udp

FILLED_IN = {
    "tls_versions": ("TLSv1.2", "TLSv1.3"),
    "tls_ciphers": "TLS_AES_256_GCM_SHA384",
    "alpn_protocols": ("h2",),
    "timeout_client_data": 50000,
    "timeout_member_connect": 5000,
    "timeout_member_data": 50000,
    "timeout_tcp_inspect": 0,
}
BOTH = ("UDP", "SCTP")


def listener(protocol="UDP", **more) -> Listener:
    return Listener(id="l", loadbalancer_id="b", protocol=ListenerProtocol(protocol), protocol_port=53, **more)


def pool(protocol="UDP", *members, **more) -> Pool:
    found = tuple(Member(id=f"m{one}", pool_id="p", address=one, protocol_port=53) for one in members)
    return Pool(id="p", loadbalancer_id="b", protocol=PoolProtocol(protocol), members=found, **more)


def kept(**more) -> SessionPersistence:
    return SessionPersistence(**{"type": PersistenceType.SOURCE_IP, **more})


def checked_by(kind, protocol="UDP") -> Pool:
    monitor = HealthMonitor(id="h", pool_id="p", type=MonitorType(kind), delay=5, timeout=3, max_retries=3)
    return pool(protocol, healthmonitor=monitor)


def vips(*addresses) -> list[Vip]:
    return [Vip(address=one, subnet_id="s", network_id="n", port_id="p") for one in addresses]


def said(check, *arguments) -> str:
    with pytest.raises(UnsupportedOption) as caught:
        check(*arguments)
    assert caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize("protocol", BOTH)
def test_octavias_defaults_are_accepted(protocol):
    options.check_listener(listener(protocol, connection_limit=5, allowed_cidrs=("192.0.2.0/24",), **FILLED_IN))
    options.check_pool(pool(protocol, tls_versions=("TLSv1.2",), tls_ciphers="HIGH", alpn_protocols=("h2",)))
    for algorithm in Algorithm:
        options.check_pool(pool(protocol, lb_algorithm=algorithm))
    options.check_pool(pool(protocol, session_persistence=kept()))


@pytest.mark.parametrize(
    "more",
    [
        {"default_tls_container_ref": "r"},
        {"sni_container_refs": ("r",)},
        {"client_ca_tls_container_ref": "r"},
        {"client_crl_container_ref": "r"},
        {"insert_headers": ("X-Forwarded-For",)},
        {"hsts_max_age": 5},
    ],
)
@pytest.mark.parametrize("protocol", BOTH)
def test_unsupported_listener_options_are_refused(protocol, more):
    assert f"listener option {next(iter(more))}" in said(options.check_listener, listener(protocol, **more))


@pytest.mark.parametrize(
    ("granularity", "prefixes"),
    [
        (None, (32, 128)),
        ("", (32, 128)),
        ("255.255.255.255", (32, 128)),
        ("255.255.255.0", (24, 128)),
        ("255.240.0.0", (12, 128)),
        ("128.0.0.0", (1, 128)),
        ("ffff:ffff:ffff:ffff::", (32, 64)),
        ("FFFF:FFFE::", (32, 31)),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", (32, 128)),
        ("64", (32, 64)),
        ("128", (32, 128)),
    ],
)
def test_a_mask_applies_to_its_own_address_family(granularity, prefixes):
    assert udp.parse_granularity(granularity) == prefixes
    options.check_pool(pool(session_persistence=kept(persistence_granularity=granularity)))


@pytest.mark.parametrize(
    "granularity",
    ["255.0.255.0", "0.0.0.0", "0.0.0.255", "::", "::ffff", "ffff::1", "129", "0", "064", "64\n", "x", "24/8", "1.2.3"],
)
def test_invalid_masks_are_refused(granularity):
    wrong = pool(session_persistence=kept(persistence_granularity=granularity))
    assert "session_persistence persistence_granularity" in said(options.check_pool, wrong)


@pytest.mark.parametrize(("given", "seconds"), [(None, 360), (0, 360), (1, 1), (2678400, 2678400)])
def test_client_persistence_timeouts_are_accepted(given, seconds):
    assert udp.persistence_timeout(kept(persistence_timeout=given)) == seconds


@pytest.mark.parametrize("given", [-1, 2678401, True, 1.5])
def test_invalid_persistence_timeouts_are_refused(given):
    wrong = pool(session_persistence=kept(persistence_timeout=given))
    assert "persistence_timeout" in said(options.check_pool, wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        SessionPersistence(type=PersistenceType.HTTP_COOKIE),
        SessionPersistence(type=PersistenceType.APP_COOKIE, cookie_name="x"),
        kept(cookie_name="x"),
    ],
)
@pytest.mark.parametrize("protocol", BOTH)
def test_udp_pools_refuse_cookies(protocol, wrong):
    assert f"{protocol} has no cookies" in said(options.check_pool, pool(protocol, session_persistence=wrong))


@pytest.mark.parametrize("protocol", BOTH)
def test_udp_pools_refuse_encryption(protocol):
    assert "pools do not support TLS" in said(options.check_pool, pool(protocol, tls_enabled=True))


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize("kind", list(MonitorType))
def test_udp_monitors_are_validated(protocol, kind):
    options.check_healthmonitor(checked_by(kind).healthmonitor)
    if kind in (MonitorType.HTTPS, MonitorType.TLS_HELLO):
        sentence = said(udp.check_monitor_type, checked_by(kind, protocol))
        assert f"health monitor type '{kind}': {protocol} pools do not support this type" in sentence
    else:
        udp.check_monitor_type(checked_by(kind, protocol))


@pytest.mark.parametrize("kind", ["UDP-CONNECT", "SCTP"])
def test_other_pools_refuse_udp_monitors(kind):
    sentence = said(udp.check_monitor_type, checked_by(kind, "HTTP"))
    assert f"health monitor type '{kind}': only UDP and SCTP pools support this type" in sentence
    udp.check_monitor_type(checked_by("TLS-HELLO", "TCP"))
    udp.check_monitor_type(pool("TCP"))


def test_an_algorithm_without_effect_under_persistence_is_refused():
    kept = SessionPersistence(type=PersistenceType.SOURCE_IP)
    least = pool(lb_algorithm=Algorithm.LEAST_CONNECTIONS, session_persistence=kept)
    sentence = said(udp.check_l4_algorithm, least)
    assert "lb_algorithm 'LEAST_CONNECTIONS': for UDP with session_persistence the client's address" in sentence
    assert "the number of connections has no effect" in sentence
    assert "Use the algorithm SOURCE_IP, or remove session_persistence" in sentence
    for served in (
        pool(lb_algorithm=Algorithm.LEAST_CONNECTIONS),
        pool("TCP", lb_algorithm=Algorithm.LEAST_CONNECTIONS, session_persistence=kept),
        pool(lb_algorithm=Algorithm.SOURCE_IP_PORT, session_persistence=kept),
    ):
        udp.check_l4_algorithm(served)


@pytest.mark.parametrize(
    ("members", "addresses", "refused"),
    [
        (["192.0.2.1"], ["198.51.100.5"], None),
        (["192.0.2.1", "2001:db8::1"], ["198.51.100.5", "2001:db8::5"], None),
        (["192.0.2.1", "2001:db8::1"], ["198.51.100.5"], "2001:db8::1"),
        (["192.0.2.1"], ["2001:db8::5"], "192.0.2.1"),
        # Unknown, or without a listener.
        (["2001:db8::1"], ["198.51.100.5", ""], None),
        ([], ["198.51.100.5"], None),
    ],
)
def test_members_have_the_address_family_of_a_vip(members, addresses, refused):
    if refused is None:
        udp.check_address_families(pool("UDP", *members), vips(*addresses))
    else:
        sentence = said(udp.check_address_families, pool("UDP", *members), vips(*addresses))
        assert f"member option address '{refused}': it is an IPv" in sentence
    udp.check_address_families(pool("TCP", *members), vips(*addresses))


@pytest.mark.parametrize("protocol", [one for one in ListenerProtocol if one not in options.READS_HTTP])
def test_l7_policies_need_http(protocol):
    policy = L7Policy(id="y", listener_id="l", action=L7Action.REJECT, position=1)
    assert f"has the protocol {protocol} and does not process HTTP" in said(
        options.check_policy_listener, policy, listener(protocol.value)
    )
    options.check_policy_listener(policy, listener("HTTP"))


def test_each_listener_protocol_has_its_own_pool_protocols():
    behind = {protocol: set(pools) for protocol, pools in options.BEHIND.items()}
    assert set(behind) == set(ListenerProtocol) == set(options.LISTENER_PROTOCOLS)
    assert behind[ListenerProtocol.UDP] == {PoolProtocol.UDP}
    assert behind[ListenerProtocol.SCTP] == {PoolProtocol.SCTP}
    assert not {PoolProtocol.UDP, PoolProtocol.SCTP} & behind[ListenerProtocol.TCP]
    assert set(options.POOL_PROTOCOLS) == set(PoolProtocol)


def test_source_address_depends_on_the_network_backend():
    open_ = msgspec.structs.replace(LOCAL, supports=frozenset({"client_address"}))
    assert (
        profile.choose_profile({"client_address": "preserved"}, {}, deployment(network=(open_,))).client_address
        == "preserved"
    )
    assert profile.choose_profile({}, {}, deployment()).client_address is None
    assert profile.choose_profile({"client_address": "hidden"}, {}, deployment()).client_address == "hidden"
    sentence = said(flavors.validate_metadata, {"client_address": "preserved"}, deployment())
    assert "the network backend local drops packets with a source address" in sentence
    # The VIP is from another backend than the one that validates the flavor.
    both = deployment(NETNS, network=(open_, ELSEWHERE))
    flavors.validate_metadata({"client_address": "preserved"}, both)
    with pytest.raises(UnsupportedOption, match="client_address"):
        profile.choose_profile({"client_address": "preserved"}, {}, both, vip_network="elsewhere")
