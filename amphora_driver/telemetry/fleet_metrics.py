# SPDX-License-Identifier: Apache-2.0
"""Metrics of the fleet and of this process in the Prometheus format.

Invariant: metrics of the fleet (`amphora_fleet_*`) describe one snapshot of the database, and are the same in every
process. All other metrics describe the process that answers. Both groups have their own path, so that a scrape of
several processes counts no fleet metric twice. Source: docs/reference/metrics.md.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from amphora_driver.metrics import CAUSES
from amphora_driver.model.amphora import Resource
from amphora_driver.telemetry.alerts import Level, due_now, oldest_due, worst_level
from amphora_driver.telemetry.process_groups import DEAD_AFTER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from amphora_driver.telemetry.fleet_snapshot import AmphoraInfo, FleetSnapshot
    from amphora_driver.telemetry.snapshot_cache import View

_PERCENTILES = (50, 90, 99, 100)
_STATES = ("ACTIVE", "ERROR", "PENDING_CREATE", "PENDING_UPDATE", "PENDING_DELETE")
_OPERATING = ("ONLINE", "DEGRADED", "ERROR", "OFFLINE", "NO_MONITOR", "DRAINING")
_BREAKER = ("closed", "trial", "open")
_DETECTOR = ("seeing", "blind")
_AMPHORA = ("booting", "ready", "retiring")
_SILENCES = ("silent", "mute", "never_spoke")
_RESOURCES = tuple(one.value for one in Resource)
# Maximum number of series with the id of an amphora. Only amphorae near a limit have such series.
_MAX_NEAR = 200


class _Collector:
    """A collector of prometheus_client with fixed metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def encode_metrics(
    accept: str, own: CollectorRegistry | None, view: View | None, version: str, kind: str
) -> tuple[bytes, str]:
    """Return the text for a scrape, and the content type that the Accept header selects.

    Args:
        own: the metrics of this process; None if not requested.
        view: the view of the fleet; None if not requested.
        version: version of this installation.
        kind: kind of this process.
    """
    families: list[Metric] = []
    if own is not None:
        build = InfoMetricFamily("amphora_driver_build", "Version of the process that answers, and its kind.")
        build.add_metric([], {"version": version, "kind": kind})
        families += [build, *own.collect()]
    for family in families:
        # prometheus_client adds a series `_created` to each counter, which would double the size of the response.
        family.samples = [one for one in family.samples if not one.name.endswith("_created")]
    if view is not None:
        families += fleet_families(view)
    whole = CollectorRegistry()
    whole.register(_Collector(families))
    encode, content_type = choose_encoder(accept)
    return encode(whole), content_type


def fleet_families(view: View) -> Iterator[Metric]:
    """Return the metrics of the fleet."""
    is_current = view.read_error is None and view.fleet is not None
    yield _gauge("amphora_fleet_up", "1 if the database could be read for this answer.", is_current)
    if view.read_error is not None or view.fleet is None:
        # If the database cannot be read, the metrics of the fleet are omitted, because old values would look current.
        return
    fleet = view.fleet
    yield _gauge("amphora_fleet_read_seconds", "Duration of the read of the fleet.", fleet.took)
    text = "Highest level of a notice: 0 none, 1 warning, 2 critical."
    yield _gauge("amphora_fleet_alert_level", text, worst_level(view.notices))
    counted = Counter(one.level for one in view.notices)
    levels = {level.name.lower(): counted[level] for level in (Level.WARNING, Level.CRITICAL)}
    yield _by("amphora_fleet_alerts", "Notices by level.", "level", levels)
    yield from _balancer_metrics(fleet)
    yield from _amphora_metrics(fleet)
    yield from _limit_metrics(fleet)
    yield _tls_expiries(fleet)
    yield from _failover_metrics(fleet)
    yield from _control_plane_metrics(fleet)


def _balancer_metrics(fleet: FleetSnapshot) -> Iterator[Metric]:
    every = fleet.balancers
    states = _count((one.state for one in every), _STATES)
    yield _by("amphora_fleet_load_balancers", "Load balancers by provisioning status.", "status", states)
    operating = _count((one.operating or "unknown" for one in every), _OPERATING)
    yield _by("amphora_fleet_load_balancers_operating", "Load balancers by operating status.", "status", operating)
    depths = {
        "due": len(due_now(fleet)),
        "waiting": sum(one.due and one.owner is None and one.due_at > fleet.at for one in every),
        "running": sum(one.owner is not None for one in every),
        "failing": sum(one.attempts > 0 for one in every),
    }
    yield _by("amphora_fleet_queue_depth", "Load balancers with a job, by its state.", "state", depths)
    oldest = oldest_due(fleet)
    age = 0.0 if oldest is None else max(0.0, fleet.at - oldest)
    yield _gauge("amphora_fleet_queue_oldest_seconds", "Age of the oldest due job.", age)
    accepted = [one.accepted_at for one in every if one.accepted_at is not None]
    waited = max((fleet.at - one for one in accepted), default=0.0)
    yield _gauge("amphora_fleet_unconfirmed", "Load balancers with an unconfirmed change.", len(accepted))
    yield _gauge("amphora_fleet_unconfirmed_oldest_seconds", "Age of the oldest unconfirmed change.", waited)
    behind = sum(one.committed < one.generation for one in every)
    yield _gauge("amphora_fleet_uncommitted", "Load balancers whose last change Octavia has not committed.", behind)


def _amphora_metrics(fleet: FleetSnapshot) -> Iterator[Metric]:
    serving = [one for one in fleet.amphorae if one.wanted]
    ready = [one for one in serving if one.state == "ready"]
    yield _by("amphora_fleet_amphorae", "Amphorae by state.", "state", _count((one.state for one in serving), _AMPHORA))
    behind = sum(one.confirmed < one.wanted for one in ready)
    yield _gauge("amphora_fleet_amphorae_outdated", "Ready amphorae that serve an older generation.", behind)
    yield _heartbeat_ages(fleet.at, serving)
    silent = _count((one.silence for one in fleet.amphorae if one.silence), _SILENCES)
    yield _by("amphora_fleet_amphorae_silent", "Silent amphorae by the failure detector's result.", "kind", silent)
    drifting = sum(one.drifts for one in fleet.amphorae)
    yield _gauge("amphora_fleet_amphorae_drifting", "Amphorae with drift.", drifting)
    ends = [one.certificate_expires_at for one in fleet.amphorae if one.certificate_expires_at is not None]
    if ends:
        text = "Time until the first amphora certificate expires."
        yield _gauge("amphora_fleet_certificate_expiry_seconds", text, min(ends) - fleet.at)
    unknown = len(fleet.unknown_amphorae)
    yield _gauge("amphora_fleet_unknown_amphorae", "Senders of heartbeats with an unknown amphora id.", unknown)
    yield _gauge("amphora_fleet_orphans", "Orphaned machines, ports and VIPs.", fleet.orphans)


def _limit_metrics(fleet: FleetSnapshot) -> Iterator[Metric]:
    near = [(one, name) for one in fleet.amphorae for name in one.near_limit]
    counts = _count((name for _, name in near), _RESOURCES)
    yield _by("amphora_fleet_amphorae_near_limit", "Amphorae near a limit, by resource.", "resource", counts)
    text = "1 for each resource of an amphora that is near its limit."
    labels = ["amphora", "load_balancer", "resource"]
    family = GaugeMetricFamily("amphora_fleet_amphora_near_limit", text, labels=labels)
    for one, name in near[:_MAX_NEAR]:
        family.add_metric([one.id, one.load_balancer_id, name], 1.0)
    yield family


def _tls_expiries(fleet: FleetSnapshot) -> Metric:
    text = "Time until the certificate of a listener or pool expires, for those that expire soon; negative afterwards."
    labels = ["load_balancer", "kind", "object"]
    family = GaugeMetricFamily("amphora_fleet_tls_certificate_expiry_seconds", text, labels=labels)
    for one in fleet.expiring:
        family.add_metric([one.load_balancer_id, one.kind, one.object_id], one.expires_at - fleet.at)
    return family


def _heartbeat_ages(now: float, amphorae: list[AmphoraInfo]) -> Metric:
    """Return percentiles of the ages of the last heartbeats.

    Without a heartbeat, the creation time counts. The label is not `quantile`, which Prometheus reserves for metrics of
    the type summary.
    """
    ages = sorted(max(0.0, now - one.last_heartbeat) for one in amphorae if one.state == "ready")
    places = {f"{one}": min(one * len(ages) // 100, len(ages) - 1) for one in _PERCENTILES if ages}
    values = {percentile: ages[place] for percentile, place in places.items()}
    return _by(
        "amphora_fleet_heartbeat_age_seconds", "Age of the last heartbeat of ready amphorae.", "percentile", values
    )


def _failover_metrics(fleet: FleetSnapshot) -> Iterator[Metric]:
    open_ones = [one for one in fleet.failovers if one.ended_at is None]
    by_cause = _count((one.cause for one in open_ones), CAUSES)
    yield _by("amphora_fleet_failovers_open", "Open fail-overs by cause.", "cause", by_cause)
    oldest = max((fleet.at - one.begun_at for one in open_ones), default=0.0)
    yield _gauge("amphora_fleet_failovers_oldest_seconds", "Age of the oldest open fail-over.", oldest)
    breaker = {state: float(fleet.breaker.state == state) for state in _BREAKER}
    yield _by("amphora_fleet_circuit_breaker", "1 for the state of the circuit breaker.", "state", breaker)
    text = "1 while an operator holds the circuit breaker open."
    yield _gauge("amphora_fleet_circuit_breaker_held", text, fleet.breaker.held)
    sight = {state: float(fleet.sight.state == state) for state in _DETECTOR}
    yield _by("amphora_fleet_detector", "1 for the state of the failure detector.", "state", sight)


def _control_plane_metrics(fleet: FleetSnapshot) -> Iterator[Metric]:
    spares = GaugeMetricFamily("amphora_fleet_spares", "Spare amphorae by pool and state.", labels=["pool", "state"])
    for pool in fleet.pools:
        for state in ("wanted", "booted", "ready"):
            spares.add_metric([pool.id, state], getattr(pool, state))
    yield spares
    states = ("waiting", "running", "done", "failed", "skipped")
    items = {state: getattr(rotation, state) for rotation in fleet.rotations[:1] for state in states}
    yield _by("amphora_fleet_rotation_items", "Load balancers of the newest rotation.", "state", items)
    running = sum(one.state in {"running", "paused"} for one in fleet.rotations)
    yield _gauge("amphora_fleet_rotations", "Running and paused image rotations.", running)
    cas = GaugeMetricFamily("amphora_fleet_ca_expiry_seconds", "Time until a CA expires.", labels=["kind", "state"])
    for authority in fleet.authorities:
        cas.add_metric([authority.kind, authority.state], authority.expires_at - fleet.at)
    yield cas
    yield _gauge("amphora_fleet_outbox", "Statuses that are not reported to Octavia yet.", fleet.outbox.waiting)
    oldest = fleet.outbox.oldest
    age = 0.0 if oldest is None else max(0.0, fleet.at - oldest)
    yield _gauge("amphora_fleet_outbox_oldest_seconds", "Age of the oldest unreported status.", age)
    seen = GaugeMetricFamily("amphora_fleet_processes", "Living processes.", labels=["kind", "draining"])
    alive = [one for one in fleet.processes if fleet.at - one.seen_at <= DEAD_AFTER]
    counted = Counter((one.kind, str(one.draining).lower()) for one in alive)
    for (kind, draining), number in sorted(counted.items()):
        seen.add_metric([kind, draining], number)
    yield seen
    # A later entry of the dictionary replaces an earlier one. With the newest heartbeat last, each kind of process
    # keeps it.
    youngest = {one.kind: one.seen_at for one in sorted(fleet.processes, key=lambda one: one.seen_at)}
    ages = {kind: max(0.0, fleet.at - seen_at) for kind, seen_at in sorted(youngest.items())}
    yield _by("amphora_fleet_process_age_seconds", "Age of the newest heartbeat of a process.", "kind", ages)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], float(number))
    return family


def _count(found: Iterable[str | None], known: tuple[str, ...]) -> dict[str, float]:
    """Count values. Known values are always present, because alerts need continuous series."""
    return {**dict.fromkeys(known, 0.0), **Counter(one for one in found if one is not None)}
