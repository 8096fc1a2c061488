# SPDX-License-Identifier: Apache-2.0
"""The fleet as the rows have it at one moment.

Invariant: plain frozen values without behaviour that could change them; everything the page, its JSON and the metrics
say of the fleet is said from here, so that they never contradict each other. Times are seconds since 1970 by the
database's clock; no secret is among the columns that are read.
"""

from __future__ import annotations

import msgspec

SPARE = "SPARE"


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Common behaviour: frozen, keywords only."""


class Balancer(Fact, frozen=True):
    """A load balancer.

    Attributes:
        state: as Octavia calls it: ACTIVE, ERROR, PENDING_CREATE, PENDING_UPDATE, PENDING_DELETE.
        operating: its operating status, where one was said.
        reason: what goes with those.
        accepted_at: since when a user waits for the oldest call that is not confirmed; None where nobody waits.
        error: what the last attempt failed of.
        due: there is something to do, at `due_at` at the earliest.
        owner: the controller that works on it now.
        holders: those of its amphorae that say they have the VIPs.
    """

    id: str
    name: str | None
    project_id: str | None
    addresses: tuple[str, ...]
    topology: str
    state: str
    operating: str | None
    reason: str | None
    generation: int
    applied: int
    committed: int
    attempts: int
    error: str | None
    due: bool
    due_at: float
    owner: str | None
    accepted_at: float | None = None
    holders: tuple[str, ...] = ()


class Machine(Fact, frozen=True):
    """An amphora, or a spare one (`role` is SPARE then, and its load balancer is a pool).

    Attributes:
        wanted: the newest generation of its load balancer; 0 of a spare.
        confirmed: the newest generation its agent said it serves.
        drift: what differed from what is wanted when something did last; history.
        drifts: whether it still does.
        silence: silent, mute or never_spoke, as the detector found it; and what follows from that.
    """

    id: str
    load_balancer_id: str
    role: str
    state: str
    wanted: int
    confirmed: int
    created_at: float
    heard_at: float | None
    holds_vip: bool | None
    agent_version: str | None
    image: str | None
    certificate_issued_at: float | None
    certificate_expires_at: float | None
    certificate_authority: int | None
    drift: str | None
    reason: str | None
    drifts: bool = False
    silence: str | None = None
    silent_since: float | None = None
    verdict: str | None = None


class Failover(Fact, frozen=True):
    """A replacement of an amphora. `step` is the newest word of its time line; empty for one that has ended."""

    id: int
    load_balancer_id: str
    amphora_id: str | None
    cause: str
    reason: str | None
    asked_by: str | None
    silent_since: float | None
    begun_at: float
    served_at: float | None
    ended_at: float | None
    outcome: str | None
    step: str | None = None
    step_at: float | None = None


class Breaker(Fact, frozen=True):
    """Whether amphorae are replaced unasked, as far as the number of silent ones and operators decide that.

    Attributes:
        state: closed, trial or open.
        held: an operator holds it open, for this reason and since then; silent and watched are the detector's.
    """

    state: str = "closed"
    since: float | None = None
    silent: int = 0
    watched: int = 0
    reason: str | None = None
    held: bool = False


class Sight(Fact, frozen=True):
    """Whether the detector hears at all: who is blind takes nobody for dead. `state` is seeing, blind or unknown."""

    state: str = "unknown"
    since: float | None = None
    reason: str | None = None


class Process(Fact, frozen=True):
    """A process of the control plane, as it said itself."""

    name: str
    kind: str
    host: str
    version: str | None
    started_at: float
    seen_at: float
    draining: bool
    jobs: int


class Pool(Fact, frozen=True):
    """Warm spares of one kind of machine: how many are wanted, booted, and ready to be taken."""

    id: str
    wanted: int
    booted: int
    ready: int
    error: str | None


class Rotation(Fact, frozen=True):
    """A roll-out over many load balancers."""

    id: int
    state: str
    max_unavailable: int
    asked_by: str | None
    created_at: float
    ended_at: float | None
    reason: str | None
    waiting: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0


class Authority(Fact, frozen=True):
    """Who vouches for amphorae or controllers, once it was rotated."""

    id: int
    kind: str
    state: str
    expires_at: float


class Zombie(Fact, frozen=True):
    """Who sends heartbeats under an id that nobody has."""

    amphora_id: str
    address: str
    first_at: float
    last_at: float
    verdict: str | None


class Outbox(Fact, frozen=True):
    """What Octavia has not taken yet: how many statuses, and since when the oldest waits."""

    waiting: int = 0
    oldest: float | None = None


class Fleet(Fact, frozen=True):
    """All of it.

    Attributes:
        at: when it was read.
        took: seconds the database needed for it.
        cut: there is more of something than is shown.
        orphans: machines, ports and VIPs that belong to nobody.
    """

    at: float
    took: float = 0.0
    cut: bool = False
    balancers: tuple[Balancer, ...] = ()
    amphorae: tuple[Machine, ...] = ()
    failovers: tuple[Failover, ...] = ()
    breaker: Breaker = Breaker()
    sight: Sight = Sight()
    processes: tuple[Process, ...] = ()
    pools: tuple[Pool, ...] = ()
    rotations: tuple[Rotation, ...] = ()
    authorities: tuple[Authority, ...] = ()
    zombies: tuple[Zombie, ...] = ()
    outbox: Outbox = Outbox()
    orphans: int = 0
