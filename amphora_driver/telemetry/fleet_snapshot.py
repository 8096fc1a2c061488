# SPDX-License-Identifier: Apache-2.0
"""Snapshot of the fleet: the rows of the database at one moment.

Invariant: the records are frozen and contain no secrets. The page, the JSON and the metrics use the same snapshot, so
their values never contradict each other. Times are seconds since 1970 by the clock of the database.
"""

from __future__ import annotations

import msgspec

from amphora_driver.store.sealed_secrets import ExpiringSecret

SPARE = "SPARE"


class _Info(msgspec.Struct, frozen=True, kw_only=True):
    pass


class LoadBalancerInfo(_Info, frozen=True):
    """A load balancer.

    Attributes:
        state: provisioning status: ACTIVE, ERROR, PENDING_CREATE, PENDING_UPDATE, PENDING_DELETE.
        operating: operating status; None if none was computed.
        accepted_at: time of the oldest unconfirmed request; None if all are confirmed.
        due: whether a job is pending, at `due_at` at the earliest.
        owner: the controller that runs the job of the load balancer now.
        holders: the amphorae that report that they hold the VIPs.
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


class AmphoraInfo(_Info, frozen=True):
    """An amphora, or a spare (`role` is SPARE, and `load_balancer_id` is the id of its pool).

    Attributes:
        wanted: the newest generation of the load balancer; 0 for a spare.
        confirmed: the newest generation that the agent confirmed.
        drift: the last detected drift, current or not.
        drifts: whether the amphora drifts now.
        silence: result of the failure detector: silent, mute or never_spoke; None for an amphora that is not silent.
        verdict: consequence of the silence.
        near_limit: the resources of which the amphora uses almost all.
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
    near_limit: tuple[str, ...] = ()

    @property
    def last_heartbeat(self) -> float:
        """The time of the last heartbeat; without a heartbeat, the creation time."""
        return self.heard_at or self.created_at


class FailoverInfo(_Info, frozen=True):
    """A replacement of an amphora. `step` is the newest event of an open fail-over."""

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


class BreakerInfo(_Info, frozen=True):
    """The circuit breaker of automatic fail-overs.

    Attributes:
        state: closed, trial or open.
        silent: number of silent amphorae at the last decision of the failure detector.
        watched: number of all amphorae at that decision.
        held: whether an operator holds the circuit breaker open; then `since` and `reason` are the operator's.
    """

    state: str = "closed"
    since: float | None = None
    silent: int = 0
    watched: int = 0
    reason: str | None = None
    held: bool = False


class DetectorInfo(_Info, frozen=True):
    """Whether the failure detector receives heartbeats: seeing, blind (no fail-over) or unknown."""

    state: str = "unknown"
    since: float | None = None
    reason: str | None = None


class ProcessInfo(_Info, frozen=True):
    """A process of the control plane, from its row in the registry."""

    name: str
    kind: str
    host: str
    version: str | None
    started_at: float
    seen_at: float
    draining: bool
    jobs: int


class SparePoolInfo(_Info, frozen=True):
    """A pool of spare amphorae: the desired number, and the numbers of booted and ready ones."""

    id: str
    wanted: int
    booted: int
    ready: int
    error: str | None


class RotationInfo(_Info, frozen=True):
    """An image rotation, with the numbers of load balancers by state."""

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


class AuthorityInfo(_Info, frozen=True):
    """A CA of amphorae or controllers. The database records the first CA at its rotation."""

    id: int
    kind: str
    state: str
    expires_at: float


class UnknownAmphoraInfo(_Info, frozen=True):
    """A sender of heartbeats with an unknown amphora id."""

    amphora_id: str
    address: str
    first_at: float
    last_at: float
    verdict: str | None


class OutboxInfo(_Info, frozen=True):
    """The number of statuses that are not reported to Octavia yet, and the time of the oldest."""

    waiting: int = 0
    oldest: float | None = None


class FleetSnapshot(_Info, frozen=True):
    """The complete snapshot.

    Attributes:
        at: time of the read.
        took: duration of the read in seconds.
        cut: whether a limit has truncated the result.
        orphans: number of orphaned machines, ports and VIPs.
        expiring: certificates of users that expire soon, the first one first.
    """

    at: float
    took: float = 0.0
    cut: bool = False
    balancers: tuple[LoadBalancerInfo, ...] = ()
    amphorae: tuple[AmphoraInfo, ...] = ()
    failovers: tuple[FailoverInfo, ...] = ()
    breaker: BreakerInfo = BreakerInfo()
    sight: DetectorInfo = DetectorInfo()
    processes: tuple[ProcessInfo, ...] = ()
    pools: tuple[SparePoolInfo, ...] = ()
    rotations: tuple[RotationInfo, ...] = ()
    authorities: tuple[AuthorityInfo, ...] = ()
    unknown_amphorae: tuple[UnknownAmphoraInfo, ...] = ()
    outbox: OutboxInfo = OutboxInfo()
    orphans: int = 0
    expiring: tuple[ExpiringSecret, ...] = ()

    def amphorae_by_balancer(self) -> dict[str, list[AmphoraInfo]]:
        found: dict[str, list[AmphoraInfo]] = {}
        for one in self.amphorae:
            found.setdefault(one.load_balancer_id, []).append(one)
        return found
