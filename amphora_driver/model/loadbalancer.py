# SPDX-License-Identifier: Apache-2.0
"""The model of a load balancer.

Invariant: values are immutable and have the field names of the Octavia v2 API. They contain references to certificates
and keys, never secrets. `None` always means "use the default", never "unknown". A tree is complete: every child is in
its parent (members in their pool, policies in their listener).
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import (
    Algorithm,
    ClientAuthentication,
    Kind,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    PersistenceType,
    PoolProtocol,
    Topology,
)
from amphora_driver.model.network import DIRECT


class ModelObject(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True):
    """Base of the model classes: frozen, keyword-only, JSON without defaults, cached hash."""


class Vip(ModelObject, frozen=True):
    """One address of a load balancer on one subnet; empty until it is allocated."""

    address: str
    subnet_id: str
    network_id: str
    port_id: str


class SessionPersistence(ModelObject, frozen=True):
    """Session persistence. The time-out (seconds) and granularity (a mask) apply to UDP and SCTP only."""

    type: PersistenceType
    cookie_name: str | None = None
    persistence_timeout: int | None = None
    persistence_granularity: str | None = None


class Member(ModelObject, frozen=True):
    """One server of a pool."""

    id: str
    pool_id: str
    address: str
    protocol_port: int
    weight: int = 1
    backup: bool = False
    admin_state_up: bool = True
    name: str | None = None
    subnet_id: str | None = None
    monitor_address: str | None = None
    monitor_port: int | None = None
    vnic_type: str | None = None


class HealthMonitor(ModelObject, frozen=True):
    """Health check of a pool's members.

    Delay and timeout are in seconds. max_retries is HAProxy's `rise`, max_retries_down its `fall`.
    """

    id: str
    pool_id: str
    type: MonitorType
    delay: int
    timeout: int
    max_retries: int
    max_retries_down: int = 3
    admin_state_up: bool = True
    name: str | None = None
    http_method: str | None = None
    url_path: str | None = None
    expected_codes: str | None = None
    http_version: float | None = None
    domain_name: str | None = None


class Pool(ModelObject, frozen=True):
    """Members that serve the same content, and their algorithm."""

    id: str
    loadbalancer_id: str
    protocol: PoolProtocol
    lb_algorithm: Algorithm = Algorithm.ROUND_ROBIN
    admin_state_up: bool = True
    name: str | None = None
    session_persistence: SessionPersistence | None = None
    tls_enabled: bool = False
    tls_container_ref: str | None = None
    ca_tls_container_ref: str | None = None
    crl_container_ref: str | None = None
    tls_versions: tuple[str, ...] | None = None
    tls_ciphers: str | None = None
    alpn_protocols: tuple[str, ...] | None = None
    members: tuple[Member, ...] = ()
    healthmonitor: HealthMonitor | None = None

    @property
    def uses_l4(self) -> bool:
        """Whether the L4 data plane (UDP, SCTP) serves it instead of HAProxy."""
        return self.protocol in (PoolProtocol.UDP, PoolProtocol.SCTP)


class L7Rule(ModelObject, frozen=True):
    """One condition of an L7 policy."""

    id: str
    l7policy_id: str
    type: L7RuleType
    compare_type: L7Compare
    value: str
    key: str | None = None
    invert: bool = False
    admin_state_up: bool = True


class L7Policy(ModelObject, frozen=True):
    """An action for requests that match all of its rules."""

    id: str
    listener_id: str
    action: L7Action
    position: int
    admin_state_up: bool = True
    name: str | None = None
    redirect_pool_id: str | None = None
    redirect_url: str | None = None
    redirect_prefix: str | None = None
    redirect_http_code: int | None = None
    rules: tuple[L7Rule, ...] = ()


class Listener(ModelObject, frozen=True):
    """One port of a load balancer.

    Timeouts are in milliseconds. A connection_limit of -1 sets no limit. insert_headers names the enabled headers. An
    `unread` listener was not delivered by Octavia: it may have unknown policies, so it is not served.
    """

    id: str
    loadbalancer_id: str
    protocol: ListenerProtocol
    protocol_port: int
    admin_state_up: bool = True
    name: str | None = None
    connection_limit: int = -1
    default_pool_id: str | None = None
    timeout_client_data: int | None = None
    timeout_member_connect: int | None = None
    timeout_member_data: int | None = None
    timeout_tcp_inspect: int | None = None
    insert_headers: tuple[str, ...] | None = None
    allowed_cidrs: tuple[str, ...] | None = None
    default_tls_container_ref: str | None = None
    sni_container_refs: tuple[str, ...] | None = None
    client_ca_tls_container_ref: str | None = None
    client_authentication: ClientAuthentication | None = None
    client_crl_container_ref: str | None = None
    tls_versions: tuple[str, ...] | None = None
    tls_ciphers: str | None = None
    alpn_protocols: tuple[str, ...] | None = None
    hsts_max_age: int | None = None
    hsts_include_subdomains: bool = False
    hsts_preload: bool = False
    unread: bool = False
    l7policies: tuple[L7Policy, ...] = ()

    @property
    def uses_l4(self) -> bool:
        """Whether the L4 data plane (UDP, SCTP) serves it instead of HAProxy."""
        return self.protocol in (ListenerProtocol.UDP, ListenerProtocol.SCTP)


class Profile(ModelObject, frozen=True):
    """Options from flavor, availability zone and configuration, fixed at a load balancer's creation.

    A later change of flavor or configuration does not change existing load balancers. Backends are named by their entry
    points. Times are milliseconds, except the VRRP interval, which is seconds. None means "as configured".
    """

    topology: Topology = Topology.SINGLE
    compute: str | None = None
    network: str | None = None
    compute_flavor: str | None = None
    compute_zone: str | None = None
    compute_zones: tuple[str, ...] | None = None
    image_tag: str | None = None
    volume_zone: str | None = None
    management_network: str | None = None
    timeout_client_data: int | None = None
    timeout_member_connect: int | None = None
    timeout_member_data: int | None = None
    timeout_client_data_minimum: int | None = None
    timeout_client_data_maximum: int | None = None
    timeout_member_connect_minimum: int | None = None
    timeout_member_connect_maximum: int | None = None
    timeout_member_data_minimum: int | None = None
    timeout_member_data_maximum: int | None = None
    timeout_tunnel: int | None = None
    timeout_http_request: int | None = None
    connection_limit: int | None = None
    process_connection_limit: int | None = None
    process_threads: int | None = None
    tls_minimum_version: str | None = None
    tls_ciphers: str | None = None
    connection_logging: bool | None = None
    log_format: str | None = None
    admin_log_targets: tuple[str, ...] | None = None
    tenant_log_targets: tuple[str, ...] | None = None
    vrrp_advert_interval: float | None = None
    warm_spares: int | None = None
    client_address: str | None = None
    sriov_vip: bool | None = None
    allow_member_sriov: bool | None = None

    def list_compute_zones(self) -> tuple[str, ...]:
        """Return the permitted compute availability zones; empty for the default of the backend."""
        first = () if self.compute_zone is None else (self.compute_zone,)
        return tuple(dict.fromkeys((*first, *(self.compute_zones or ()))))


class LoadBalancer(ModelObject, frozen=True):
    """A load balancer with its addresses, listeners and pools."""

    id: str
    project_id: str
    vip: Vip
    admin_state_up: bool = True
    name: str | None = None
    description: str | None = None
    additional_vips: tuple[Vip, ...] = ()
    vip_qos_policy_id: str | None = None
    vip_sg_ids: tuple[str, ...] | None = None
    flavor: dict[str, object] | None = None
    availability_zone: dict[str, object] | None = None
    profile: Profile = Profile()
    listeners: tuple[Listener, ...] = ()
    pools: tuple[Pool, ...] = ()

    @property
    def vips(self) -> tuple[Vip, ...]:
        """Every VIP, the primary one first."""
        return (self.vip, *self.additional_vips)

    def uses_sr_iov(self, member: Member) -> bool:
        """Return whether the amphorae reach a member through an SR-IOV port.

        The user requests it, and the flavor must permit it. Octavia never changes the type of an existing member.
        """
        return self.profile.allow_member_sriov is True and member.vnic_type == DIRECT

    def pool(self, pool_id: str | None) -> Pool | None:
        """Return the pool with this id, or None."""
        return next((pool for pool in self.pools if pool.id == pool_id), None)

    def is_default_pool(self, pool: Pool) -> bool:
        """Return whether the pool is the default pool of a listener, enabled or not."""
        return any(listener.default_pool_id == pool.id for listener in self.listeners)


def without_addresses(tree: LoadBalancer) -> LoadBalancer:
    """Return the load balancer with empty VIP addresses, until the requested ones are allocated."""
    bare = [msgspec.structs.replace(vip, address="") for vip in tree.vips]
    return msgspec.structs.replace(tree, vip=bare[0], additional_vips=tuple(bare[1:]))


Node = LoadBalancer | Listener | Pool | Member | HealthMonitor | L7Policy | L7Rule

# For each kind of parent: the fields with child objects, and the kind of these child objects.
CHILDREN: dict[Kind, dict[str, Kind]] = {
    Kind.LOAD_BALANCER: {"listeners": Kind.LISTENER, "pools": Kind.POOL},
    Kind.LISTENER: {"l7policies": Kind.L7POLICY},
    Kind.POOL: {"members": Kind.MEMBER, "healthmonitor": Kind.HEALTH_MONITOR},
    Kind.L7POLICY: {"rules": Kind.L7RULE},
}
MODEL_CLASSES: dict[Kind, type[Node]] = {
    Kind.LOAD_BALANCER: LoadBalancer,
    Kind.LISTENER: Listener,
    Kind.POOL: Pool,
    Kind.MEMBER: Member,
    Kind.HEALTH_MONITOR: HealthMonitor,
    Kind.L7POLICY: L7Policy,
    Kind.L7RULE: L7Rule,
}
