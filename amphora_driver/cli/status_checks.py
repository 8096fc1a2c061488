# SPDX-License-Identifier: Apache-2.0
"""Results of `status check`, and the checks of database rows. The functions do no I/O.

Invariant: the details of each result describe the state in one sentence and, for a warning or failure, the remedy.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

from amphora_driver.cli import queries
from amphora_driver.cli.formatting import format_duration
from amphora_driver.model.amphora import AmphoraState, describe_resources
from amphora_driver.store import circuit_breaker, process_registry
from amphora_driver.telemetry.alerts import MONTH, RENEWAL_OVERDUE
from amphora_driver.telemetry.process_groups import DEAD_AFTER, LOOP_SECONDS, group_processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amphora_driver.cli.queries import LoadBalancerSummary
    from amphora_driver.store.sealed_secrets import ExpiringSecret

_MAX_LISTED = 5
_DATE = re.compile(r"(?<![0-9])([0-9]{4})-([0-9]{2})-([0-9]{2})(?![0-9])", re.ASCII)
_KINDS = {
    process_registry.ProcessKind.CONTROLLER: (
        "Controllers",
        "Start amphora-controller: without it no load balancer is changed and no amphora is replaced.",
    ),
    process_registry.ProcessKind.HEALTH_MANAGER: (
        "Health managers",
        "Start amphora-health-manager: without it no heartbeat is received and no amphora is replaced.",
    ),
    process_registry.ProcessKind.PROVIDER_AGENT: (
        "Provider agents",
        "Start octavia-driver-agent with `haproxy` in enabled_provider_agents: without it Octavia receives no status.",
    ),
}


class Result(IntEnum):
    """Result of a check. The largest number of all checks is the exit status."""

    SUCCESS = 0
    WARNING = 1
    FAILURE = 2

    @property
    def word(self) -> str:
        """The name in the form of OpenStack's upgrade checks."""
        return self.name.capitalize()


class Check(msgspec.Struct, frozen=True):
    """One line of the output. `host_checks.run_check` sets the name of a single check."""

    result: Result
    details: str
    name: str = ""


def success(details: str, name: str = "") -> Check:
    """Return a result that needs no action."""
    return Check(Result.SUCCESS, details, name)


def warning(details: str, name: str = "") -> Check:
    """Return a result that an operator should examine; the service works."""
    return Check(Result.WARNING, details, name)


def failure(details: str, name: str = "") -> Check:
    """Return a result that an operator must correct before an upgrade."""
    return Check(Result.FAILURE, details, name)


def list_ids(ids: Iterable[str]) -> str:
    """Return the first ids and the number of the others."""
    found = list(ids)
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return ", ".join(found[:_MAX_LISTED]) + more


def check_processes(rows: Sequence[Any], now: float, installed: str) -> list[Check]:
    """Check that a process of each kind is alive, and that all have the installed version."""
    found = []
    for kind, (name, remedy) in _KINDS.items():
        groups = [one for one in group_processes(rows, now) if one.kind == kind.value]
        alive = [row for one in groups for row in one.alive]
        gone = [row for one in groups for row in one.missing]
        loops = [one for one in groups if one.restarts_repeatedly(now)]
        hosts = ", ".join(sorted(f"{row.host} ({row.version})" for row in alive))
        if not alive:
            last = max((row.seen_at for row in gone), default=None)
            stopped = "none is recorded; a process removes its record when it stops"
            since = stopped if last is None else f"the last sign of life was {format_duration(now - last)} ago"
            found.append(failure(f"none is alive: {since}. {remedy}", name))
        elif all(row.draining for row in alive):
            words = f"all are draining: {hosts}. Run: amphoractl controller resume NAME, or --host HOST."
            found.append(failure(words, name))
        elif gone:
            lost = ", ".join(f"{row.host} (last sign {format_duration(now - row.seen_at)} ago)" for row in gone)
            words = f"alive: {hosts}; ended without a shutdown: {lost}. Check its log and start it again."
            found.append(warning(words, name))
        elif loops:
            counted = ", ".join(f"{one.host} ({one.recent_deaths(now)} times)" for one in loops)
            words = f"ended without a shutdown and replaced in the last {LOOP_SECONDS / 60:.0f} min: {counted}"
            found.append(warning(f"{words}. Check the log of the process.", name))
        else:
            found.append(success(f"alive: {hosts}", name))
    versions = {row.version or "unknown" for row in rows if now - row.seen_at <= DEAD_AFTER}
    if versions - {installed}:
        words = ", ".join(sorted(versions | {installed}))
        found.append(warning(f"several are in use: {words}. Upgrade all hosts to one version.", "Versions"))
    else:
        found.append(success(f"{installed} on all hosts", "Versions"))
    return found


def check_provider(provider: str, offered: Sequence[str]) -> Check:
    """Check that the list of providers of Octavia's API contains this provider."""
    if provider in offered:
        return success(f"octavia-api offers {provider}")
    words = f"octavia-api does not offer {provider}, only: {', '.join(offered) or 'nothing'}"
    cause = "It drops a driver that it cannot load at its start: its log has 'Unable to load provider driver'"
    remedy = "Correct the reason in the log, or enabled_provider_drivers in octavia.conf, and restart octavia-api."
    return failure(f"{words}. {cause}. {remedy}")


def check_load_balancers(found: Sequence[LoadBalancerSummary], now: float, max_seconds: float) -> list[Check]:
    """Check for load balancers in ERROR and for changes that take longer than `max_seconds`."""
    wrong = [one.work.load_balancer_id for one in found if queries.provisioning_status(one) == "ERROR"]
    down = [one.work.load_balancer_id for one in found if queries.operating_status(one) == "ERROR"]
    stuck = [one for one in found if one.since is not None and now - one.since > max_seconds]
    remedy = "Run: amphoractl loadbalancer show ID."
    checks = [
        failure(f"{len(wrong)} in ERROR: {list_ids(wrong)}. {remedy}", "Load balancers")
        if wrong
        else warning(f"{len(down)} with operating status ERROR: {list_ids(down)}. {remedy}", "Load balancers")
        if down
        else success(f"none of {len(found)} is in ERROR", "Load balancers")
    ]
    if stuck:
        longest = max(now - (one.since or now) for one in stuck)
        ids = list_ids(one.work.load_balancer_id for one in stuck)
        words = f"{len(stuck)} pending for up to {format_duration(longest)}: {ids}. Run: amphoractl job list."
        checks.append(failure(words, "Pending work"))
    else:
        busy = sum(one.since is not None for one in found)
        checks.append(success(f"{busy} load balancers are being changed, none for too long", "Pending work"))
    return checks


def check_failovers(rows: Sequence[Any], now: float, max_seconds: float) -> Check:
    """Check for fail-overs in progress, which must serve the load balancer again within `max_seconds`."""
    if not rows:
        return success("none in progress")
    late = [row for row in rows if row.served_at is None and now - row.begun_at > max_seconds]
    if late:
        ids = list_ids(row.load_balancer_id for row in late)
        words = f"{len(late)} in progress for more than {format_duration(max_seconds)}: load balancers {ids}."
        return failure(f"{words} Run: amphoractl failover list, failover show NUMBER.")
    ids = list_ids(row.load_balancer_id for row in rows)
    return warning(f"{len(rows)} in progress: load balancers {ids}. Wait until they have ended.")


def check_rotations(rows: Sequence[Any]) -> Check:
    """Check for rotations in progress, which have no end in the database."""
    paused = [row for row in rows if row.state == "paused"]
    if paused:
        words = "; ".join(f"{row.id}: {row.reason or 'paused by an operator'}" for row in paused)
        return warning(f"paused: {words}. Run: amphoractl rotation show, then resume or abort.")
    if rows:
        numbers = ", ".join(str(row.id) for row in rows)
        return warning(f"in progress: {numbers}. Wait, or pause it: amphoractl rotation pause NUMBER.")
    return success("none in progress")


def check_breaker(rows: Mapping[str, circuit_breaker.BreakerRow]) -> Check:
    """Check that automatic fail-overs are possible and that the detector receives heartbeats."""
    held, automatic, sight = (
        rows.get(one) for one in (circuit_breaker.OPERATOR, circuit_breaker.AUTOMATIC, circuit_breaker.SIGHT)
    )
    if held is not None:
        return warning(f"held open by an operator: {held.reason}. Run: amphoractl circuit-breaker close.")
    if automatic is not None and automatic.state != circuit_breaker.CLOSED:
        words = f"{automatic.state}: {automatic.silent} of {automatic.watched} amphorae are silent"
        return failure(f"{words}. No automatic fail-over begins. Run: amphoractl failover status.")
    if sight is not None and sight.state == circuit_breaker.BLIND:
        words = f"the detector is blind: {sight.reason}. No automatic fail-over begins"
        return warning(f"{words}. Run: amphoractl failover status.")
    return success("closed")


def check_witnesses(witnesses: Sequence[str], machines: Sequence[Any]) -> Check:
    """Check that witnesses are configured, which tell a network fault from dead amphorae."""
    if witnesses:
        return success(f"{len(witnesses)} are configured")
    if not machines:
        return success("none is configured, and no amphora exists")
    words = "none is configured: when no heartbeat at all arrives, dead amphorae are replaced late or live ones wrongly"
    return warning(f"{words}. Set [amp_failover] witnesses (docs/explanation/failure-detection.md).")


def check_silent_amphorae(machines: Sequence[Any], now: float, max_silence: float) -> Check:
    """Check for amphorae without a heartbeat for more than `max_silence` seconds."""
    silent = [one for one in machines if one.silent or queries.is_stale(one, now - max_silence)]
    if silent:
        words = f"{len(silent)} of {len(machines)}: {list_ids(one.id for one in silent)}"
        return warning(f"{words}. Run: amphoractl amphora list --stale, failover status.")
    return success(f"none of {len(machines)}")


def check_drift(machines: Sequence[Any]) -> Check:
    """Check for amphorae with drift."""
    differing = [one for one in machines if one.drifts]
    if differing:
        words = "; ".join(f"{one.id}: {one.drift or 'details not known'}" for one in differing[:_MAX_LISTED])
        return warning(f"{len(differing)}: {words}. Run: amphoractl loadbalancer diff ID, repair ID.")
    return success(f"none of {len(machines)} amphorae differs")


def check_limits(machines: Sequence[Any]) -> Check:
    """Check for amphorae that use almost all connections, CPU, memory or another limited resource."""
    near = [one for one in machines if one.near_limit]
    if near:
        words = "; ".join(
            f"{one.id} of load balancer {one.load_balancer_id}: {describe_resources(one.near_limit.split(','))}"
            for one in near[:_MAX_LISTED]
        )
        more = f"; and {len(near) - _MAX_LISTED} more" if len(near) > _MAX_LISTED else ""
        remedy = "Run: amphoractl loadbalancer resize ID; see docs/how-to/monitor.md"
        return warning(f"{len(near)} of {len(machines)} amphorae are near a limit: {words}{more}. {remedy}.")
    return success(f"none of {len(machines)} amphorae is near a limit")


def check_tls_certificates(found: Sequence[ExpiringSecret], now: float, days: int) -> Check:
    """Check for certificates of listeners and pools that have expired or that expire within some days."""
    if not found:
        return success(f"none of the listeners' and pools' certificates expires within {days} days")
    words = "; ".join(
        f"{one.kind} {one.object_id} of load balancer {one.load_balancer_id} {_describe_expiry(one.expires_at, now)}"
        for one in found[:_MAX_LISTED]
    )
    more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    over = sum(one.expires_at <= now for one in found)
    head = f"{over} listeners and pools have an expired certificate, {len(found) - over} one that expires soon"
    return warning(f"{head}: {words}{more}. Inform the users: they must replace the certificates.")


def _describe_expiry(expires_at: float, now: float) -> str:
    left = expires_at - now
    return f"in {format_duration(left)}" if left > 0 else f"{format_duration(-left)} ago"


def check_unknown_amphorae(rows: Sequence[Any]) -> Check:
    """Check for heartbeats under unknown amphora ids."""
    if rows:
        return warning(f"{list_ids(row.amphora_id for row in rows)}. Run: amphoractl unknown-amphora list.")
    return success("none")


def check_certificates(machines: Sequence[Any], now: float) -> Check:
    """Check for certificates of amphorae that have expired or that are renewed late."""
    known = [one for one in machines if one.certificate_expires_at]
    over = [one.id for one in known if one.certificate_expires_at <= now]
    late = [one.id for one in known if one.certificate_issued_at and _is_renewal_late(one, now)]
    if over:
        words = f"{len(over)} have expired: {list_ids(over)}"
        return failure(f"{words}. Run: amphoractl amphora failover ID; check that controllers run.")
    if late:
        words = f"{len(late)} should have been renewed: {list_ids(late)}"
        return warning(f"{words}. Run: amphoractl certificate list, and the controllers' log.")
    first = min((one.certificate_expires_at for one in known), default=None)
    return success("none" if first is None else f"the first expires in {format_duration(first - now)}")


def _is_renewal_late(one: Any, now: float) -> bool:
    life = float(one.certificate_expires_at - one.certificate_issued_at)
    return life <= 0 or (now - float(one.certificate_issued_at)) / life > RENEWAL_OVERDUE


def check_agents(machines: Sequence[Any], installed: str) -> Check:
    """Check for agents of another version."""
    ready = [one for one in machines if one.state != AmphoraState.BOOTING.value and one.seen_at]
    other = [one for one in ready if one.agent_version != installed]
    if other:
        versions = ", ".join(sorted({one.agent_version or "unknown" for one in other}))
        words = f"{len(other)} of {len(ready)} amphorae have another version than {installed}: {versions}"
        return warning(f"{words}. Run: amphoractl rotate, after the controllers are upgraded.")
    return success(f"{installed} in all {len(ready)} amphorae with a heartbeat")


def check_images(machines: Sequence[Any], now: float, days: int) -> Check:
    """Check the age of the amphorae's images by the date in the name of each image; 0 days: no limit."""
    today = dt.datetime.fromtimestamp(now, dt.timezone.utc).date()
    ages = {one.image: (today - day).days for one in machines if (day := _date_of_image(one.image)) is not None}
    old = Counter(one.image for one in machines if days and ages.get(one.image, 0) > days)
    undated = sum(one.image not in ages for one in machines)
    rest = f"; the age of {undated} amphorae's images is not known" if undated else ""
    if old:
        names = list_ids(f"{image} ({number})" for image, number in sorted(old.items()))
        words = f"{sum(old.values())} of {len(machines)} amphorae run an image older than {days} days: {names}{rest}"
        return warning(f"{words}. Build and test a new image, run: amphoractl rotate --image NAME.")
    return success(f"the oldest is {max(ages.values())} days old{rest}" if ages else f"none has a date{rest}")


def _date_of_image(image: str | None) -> dt.date | None:
    """Return the first date in the name of an image."""
    for year, month, day in _DATE.findall(image or ""):
        # Digits in the name of an image may look like an invalid date, for example 2026-13-01. Such digits are ignored.
        with contextlib.suppress(ValueError):
            return dt.date(int(year), int(month), int(day))
    return None


def check_authorities(ends: Mapping[str, float], now: float) -> Check:
    """Check the expiry of CAs and of the controllers' certificate, by name in seconds since 1970."""
    over = [name for name, end in ends.items() if end <= now]
    soon = [f"{name} in {format_duration(end - now)}" for name, end in ends.items() if now < end <= now + MONTH]
    if over:
        words = f"expired: {', '.join(over)}"
        return failure(f"{words}. Run: amphoractl ca rotate; see docs/how-to/rotate-certificates.md.")
    if soon:
        return warning(f"expires soon: {', '.join(soon)}. Run: amphoractl ca rotate.")
    first = min(ends, key=lambda name: ends[name], default=None)
    left = "" if first is None else f"; the first to expire is {first}, in {format_duration(ends[first] - now)}"
    return success(f"{len(ends)} certificates{left}")


def check_resyncs(rows: Sequence[Any], now: float, max_seconds: float) -> Check:
    """Check for load balancers that exist in Octavia only or in the driver's database only."""
    apart = [row for row in rows if row.outcome in ("unknown", "unrecorded")]
    late = [row for row in rows if row.ended_at is None and now - row.asked_at > max_seconds]
    if apart:
        words = ", ".join(f"{row.load_balancer_id} ({row.outcome})" for row in apart[:_MAX_LISTED])
        remedy = "If a database was restored from a backup, see docs/how-to/restore-a-database.md."
        return warning(f"{len(apart)} load balancers exist on one side only: {words}. {remedy}")
    if late:
        words = f"{len(late)} load balancers wait for a resync: {list_ids(row.load_balancer_id for row in late)}"
        return warning(f"{words}. Run: amphoractl loadbalancer resync.")
    return success("no difference is known")
