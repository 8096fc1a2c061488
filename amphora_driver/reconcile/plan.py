# SPDX-License-Identifier: Apache-2.0
"""The next steps of a load balancer, as a pure function.

Invariant: `plan` compares the desired with the observed state and does no I/O. An empty result means that nothing is
left to do. Every step is idempotent and records its result, so after a crash `plan` returns the unfinished step again.
Create, update, fail-over and delete use the same function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from amphora_driver.model.amphora import Amphora, AmphoraState, Partner
from amphora_driver.reconcile import steps, vip_allocation, vrrp_peers
from amphora_driver.reconcile.spare_pool_plan import plan_pool

# Seconds between two checks whether the connections of a draining amphora have ended.
_DRAIN_CHECK_PAUSE = 2.0
# Seconds between two checks whether a new pair of amphorae has taken the VIPs.
_VIP_CHECK_PAUSE = 0.1
# Shortest and longest pause in seconds between two checks of a booting amphora.
_BOOT_PAUSE, _MAX_BOOT_PAUSE = 1.0, 10.0
# All amphorae begin to boot before the wait for the first agent, so the machines boot in parallel.
_STAGES = (steps.Boot, steps.Plug, steps.AwaitAgent)


def plan(view: steps.AnyView, amphorae: tuple[Amphora, ...]) -> list[steps.Step]:
    """Return the next steps, in order; the caller performs them and then plans again."""
    if isinstance(view, steps.LoadBalancerView) and view.gone:
        if amphorae:
            return [steps.Release(amphora_id=one.id, reason="its load balancer is deleted") for one in amphorae]
        pending = view.applied < view.generation
        return [steps.ReleaseVip(reason="the load balancer is deleted")] if pending else []
    first, later = _renewals(view, amphorae)
    if first:
        return first
    found = plan_pool(view, amphorae) if isinstance(view, steps.SparePoolView) else _load_balancer_steps(view, amphorae)
    # Certificate renewals of retiring amphorae (`later`) must not delay other steps. So they are planned only if no
    # step is due, or if the next step is CheckDrain.
    return [*later, *found] if not found or isinstance(found[0], steps.CheckDrain) else found


def _renewals(view: steps.View, amphorae: tuple[Amphora, ...]) -> tuple[list[steps.Step], list[steps.Step]]:
    """Return the certificate renewals that precede all other steps, and those that follow them.

    An agent with an expired certificate accepts nothing else. A retiring amphora may not answer and must not delay
    others.
    """
    going = {one.id for one in amphorae if one.state is AmphoraState.RETIRING}
    expired = {one.id for one in amphorae if one.certificate_expires_at and one.certificate_expires_at <= view.now}
    first: list[steps.Step] = []
    later: list[steps.Step] = []
    for one, why in sorted(view.renewals.items()):
        step = steps.RenewCertificate(amphora_id=one, reason=why)
        (later if one in going - expired else first).append(step)
    return first, later


def _load_balancer_steps(view: steps.LoadBalancerView, amphorae: tuple[Amphora, ...]) -> list[steps.Step]:
    amphora_set = AmphoraSet(view, amphorae)
    if query_targets := amphora_set.query_targets():
        reason = "an amphora is retiring, and the holder of the VIPs hands them over"
        return [steps.QueryVipHolder(amphora_ids=query_targets, reason=reason)]
    if amphora_set.missing and amphora_set.may_add():
        # A new load balancer gets all its amphorae at once. Amphorae are replaced one after the other, so that one
        # amphora serves.
        is_new = not amphora_set.everyone and not view.applied
        roles = amphora_set.missing if is_new else [amphora_set.next_role()]
        return [_fill_role(view, role) for role in roles]
    found = [step for one in amphora_set.live for step in _boot_steps(view, one)]
    if not vip_allocation.addresses_known(view.tree):
        # Some network backends choose the VIP addresses by the location of the machines. So the amphorae boot before
        # the controller requests the VIP addresses.
        boots: list[steps.Step] = [step for step in found if isinstance(step, steps.Boot)]
        reason = "the network backend needs time for the addresses"
        if view.allocate_at > view.now:
            return boots or [steps.Await(until=view.allocate_at, reason=reason)]
        return boots or [steps.AllocateVip(reason=reason)]
    waiting = [one for one in amphora_set.live if one.state is AmphoraState.BOOTING and one.id in view.absent]
    arrived = [one for one in amphora_set.live if one not in waiting and not _boot_steps(view, one)]
    if found and not (view.attempts > 0 and amphora_set.pushes_early(arrived)):
        return sorted(found, key=amphora_set.boot_order)
    if waiting and not amphora_set.pushes_early(arrived):
        return [_wait_for_boot(view, waiting)]
    if not view.readable:
        return [steps.Await(reason="the tree is read back from Octavia after its commit")]
    return _serving_steps(view, amphora_set, arrived)


def _serving_steps(
    view: steps.LoadBalancerView, amphora_set: AmphoraSet, arrived: Sequence[Amphora]
) -> list[steps.Step]:
    if amphora_set.peers_outdated(arrived):
        return [steps.BumpGeneration(reason="the VRRP peers lack a new amphora")]
    undone = vip_allocation.options_due(view, amphora_set.everyone)
    if undone:
        return [steps.ApplyVipOptions(reason=undone)]
    if amphora_set.behind(arrived):
        return amphora_set.fencing_steps() or [amphora_set.push_step(arrived)]
    if amphora_set.missing or amphora_set.former_holder():
        return amphora_set.handover_steps()
    if view.applied < view.generation:
        confirm = steps.Confirm(reason=f"every amphora serves generation {view.generation}")
        return _wait_for_vips(view, amphora_set) or [confirm]
    if (None if view.spec is None else view.spec.id) != view.pool:
        # The controller changes the spare pool after the push, because a user may be waiting for the push.
        reason = "the load balancer uses another spare pool, or none"
        return [steps.SetSparePool(spec=view.spec, former=view.pool, reason=reason)]
    return _cleanup_steps(view, amphora_set) or amphora_set.forget_departed()


def _fill_role(view: steps.LoadBalancerView, role: str) -> steps.Record | steps.Adopt:
    """Return the step that fills a role: with a spare if one is ready and the load balancer has served."""
    reason = f"{role} is missing of {', '.join(view.roles)}"
    if view.spares and view.applied:
        return steps.Adopt(role=role, amphora_ids=view.spares, reason=reason)
    return steps.Record(role=role, reason=reason)


class AmphoraSet:
    """The amphorae of one load balancer, and the steps that follow from their states.

    A pair is replaced one amphora at a time. The second replacement is created after the first one serves, has the
    VIPs, and its predecessor is deleted. A load balancer therefore has at most one amphora more than its topology
    requires. A dead amphora is replaced at once, before its machine is deleted.

    After a change of the topology, the amphorae with a role of the former topology count as retiring. All amphorae of
    the new topology boot at once. A former pair hands the VIPs over to the new single amphora. A former single amphora
    takes no part in VRRP: it is removed when the new pair has the VIPs.
    """

    def __init__(self, view: steps.LoadBalancerView, amphorae: tuple[Amphora, ...]) -> None:
        self._view = view
        self.everyone = amphorae
        # A change of the topology may leave an amphora with a role that the new topology does not have. Such an amphora
        # counts as retiring.
        self.live = [one for one in amphorae if one.state is not AmphoraState.RETIRING and one.role in view.roles]
        self.retiring = [one for one in amphorae if one not in self.live]
        self.missing = list((Counter(view.roles) - Counter(one.role for one in self.live)).elements())
        self._several = len(view.roles) > 1 or bool(view.priorities)
        self._in_vrrp = vrrp_peers.participants(amphorae, view.priorities) if view.priorities else amphorae
        self._without_machine = {one.id for one in self.live if one.management_address is None}
        self._silent = vrrp_peers.find_silent(amphorae, view.silence_limit) | {one.id for one in amphorae if one.dead}
        first_role = max(view.priorities, key=view.priorities.__getitem__) if view.priorities else view.roles[0]
        self._holder = vrrp_peers.find_holder(self._in_vrrp, first_role, self._silent)

    def query_targets(self) -> tuple[str, ...]:
        """Return the amphorae to ask for the VIPs before an amphora is removed: heartbeats may be out of date."""
        if self._view.holder_asked or not self._several:
            return ()
        serving = [one for one in self._in_vrrp if one.confirmed > 0 and one.plugged and one.id not in self._silent]
        going = [one for one in serving if one in self.retiring and not one.handed_over]
        return tuple(one.id for one in serving) if going and len(serving) > 1 else ()

    def may_add(self) -> bool:
        serving = [one for one in self.retiring if one.confirmed > 0 and not one.dead and one in self._in_vrrp]
        if not serving or not self.live:
            return True
        settled = all(one.confirmed >= self._view.generation for one in self.live)
        # Draining amphorae have handed their VIPs over, so they do not delay a replacement.
        staying = [one for one in serving if not self._is_draining(one)]
        replaced = {one.role for one in staying} & {one.role for one in self.live}
        lost = {one.role for one in self.retiring if one.dead}
        if lost & set(self.missing) and self._holder not in {one.id for one in staying}:
            # No retiring amphora holds the VIPs, so the replacement of the dead amphora need not wait for the removal
            # of retiring amphorae.
            return settled
        return settled and not replaced and not self._holder_to_hand_over()

    def next_role(self) -> str:
        """Return the role to fill first: of two replaced amphorae, the role of the one without the VIPs."""
        held = {one.role for one in self.retiring if one.id == self._holder}
        return min(self.missing, key=lambda role: role in held)

    def boot_order(self, step: steps.Step) -> tuple[bool, int]:
        """Return the sort key of a boot step: its stage; after a failure, amphorae with a machine first."""
        late = self._view.attempts > 0 and getattr(step, "amphora_id", None) in self._without_machine
        return late, _STAGES.index(type(step))

    def fencing_steps(self) -> list[steps.Step]:
        """Return the removal of dead amphorae that a partner still has as a peer: they may have the VIPs.

        An amphora is also silent if its agent or its management network fails, and HAProxy may still serve. The removal
        is tried once, so an unreachable host does not delay the fail-over. A single amphora has no partner, and its
        removal follows after its replacement serves.
        """
        if not (self._several and self._view.priorities) or self._view.attempts > 0:
            return []
        known = {each.id for one in self.live for each in one.partners}
        none_serves = not any(one.confirmed for one in self.live)
        reason = "it is silent and may still have the VIPs"
        return [
            steps.Release(amphora_id=one.id, reason=reason)
            for one in self.retiring
            if one.dead and one.confirmed > 0 and (none_serves or one.id in known)
        ]

    def pushes_early(self, arrived: Sequence[Amphora]) -> bool:
        """Return whether to push to the reachable amphorae while others still boot.

        An amphora that never boots must not block the others, and must not delay an amphora that serves. The two
        amphorae of a new pair are pushed together, because otherwise each of the two would take the VIPs.
        """
        if not self._view.readable:
            return False
        return any(one.confirmed or self._view.attempts for one in self.behind(arrived))

    def behind(self, arrived: Sequence[Amphora]) -> list[Amphora]:
        return [one for one in arrived if one.confirmed < self._view.generation]

    def peers_outdated(self, arrived: Sequence[Amphora]) -> bool:
        """Return whether a serving amphora lacks a VRRP peer that is to stay.

        The agent refuses a second bundle with the same generation, so a changed list of peers needs a new generation.
        """
        checked = [(one, arrived) for one in self._retiring_holder()] + [(one, self.live) for one in arrived]
        return any(
            one.confirmed >= self._view.generation and set(self._partners(one, peers)) - set(one.partners)
            for one, peers in checked
        )

    def push_step(self, arrived: Sequence[Amphora]) -> steps.Push:
        """Return the push to amphorae that are behind, and to a retiring VIP holder for its VRRP peers."""
        behind = self.behind(arrived)
        # A retiring amphora with the VIPs must know its new VRRP peers, even if this amphora serves the generation
        # already.
        holders = self._retiring_holder()
        return steps.Push(
            waves=vrrp_peers.order_waves([*behind, *holders], self._holder, self._silent)
            if self._several
            else (tuple(one.id for one in behind),),
            optional=frozenset(one.id for one in holders),
            whole=self._completes(arrived),
            reason=f"generation {self._view.generation} is not confirmed yet",
        )

    def _completes(self, arrived: Sequence[Amphora]) -> bool:
        """Return whether the load balancer is served as desired after a push to these amphorae."""
        moves = self.is_new_pair() or self.former_holder()
        return not self.missing and len(arrived) == len(self.live) and not moves

    def is_new_pair(self) -> bool:
        """Return whether the VIPs are new to the pair, because no amphora of it has served before.

        That is a new load balancer, or a former single amphora that still serves.
        """
        if len(self._view.roles) == 1 or not self._view.priorities:
            return False
        if any(one.role in self._view.priorities for one in self.retiring):
            return False
        return bool(self.retiring) or not self._view.applied

    def handover_steps(self) -> list[steps.Step]:
        """Return the release of replaced amphorae, or the VIP handover before the next replacement.

        A handover to the amphora of another topology needs the release of the former standby first.
        """
        roles = {one.role for one in self.live}
        # A handover keeps connections only if the load balancer has two amphorae, so replaced amphorae are released
        # first. Dead amphorae are not released here, because the deletion of their machines may take long.
        replaced = [
            one for one in self.retiring if not one.dead and (one.role in roles or one.drains_until is not None)
        ] or self._former_standbys()
        if replaced:
            return [self._release_or_hand_over(one) for one in replaced]
        if any(set(one.partners) != set(self._partners(one, self.everyone)) for one in self.live):
            return [steps.BumpGeneration(reason="a VIP handover needs exactly two VRRP peers")]
        to = self.live[0].id
        reason, holder = "it is retiring and has the VIPs", self._holder_to_hand_over()
        return [steps.HandOver(amphora_id=one.id, to=to, reason=reason) for one in holder]

    def former_holder(self) -> list[Amphora]:
        """Return the VIP holder of a former topology, if the VIPs are still to be handed over."""
        return [one for one in self._holder_to_hand_over() if one.role not in self._view.roles] if self.live else []

    def _former_standbys(self) -> list[Amphora]:
        """Return the VRRP peers of a VIP holder of a former topology; they must not take the VIPs from it."""
        holder = self.former_holder()
        return [one for one in self.retiring if holder and one not in holder and not one.dead and one.plugged]

    def _holder_to_hand_over(self) -> list[Amphora]:
        """Return the retiring VIP holder that was not asked to hand the VIPs over; one amphora at most."""
        return [one for one in self._retiring_holder() if not one.handed_over]

    def _retiring_holder(self) -> list[Amphora]:
        """Return the retiring VIP holder, if there is one: its replacement must have it as a peer."""
        return [one for one in self.retiring if self._several and one.id == self._holder and one.id not in self._silent]

    def release_steps(self) -> list[steps.Step]:
        """Return the steps that remove replaced amphorae; a draining amphora stays until its connections end."""
        draining = [one for one in self.retiring if self._is_draining(one)]
        found: list[steps.Step] = [self._release_or_hand_over(one) for one in self.retiring if one not in draining]
        # A draining amphora that does not know all VRRP peers could take the VIPs back. So the controller pushes to a
        # draining amphora if its peers have changed.
        reason = "its VRRP peers lack an amphora that stays"
        found += [
            steps.Push(waves=((one.id,),), optional=frozenset((one.id,)), whole=False, reason=reason)
            for one in draining
            if set(self._partners(one, self.live)) - set(one.partners)
        ]
        found += [
            steps.CheckDrain(amphora_id=one.id, silent=one.id in self._silent, reason="its connections may have ended")
            for one in draining
        ]
        return found

    def _release_or_hand_over(self, one: Amphora) -> steps.Release | steps.HandOver:
        """Return the release of an amphora, or a handover if the amphora took the VIPs in its replacement."""
        # During a replacement, the load balancer has three amphorae, so this handover ends the open connections. A
        # handover keeps connections only between two amphorae.
        if one.holds_vip and one in self._holder_to_hand_over() and self.live:
            to = max(self.live, key=lambda other: self._view.priorities.get(other.role, 0))
            return steps.HandOver(amphora_id=one.id, to=to.id, reason="it took the VIPs during its replacement")
        return steps.Release(amphora_id=one.id, reason="it was replaced")

    def wait_steps(self) -> list[steps.Step]:
        draining, now = [one for one in self.retiring if self._is_draining(one)], self._view.now
        if not draining:
            return []
        ends = [one.drains_until for one in draining if one.drains_until is not None and one.drains_until > now]
        return [steps.Await(until=min([now + _DRAIN_CHECK_PAUSE, *ends]), reason="connections drain")]

    def _is_draining(self, one: Amphora) -> bool:
        if not one.drains_until:
            return False
        # A changed wall clock makes the recorded end of the drain wrong. The amphora then counts as draining until its
        # agent, which uses a monotonic clock, reports the end.
        return self._view.clock_set or one.drains_until > self._view.now

    def forget_departed(self) -> list[steps.Step]:
        """Return the new generation that removes deleted amphorae from the peers of the others."""
        if self.retiring or not any(set(one.partners) - set(self._partners(one, self.live)) for one in self.live):
            return []
        return [steps.BumpGeneration(reason="the VRRP peers contain a deleted amphora")]

    def _partners(self, one: Amphora, others: Sequence[Amphora]) -> tuple[Partner, ...]:
        tree = self._view.tree
        if not self._several or tree is None:
            return ()
        return vrrp_peers.partners(one, [other for other in others if other in self._in_vrrp], tree.vip)


def _boot_steps(view: steps.LoadBalancerView, amphora: Amphora) -> list[steps.Step]:
    if amphora.id in view.boots_at:
        return []
    found: list[steps.Step] = []
    if amphora.management_address is None and amphora.id not in view.absent:
        found.append(steps.Boot(amphora_id=amphora.id, reason="it is recorded but not booted"))
    if view.readable and (view.plugs_while_booting or amphora.state is not AmphoraState.BOOTING):
        found += _plug_steps(view, amphora)
    if amphora.state is AmphoraState.BOOTING and amphora.id not in view.absent:
        found.append(steps.AwaitAgent(amphora_id=amphora.id, reason="its agent has not answered yet"))
    return found


def _wait_for_boot(view: steps.LoadBalancerView, waiting: Sequence[Amphora]) -> steps.Await:
    """Return the wait for booting machines; the first agent that listens ends the wait earlier."""
    delays = [view.boots_at[one.id] for one in waiting if one.id in view.boots_at]
    booting = [one for one in waiting if one.id not in view.boots_at]
    if not booting:
        return steps.Await(until=min(delays), reason="the rate limit or the placement delays the boot")
    youngest = max(view.now if one.booted_at is None else one.booted_at for one in booting)
    pause = min(max((view.now - youngest) / 8, _BOOT_PAUSE), _MAX_BOOT_PAUSE)
    until = min([view.now + pause, *delays])
    return steps.Await(until=until, amphorae=tuple(one.id for one in booting), reason="machines boot")


def _wait_for_vips(view: steps.LoadBalancerView, amphora_set: AmphoraSet) -> list[steps.Step]:
    """Return the limited wait until an amphora of a new pair has the VIPs: the pair is ACTIVE after that."""
    confirmed = max((one.confirmed_at for one in amphora_set.live if one.confirmed_at is not None), default=0.0)
    earliest, latest = (confirmed + seconds for seconds in view.taking_vips)
    if view.vips_held or not amphora_set.is_new_pair() or view.vips_taken or view.now >= latest:
        return []
    if view.vips_taken is None:
        return [steps.QueryVips(reason="an amphora must have the VIPs")]
    until = min(max(earliest, view.now + _VIP_CHECK_PAUSE), latest)
    return [steps.Await(until=until, reason="no amphora has the VIPs yet")]


def _plug_steps(view: steps.LoadBalancerView, amphora: Amphora) -> list[steps.Step]:
    plugged = {one.key: {address.subnet_id for address in one.port.addresses} for one in amphora.plugged}
    return [
        steps.Plug(
            amphora_id=amphora.id,
            network_id=key[0],
            subnet_ids=subnets,
            sr_iov=key[1],
            reason="the port lacks a subnet" if key in plugged else "it has no such port on this network",
        )
        for key, subnets in _needed_ports(view).items()
        if key not in plugged or not set(subnets) <= plugged[key]
    ]


def _needed_ports(view: steps.LoadBalancerView) -> dict[tuple[str, bool], tuple[str, ...]]:
    """Return the subnets of the ports that an amphora needs, by `AttachedPort.key`."""
    ordinary = {(network_id, False): subnets for network_id, subnets in view.networks.items()}
    return ordinary | {(network_id, True): subnets for network_id, subnets in view.sr_iov_networks.items()}


def _cleanup_steps(view: steps.LoadBalancerView, amphora_set: AmphoraSet) -> list[steps.Step]:
    found = amphora_set.release_steps()
    needed, reason = _needed_ports(view), "no member uses this port"
    found += [
        steps.Unplug(amphora_id=one.id, network_id=plugged.port.network_id, sr_iov=plugged.sr_iov, reason=reason)
        for one in amphora_set.live
        for plugged in one.plugged
        if plugged.key not in needed
    ]
    # The round ends at a step Await, and later steps are not performed. So Await is the last step.
    return found + amphora_set.wait_steps()
