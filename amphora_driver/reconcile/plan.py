# SPDX-License-Identifier: Apache-2.0
"""What to do next, as a pure function.

Invariant: `plan` looks at what is wanted and what is observed and names the steps that lead from one to the other. It
does no I/O, has no memory, and an empty answer means that nothing is left to do. Every step is idempotent and leaves
its mark in the store, so that after a crash the same function names the same step again. Create, update, fail-over
and delete are this one function with different wanted states.
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
    ApplyVipOptions,
    AskHolder,
    AskSpares,
    AskVips,
    Await,
    AwaitAgent,
    Boot,
    Confirm,
    Disband,
    HandOver,
    Join,
    LookAfter,
    Plug,
    Push,
    Record,
    Release,
    ReleaseVip,
    Renew,
    RenewCertificate,
    Retire,
    Step,
    Unplug,
    Wanted,
)

# Who takes steps knows them from here.
__all__ = [
    "Adopt",
    "AllocateVip",
    "AnyStep",
    "ApplyVipOptions",
    "AskHolder",
    "AskSpares",
    "AskVips",
    "Await",
    "AwaitAgent",
    "Boot",
    "Confirm",
    "Disband",
    "HandOver",
    "Join",
    "LookAfter",
    "Plug",
    "Push",
    "Record",
    "Release",
    "ReleaseVip",
    "Renew",
    "RenewCertificate",
    "Retire",
    "Step",
    "Unplug",
    "Wanted",
    "plan",
]

# Seconds between two looks at an amphora whose connections are to end.
_LOOK_PAUSE = 2.0
# The same at a pair that begins: one of them is about to take the VIPs.
_VIP_PAUSE = 0.1
# Seconds between two looks at a machine that boots: of one that has not come for long, at the most.
_BOOT_PAUSE, _LONGEST_BOOT_PAUSE = 1.0, 10.0
# Those that boot do so side by side: what takes long begins before anything is waited for.
_STAGES = (Boot, Plug, AwaitAgent)


def plan(wanted: Wanted, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    """The next steps, in order; the same question is asked again after they were taken."""
    if wanted.gone:
        return _removal(wanted, amphorae)
    first, later = _renewals(wanted, amphorae)
    if first:
        return first
    steps = _present(wanted, amphorae) if wanted.stock is None else plan_pool(wanted, wanted.stock, amphorae)
    # While connections end there is time enough.
    return [*later, *steps] if not steps or isinstance(steps[0], LookAfter) else steps


def _renewals(wanted: Wanted, amphorae: tuple[Amphora, ...]) -> tuple[list[AnyStep], list[AnyStep]]:
    """Certificates to be given before anything else, and those that wait until there is nothing else to do.

    One whose certificate has expired takes nothing else. One that is about to go may not answer any more: who comes in
    its place is not kept waiting for that.
    """
    going = {one.id for one in amphorae if one.state is AmphoraState.RETIRING}
    expired = {one.id for one in amphorae if one.certificate_expires_at and one.certificate_expires_at <= wanted.now}
    first: list[AnyStep] = []
    later: list[AnyStep] = []
    for one, why in sorted(wanted.renewals.items()):
        step = RenewCertificate(amphora_id=one, reason=why)
        (later if one in going - expired else first).append(step)
    return first, later


def _present(wanted: Wanted, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    """The next steps for one that is to be there."""
    house = _House(wanted, amphorae)
    if witnesses := house.witnesses():
        return [AskHolder(amphora_ids=witnesses, reason="one of them goes, and whoever has the VIPs hands them over")]
    if house.missing and house.may_grow():
        return [_newcomer(wanted, house.next_role())]
    steps = [step for one in house.live for step in _arrival(wanted, one)]
    if not vip_allocation.known(wanted.tree):
        # Amphorae boot meanwhile: where they are may be what decides.
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


def _serving(wanted: Wanted, house: _House, arrived: Sequence[Amphora]) -> list[AnyStep]:
    """What those that have arrived need, until everybody serves the newest generation and nothing is left over."""
    if house.apart(arrived):
        return [Renew(reason="an amphora has come of which its partner does not know")]
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


def _newcomer(wanted: Wanted, role: str) -> Record | Adopt:
    """Somebody for a role: a warm spare where there is one, for those that have served users before."""
    reason = f"{role} is missing of {', '.join(wanted.roles)}"
    if wanted.spares and wanted.applied:
        return Adopt(role=role, amphora_ids=wanted.spares, reason=reason)
    return Record(role=role, reason=reason)


def _joining(wanted: Wanted) -> list[AnyStep]:
    """Spares are a matter of whoever serves already: nobody waits for a pool."""
    sought = None if wanted.spec is None else wanted.spec.id
    if sought == wanted.pool:
        return []
    return [Join(spec=wanted.spec, former=wanted.pool, reason="it takes spares from another pool, or from none")]


def _addresses(wanted: Wanted) -> AllocateVip | Await:
    reason = "the network backend needs time for the addresses"
    if wanted.allocate_at > wanted.now:
        return Await(until=wanted.allocate_at, reason=reason)
    return AllocateVip(reason=reason)


class _House:
    """The amphorae of one load balancer, and what follows from who is there.

    Of several that serve, one is replaced at a time: the next replacement is made when the one before serves, its
    predecessor is gone, and it has the VIPs. So there is never more than one too many, and never none. Those that are
    dead are replaced at once, whatever becomes of their machines: nobody waits for who serves nobody.
    """

    def __init__(self, wanted: Wanted, amphorae: tuple[Amphora, ...]) -> None:
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
        """Who is to be asked for the VIPs, before anybody goes: what was heard may be older than where they are."""
        if self._wanted.holder_asked or not self._several:
            return ()
        serving = [one for one in self.everyone if one.confirmed > 0 and one.plugged and one.id not in self._quiet]
        going = [one for one in serving if one.state is AmphoraState.RETIRING and not one.handed_over]
        return tuple(one.id for one in serving) if going and len(serving) > 1 else ()

    def may_grow(self) -> bool:
        """Whether the next amphora may be made now."""
        serving = [one for one in self.retiring if one.confirmed > 0 and not one.dead]
        if not serving or not self.live:
            return True
        settled = all(one.confirmed >= self._wanted.generation for one in self.live)
        # One whose connections go on is in the way only where VIPs are to be handed over.
        staying = [one for one in serving if not self._drains(one)]
        replaced = {one.role for one in staying} & {one.role for one in self.live}
        lost = {one.role for one in self.retiring if one.dead}
        if lost & set(self.missing) and self._holder not in {one.id for one in staying}:
            # What has yet to go of somebody else, and perhaps cannot, is no reason to leave one alone.
            return settled
        return settled and not replaced and not self._leaving()

    def next_role(self) -> str:
        """The role to fill first: of two that are replaced, that of the one that has no VIPs."""
        has = {one.role for one in self.retiring if one.id == self._holder}
        return min(self.missing, key=lambda role: role in has)

    def turn_of(self, step: AnyStep) -> tuple[bool, int]:
        """Which steps of those that come are taken first: by stage; once something failed, by who has a machine."""
        late = self._wanted.attempts > 0 and getattr(step, "amphora_id", None) in self._without_machine
        return late, _STAGES.index(type(step))

    def fencing(self) -> list[AnyStep]:
        """Remove those taken for dead before their partners forget them: they may have the VIPs still.

        One whose agent ended, or whose management network did, is as silent as one that is gone. Its partner hears its
        advertisements for as long as it knows it. This is tried once: nobody waits for a machine that cannot be
        reached. One on its own has no partner that would take anything because of it: it is removed when its
        replacement serves.
        """
        if not (self._several and self._wanted.priorities) or self._wanted.attempts > 0:
            return []
        known = {each.id for one in self.live for each in one.partners}
        nobody = not any(one.confirmed for one in self.live)
        reason = "it is silent, and might have the VIPs when its partner takes them"
        return [
            Release(amphora_id=one.id, reason=reason)
            for one in self.retiring
            if one.dead and one.confirmed > 0 and (nobody or one.id in known)
        ]

    def served_meanwhile(self, arrived: Sequence[Amphora]) -> bool:
        """Whether some are to be served although others are still coming.

        One that does not come must not keep the others from it for ever, and those that have users not at all. But two
        that begin are pushed together, or each would take the VIPs.
        """
        if not self._wanted.readable:
            return False
        return any(one.confirmed or self._wanted.attempts for one in self.behind(arrived))

    def behind(self, arrived: Sequence[Amphora]) -> list[Amphora]:
        """Those that do not serve what is wanted."""
        return [one for one in arrived if one.confirmed < self._wanted.generation]

    def apart(self, arrived: Sequence[Amphora]) -> bool:
        """Whether one that serves, or has the VIPs and is about to go, does not know one that stays.

        Without a generation of its own the latter could not be told: it serves this one already, in other words.
        """
        return any(
            one.confirmed >= self._wanted.generation and set(self._partners(one, arrived)) - set(one.partners)
            for one in self._with_vips()
        ) or any(
            one.confirmed >= self._wanted.generation and set(self._partners(one, self.live)) - set(one.partners)
            for one in arrived
        )

    def push(self, arrived: Sequence[Amphora]) -> Push:
        """Have those that are behind serve; those that are replaced learn who comes."""
        behind = self.behind(arrived)
        # The others hear it whatever they know.
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
        """Whether this is a pair of which nobody has had the VIPs yet."""
        return self._several and bool(self._wanted.priorities) and not self._wanted.applied and not self.retiring

    def relief(self) -> list[AnyStep]:
        """Let those go that were replaced, and the VIPs move to the one that stays, before the next is replaced."""
        roles = {one.role for one in self.live}
        # VIPs are handed over between two. Who still has connections of a fail-over before this one is in the way; who
        # is dead is not, and its machine may take long to go.
        replaced = [
            one for one in self.retiring if not one.dead and (one.role in roles or one.drains_until is not None)
        ]
        if replaced:
            return [self._parting(one) for one in replaced]
        if any(set(one.partners) != set(self._partners(one, self.everyone)) for one in self.live):
            return [Renew(reason="the VIPs are handed over between two that know nobody else")]
        to = self.live[0].id
        return [
            HandOver(amphora_id=one.id, to=to, reason="it has the VIPs and is about to go") for one in self._leaving()
        ]

    def _leaving(self) -> list[Amphora]:
        """The one that has the VIPs, if it is about to go and was not asked to hand them over; one at most."""
        return [one for one in self._with_vips() if not one.handed_over]

    def _with_vips(self) -> list[Amphora]:
        """The one that has the VIPs, if it is about to go; one at most.

        One that could not hand them over keeps them until it is gone: who comes has to hear it, or takes them too.
        """
        return [one for one in self.retiring if self._several and one.id == self._holder and one.id not in self._quiet]

    def farewell(self) -> list[AnyStep]:
        """Let those go that were replaced; one whose VIPs have moved stays while its connections go on."""
        draining = [one for one in self.retiring if self._drains(one)]
        steps: list[AnyStep] = [self._parting(one) for one in self.retiring if one not in draining]
        steps += [self._stand_down(one) for one in draining if set(self._partners(one, self.live)) - set(one.partners)]
        steps += [
            LookAfter(amphora_id=one.id, silent=one.id in self._quiet, reason="its connections may have ended")
            for one in draining
        ]
        return steps

    def _parting(self, one: Amphora) -> Release | HandOver:
        """Let one go; if VIPs have come to it after its replacement was begun, without a moment without them.

        There are three of them then, so its connections end: only between two can they go on.
        """
        if one.holds_vip and one in self._leaving() and self.live:
            to = max(self.live, key=lambda other: self._wanted.priorities.get(other.role, 0))
            return HandOver(amphora_id=one.id, to=to.id, reason="the VIPs have come to it meanwhile")
        return Release(amphora_id=one.id, reason="it was replaced")

    def patience(self) -> list[AnyStep]:
        """Look again while connections go on."""
        draining, now = [one for one in self.retiring if self._drains(one)], self._wanted.now
        if not draining:
            return []
        ends = [one.drains_until for one in draining if one.drains_until is not None and one.drains_until > now]
        return [Await(until=min([now + _LOOK_PAUSE, *ends]), reason="connections go on until they end")]

    def _drains(self, one: Amphora) -> bool:
        """Whether it has connections that may go on, as far as is known."""
        if not one.drains_until:
            return False
        # Its agent measures that by a clock that only goes forward, and is asked again and again (`LookAfter`).
        return self._wanted.clock_set or one.drains_until > self._wanted.now

    @staticmethod
    def _stand_down(one: Amphora) -> Push:
        """Have one whose VIPs have gone know those that stay, so that it takes them only if nobody else is there."""
        reason = "it does not know everybody who stays"
        return Push(waves=((one.id,),), optional=frozenset((one.id,)), whole=False, reason=reason)

    def tidying(self) -> list[AnyStep]:
        """Once those that were replaced are gone, nobody is to ask after them any more."""
        if self.retiring or not any(set(one.partners) - set(self._partners(one, self.live)) for one in self.live):
            return []
        return [Renew(reason="an amphora is gone that its partner still knows")]

    def _partners(self, one: Amphora, others: Sequence[Amphora]) -> tuple[Partner, ...]:
        tree = self._wanted.tree
        return vrrp_peers.partners(one, others, tree.vip) if self._several and tree is not None else ()


def _removal(wanted: Wanted, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    if amphorae:
        return [Release(amphora_id=one.id, reason="its load balancer is deleted") for one in amphorae]
    if wanted.applied < wanted.generation:
        return [ReleaseVip(reason="the load balancer is deleted")]
    return []


def _arrival(wanted: Wanted, amphora: Amphora) -> list[AnyStep]:
    """What an amphora needs before it can be given a configuration."""
    steps: list[AnyStep] = []
    if amphora.management_address is None and amphora.id not in wanted.absent:
        steps.append(Boot(amphora_id=amphora.id, reason="it is recorded but not booted"))
    if wanted.readable:
        steps += _plugging(wanted, amphora)
    if amphora.state is AmphoraState.BOOTING and amphora.id not in wanted.absent:
        steps.append(AwaitAgent(amphora_id=amphora.id, reason="its agent has not answered yet"))
    return steps


def _boots(wanted: Wanted, amphora: Amphora) -> bool:
    """Whether nothing can be done for it but wait: its agent was asked a moment ago."""
    return amphora.state is AmphoraState.BOOTING and amphora.id in wanted.absent


def _patience(wanted: Wanted, waiting: Sequence[Amphora]) -> Await:
    """Look again at machines that boot, if nobody says before that an agent is there."""
    youngest = max(wanted.now if one.booted_at is None else one.booted_at for one in waiting)
    pause = min(max((wanted.now - youngest) / 8, _BOOT_PAUSE), _LONGEST_BOOT_PAUSE)
    return Await(until=wanted.now + pause, amphorae=tuple(one.id for one in waiting), reason="machines boot")


def _beginning(wanted: Wanted, house: _House) -> list[AnyStep]:
    """Of a pair that begins, one has to have the VIPs before anybody is told that users are served.

    It does not take for ever, and nothing depends on it: they agree on it among themselves.
    """
    confirmed = max((one.confirmed_at for one in house.live if one.confirmed_at is not None), default=0.0)
    earliest, latest = (confirmed + seconds for seconds in wanted.taking_vips)
    if not house.begins() or wanted.vips_taken or wanted.now >= latest:
        return []
    if wanted.vips_taken is None:
        return [AskVips(reason="one of them is to have the VIPs")]
    return [Await(until=min(max(earliest, wanted.now + _VIP_PAUSE), latest), reason="nobody has the VIPs yet")]


def _plugging(wanted: Wanted, amphora: Amphora) -> list[AnyStep]:
    plugged = {one.port.network_id: {address.subnet_id for address in one.port.addresses} for one in amphora.plugged}
    return [
        Plug(
            amphora_id=amphora.id,
            network_id=network_id,
            subnet_ids=subnets,
            reason="it has no port there yet" if network_id not in plugged else "the port lacks a subnet",
        )
        for network_id, subnets in wanted.networks.items()
        if not set(subnets) <= plugged.get(network_id, set()) or network_id not in plugged
    ]


def _cleaning(wanted: Wanted, house: _House) -> list[AnyStep]:
    """What is left over once the newest generation is served everywhere."""
    steps = house.farewell()
    steps += [
        Unplug(amphora_id=one.id, network_id=plugged.port.network_id, reason="no member is there any more")
        for one in house.live
        for plugged in one.plugged
        if plugged.port.network_id not in wanted.networks
    ]
    # The last one: who awaits takes the steps before it, and asks again later.
    return steps + house.patience()
