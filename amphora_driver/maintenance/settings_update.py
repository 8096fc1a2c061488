# SPDX-License-Identifier: Apache-2.0
"""Sends changed heartbeat settings, check intervals and log targets to the agents, without a rotation.

Invariant: the settings depend on the configuration and on recorded rows only, so an update needs no lease and may be
repeated. A warm spare has the settings of the deployment without targets of flows. Another amphora has those of its
load balancer, whose flavor can have log targets. The holder of the duty `audit` queries every ready amphora, also
spares and amphorae of load balancers with an open job. The number of amphorae in a round is limited. The drift audit
reports the digests that it reads anyway, which saves queries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from oslo_config.cfg import ConfigOpts

from amphora_driver import metrics
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentError, AgentRefused, AmphoraDriverError, ConfigurationError
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.reconcile.defaults import agent_settings, log_defaults, log_files, log_settings
from amphora_driver.render.agent_settings import AgentSettings, LogTarget
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, desired_objects
from amphora_driver.store.amphorae import ReachableAmphora

if TYPE_CHECKING:
    from amphora_driver.agent.client import BundleState
    from amphora_driver.agent.responses import LogLines
    from amphora_driver.reconcile.context import ReconcileContext

LOG = logging.getLogger(__name__)
# Time-out in seconds of one request to an agent.
_AGENT_TIMEOUT = 5.0
# Maximum number of amphorae in one round, as a multiple of the number of parallel queries.
_ROUND_FACTOR = 8
# Maximum seconds until a failed query or change of settings is repeated.
_RETRY_AFTER = 60.0
# Number of audit intervals between two queries for the settings of an agent. A drift audit, which also compares the
# settings, restarts the count.
_INTERVALS = 2
# Seconds between two checks whether the round must end.
_CHECK_EVERY = 0.2
_BAD_REQUEST, _NOT_FOUND = 400, 404


def choose_amphorae(
    ready: Sequence[ReachableAmphora], due_at: Mapping[str, float], moment: float, most: int
) -> list[ReachableAmphora]:
    """Return at most `most` amphorae that are due; first those that this process has never queried."""
    due = [one for one in ready if due_at.get(one.id, moment) <= moment]
    return sorted(due, key=lambda one: (due_at.get(one.id, float("-inf")), one.id))[:most]


class LogFiles:
    """The log targets of the configuration. The controller reads a changed file again without a restart."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        self._seen = self._describe_files()
        self._problem = ""
        self.settings = log_defaults(conf)

    def refresh(self) -> bool:
        """Read changed files; return whether the settings have changed. Unusable files have no effect."""
        present = self._describe_files()
        if present == self._seen:
            return False
        former = self.settings
        try:
            self.settings = log_defaults(self._conf)
        except ConfigurationError as error:
            # `_seen` stays unchanged, so the next call reads the files again. A temporary read error ends without a
            # change of a file.
            if str(error) != self._problem:
                LOG.warning(
                    "the controller cannot use the files of [amp_logs] and keeps their former content: %s", error
                )
            self._problem = str(error)
            return False
        self._seen, self._problem = present, ""
        return self.settings != former

    def _describe_files(self) -> list[tuple[int, ...] | None]:
        """Return what a change of a file changes, for each file; None for a missing file."""
        found: list[tuple[int, ...] | None] = []
        for path in log_files(self._conf):
            try:
                state = Path(path).stat()
            except OSError:
                found.append(None)
            else:
                # A copied file can have the st_mtime_ns of the original, so st_ctime_ns is compared too.
                found.append((state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size))
        return found


class SettingsUpdate:
    """Compares the settings of agents with the configuration, and sends the configured ones. Thread-safe."""

    def __init__(self, context: ReconcileContext) -> None:
        self._database = context.database
        self._agents = context.agents
        self._common = agent_settings(context.conf)
        self._logs = LogFiles(context.conf)
        self._interval: float = context.conf.amp_drift.interval
        self._most: int = _ROUND_FACTOR * context.conf.amp_drift.most_at_once
        # Times of the next queries by amphora (`time.monotonic()`).
        self._due_at: dict[str, float] = {}
        # Load balancer and heartbeat epoch of each amphora. The agent is queried at once after a change of the load
        # balancer (a spare begins to serve) or of the epoch (a restart).
        self._states: dict[str, tuple[str, int]] = {}
        self._log_lines: dict[str, LogLines] = {}

    def run_round(self, pool: ThreadPoolExecutor, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Query the amphorae that are due, and update those with other settings; return the number of answers."""
        ready = self._database.read(amphorae.list_reachable)
        if self._logs.refresh():
            LOG.info("the files of [amp_logs] have changed; the controller sends their content to all amphorae")
            self._due_at = {}
        moment = time.monotonic()
        known = {one.id for one in ready}
        # The loops use copies, because a thread of an earlier round may add a result at the same time.
        self._due_at = {one: at for one, at in self._due_at.copy().items() if one in known}
        self._log_lines = {one: lines for one, lines in self._log_lines.copy().items() if one in known}
        states = {one.id: (one.load_balancer_id, one.epoch) for one in ready}
        for known_id in self._due_at.keys() & self._states.keys():
            if self._states[known_id] != states[known_id]:
                self._due_at[known_id] = moment
        self._states = states
        chosen = choose_amphorae(ready, self._due_at, moment, self._most)
        roots = self._database.read(
            lambda connection: desired_objects.load_roots(connection, [one.load_balancer_id for one in chosen])
        )
        # The time of the next query is set before this query is sent. Otherwise, each round would send another query to
        # an agent that does not answer.
        for one in chosen:
            self._put_off(one.id)
        asked = {pool.submit(self._query, one, roots.get(one.load_balancer_id)): one for one in chosen}
        done = 0
        try:
            while asked and goes_on():
                for answer in wait(asked, _CHECK_EVERY, FIRST_COMPLETED).done:
                    done += _log_result(asked.pop(answer), answer)
        finally:
            for answer in asked:
                answer.cancel()
        return done

    def compare(self, amphora_id: str, address: str, reported: BundleState, root: LoadBalancer | None) -> str:
        """Send the settings if an agent reports another digest; return why it still has other settings.

        `root` is the load balancer of the amphora, whose children are not read; None for a warm spare. The result is
        empty if the settings are equal. It is also empty for an agent of an earlier version, which reports no digest:
        only a rotation changes its settings.
        """
        failure = ""
        if reported.settings_digest is not None:
            try:
                wanted = self._settings_of(reported, root)
            except ConfigurationError as error:
                failure = f"settings: {error.happened}"
            else:
                failure = self._send(amphora_id, address, reported.settings_digest, wanted)
        self._count_log_lines(amphora_id, reported.log_lines)
        if failure:
            self._put_off(amphora_id)
            return failure
        self._due_at[amphora_id] = time.monotonic() + _INTERVALS * self._interval
        return ""

    def _settings_of(self, reported: BundleState, root: LoadBalancer | None) -> AgentSettings:
        """Return the settings of an amphora. An agent that reports no log lines knows no log targets."""
        if reported.log_lines is None:
            return self._common
        return msgspec.structs.replace(self._common, logs=log_settings(self._logs.settings, root))

    def _count_log_lines(self, amphora_id: str, lines: LogLines | None) -> None:
        """Add the lines since the last query to the metrics of this process. The first query is the beginning."""
        former = self._log_lines.get(amphora_id)
        if lines is None:
            return
        self._log_lines[amphora_id] = lines
        for result in metrics.LOG_RESULTS:
            present = getattr(lines, result)
            before = present if former is None else getattr(former, result)
            # A lower value than before means that the log forwarder has restarted. The new value counts the lines since
            # the restart.
            metrics.count_log_lines(result, present - before if present >= before else present)

    def _query(self, one: ReachableAmphora, root: LoadBalancer | None) -> str:
        deadline = Deadline(_AGENT_TIMEOUT, f"get the settings of amphora {one.id}")
        reported = self._agents.bundle_state(one.id, one.management_address, deadline=deadline)
        return self.compare(one.id, one.management_address, reported, root)

    def _send(self, amphora_id: str, address: str, present: str, wanted: AgentSettings) -> str:
        """Send settings to an agent that reports another digest; return why it still has other settings."""
        if present == wanted.digest:
            return ""
        deadline = Deadline(_AGENT_TIMEOUT, f"change the settings of amphora {amphora_id}")
        try:
            actual = self._agents.put_settings(amphora_id, address, wanted.encode(), deadline=deadline).digest
        except AgentError as error:
            if isinstance(error, AgentRefused) and error.status == _NOT_FOUND:
                # Status 404 means that an agent of an earlier version, which has no settings, has started since the
                # query.
                return ""
            reduced = _without_certificates(wanted)
            if isinstance(error, AgentRefused) and error.status == _BAD_REQUEST and reduced != wanted:
                # An agent of an earlier version refuses settings with a client certificate. So the controller sends the
                # other settings again, because the agent needs the configured heartbeat targets.
                reason = "its agent does not support the client certificate of log targets: replace the amphora"
                return self._send(amphora_id, address, present, reduced) or f"settings: {reason}"
            return f"settings: it has other heartbeat settings or log targets than configured: {error.happened}"
        if actual != wanted.digest:
            return "settings: it reports other settings than those that it has accepted"
        LOG.info(
            "the controller sent the configured heartbeat settings, intervals and log targets to amphora %s", amphora_id
        )
        return ""

    def _put_off(self, amphora_id: str) -> None:
        self._due_at[amphora_id] = time.monotonic() + min(_RETRY_AFTER, self._interval)


def _without_certificates(settings: AgentSettings) -> AgentSettings:
    """Return the settings without client certificates of log targets.

    Each target decides whether it accepts lines without one.
    """

    def reduced(targets: Sequence[LogTarget]) -> tuple[LogTarget, ...]:
        return tuple(msgspec.structs.replace(one, client_certificate=Secret(b"")) for one in targets)

    logs = msgspec.structs.replace(
        settings.logs, admin=reduced(settings.logs.admin), tenant=reduced(settings.logs.tenant)
    )
    return msgspec.structs.replace(settings, logs=logs)


def _log_result(one: ReachableAmphora, answer: Future[str]) -> int:
    """Log a failure; return 1 if the amphora has answered, 0 otherwise."""
    error = answer.exception()
    if isinstance(error, AmphoraDriverError):
        LOG.info("the controller cannot compare the settings of amphora %s and tries again later: %s", one.id, error)
    elif error is not None:
        failed = "the controller failed unexpectedly in the comparison of settings of amphora %s, and tries again later"
        LOG.error(failed, one.id, exc_info=error)
    elif failure := answer.result():
        LOG.warning(
            "the controller cannot change the settings of amphora %s and tries again later: %s", one.id, failure
        )
    return int(error is None)
