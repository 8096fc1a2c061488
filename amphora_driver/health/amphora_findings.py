# SPDX-License-Identifier: Apache-2.0
"""Records findings about amphorae: a lost configuration, drift, and resources near their limits.

Invariant: only changes are written. A heartbeat is examined if it may lead to a finding (`needs_attention`); the other
heartbeats cause no read of the database.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.health.amphora_reports import LastReport
from amphora_driver.health.drift_reports import DriftReports, UnrepairedDrift
from amphora_driver.health.lost_configs import LostConfig, LostConfigDetector
from amphora_driver.health.near_limits import NearLimits
from amphora_driver.health.write_batch import apply_or_split, plain
from amphora_driver.model.amphora import describe_resources
from amphora_driver.store import amphorae, config_drift
from amphora_driver.store.amphorae import ServingState

LOG = logging.getLogger(__name__)


class AmphoraFindings:
    """The findings of one health manager. Not thread-safe.

    Args:
        interval: seconds between two heartbeats of an amphora.
        on_due: called when a load balancer needs a push.
        near_limit: percentage of a limited resource from which an amphora is near the limit.
    """

    def __init__(self, database: Database, interval: float, on_due: Callable[[], None], near_limit: int) -> None:
        self._database = database
        self._on_due = on_due
        self._lost_configs = LostConfigDetector(interval)
        self._drift_reports = DriftReports(interval)
        self._near_limits = NearLimits(interval, near_limit)

    def needs_attention(self, amphora_id: str, last: LastReport, recorded: ServingState) -> bool:
        """Return whether a heartbeat may lead to a finding, although it repeats the previous one."""
        return (
            last.generation != recorded.confirmed.get(amphora_id, 0)
            or bool(last.drift)
            or amphora_id in recorded.drifting
            or self._drift_reports.has_unrecorded(amphora_id, last)
            or self._near_limits.needs_attention(amphora_id, last.usage, recorded.near_limit.get(amphora_id, ""))
        )

    def record(
        self,
        recorded: Mapping[str, ServingState],
        updated: Mapping[str, LastReport],
        record_refusal: Callable[[str, Exception], None],
    ) -> None:
        """Record the findings of the new heartbeats of these load balancers.

        Raise StoreError if the database does not answer. `record_refusal` gets the id of a load balancer with a value
        that the database refuses.
        """
        now = time.monotonic()
        parts = list(recorded.items())
        for record in (self._record_lost_configs, self._record_drift, self._record_near_limits):
            apply_or_split(
                parts,
                partial(record, updated, now),
                lambda part, error: record_refusal(part[0], error),
            )

    def retain(self, amphora_ids: Collection[str]) -> None:
        """Forget deleted amphorae."""
        kept = set(amphora_ids)
        self._lost_configs.retain(kept)
        self._drift_reports.retain(kept)
        self._near_limits.retain(kept)

    def _record_lost_configs(
        self, updated: Mapping[str, LastReport], now: float, parts: Sequence[tuple[str, ServingState]]
    ) -> None:
        """Make load balancers due if their amphorae have lost their configuration."""
        confirmed, heard = _confirmed_and_updated(parts, updated)
        suspected = self._lost_configs.find_lost(heard, confirmed, now)
        if not suspected:
            return

        def write(connection: sa.Connection) -> list[LostConfig]:
            config_drift.lock_work_of_amphorae(connection, [one.amphora_id for one in suspected])
            lower = partial(amphorae.lower_confirmed, connection)
            return [one for one in suspected if lower(one.amphora_id, one.confirmed, one.serves)]

        lost = self._database.write(write)
        for one in lost:
            lost_config = (
                "amphora %s confirmed generation %d of its configuration but serves generation %d; "
                "a controller pushes the configuration again"
            )
            LOG.warning(lost_config, one.amphora_id, one.confirmed, one.serves)
        self._lost_configs.clear(suspected)
        if lost:
            self._on_due()

    def _record_drift(
        self, updated: Mapping[str, LastReport], now: float, parts: Sequence[tuple[str, ServingState]]
    ) -> None:
        """Record the drift that agents report, and make load balancers with unrepaired drift due."""
        confirmed, heard = _confirmed_and_updated(parts, updated)
        marked = {amphora_id for _, one in parts for amphora_id in one.drifting}
        marks = self._drift_reports.find_changed_marks(heard, confirmed, marked)
        unrepaired = self._drift_reports.find_unrepaired(heard, confirmed, now)
        notices = self._drift_reports.find_notices(heard, now)
        if not (unrepaired or notices or marks):
            return

        def write(connection: sa.Connection) -> tuple[int, list[str]]:
            config_drift.lock_work_of_amphorae(connection, [one.amphora_id for one in unrepaired])
            config_drift.set_drifting(connection, marks)
            record = partial(config_drift.record_agent_finding, connection)
            recorded = [
                one for one, each in sorted(notices.items()) if record(one, plain(each.sentence), each.found_at)
            ]
            revoke = partial(config_drift.revoke_confirmation, connection)
            revoked = [
                revoke(one.amphora_id, one.confirmed, plain(_push_reason(one)), replug=one.replug) for one in unrepaired
            ]
            return sum(revoked), recorded

        due, recorded = self._database.write(write)
        for amphora_id in recorded:
            LOG.warning(
                "the agent of amphora %s reports configuration drift that it found and tried to repair: %s",
                amphora_id,
                plain(notices[amphora_id].sentence),
            )
        for one in unrepaired:
            LOG.warning(
                "the health manager requests that a controller pushes the configuration to amphora %s again: %s",
                one.amphora_id,
                plain(_push_reason(one)),
            )
        self._drift_reports.record_pushes(unrepaired, now)
        self._drift_reports.record_notices(heard, now)
        if due:
            self._on_due()

    def _record_near_limits(
        self, updated: Mapping[str, LastReport], _now: float, parts: Sequence[tuple[str, ServingState]]
    ) -> None:
        """Record which amphorae came near a limit, or left it."""
        _, heard = _confirmed_and_updated(parts, updated)
        marked = {amphora_id: names for _, one in parts for amphora_id, names in one.near_limit.items()}
        changed = self._near_limits.find_changed(heard, marked)
        if not changed:
            return
        self._database.write(lambda connection: amphorae.record_near_limit(connection, changed))
        for amphora_id, names in sorted(changed.items()):
            if names:
                words = describe_resources(names.split(","))
                LOG.warning("amphora %s is near its limit of: %s; the status page shows a warning", amphora_id, words)
            else:
                LOG.info("amphora %s is no longer near a limit; the warning on the status page ends", amphora_id)


def _confirmed_and_updated(
    parts: Sequence[tuple[str, ServingState]], updated: Mapping[str, LastReport]
) -> tuple[dict[str, int], dict[str, LastReport]]:
    """Return the confirmed generations and the new heartbeats of the amphorae of these load balancers."""
    confirmed = {amphora_id: generation for _, one in parts for amphora_id, generation in one.confirmed.items()}
    return confirmed, {amphora_id: updated[amphora_id] for amphora_id in confirmed if amphora_id in updated}


def _push_reason(one: UnrepairedDrift) -> str:
    reason = f"its agent could not repair: {one.kinds}"
    return f"{one.found_at}, {reason}" if one.found_at else reason
