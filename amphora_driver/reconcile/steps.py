# SPDX-License-Identifier: Apache-2.0
"""The input of a plan and the steps that a plan contains.

Invariant: this module contains values only. `plan` decides which step is next, `executor` performs the step.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import SecretName
from amphora_driver.reconcile import vip_allocation
from amphora_driver.store.sealed_secrets import SealedSecret
from amphora_driver.store.spare_pools import SparePoolSpec, SparePoolState


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded state that the views of load balancers and spare pools have in common.

    Attributes:
        load_balancer_id: id of the load balancer or of the pool.
        applied: the newest generation that every amphora confirmed.
        compute: compute backend (entry point); None for the default. `network` is the same for VIPs and ports.
        attempts: failed attempts since the last request.
        silence_limit: seconds without heartbeats after which the plan ignores an amphora, if another one sends them.
        absent: amphorae whose agents did not answer in this job, or whose boots are delayed.
        boots_at: times at which delayed boots may start, by amphora id.
        plugs_while_booting: see `Compute.plugs_while_booting`.
        renewals: amphorae that need another certificate, with the reasons.
    """

    load_balancer_id: str
    generation: int
    applied: int
    compute: str | None = None
    network: str | None = None
    attempts: int = 0
    silence_limit: float = 15.0
    now: float = 0.0
    absent: frozenset[str] = frozenset()
    boots_at: dict[str, float] = {}
    plugs_while_booting: bool = True
    renewals: dict[str, str] = {}


class LoadBalancerView(View, frozen=True, kw_only=True):
    """The recorded state of a load balancer, at one moment.

    Attributes:
        gone: the load balancer is to be deleted, and `tree` is None.
        readable: the tree is complete; False until the provider agent has read it back from Octavia.
        networks: the networks an amphora needs, with their subnets; the VIP's network is the first.
        sr_iov_networks: the networks with an additional port for members that request SR-IOV, with their subnets.
        failed: objects that cannot be served: reasons by object id.
        omitted: objects omitted from the newest generation where amphorae serve it already: reasons by object id.
        priorities: VRRP priorities by role; empty without VRRP. A role of a former topology may be among them.
        tickets: number of rotations of the TLS ticket keys; None without keys.
        clock_set: the clock jumped less than a drain time-out ago, so only the agent knows if a drain has ended.
        taking_vips: a new pair takes the VIPs between these two times, in seconds after its confirmation.
        vips_taken: an amphora has the VIPs, by the answers in this job; None without a query.
        vips_held: an adoption keeps the VIPs away from the amphorae, because Octavia's own amphorae serve them.
        takes_vips: the amphorae take the VIPs in an adoption.
        holder_asked: this job has queried the amphorae for the holder of the VIPs.
        vip_given: the VIP options last sent to the network backend.
        listener_rules: the network backend needs the listeners' ports as part of the VIP options.
        allocate_at: time of the next request for missing addresses.
        replacing: a fail-over is in progress, and its events are recorded.
        pool: id of the recorded spare pool; `spec` is the specification of the needed pool, None without spares.
        spares: ids of the spares that may be adopted now, the best one first.
    """

    gone: bool
    readable: bool
    tree: LoadBalancer | None
    networks: dict[str, tuple[str, ...]]
    sr_iov_networks: dict[str, tuple[str, ...]] = {}
    failed: dict[str, str] = {}
    omitted: dict[str, str] = {}
    secrets: dict[SecretName, SealedSecret] = {}
    roles: tuple[str, ...] = ("STANDALONE",)
    priorities: dict[str, int] = {}
    tickets: int | None = None
    clock_set: bool = False
    taking_vips: tuple[float, float] = (0.0, 0.0)
    vips_taken: bool | None = None
    vips_held: bool = False
    takes_vips: bool = False
    holder_asked: bool = False
    vip_given: vip_allocation.AppliedVipOptions | None = None
    listener_rules: bool = False
    allocate_at: float = 0.0
    replacing: bool = False
    pool: str | None = None
    spec: SparePoolSpec | None = None
    spares: tuple[str, ...] = ()


class SparePoolView(View, frozen=True, kw_only=True):
    """The recorded state of a pool of warm spares; this job has queried the spares in `asked`."""

    stock: SparePoolState
    asked: frozenset[str] = frozenset()


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One step of a plan, with its reason. The tag of a class names the step in failpoints and metrics."""

    reason: str


class Record(Step, frozen=True, kw_only=True):
    """Record a new amphora, before any resource is created for it."""

    role: str


class Adopt(Step, frozen=True, kw_only=True):
    """Assign a warm spare instead of a new amphora: the first one of `amphora_ids` that answers."""

    role: str
    amphora_ids: tuple[str, ...]


class SetSparePool(Step, frozen=True, kw_only=True, tag="Join"):
    """Set the spare pool of a load balancer; none if `spec` is None."""

    spec: SparePoolSpec | None
    former: str | None


class RetireSpare(Step, frozen=True, kw_only=True, tag="Retire"):
    """Mark a spare as retiring, so that no load balancer adopts it."""

    amphora_id: str


class QuerySpares(Step, frozen=True, kw_only=True, tag="AskSpares"):
    """Query the agents of spares that send no heartbeats."""

    amphora_ids: tuple[str, ...]


class DeletePool(Step, frozen=True, kw_only=True, tag="Disband"):
    """Delete the row of a spare pool without users and spares."""


class Boot(Step, frozen=True, kw_only=True):
    """Boot an amphora with the compute backend."""

    amphora_id: str


class Plug(Step, frozen=True, kw_only=True):
    """Attach a port on a network to an amphora, with an address on each of the subnets.

    With `sr_iov` it is the additional port for members that request SR-IOV.
    """

    amphora_id: str
    network_id: str
    subnet_ids: tuple[str, ...]
    sr_iov: bool = False


class AwaitAgent(Step, frozen=True, kw_only=True):
    """Query an amphora's agent; without an answer, check that its machine exists."""

    amphora_id: str


class RenewCertificate(Step, frozen=True, kw_only=True):
    """Replace an amphora's certificate and its trusted certificate authorities."""

    amphora_id: str


class BumpGeneration(Step, frozen=True, kw_only=True, tag="Renew"):
    """Increment the generation without a user's request: the VRRP peers of an amphora have changed."""


class AllocateVip(Step, frozen=True, kw_only=True):
    """Request VIP addresses that were not available when the load balancer was created."""


class ApplyVipOptions(Step, frozen=True, kw_only=True):
    """Apply the VIPs' QoS policy and security groups with the network backend."""


class Push(Step, frozen=True, kw_only=True):
    """Push the newest generation to amphorae; each amphora answers when it serves the generation.

    Attributes:
        waves: amphora ids; the amphorae of one wave are pushed in parallel, the waves in sequence.
        optional: amphorae that are being replaced; a failed push to them is ignored.
        whole: after this push every amphora of the load balancer serves the generation.
    """

    waves: tuple[tuple[str, ...], ...]
    optional: frozenset[str] = frozenset()
    whole: bool = True


class QueryVips(Step, frozen=True, kw_only=True, tag="AskVips"):
    """Query a new pair for the VIPs: the pair serves no client before one amphora has taken the VIPs."""


class QueryVipHolder(Step, frozen=True, kw_only=True, tag="AskHolder"):
    """Query a pair for the VIP holder before an amphora is removed, because heartbeats may be older."""

    amphora_ids: tuple[str, ...]


class Confirm(Step, frozen=True, kw_only=True):
    """Record that every amphora serves the newest generation."""


class Unplug(Step, frozen=True, kw_only=True):
    """Detach and delete a port that the load balancer does not need; `sr_iov` as in `Plug`."""

    amphora_id: str
    network_id: str
    sr_iov: bool = False


class HandOver(Step, frozen=True, kw_only=True):
    """Hand the VIPs of a retiring amphora over to the amphora `to`."""

    amphora_id: str
    to: str


class CheckDrain(Step, frozen=True, kw_only=True, tag="LookAfter"):
    """Check whether the connections of an amphora have ended after the handover of its VIPs.

    A `silent` amphora sends no heartbeats: its drain also ends if its agent does not answer.
    """

    amphora_id: str
    silent: bool = False


class Release(Step, frozen=True, kw_only=True):
    """Delete an amphora's machine and ports, then its row."""

    amphora_id: str


class ReleaseVip(Step, frozen=True, kw_only=True):
    """Release the VIP addresses and confirm the deletion of the load balancer."""


class Await(Step, frozen=True, kw_only=True):
    """End the job. The next job starts at `until` or earlier after an event; None waits for an event only.

    `amphorae` are booting: the next job starts as soon as one of their agents listens.
    """

    until: float | None = None
    amphorae: tuple[str, ...] = ()


AnyView = LoadBalancerView | SparePoolView
