# SPDX-License-Identifier: Apache-2.0
"""The next steps of a load balancer, as a pure function.

Invariant: `plan` compares the desired with the observed state and returns the steps from one to the other. It does no
I/O and has no memory; an empty result means that nothing is left to do. Every step is idempotent and records its
result. After a crash the same function therefore returns the unfinished step again. Create, update, fail-over and
delete use this function with different desired states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from amphora_driver.model.amphora import Amphora, AmphoraState, Partner
from amphora_driver.reconcile import vip_allocation, vrrp_peers
from amphora_driver.reconcile.spare_pool_plan import plan_pool
from amphora_driver.reconcile.steps import (
    Adopt,
    AllocateVip,
    AnyStep,
    AnyView,
    ApplyVipOptions,
    Await,
    AwaitAgent,
    Boot,
    BumpGeneration,
    CheckDrain,
    Confirm,
    DeletePool,
    HandOver,
    LoadBalancerView,
    Plug,
    Push,
    QuerySpares,
    QueryVipHolder,
    QueryVips,
    Record,
    Release,
    ReleaseVip,
    RenewCertificate,
    RetireSpare,
    SetSparePool,
    SparePoolView,
    Step,
    Unplug,
    View,
)

# Other modules import the steps from here.
__all__ = [
    "Adopt",
    "AllocateVip",
    "AnyStep",
    "AnyView",
    "ApplyVipOptions",
    "Await",
    "AwaitAgent",
    "Boot",
    "BumpGeneration",
    "CheckDrain",
    "Confirm",
    "DeletePool",
    "HandOver",
    "LoadBalancerView",
    "Plug",
    "Push",
    "QuerySpares",
    "QueryVipHolder",
    "QueryVips",
    "Record",
    "Release",
    "ReleaseVip",
    "RenewCertificate",
    "RetireSpare",
    "SetSparePool",
    "SparePoolView",
    "Step",
    "Unplug",
    "plan",
]

# Seconds between two checks of a draining amphora.
_LOOK_PAUSE = 2.0
# Seconds between two checks whether a new pair has taken the VIPs.
_VIP_PAUSE = 0.1
# Seconds between two checks of a booting machine: at first, and at most.
_BOOT_PAUSE, _LONGEST_BOOT_PAUSE = 1.0, 10.0
# Start all boots before waiting for an agent, so that machines boot in parallel.
_STAGES = (Boot, Plug, AwaitAgent)


def plan(wanted: AnyView, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    """Return the next steps, in order; the caller performs them and then plans again."""
    if isinstance(wanted, LoadBalancerView) and wanted.gone:
        return _removal(wanted, amphorae)
    first, later = _renewals(wanted, amphorae)
    if first:
        return first
    steps = plan_pool(wanted, amphorae) if isinstance(wanted, SparePoolView) else _present(wanted, amphorae)
    # A certificate of a retiring amphora is renewed only if the plan is empty or checks a drain.
    return [*later, *steps] if not steps or isinstance(steps[0], CheckDrain) else steps


def _renewals(wanted: View, amphorae: tuple[Amphora, ...]) -> tuple[list[AnyStep], list[AnyStep]]:
    """Return the certificate renewals that precede all other steps, and those that follow them.

    An agent with an expired certificate accepts nothing else. A retiring amphora may not answer, and its renewal must
    not delay its replacement.
    """
    going = {one.id for one in amphorae if one.state is AmphoraState.RETIRING}
    expired = {one.id for one in amphorae if one.certificate_expires_at and one.certificate_expires_at <= wanted.now}
    first: list[AnyStep] = []
    later: list[AnyStep] = []
    for one, why in sorted(wanted.renewals.items()):
        step = RenewCertificate(amphora_id=one, reason=why)
        (later if one in going - expired else first).append(step)
    return first, later


def _present(wanted: LoadBalancerView, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    """Return the next steps of a load balancer that is not deleted."""
    house = _House(wanted, amphorae)
    if witnesses := house.witnesses():
        return [
            QueryVipHolder(
                amphora_ids=witnesses, reason="an amphora is retiring, and the holder of the VIPs hands them over"
            )
        ]
    if house.missing and house.may_grow():
        return [_newcomer(wanted, house.next_role())]
    steps = [step for one in house.live for step in _arrival(wanted, one)]
    if not vip_allocation.known(wanted.tree):
        # Boot amphorae meanwhile: the network backend may choose addresses by the location of the machines.
        return [step for step in steps if isinstance(step, Boot)] or [_addresses(wanted)]
    waiting = [one for one in house.live if _boots(wanted, one)]
    arrived = [one for one in house.live if one not in waiting and not _arrival(wanted, one)]
    if steps and not (wanted.attempts > 0 and house.served_meanwhile(arrived)):
        return sorted(steps, key=house.turn_of)
    if waiting and not house.served_meanwhile(arrived):
        return [_patience(wanted, waiting)]
    if not wanted.readable:
        return [Await(reason="the tree is read back from Octavia after its commit")]
    return _serving(wanted, house, arrived)


def _serving(wanted: LoadBalancerView, house: _House, arrived: Sequence[Amphora]) -> list[AnyStep]:
    """Return the next steps once amphorae are reachable, until all serve and cleanup is done."""
    if house.apart(arrived):
        return [BumpGeneration(reason="the VRRP peers lack a new amphora")]
    undone = vip_allocation.due(wanted.tree, wanted.vip_given, house.everyone)
    if undone:
        return [ApplyVipOptions(reason=undone)]
    if house.behind(arrived):
        return house.fencing() or [house.push(arrived)]
    if house.missing:
        return house.relief()
    if wanted.applied < wanted.generation:
        return _beginning(wanted, house) or [Confirm(reason=f"every amphora serves generation {wanted.generation}")]
    return _joining(wanted) or _cleaning(wanted, house) or house.tidying()


def _newcomer(wanted: LoadBalancerView, role: str) -> Record | Adopt:
    """Return the step that fills a role: with a spare if there is one and the load balancer has served."""
    reason = f"{role} is missing of {', '.join(wanted.roles)}"
    if wanted.spares and wanted.applied:
        return Adopt(role=role, amphora_ids=wanted.spares, reason=reason)
    return Record(role=role, reason=reason)


def _joining(wanted: LoadBalancerView) -> list[AnyStep]:
    """Return the change of the spare pool; it follows the push, so that no user waits for a pool."""
    sought = None if wanted.spec is None else wanted.spec.id
    if sought == wanted.pool:
        return []
    return [
        SetSparePool(spec=wanted.spec, former=wanted.pool, reason="the load balancer uses another spare pool, or none")
    ]


def _addresses(wanted: LoadBalancerView) -> AllocateVip | Await:
    reason = "the network backend needs time for the addresses"
    if wanted.allocate_at > wanted.now:
        return Await(until=wanted.allocate_at, reason=reason)
    return AllocateVip(reason=reason)


class _House:
    """The amphorae of one load balancer, and the steps that follow from their states.

    A pair is replaced one amphora at a time. The second replacement is created after the first one serves, its
    predecessor is deleted, and it has the VIPs. There is therefore at most one amphora more than the topology has, and
    always one that serves. A dead amphora is replaced at once, before its machine is deleted.
    """

    def __init__(self, wanted: LoadBalancerView, amphorae: tuple[Amphora, ...]) -> None:
        self._wanted = wanted
        self.everyone = amphorae
        self.live = [one for one in amphorae if one.state is not AmphoraState.RETIRING]
        self.retiring = [one for one in amphorae if one.state is AmphoraState.RETIRING]
        self.missing = list((Counter(wanted.roles) - Counter(one.role for one in self.live)).elements())
        self._several = len(wanted.roles) > 1
        self._without_machine = {one.id for one in self.live if one.management_address is None}
        self._quiet = vrrp_peers.silent(amphorae, wanted.patience) | {one.id for one in amphorae if one.dead}
        self._holder = vrrp_peers.holder(amphorae, wanted.roles[0], self._quiet)

    def witnesses(self) -> tuple[str, ...]:
        """Return the amphorae to query for the VIPs before one is removed: heartbeats may be older."""
        if self._wanted.holder_asked or not self._several:
            return ()
        serving = [one for one in self.everyone if one.confirmed > 0 and one.plugged and one.id not in self._quiet]
        going = [one for one in serving if one.state is AmphoraState.RETIRING and not one.handed_over]
        return tuple(one.id for one in serving) if going and len(serving) > 1 else ()

    def may_grow(self) -> bool:
        """Return whether the next amphora may be created now."""
        serving = [one for one in self.retiring if one.confirmed > 0 and not one.dead]
        if not serving or not self.live:
            return True
        settled = all(one.confirmed >= self._wanted.generation for one in self.live)
        # A draining amphora delays a replacement only if VIPs must be handed over.
        staying = [one for one in serving if not self._drains(one)]
        replaced = {one.role for one in staying} & {one.role for one in self.live}
        lost = {one.role for one in self.retiring if one.dead}
        if lost & set(self.missing) and self._holder not in {one.id for one in staying}:
            # An undeletable old amphora must not delay replacing a dead one.
            return settled
        return settled and not replaced and not self._leaving()

    def next_role(self) -> str:
        """Return the role to fill first: of two replaced amphorae, the role of the one without the VIPs."""
        has = {one.role for one in self.retiring if one.id == self._holder}
        return min(self.missing, key=lambda role: role in has)

    def turn_of(self, step: AnyStep) -> tuple[bool, int]:
        """Return the sort key of a boot step: its stage; after a failure, amphorae with a machine first."""
        late = self._wanted.attempts > 0 and getattr(step, "amphora_id", None) in self._without_machine
        return late, _STAGES.index(type(step))

    def fencing(self) -> list[AnyStep]:
        """Return the removal of dead amphorae that a partner still has as a peer: they may have the VIPs.

        An amphora also becomes silent if its agent or its management network fails, and HAProxy may still serve. Its
        partner receives its advertisements while the partner has it as a peer. The removal is tried once, so an
        unreachable host does not delay the fail-over. An amphora of a single topology has no partner: it is removed
        after its replacement serves.
        """
        if not (self._several and self._wanted.priorities) or self._wanted.attempts > 0:
            return []
        known = {each.id for one in self.live for each in one.partners}
        nobody = not any(one.confirmed for one in self.live)
        reason = "it is silent and may still have the VIPs"
        return [
            Release(amphora_id=one.id, reason=reason)
            for one in self.retiring
            if one.dead and one.confirmed > 0 and (nobody or one.id in known)
        ]

    def served_meanwhile(self, arrived: Sequence[Amphora]) -> bool:
        """Return whether to push to the reachable amphorae while others still boot.

        An amphora that never boots must not block the others for ever, and must not delay an amphora that serves. A
        new pair is pushed together, because otherwise each of the two would take the VIPs.
        """
        if not self._wanted.readable:
            return False
        return any(one.confirmed or self._wanted.attempts for one in self.behind(arrived))

    def behind(self, arrived: Sequence[Amphora]) -> list[Amphora]:
        """Return the amphorae that do not serve the newest generation."""
        return [one for one in arrived if one.confirmed < self._wanted.generation]

    def apart(self, arrived: Sequence[Amphora]) -> bool:
        """Return whether a serving amphora lacks a VRRP peer that is to stay.

        The agent refuses a second bundle with the same generation, so a changed list of peers needs a new generation.
        """
        return any(
            one.confirmed >= self._wanted.generation and set(self._partners(one, arrived)) - set(one.partners)
            for one in self._with_vips()
        ) or any(
            one.confirmed >= self._wanted.generation and set(self._partners(one, self.live)) - set(one.partners)
            for one in arrived
        )

    def push(self, arrived: Sequence[Amphora]) -> Push:
        """Return the push to amphorae that are behind, and to a retiring one with the VIPs for its peers."""
        behind = self.behind(arrived)
        # Push to a retiring amphora with the VIPs also if it has confirmed this generation.
        told = self._with_vips()
        return Push(
            waves=vrrp_peers.waves([*behind, *told], self._holder, self._quiet)
            if self._several
            else (tuple(one.id for one in behind),),
            optional=frozenset(one.id for one in told),
            whole=not self.missing and len(arrived) == len(self.live) and not self.begins(),
            reason=f"generation {self._wanted.generation} is not confirmed yet",
        )

    def begins(self) -> bool:
        """Return whether this is a new pair that has not taken the VIPs yet."""
        return self._several and bool(self._wanted.priorities) and not self._wanted.applied and not self.retiring

    def relief(self) -> list[AnyStep]:
        """Return the release of replaced amphorae, or the VIP handover before the next replacement."""
        roles = {one.role for one in self.live}
        # A handover is between two amphorae. An amphora that drains since an earlier fail-over prevents it. A dead one
        # does not, and the deletion of its machine may take long.
        replaced = [
            one for one in self.retiring if not one.dead and (one.role in roles or one.drains_until is not None)
        ]
        if replaced:
            return [self._parting(one) for one in replaced]
        if any(set(one.partners) != set(self._partners(one, self.everyone)) for one in self.live):
            return [BumpGeneration(reason="a VIP handover needs exactly two VRRP peers")]
        to = self.live[0].id
        return [HandOver(amphora_id=one.id, to=to, reason="it is retiring and has the VIPs") for one in self._leaving()]

    def _leaving(self) -> list[Amphora]:
        """Return the retiring amphora with the VIPs that was not asked to hand them over; one at most."""
        return [one for one in self._with_vips() if not one.handed_over]

    def _with_vips(self) -> list[Amphora]:
        """Return the retiring amphora with the VIPs; one at most.

        After a failed handover it keeps the VIPs until it is deleted. The new amphora must have it as a peer until
        then; otherwise both would have the VIPs.
        """
        return [one for one in self.retiring if self._several and one.id == self._holder and one.id not in self._quiet]

    def farewell(self) -> list[AnyStep]:
        """Return the steps that remove replaced amphorae; one that drains stays until its connections end."""
        draining = [one for one in self.retiring if self._drains(one)]
        steps: list[AnyStep] = [self._parting(one) for one in self.retiring if one not in draining]
        steps += [self._stand_down(one) for one in draining if set(self._partners(one, self.live)) - set(one.partners)]
        steps += [
            CheckDrain(amphora_id=one.id, silent=one.id in self._quiet, reason="its connections may have ended")
            for one in draining
        ]
        return steps

    def _parting(self, one: Amphora) -> Release | HandOver:
        """Return the release of an amphora, or a handover first if it took the VIPs during its replacement.

        Three amphorae exist at that time, so its connections end: only a handover between two keeps connections.
        """
        if one.holds_vip and one in self._leaving() and self.live:
            to = max(self.live, key=lambda other: self._wanted.priorities.get(other.role, 0))
            return HandOver(amphora_id=one.id, to=to.id, reason="it took the VIPs during its replacement")
        return Release(amphora_id=one.id, reason="it was replaced")

    def patience(self) -> list[AnyStep]:
        """Return the wait for the end of drains; empty without a drain."""
        draining, now = [one for one in self.retiring if self._drains(one)], self._wanted.now
        if not draining:
            return []
        ends = [one.drains_until for one in draining if one.drains_until is not None and one.drains_until > now]
        return [Await(until=min([now + _LOOK_PAUSE, *ends]), reason="connections drain")]

    def _drains(self, one: Amphora) -> bool:
        """Return whether an amphora still drains, as far as is known."""
        if not one.drains_until:
            return False
        # The agent measures the drain with a monotonic clock, and `CheckDrain` queries it repeatedly.
        return self._wanted.clock_set or one.drains_until > self._wanted.now

    @staticmethod
    def _stand_down(one: Amphora) -> Push:
        """Return a push of the current peers, so that a drained amphora takes the VIPs only as the last one."""
        reason = "its VRRP peers lack an amphora that stays"
        return Push(waves=((one.id,),), optional=frozenset((one.id,)), whole=False, reason=reason)

    def tidying(self) -> list[AnyStep]:
        """Return the new generation that removes deleted amphorae from the peers of the others."""
        if self.retiring or not any(set(one.partners) - set(self._partners(one, self.live)) for one in self.live):
            return []
        return [BumpGeneration(reason="the VRRP peers contain a deleted amphora")]

    def _partners(self, one: Amphora, others: Sequence[Amphora]) -> tuple[Partner, ...]:
        tree = self._wanted.tree
        return vrrp_peers.partners(one, others, tree.vip) if self._several and tree is not None else ()


def _removal(wanted: LoadBalancerView, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    if amphorae:
        return [Release(amphora_id=one.id, reason="its load balancer is deleted") for one in amphorae]
    if wanted.applied < wanted.generation:
        return [ReleaseVip(reason="the load balancer is deleted")]
    return []


def _arrival(wanted: LoadBalancerView, amphora: Amphora) -> list[AnyStep]:
    """Return the steps an amphora needs before a push."""
    steps: list[AnyStep] = []
    if amphora.management_address is None and amphora.id not in wanted.absent:
        steps.append(Boot(amphora_id=amphora.id, reason="it is recorded but not booted"))
    if wanted.readable:
        steps += _plugging(wanted, amphora)
    if amphora.state is AmphoraState.BOOTING and amphora.id not in wanted.absent:
        steps.append(AwaitAgent(amphora_id=amphora.id, reason="its agent has not answered yet"))
    return steps


def _boots(wanted: LoadBalancerView, amphora: Amphora) -> bool:
    """Return whether an amphora boots and its agent did not answer in this job."""
    return amphora.state is AmphoraState.BOOTING and amphora.id in wanted.absent


def _patience(wanted: LoadBalancerView, waiting: Sequence[Amphora]) -> Await:
    """Return the wait for booting machines; an agent that listens ends it earlier."""
    youngest = max(wanted.now if one.booted_at is None else one.booted_at for one in waiting)
    pause = min(max((wanted.now - youngest) / 8, _BOOT_PAUSE), _LONGEST_BOOT_PAUSE)
    return Await(until=wanted.now + pause, amphorae=tuple(one.id for one in waiting), reason="machines boot")


def _beginning(wanted: LoadBalancerView, house: _House) -> list[AnyStep]:
    """Return the wait until an amphora of a new pair has the VIPs: the pair is ACTIVE only after that.

    The wait is limited. The pair elects the VIPs' holder by itself, with or without this check.
    """
    confirmed = max((one.confirmed_at for one in house.live if one.confirmed_at is not None), default=0.0)
    earliest, latest = (confirmed + seconds for seconds in wanted.taking_vips)
    if not house.begins() or wanted.vips_taken or wanted.now >= latest:
        return []
    if wanted.vips_taken is None:
        return [QueryVips(reason="an amphora must have the VIPs")]
    return [Await(until=min(max(earliest, wanted.now + _VIP_PAUSE), latest), reason="no amphora has the VIPs yet")]


def _plugging(wanted: LoadBalancerView, amphora: Amphora) -> list[AnyStep]:
    plugged = {one.port.network_id: {address.subnet_id for address in one.port.addresses} for one in amphora.plugged}
    return [
        Plug(
            amphora_id=amphora.id,
            network_id=network_id,
            subnet_ids=subnets,
            reason="it has no port on this network" if network_id not in plugged else "the port lacks a subnet",
        )
        for network_id, subnets in wanted.networks.items()
        if not set(subnets) <= plugged.get(network_id, set()) or network_id not in plugged
    ]


def _cleaning(wanted: LoadBalancerView, house: _House) -> list[AnyStep]:
    """Return the cleanup steps after all amphorae serve the newest generation."""
    steps = house.farewell()
    steps += [
        Unplug(amphora_id=one.id, network_id=plugged.port.network_id, reason="no member uses this network")
        for one in house.live
        for plugged in one.plugged
        if plugged.port.network_id not in wanted.networks
    ]
    # A wait ends the round, so it is the last step.
    return steps + house.patience()
