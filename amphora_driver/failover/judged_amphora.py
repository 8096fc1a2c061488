# SPDX-License-Identifier: Apache-2.0
"""One silent amphora, and the texts and rows that describe it. Pure."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.failover.failure_rules import SilentPeriod, Verdict
from amphora_driver.store.failovers import Cause, FailoverTrigger
from amphora_driver.store.silent_amphorae import AmphoraLiveness, SilentAmphora

if TYPE_CHECKING:
    from amphora_driver.store.silent_amphorae import LivenessSnapshot


class JudgedAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """One silent amphora: its row, its silence and the verdict."""

    liveness: AmphoraLiveness
    period: SilentPeriod
    verdict: Verdict


def outage_reason(snapshot: LivenessSnapshot, load_balancer_id: str, found: list[JudgedAmphora]) -> str:
    """Return why no amphora serves a load balancer; empty if one may."""
    dead = {one.liveness.amphora_id for one in found if one.verdict.dead}
    all_ids = {one.amphora_id for one in snapshot.amphorae if one.load_balancer_id == load_balancer_id}
    if not dead or not all_ids <= dead:
        return ""
    if len(dead) == 1:
        return f"amphora {next(iter(dead))} sends no heartbeats and does not answer"
    return f"all amphorae send no heartbeats and do not answer: {', '.join(sorted(dead))}"


def silence_row(one: JudgedAmphora, refusal: str, snapshot: LivenessSnapshot, now: float) -> SilentAmphora:
    """Return the row that shows a silent amphora to operators; `refusal` is why its fail-over must wait."""
    text = one.verdict.text
    if one.verdict.cause is not None:
        text += f"; fail-over held: {refusal}" if refusal else "; it is replaced"
    return SilentAmphora(
        amphora_id=one.liveness.amphora_id,
        load_balancer_id=one.liveness.load_balancer_id,
        kind=one.verdict.kind.value,
        since=snapshot.at - (now - one.period.since),
        verdict=text,
    )


def failover_cause(one: JudgedAmphora) -> FailoverTrigger:
    """Return cause and reason of the fail-over of a silent amphora."""
    cause = one.verdict.cause or Cause.SILENT
    reason = {
        Cause.SILENT: "it sends no heartbeats and does not answer",
        Cause.MUTE: "it answers and sends no heartbeats",
        Cause.NEVER_SPOKE: "it has never sent a heartbeat",
    }[cause]
    return FailoverTrigger(cause=cause, reason=reason, silent_since=one.liveness.heard_at)


def finding(one: JudgedAmphora, now: float) -> str:
    """Return the text of the event that opens a fail-over."""
    at = one.liveness.heard_at
    date = "" if at is None else dt.datetime.fromtimestamp(at, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    ready = f"no heartbeat since it became ready at {date or 'an unknown time'}"
    last = f"last heartbeat at {date}" if one.period.ever_heard else ready
    return f"{last}, silent for {now - one.period.since:.1f} s; {one.verdict.text}"
