# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from, and what it is made of: what is wanted, and the steps there are.

Invariant: values only. A step names what is to be done and why; how it is done is not known here (`steps`), nor when
(`plan`).
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import SecretName
from amphora_driver.reconcile import vip_allocation
from amphora_driver.store.sealed_secrets import SealedSecret
from amphora_driver.store.spare_pools import SparePoolSpec, SparePoolState


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded of a load balancer.

    Args:
        generation: the newest generation.
        applied: the newest generation that every amphora confirmed.
        gone: it is to be removed.
        readable: the tree is complete; False while it waits to be read back from Octavia.
        tree: what is to be served; None when `gone`.
        networks: the networks an amphora needs, with the subnets on each of them; the VIP's network first.
        failed: what is known beforehand not to be servable: reasons by object id.
        left_out: what those that serve the newest generation already were given it without: reasons by object id.
        secrets: what is kept, sealed, of the secrets it uses.
        roles: what its topology wants, one for each amphora.
        compute: the compute backend (entry point) its amphorae are with; None for the default.
        network: the network backend its VIPs and ports are with; None for the default.
        priorities: who is preferred to have the VIPs, by role; empty where nobody takes over.
        attempts: how often this was tried in vain since the last request.
        patience: seconds of silence after which an amphora is not waited for, if another one is heard.
        tickets: how often its TLS ticket keys were made or rotated; None if it never needed any.
        now: when this was seen (seconds since 1970).
        clock_set: the clock was set less than a drain ago: whether that is over only the agent knows.
        taking_vips: for how many seconds after it confirmed one of a pair that begins takes the VIPs: from, to.
        absent: amphorae whose agents were asked in this job and did not answer.
        vips_taken: whether one of them has the VIPs, as they were asked in this job; None if they were not.
        holder_asked: they were asked in this job who has the VIPs.
        vip_given: what the network backend was told last of the VIPs' options.
        allocate_at: when it is to be asked for addresses it does not know yet.
        replacing: fail-overs of it go on, and what happens is written into their time lines.
        pool: the pool of warm spares it is recorded to take amphorae from.
        spec: what that pool should keep; None where it wants no spares.
        spares: ids of spares it may take now, the best first.
        stock: set where this is no load balancer but such a pool.
        asked: spares whose agents were asked in this job whether they are there.
        renewals: amphorae that are to be given another certificate, and why.
    """

    load_balancer_id: str
    generation: int
    applied: int
    gone: bool
    readable: bool
    tree: LoadBalancer | None
    networks: dict[str, tuple[str, ...]]
    failed: dict[str, str] = {}
    left_out: dict[str, str] = {}
    secrets: dict[SecretName, SealedSecret] = {}
    roles: tuple[str, ...] = ("STANDALONE",)
    compute: str | None = None
    network: str | None = None
    priorities: dict[str, int] = {}
    attempts: int = 0
    patience: float = 15.0
    tickets: int | None = None
    now: float = 0.0
    clock_set: bool = False
    taking_vips: tuple[float, float] = (0.0, 0.0)
    absent: frozenset[str] = frozenset()
    vips_taken: bool | None = None
    holder_asked: bool = False
    vip_given: vip_allocation.Given | None = None
    allocate_at: float = 0.0
    replacing: bool = False
    pool: str | None = None
    spec: SparePoolSpec | None = None
    spares: tuple[str, ...] = ()
    stock: SparePoolState | None = None
    asked: frozenset[str] = frozenset()
    renewals: dict[str, str] = {}


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One thing to do, and why."""

    reason: str


class Record(Step, frozen=True, kw_only=True):
    """Write down a new amphora, before anything is made for it."""

    role: str


class Adopt(Step, frozen=True, kw_only=True):
    """Take a warm spare instead of a new amphora: the first of these that is there and answers."""

    role: str
    amphora_ids: tuple[str, ...]


class Join(Step, frozen=True, kw_only=True):
    """Take spares from the pool that keeps these from now on; from none where nothing is named."""

    spec: SparePoolSpec | None
    former: str | None


class Retire(Step, frozen=True, kw_only=True):
    """Mark an amphora of a pool, so that nobody takes it any more."""

    amphora_id: str


class AskSpares(Step, frozen=True, kw_only=True):
    """Ask spares that are not heard whether they are there."""

    amphora_ids: tuple[str, ...]


class Disband(Step, frozen=True, kw_only=True):
    """Forget a pool that nobody uses."""


class Boot(Step, frozen=True, kw_only=True):
    """Have the compute backend boot an amphora."""

    amphora_id: str


class Plug(Step, frozen=True, kw_only=True):
    """Give an amphora a port on a network, with an address on each of these subnets."""

    amphora_id: str
    network_id: str
    subnet_ids: tuple[str, ...]


class AwaitAgent(Step, frozen=True, kw_only=True):
    """Ask an amphora's agent whether it is there; if it is not, whether its machine still is."""

    amphora_id: str


class RenewCertificate(Step, frozen=True, kw_only=True):
    """Give an amphora another certificate, and the authorities that it is to trust."""

    amphora_id: str


class Renew(Step, frozen=True, kw_only=True):
    """Take the next generation: what amphorae have to know of each other has changed, and no user asked for it."""


class AllocateVip(Step, frozen=True, kw_only=True):
    """Ask the network backend for addresses that it had not when the load balancer was created."""


class ApplyVipOptions(Step, frozen=True, kw_only=True):
    """Tell the network backend what the VIPs have besides addresses."""


class Push(Step, frozen=True, kw_only=True):
    """Give amphorae the newest generation; they answer when they serve it.

    Attributes:
        waves: those of a wave at once, one wave after the other.
        optional: those of them that are being replaced: they are told, but nothing depends on it.
        whole: with this every amphora of the load balancer serves the generation.
    """

    waves: tuple[tuple[str, ...], ...]
    optional: frozenset[str] = frozenset()
    whole: bool = True


class AskVips(Step, frozen=True, kw_only=True):
    """Ask a pair that begins whether one of them has taken the VIPs: before that no user is served."""


class AskHolder(Step, frozen=True, kw_only=True):
    """Ask amphorae of a pair, of which one is about to go, who has the VIPs: heartbeats may not say so yet."""

    amphora_ids: tuple[str, ...]


class Confirm(Step, frozen=True, kw_only=True):
    """Note that every amphora serves the newest generation."""


class Unplug(Step, frozen=True, kw_only=True):
    """Take a port away that nothing needs any more."""

    amphora_id: str
    network_id: str


class HandOver(Step, frozen=True, kw_only=True):
    """Have an amphora that is about to go give the VIPs to the one that stays."""

    amphora_id: str
    to: str


class LookAfter(Step, frozen=True, kw_only=True):
    """Ask an amphora that has given its VIPs away whether its connections have ended.

    Attributes:
        silent: it is not heard any more: if it does not answer either, it is dead.
    """

    amphora_id: str
    silent: bool = False


class Release(Step, frozen=True, kw_only=True):
    """Remove an amphora with all that was made for it, then its row."""

    amphora_id: str


class ReleaseVip(Step, frozen=True, kw_only=True):
    """Give the addresses back and note that the load balancer is gone."""


class Await(Step, frozen=True, kw_only=True):
    """Nothing is left to do now: somebody else moves next and will wake us, or it is looked again at `until`.

    Attributes:
        until: when; None if only somebody else can know.
        amphorae: those that boot: it is looked again as soon as an agent of theirs listens.
    """

    until: float | None = None
    amphorae: tuple[str, ...] = ()


AnyStep = (
    Record
    | Adopt
    | Join
    | Retire
    | AskSpares
    | Disband
    | Boot
    | Plug
    | AwaitAgent
    | RenewCertificate
    | Renew
    | AllocateVip
    | ApplyVipOptions
    | Push
    | AskVips
    | AskHolder
    | Confirm
    | Unplug
    | HandOver
    | LookAfter
    | Release
    | ReleaseVip
    | Await
)
