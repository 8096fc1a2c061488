# SPDX-License-Identifier: Apache-2.0
"""What `status check` finds, as values, and what follows from rows of the database.

Invariant: every finding says in one sentence what is, and, unless all is well, what to do. Nothing here asks anybody:
rows go in, findings come out.
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
from amphora_driver.cli.formatting import lasting
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store import circuit_breaker, process_registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amphora_driver.cli.queries import Balancer

# Seconds without a sign of life after which a process is taken for gone: five that were missed.
GONE_AFTER = 5 * process_registry.HEARTBEAT_INTERVAL
# Ids that are named in one finding.
_NAMED = 5
_MONTH = 30 * 86400.0
_DATE = re.compile(r"(?<![0-9])([0-9]{4})-([0-9]{2})-([0-9]{2})(?![0-9])", re.ASCII)
# The part of its life after which a certificate should have been renewed long since: it is at half.
_LATE = 0.75
_KINDS = {
    process_registry.ProcessKind.CONTROLLER: (
        "Controllers",
        "Start amphora-controller: nothing is changed or replaced without one.",
    ),
    process_registry.ProcessKind.HEALTH_MANAGER: (
        "Health managers",
        "Start amphora-health-manager: nobody hears amphorae without one, and none is replaced.",
    ),
    process_registry.ProcessKind.PROVIDER_AGENT: (
        "Provider agents",
        "Start octavia-driver-agent with `haproxy` among enabled_provider_agents: Octavia hears nothing without one.",
    ),
}


class Result(IntEnum):
    """How a check ended; the number is the exit status of a run whose worst it is."""

    SUCCESS = 0
    WARNING = 1
    FAILURE = 2

    @property
    def word(self) -> str:
        """As OpenStack's own checks say it."""
        return self.name.capitalize()


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    name: str
    result: Result
    details: str


def well(name: str, details: str) -> Check:
    """Nothing to do."""
    return Check(name=name, result=Result.SUCCESS, details=details)


def warning(name: str, details: str) -> Check:
    """Users are served; somebody should look."""
    return Check(name=name, result=Result.WARNING, details=details)


def failure(name: str, details: str) -> Check:
    """Do this first, and upgrade nothing before."""
    return Check(name=name, result=Result.FAILURE, details=details)


def named(ids: Iterable[str]) -> str:
    """Some ids, and how many more there are."""
    found = list(ids)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


# --- processes ------------------------------------------------------------------------------------------------------


def of_processes(rows: Sequence[Any], now: float, installed: str) -> list[Check]:
    """Whether there is somebody for everything.

    Args:
        rows: of the table `process`.
        now: seconds since 1970, by the database's clock.
        installed: the version of this installation.
    """
    found = []
    for kind, (name, remedy) in _KINDS.items():
        mine = [row for row in rows if row.kind == kind.value]
        alive = [row for row in mine if now - row.seen_at <= GONE_AFTER]
        gone = [row for row in mine if now - row.seen_at > GONE_AFTER]
        hosts = ", ".join(sorted(f"{row.host} ({row.version})" for row in alive))
        if not alive:
            last = max((row.seen_at for row in gone), default=None)
            stopped = "none is recorded, since one that is stopped leaves"
            since = stopped if last is None else f"the last one was seen {lasting(now - last)} ago"
            found.append(failure(name, f"none is alive: {since}. {remedy}"))
        elif all(row.draining for row in alive):
            found.append(
                failure(name, f"all are draining: {hosts}. Run: amphoractl controller resume NAME, or --host HOST.")
            )
        elif gone:
            lost = ", ".join(f"{row.host} (seen {lasting(now - row.seen_at)} ago)" for row in gone)
            found.append(
                warning(name, f"alive: {hosts}; gone without a word: {lost}. Look at its log, start it again.")
            )
        else:
            found.append(well(name, f"alive: {hosts}"))
    versions = {row.version or "unknown" for row in rows if now - row.seen_at <= GONE_AFTER}
    if versions - {installed}:
        words = ", ".join(sorted(versions | {installed}))
        found.append(warning("Versions", f"several are in use: {words}. Bring all hosts to one."))
    else:
        found.append(well("Versions", f"{installed} everywhere"))
    return found


# --- load balancers -------------------------------------------------------------------------------------------------


def of_work(found: Sequence[Balancer], now: float, patience: float) -> list[Check]:
    """Load balancers in ERROR, and what has been pending for longer than it can take.

    Args:
        found: all of them.
        now: seconds since 1970.
        patience: how long a change may take, in seconds.
    """
    wrong = [one.work.load_balancer_id for one in found if queries.provisioning(one) == "ERROR"]
    down = [one.work.load_balancer_id for one in found if queries.operating(one) == "ERROR"]
    stuck = [one for one in found if one.since is not None and now - one.since > patience]
    looks = "Look at: amphoractl loadbalancer show ID."
    checks = [
        failure("Load balancers", f"{len(wrong)} in ERROR: {named(wrong)}. {looks}")
        if wrong
        else warning("Load balancers", f"{len(down)} with operating status ERROR: {named(down)}. {looks}")
        if down
        else well("Load balancers", f"none of {len(found)} is in ERROR")
    ]
    if stuck:
        longest = max(now - (one.since or now) for one in stuck)
        ids = named(one.work.load_balancer_id for one in stuck)
        words = f"{len(stuck)} pending for up to {lasting(longest)}: {ids}. Look at: amphoractl work list."
        checks.append(failure("Pending work", words))
    else:
        busy = sum(one.since is not None for one in found)
        checks.append(well("Pending work", f"{busy} load balancers are being changed, none for long"))
    return checks


def of_failovers(rows: Sequence[Any], now: float, patience: float) -> Check:
    """Fail-overs that go on.

    Args:
        rows: of the table `failover`, those without an end.
        now: seconds since 1970.
        patience: how long one may take, in seconds.
    """
    if not rows:
        return well("Fail-overs", "none goes on")
    late = [row for row in rows if row.served_at is None and now - row.begun_at > patience]
    if late:
        ids = named(row.load_balancer_id for row in late)
        words = f"{len(late)} without an end for more than {lasting(patience)}: load balancers {ids}."
        return failure("Fail-overs", f"{words} Look at: amphoractl failover list, failover show NUMBER.")
    ids = named(row.load_balancer_id for row in rows)
    return warning("Fail-overs", f"{len(rows)} go on: load balancers {ids}. Wait until they have ended.")


def of_rotations(rows: Sequence[Any]) -> Check:
    """Rotations (rows without an end)."""
    paused = [row for row in rows if row.state == "paused"]
    if paused:
        words = "; ".join(f"{row.id}: {row.reason or 'paused by an operator'}" for row in paused)
        return warning("Rotations", f"paused: {words}. Run: amphoractl rotation show, then resume or abort.")
    if rows:
        numbers = ", ".join(str(row.id) for row in rows)
        return warning("Rotations", f"going on: {numbers}. Wait, or pause it: amphoractl rotation pause NUMBER.")
    return well("Rotations", "none goes on")


# --- amphorae -------------------------------------------------------------------------------------------------------


def of_breaker(rows: Mapping[str, circuit_breaker.BreakerRow]) -> Check:
    """Whether amphorae are replaced unasked, and whether the detector sees."""
    held, automatic, sight = (
        rows.get(one) for one in (circuit_breaker.OPERATOR, circuit_breaker.AUTOMATIC, circuit_breaker.SIGHT)
    )
    if held is not None:
        return warning("Breaker", f"held open by an operator: {held.reason}. Run: amphoractl breaker close.")
    if automatic is not None and automatic.state != circuit_breaker.CLOSED:
        words = f"{automatic.state}: {automatic.silent} of {automatic.watched} amphorae are silent"
        return failure("Breaker", f"{words}. Nothing is replaced unasked. Look at: amphoractl failover status.")
    if sight is not None and sight.state == circuit_breaker.BLIND:
        words = f"the detector is blind: {sight.reason}. Nothing is replaced unasked"
        return warning("Breaker", f"{words}. Look at: amphoractl failover status.")
    return well("Breaker", "closed")


def of_witnesses(witnesses: Sequence[str], machines: Sequence[Any]) -> Check:
    """Whether somebody can say that the way to the amphorae is there, where nobody is heard.

    Args:
        witnesses: option of [failover].
        machines: rows of `recorded.amphorae`.
    """
    if witnesses:
        return well("Witnesses", f"{len(witnesses)} are configured")
    if not machines:
        return well("Witnesses", "none is configured, and there are no amphorae")
    words = (
        "none is configured: where no amphora at all is heard, dead ones are replaced late, or taken for dead wrongly"
    )
    return warning("Witnesses", f"{words}. Set [failover] witnesses (docs/explanation/failure-detection.md).")


def of_silence(machines: Sequence[Any], now: float, patience: float) -> Check:
    """Amphorae nobody hears.

    Args:
        machines: rows of `recorded.amphorae`.
        now: seconds since 1970.
        patience: for how long one may keep silent, in seconds.
    """
    silent = [one for one in machines if one.silent or queries.is_stale(one, now - patience)]
    if silent:
        words = f"{len(silent)} of {len(machines)}: {named(one.id for one in silent)}"
        return warning("Silent amphorae", f"{words}. Look at: amphoractl amphora list --stale, failover status.")
    return well("Silent amphorae", f"none of {len(machines)}")


def of_drift(machines: Sequence[Any]) -> Check:
    """Amphorae that are not as wanted now."""
    differing = [one for one in machines if one.drifts]
    if differing:
        words = "; ".join(f"{one.id}: {one.drift or 'nobody has said in what'}" for one in differing[:_NAMED])
        return warning("Drift", f"{len(differing)}: {words}. Run: amphoractl loadbalancer diff ID, repair ID.")
    return well("Drift", f"none of {len(machines)} amphorae differs")


def of_zombies(rows: Sequence[Any]) -> Check:
    """Machines that report and belong to nobody."""
    if rows:
        return warning("Zombies", f"{named(row.amphora_id for row in rows)}. Look at: amphoractl zombie list.")
    return well("Zombies", "none")


def of_certificates(machines: Sequence[Any], now: float) -> Check:
    """The amphorae's own certificates."""
    known = [one for one in machines if one.certificate_expires_at]
    over = [one.id for one in known if one.certificate_expires_at <= now]
    late = [one.id for one in known if one.certificate_issued_at and _part(one, now) > _LATE]
    if over:
        words = f"{len(over)} have expired: {named(over)}"
        return failure("Certificates", f"{words}. Run: amphoractl amphora failover ID; look whether controllers live.")
    if late:
        words = f"{len(late)} should have been renewed: {named(late)}"
        return warning("Certificates", f"{words}. Look at: amphoractl certificate list, and the controllers' log.")
    first = min((one.certificate_expires_at for one in known), default=None)
    return well("Certificates", "none" if first is None else f"the first expires in {lasting(first - now)}")


def _part(one: Any, now: float) -> float:
    """How much of its life a certificate has behind it."""
    life = float(one.certificate_expires_at - one.certificate_issued_at)
    return (now - float(one.certificate_issued_at)) / life if life > 0 else 1.0


def of_agents(machines: Sequence[Any], installed: str) -> Check:
    """Agents of another version than this one."""
    ready = [one for one in machines if one.state != AmphoraState.BOOTING.value and one.seen_at]
    other = [one for one in ready if one.agent_version != installed]
    if other:
        versions = ", ".join(sorted({one.agent_version or "one that does not say" for one in other}))
        words = f"{len(other)} of {len(ready)} amphorae have another version than {installed}: {versions}"
        return warning("Agents", f"{words}. Run: amphoractl rotate, after the controllers are upgraded.")
    return well("Agents", f"{installed} in all {len(ready)} amphorae that were heard")


def of_images(machines: Sequence[Any], now: float, days: int) -> Check:
    """The age of the images that amphorae were booted from, by the date that the name of an image has in it.

    Args:
        machines: rows of `recorded.amphorae`.
        now: seconds since 1970.
        days: the age that is too old; 0 for none.
    """
    today = dt.datetime.fromtimestamp(now, dt.timezone.utc).date()
    ages = {one.image: (today - day).days for one in machines if (day := _day(one.image)) is not None}
    old = Counter(one.image for one in machines if days and ages.get(one.image, 0) > days)
    undated = sum(one.image not in ages for one in machines)
    rest = f"; the age of {undated} amphorae's images is not known" if undated else ""
    if old:
        names = named(f"{image} ({number})" for image, number in sorted(old.items()))
        words = f"{sum(old.values())} of {len(machines)} amphorae run an image older than {days} days: {names}{rest}"
        return warning("Images", f"{words}. Build and test a new image, run: amphoractl rotate --image NAME.")
    return well("Images", f"the oldest is {max(ages.values())} days old{rest}" if ages else f"none has a date{rest}")


def _day(image: str | None) -> dt.date | None:
    """The first date in the name of an image."""
    for year, month, day in _DATE.findall(image or ""):
        with contextlib.suppress(ValueError):  # 2026-13-01 is no date
            return dt.date(int(year), int(month), int(day))
    return None


def of_authorities(ends: Mapping[str, float], now: float) -> Check:
    """When authorities and the controllers' certificates end.

    Args:
        ends: by what each is called (seconds since 1970).
        now: seconds since 1970.
    """
    over = [name for name, end in ends.items() if end <= now]
    soon = [f"{name} in {lasting(end - now)}" for name, end in ends.items() if now < end <= now + _MONTH]
    if over:
        words = f"expired: {', '.join(over)}"
        return failure(
            "Authorities", f"{words}. Run: amphoractl authority rotate; see docs/how-to/rotate-certificates.md."
        )
    if soon:
        return warning("Authorities", f"expires soon: {', '.join(soon)}. Run: amphoractl authority rotate.")
    first = min(ends, key=lambda name: ends[name], default=None)
    left = "" if first is None else f"; the first to expire is {first}, in {lasting(ends[first] - now)}"
    return well("Authorities", f"{len(ends)} certificates{left}")


def of_resyncs(rows: Sequence[Any], now: float, patience: float) -> Check:
    """Where Octavia and these rows do not agree on what there is."""
    apart = [row for row in rows if row.outcome in ("unknown", "unrecorded")]
    late = [row for row in rows if row.ended_at is None and now - row.asked_at > patience]
    if apart:
        words = ", ".join(f"{row.load_balancer_id} ({row.outcome})" for row in apart[:_NAMED])
        remedy = "docs/how-to/operate.md, database restored from a backup, says what to do."
        return warning(
            "Octavia's records", f"{len(apart)} load balancers are known to one side only: {words}. {remedy}"
        )
    if late:
        words = f"{len(late)} load balancers wait for a resync: {named(row.load_balancer_id for row in late)}"
        return warning("Octavia's records", f"{words}. Look at: amphoractl loadbalancer resync.")
    return well("Octavia's records", "no difference is known")
