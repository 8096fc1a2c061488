# SPDX-License-Identifier: Apache-2.0
"""What to do next, as a pure function.

Invariant: `plan` looks at what is wanted and what is observed and names the steps that lead from one to the other. It
does no I/O, has no memory, and an empty answer means that nothing is left to do. Every step is idempotent and leaves
its mark in the store, so that after a crash the same function names the same step again. Create, update, fail-over
and delete are this one function with different wanted states.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secrets import SecretName
from amphora_driver.store.amphorae import Amphora, State
from amphora_driver.store.secrets import Sealed


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
        secrets: what is kept, sealed, of the secrets it uses.
        roles: what its topology wants, one for each amphora.
        compute: the compute backend (entry point) its amphorae are with; None for the default.
        network: the network backend its VIPs and ports are with; None for the default.
    """

    load_balancer_id: str
    generation: int
    applied: int
    gone: bool
    readable: bool
    tree: LoadBalancer | None
    networks: dict[str, tuple[str, ...]]
    failed: dict[str, str] = {}
    secrets: dict[SecretName, Sealed] = {}
    roles: tuple[str, ...] = ("STANDALONE",)
    compute: str | None = None
    network: str | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One thing to do, and why."""

    reason: str


class Record(Step, frozen=True, kw_only=True):
    """Write down a new amphora, before anything is made for it."""

    role: str


class Boot(Step, frozen=True, kw_only=True):
    """Have the compute backend boot an amphora."""

    amphora_id: str


class Plug(Step, frozen=True, kw_only=True):
    """Give an amphora a port on a network, with an address on each of these subnets."""

    amphora_id: str
    network_id: str
    subnet_ids: tuple[str, ...]


class AwaitAgent(Step, frozen=True, kw_only=True):
    """Wait until an amphora's agent answers."""

    amphora_id: str


class Push(Step, frozen=True, kw_only=True):
    """Give these amphorae the newest generation, at once; they answer when they serve it."""

    amphora_ids: tuple[str, ...]


class Confirm(Step, frozen=True, kw_only=True):
    """Note that every amphora serves the newest generation."""


class Unplug(Step, frozen=True, kw_only=True):
    """Take a port away that nothing needs any more."""

    amphora_id: str
    network_id: str


class Release(Step, frozen=True, kw_only=True):
    """Remove an amphora with all that was made for it, then its row."""

    amphora_id: str


class ReleaseVip(Step, frozen=True, kw_only=True):
    """Give the addresses back and note that the load balancer is gone."""


class Await(Step, frozen=True, kw_only=True):
    """Somebody else moves next and will wake us."""


AnyStep = Record | Boot | Plug | AwaitAgent | Push | Confirm | Unplug | Release | ReleaseVip | Await


def plan(wanted: Wanted, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    """The next steps, in order; the same question is asked again after they were taken."""
    if wanted.gone:
        return _removal(wanted, amphorae)
    live = [one for one in amphorae if one.state is not State.RETIRING]
    missing = list((Counter(wanted.roles) - Counter(one.role for one in live)).elements())
    if missing:
        return [Record(role=missing[0], reason=f"{missing[0]} is missing of {', '.join(wanted.roles)}")]
    steps: list[AnyStep] = []
    for one in live:
        steps += _arrival(wanted, one)
    if steps:
        return steps
    if not wanted.readable:
        return [Await(reason="the tree is read back from Octavia after its commit")]
    behind = tuple(one.id for one in live if one.confirmed < wanted.generation)
    if behind:
        return [Push(amphora_ids=behind, reason=f"generation {wanted.generation} is not confirmed yet")]
    if wanted.applied < wanted.generation:
        return [Confirm(reason=f"every amphora serves generation {wanted.generation}")]
    return _cleaning(wanted, live, [one for one in amphorae if one.state is State.RETIRING])


def _removal(wanted: Wanted, amphorae: tuple[Amphora, ...]) -> list[AnyStep]:
    if amphorae:
        return [Release(amphora_id=one.id, reason="its load balancer is deleted") for one in amphorae]
    if wanted.applied < wanted.generation:
        return [ReleaseVip(reason="the load balancer is deleted")]
    return []


def _arrival(wanted: Wanted, amphora: Amphora) -> list[AnyStep]:
    """What an amphora needs before it can be given a configuration."""
    steps: list[AnyStep] = []
    if amphora.management_address is None:
        steps.append(Boot(amphora_id=amphora.id, reason="it is recorded but not booted"))
    if wanted.readable:
        steps += _plugging(wanted, amphora)
    if amphora.state is State.BOOTING:
        steps.append(AwaitAgent(amphora_id=amphora.id, reason="its agent has not answered yet"))
    return steps


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


def _cleaning(wanted: Wanted, live: list[Amphora], retiring: list[Amphora]) -> list[AnyStep]:
    """What is left over once the newest generation is served everywhere."""
    steps: list[AnyStep] = [Release(amphora_id=one.id, reason="it was replaced") for one in retiring]
    steps += [
        Unplug(amphora_id=one.id, network_id=plugged.port.network_id, reason="no member is there any more")
        for one in live
        for plugged in one.plugged
        if plugged.port.network_id not in wanted.networks
    ]
    return steps
