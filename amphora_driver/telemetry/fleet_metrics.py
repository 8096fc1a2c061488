# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told.

Invariant: facts of the fleet (names that begin with `amphora_fleet_`) are of one look at the rows, the same whichever
process gives them; everything else is of the process that says it. The two can be asked for apart, so that nothing is
counted twice. Every name is explained in docs/reference/metrics.md.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from amphora_driver.metrics import CAUSES
from amphora_driver.telemetry.alerts import Level, oldest_due, worst

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from amphora_driver.telemetry.fleet_snapshot import Fleet, Machine
    from amphora_driver.telemetry.snapshot_cache import View

_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_STATES = ("ACTIVE", "ERROR", "PENDING_CREATE", "PENDING_UPDATE", "PENDING_DELETE")
_OPERATING = ("ONLINE", "DEGRADED", "ERROR", "OFFLINE", "NO_MONITOR", "DRAINING")
_BREAKER = ("closed", "trial", "open")
_SIGHT = ("seeing", "blind")
_AMPHORA = ("booting", "ready", "retiring")
_SILENCES = ("silent", "mute", "never_spoke")


class _Families:
    """Families, as a collector of prometheus_client's."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class _Plain:
    """A registry without the series that say when a counter was made: nobody asks, and they double the answer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


def answer(accept: str, own: CollectorRegistry | None, view: View | None, version: str, kind: str) -> tuple[bytes, str]:
    """The text for a scrape, and its content type.

    Args:
        accept: the header of that name.
        own: what this process counts; None: not asked for.
        view: of the fleet; None: not asked for.
        version: of this installation.
        kind: of this process.
    """
    whole = CollectorRegistry()
    if own is not None:
        build = InfoMetricFamily("amphora_driver_build", "The installation that answers.")
        build.add_metric([], {"version": version, "kind": kind})
        whole.register(_Families([build]))
        whole.register(_Plain(own))
    if view is not None:
        whole.register(_Families(families(view)))
    encode, content_type = choose_encoder(accept)
    return encode(whole), content_type


def families(view: View) -> Iterator[Metric]:
    """The facts of the fleet."""
    up = GaugeMetricFamily("amphora_fleet_up", "Whether the rows could be read for this answer.")
    up.add_metric([], float(view.trouble is None and view.fleet is not None))
    yield up
    if view.trouble is not None or view.fleet is None:
        # Facts that are old must not look like new ones.
        return
    fleet = view.fleet
    yield _gauge("amphora_fleet_read_seconds", "How long reading them took.", fleet.took)
    yield _gauge("amphora_fleet_attention_level", "0 well, 1 to be watched, 2 trouble.", worst(view.notices))
    yield _by("amphora_fleet_notices", "What needs attention, by level.", "level", _levels(view))
    yield from _balancers(fleet)
    yield from _amphorae(fleet)
    yield from _failovers(fleet)
    yield from _rest(fleet)


def _levels(view: View) -> dict[str, float]:
    counted = Counter(one.level for one in view.notices)
    return {level.name.lower(): counted[level] for level in (Level.WATCH, Level.TROUBLE)}


def _balancers(fleet: Fleet) -> Iterator[Metric]:
    every = fleet.balancers
    yield _by("amphora_fleet_load_balancers", "By status.", "status", _count((one.state for one in every), _STATES))
    operating = _count((one.operating or "unknown" for one in every), _OPERATING)
    yield _by("amphora_fleet_load_balancers_operating", "By operating status.", "status", operating)
    due = [one for one in every if one.due and one.owner is None and one.due_at <= fleet.at]
    depths = {
        "due": len(due),
        "waiting": sum(one.due and one.owner is None and one.due_at > fleet.at for one in every),
        "worked_on": sum(one.owner is not None for one in every),
        "failing": sum(one.attempts > 0 for one in every),
    }
    yield _by("amphora_fleet_queue_depth", "Load balancers with work left.", "state", depths)
    oldest = oldest_due(fleet)
    age = 0.0 if oldest is None else max(0.0, fleet.at - oldest)
    yield _gauge("amphora_fleet_queue_oldest_seconds", "How long the oldest one that is due has waited.", age)
    accepted = [one.accepted_at for one in every if one.accepted_at is not None]
    waited = max((fleet.at - one for one in accepted), default=0.0)
    yield _gauge("amphora_fleet_unconfirmed", "Load balancers for a change of which a user waits.", len(accepted))
    yield _gauge("amphora_fleet_unconfirmed_oldest_seconds", "How long the oldest such change has waited.", waited)
    behind = sum(one.committed < one.generation for one in every)
    yield _gauge("amphora_fleet_uncommitted", "Load balancers whose newest call Octavia has not committed.", behind)


def _amphorae(fleet: Fleet) -> Iterator[Metric]:
    serving = [one for one in fleet.amphorae if one.wanted]
    ready = [one for one in serving if one.state == "ready"]
    yield _by("amphora_fleet_amphorae", "By state.", "state", _count((one.state for one in serving), _AMPHORA))
    behind = sum(one.confirmed < one.wanted for one in ready)
    yield _gauge("amphora_fleet_amphorae_behind", "Ready ones that serve an older generation than is wanted.", behind)
    yield _lag(fleet.at, serving)
    silent = _count((one.silence for one in fleet.amphorae if one.silence), _SILENCES)
    yield _by("amphora_fleet_amphorae_silent", "As the detector has found them.", "kind", silent)
    drifting = sum(one.drifts for one in fleet.amphorae)
    yield _gauge("amphora_fleet_amphorae_drifting", "Those that differ from what is wanted now.", drifting)
    ends = [one.certificate_expires_at for one in fleet.amphorae if one.certificate_expires_at is not None]
    if ends:
        text = "Until the first certificate of an amphora expires."
        yield _gauge("amphora_fleet_certificate_expiry_seconds", text, min(ends) - fleet.at)
    yield _gauge("amphora_fleet_zombies", "Senders of heartbeats under an id nobody has.", len(fleet.zombies))
    yield _gauge("amphora_fleet_orphans", "Machines, ports and VIPs that belong to nobody.", fleet.orphans)


def _lag(now: float, amphorae: list[Machine]) -> Metric:
    """Ages of the last heartbeats of this moment; who was never heard counts from its creation."""
    ages = sorted(max(0.0, now - (one.heard_at or one.created_at)) for one in amphorae if one.state == "ready")
    family = GaugeMetricFamily(
        "amphora_fleet_heartbeat_age_seconds", "Since ready amphorae were heard; 1 is the oldest.", labels=["quantile"]
    )
    for quantile in _QUANTILES if ages else ():
        family.add_metric([f"{quantile:g}"], ages[min(int(quantile * len(ages)), len(ages) - 1)])
    return family


def _failovers(fleet: Fleet) -> Iterator[Metric]:
    going = [one for one in fleet.failovers if one.ended_at is None]
    open_ones = _count((one.cause for one in going), CAUSES)
    yield _by("amphora_fleet_failovers_open", "Fail-overs that go on, by cause.", "cause", open_ones)
    oldest = max((fleet.at - one.begun_at for one in going), default=0.0)
    yield _gauge("amphora_fleet_failovers_oldest_seconds", "How long the oldest of them goes on.", oldest)
    breaker = {state: float(fleet.breaker.state == state) for state in _BREAKER}
    yield _by("amphora_fleet_breaker", "1 for the state the breaker is in.", "state", breaker)
    held = "1 while an operator holds the breaker open."
    yield _gauge("amphora_fleet_breaker_held", held, fleet.breaker.held)
    sight = {state: float(fleet.sight.state == state) for state in _SIGHT}
    yield _by("amphora_fleet_sight", "1 for whether the detector sees; who is blind replaces nobody.", "state", sight)


def _rest(fleet: Fleet) -> Iterator[Metric]:
    spares = GaugeMetricFamily("amphora_fleet_spares", "Warm spares by pool.", labels=["pool", "state"])
    for pool in fleet.pools:
        for state in ("wanted", "booted", "ready"):
            spares.add_metric([pool.id, state], getattr(pool, state))
    yield spares
    items = GaugeMetricFamily("amphora_fleet_rotation_items", "Of the newest rotation.", labels=["state"])
    for rotation in fleet.rotations[:1]:
        for state in ("waiting", "running", "done", "failed", "skipped"):
            items.add_metric([state], getattr(rotation, state))
    yield items
    running = sum(one.state in {"running", "paused"} for one in fleet.rotations)
    yield _gauge("amphora_fleet_rotations", "Rotations that go on, or are paused.", running)
    authorities = GaugeMetricFamily(
        "amphora_fleet_authority_expiry_seconds", "Until an authority ends.", labels=["kind", "state"]
    )
    for authority in fleet.authorities:
        authorities.add_metric([authority.kind, authority.state], authority.expires_at - fleet.at)
    yield authorities
    yield _gauge("amphora_fleet_outbox", "Statuses Octavia has not taken yet.", fleet.outbox.waiting)
    oldest = fleet.outbox.oldest
    age = 0.0 if oldest is None else max(0.0, fleet.at - oldest)
    yield _gauge("amphora_fleet_outbox_oldest_seconds", "How long the oldest of them waits.", age)
    seen = GaugeMetricFamily("amphora_fleet_processes", "Processes of the control plane.", labels=["kind", "draining"])
    counted = Counter((one.kind, str(one.draining).lower()) for one in fleet.processes)
    for (kind, draining), number in sorted(counted.items()):
        seen.add_metric([kind, draining], number)
    yield seen
    ages = GaugeMetricFamily("amphora_fleet_process_age_seconds", "Since the youngest sign of life.", labels=["kind"])
    youngest: dict[str, float] = {}
    for process in fleet.processes:
        youngest[process.kind] = max(process.seen_at, youngest.get(process.kind, 0.0))
    for kind, seen_at in sorted(youngest.items()):
        ages.add_metric([kind], max(0.0, fleet.at - seen_at))
    yield ages


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], float(number))
    return family


def _count(found: Iterable[str | None], known: tuple[str, ...]) -> dict[str, float]:
    """How many of each, those of which there are none too: a series that comes and goes cannot be watched."""
    counted = Counter(one for one in found if one is not None)
    return {**dict.fromkeys(known, 0.0), **{name: float(number) for name, number in counted.items()}}
