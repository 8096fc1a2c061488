# SPDX-License-Identifier: Apache-2.0
"""VIP addresses that the network backend allocates later, and the options of the VIPs.

Invariant: all addresses of a load balancer become known in one transaction. Until then no amphora gets ports or a
configuration. The options last sent to the network backend are recorded, and they are sent again only after a change of
the options or for a new amphora. A permanent refusal is reported to the user and not retried for the same options.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import job, request
from amphora_driver.errors import NetworkError, RequestError
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.network import DIRECT, ListenerRule, VipOptions, VipRequest
from amphora_driver.network.interface import NotYet, PortPurpose, PortRequest
from amphora_driver.store import desired_objects, generations, vip_claims
from amphora_driver.store.vip_claims import PendingVipRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amphora_driver.database.engine import Database
    from amphora_driver.model.amphora import Amphora
    from amphora_driver.model.loadbalancer import LoadBalancer, Vip
    from amphora_driver.network.interface import Network
    from amphora_driver.reconcile.context import WriteUnderLease
    from amphora_driver.reconcile.steps import LoadBalancerView, Plug
    from amphora_driver.store.amphorae import RecordedJob


LOG = logging.getLogger(__name__)


class AppliedVipOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The VIP options last sent to the network backend, as `job.vip_applied` stores them.

    Attributes:
        options: QoS policy and security groups.
        ports: the amphorae's ports to which the options were applied.
        refused: reason of a permanent refusal; empty without one.
        generation: of the load balancer at that time.
    """

    options: VipOptions
    ports: tuple[str, ...] = ()
    refused: str = ""
    generation: int = 0


def addresses_known(tree: LoadBalancer | None) -> bool:
    """Return whether every VIP has its address; True for a load balancer to be deleted."""
    return tree is None or all(vip.address for vip in tree.vips)


def desired_options(tree: LoadBalancer, *, listener_rules: bool = False) -> VipOptions:
    """Return the desired QoS policy and security groups of the VIPs.

    Args:
        tree: the load balancer.
        listener_rules: include the ports and the permitted clients of the listeners.
    """
    return VipOptions(
        qos_policy_id=tree.vip_qos_policy_id or None,
        security_group_ids=tuple(sorted(tree.vip_sg_ids or ())),
        listener_rules=_listener_rules(tree) if listener_rules else (),
    )


def _listener_rules(tree: LoadBalancer) -> tuple[ListenerRule, ...]:
    return tuple(
        sorted(
            (
                ListenerRule(
                    protocol=listener.protocol.value.lower()
                    if listener.uses_l4
                    else ListenerProtocol.TCP.value.lower(),
                    port=listener.protocol_port,
                    cidr=cidr,
                )
                for listener in tree.listeners
                if listener.admin_state_up
                for cidr in listener.allowed_cidrs or (None,)
            ),
            key=lambda one: (one.protocol, one.port, one.cidr or ""),
        )
    )


def request_port(step: Plug, view: LoadBalancerView) -> PortRequest:
    """Return the request for the port of a step. The ordinary port on the VIPs' network may use all VIPs."""
    tree = view.tree
    if tree is None or step.sr_iov or step.network_id != tree.vip.network_id:
        return PortRequest(
            amphora_id=step.amphora_id,
            network_id=step.network_id,
            subnet_ids=step.subnet_ids,
            purpose=PortPurpose.MEMBER,
            load_balancer_id=view.load_balancer_id,
            project_id="" if tree is None else tree.project_id,
            vnic_type=DIRECT if step.sr_iov else "normal",
        )
    return PortRequest(
        amphora_id=step.amphora_id,
        network_id=step.network_id,
        subnet_ids=step.subnet_ids,
        purpose=PortPurpose.VIP,
        load_balancer_id=view.load_balancer_id,
        project_id=tree.project_id,
        vips=tuple(vip.address for vip in tree.vips),
        vnic_type=DIRECT if tree.profile.sriov_vip else "normal",
        options=desired_options(tree, listener_rules=view.listener_rules),
    )


def vip_ports(tree: LoadBalancer, amphorae: Iterable[Amphora]) -> tuple[str, ...]:
    """Return the amphorae's ports for the VIPs."""
    key = (tree.vip.network_id, False)
    return tuple(sorted(plugged.port.id for one in amphorae for plugged in one.plugged if plugged.key == key))


def options_due(view: LoadBalancerView, amphorae: Sequence[Amphora]) -> str:
    """Return the reason to send the VIP options to the network backend; empty if they are current."""
    tree, given = view.tree, view.vip_given
    if tree is None or not addresses_known(tree):
        return ""
    options = desired_options(tree, listener_rules=view.listener_rules)
    if given is None:
        return "the network backend does not have the VIPs' options" if options else ""
    if options != given.options:
        return "the VIPs' options have changed"
    if not given.refused and set(vip_ports(tree, amphorae)) - set(given.ports):
        return "the VIPs' options do not apply to a new amphora yet"
    return ""


def read_applied_options(row: RecordedJob | sa.Row[Any]) -> AppliedVipOptions | None:
    """Return the VIP options that a row of `job` stores."""
    return None if row.vip_applied is None else msgspec.json.decode(row.vip_applied, type=AppliedVipOptions)


def read_refusal(connection: sa.Connection, load_balancer_id: str, given: AppliedVipOptions | None) -> dict[str, str]:
    """Return a refusal of the VIP options by load balancer id; empty after a newer request of the user.

    A refusal without this limit would block all changes: Octavia accepts no change of a load balancer in ERROR.
    """
    if given is None or not given.refused:
        return {}
    newest = connection.execute(
        sa.select(sa.func.max(request.c.generation)).where(request.c.load_balancer_id == load_balancer_id)
    ).scalar()
    return {load_balancer_id: given.refused} if (newest or 0) <= given.generation else {}


def next_request_at(connection: sa.Connection, load_balancer_id: str, now: float) -> float:
    """Return the time of the next request for addresses, in seconds since 1970; 0 for now."""
    pending = vip_claims.read_pending_request(connection, load_balancer_id)
    return 0.0 if pending is None or pending.again_at > now + pending.pause else pending.again_at


class VipSteps:
    """Performs the VIP steps of one load balancer under one lease.

    The status is ERROR after `error_after` seconds without addresses; requests continue after that.
    """

    def __init__(self, database: Database, write: WriteUnderLease, error_after: float) -> None:
        self._database = database
        self._write = write
        self._error_after = error_after

    def allocate(
        self, network: Network, tree: LoadBalancer, backend: str | None, generation: int, machines: Sequence[str]
    ) -> None:
        """Request the addresses; record them, or the time of the next request.

        The backend is named as in the rows, None for the default; `machines` are compute ids of the amphorae.

        Raises:
            RequestError: the backend refuses the addresses.
            NetworkError: the backend failed, or exceeded its time-out.
        """
        begun = self._database.now()
        pending = self._database.read(
            lambda connection: vip_claims.read_pending_request(connection, tree.id)
        ) or _default_request(tree, begun)
        answer = network.allocate_vip(tree.id, pending.project_id, pending.vips, machines)
        if isinstance(answer, NotYet):
            now = self._database.now()
            later = vip_claims.schedule_retry(pending, answer.reason, answer.again_in, now)
            LOG.info(
                "load balancer %s has no VIP addresses yet, so the controller requests the addresses again later: %s",
                tree.id,
                answer.reason,
            )
            self._write(lambda connection: vip_claims.write_pending_request(connection, tree.id, backend, later))
            if now - pending.since > self._error_after:
                waited = f"the network backend has allocated none in {now - pending.since:.0f} s: {answer.reason}"
                raise NetworkError(f"allocate a VIP for load balancer {tree.id}", waited, final=True)
            return
        LOG.info(
            "the network backend has allocated the VIP addresses of load balancer %s: %s",
            tree.id,
            ", ".join(one.address for one in answer),
        )
        self._write(lambda connection: record_addresses(connection, tree.id, generation, answer))

    def apply(self, network: Network, tree: LoadBalancer, amphorae: Sequence[Amphora], generation: int) -> None:
        """Send the VIP options to the network backend; record a permanent refusal."""
        options = desired_options(tree, listener_rules=network.listener_rules)
        ports = vip_ports(tree, amphorae)
        refused = ""
        try:
            network.apply_vip_options(tree.id, tree.project_id, options, ports)
        except RequestError as error:
            LOG.warning(
                "the network backend refuses the VIP options of load balancer %s, and the controller "
                "reports the refusal to the user: %s",
                tree.id,
                error,
            )
            refused = str(error)
        given = AppliedVipOptions(options=options, ports=ports, refused=refused, generation=generation)
        text = msgspec.json.encode(given).decode() if options else None
        self._write(
            lambda connection: connection.execute(
                job.update().where(job.c.load_balancer_id == tree.id).values(vip_applied=text)
            )
        )


def record_addresses(connection: sa.Connection, load_balancer_id: str, generation: int, found: Sequence[Vip]) -> None:
    """Record the allocated addresses as a new generation of the load balancer."""
    generations.bump_generation(connection, load_balancer_id, generation)
    now = connection.execute(sa.select(job.c.generation).where(job.c.load_balancer_id == load_balancer_id)).scalar_one()
    node: LoadBalancer = desired_objects.load_object(connection, Kind.LOAD_BALANCER, load_balancer_id)
    desired_objects.update_objects(
        connection, now, [msgspec.structs.replace(node, vip=found[0], additional_vips=tuple(found[1:]))]
    )
    vip_claims.clear_pending_request(connection, load_balancer_id)


def _default_request(tree: LoadBalancer, now: float) -> PendingVipRequest:
    """Return a request for addresses on the VIPs' subnets, if no pending request is recorded."""
    vips = tuple(
        VipRequest(
            subnet_id=vip.subnet_id or None,
            network_id=vip.network_id or None,
            address=vip.address or None,
            port_id=vip.port_id or None,
        )
        for vip in tree.vips
    )
    return PendingVipRequest(project_id=tree.project_id, vips=vips, since=now)
