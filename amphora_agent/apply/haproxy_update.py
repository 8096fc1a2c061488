# SPDX-License-Identifier: Apache-2.0
"""The update of HAProxy for a bundle, and its rollback.

Invariant: each change has a reason and ends with a verification of the running HAProxy. A runtime update that fails
becomes a reload. The applier decides when the configuration file is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from amphora_agent.apply import bundle_check
from amphora_agent.apply.change_log import UNCHANGED, Change
from amphora_agent.apply.config_swap import ConfigSwap
from amphora_agent.apply.file_sets import FileSets
from amphora_agent.bundle import Bundle, File
from amphora_agent.errors import AgentError, ConfigurationRefused, HaproxyError
from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy import config_check, config_file, config_parser, tls_diff
from amphora_agent.haproxy.config_check import Check
from amphora_agent.haproxy.config_diff import Decision, Reload, Runtime, Unchanged, compare_configurations
from amphora_agent.haproxy.config_file import Document
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.haproxy.runtime_actions import Action, changed_servers
from amphora_agent.haproxy.runtime_commands import ActionRunner
from amphora_agent.haproxy.runtime_state import NOTHING_LOADED, Loaded
from amphora_agent.paths import Paths

_log = logging.getLogger(__name__)
NOT_AS_CONFIGURED = Reload("HAProxy did not run its configuration")
RuntimeResult = Loaded | HaproxyError
"""The configuration that HAProxy reports after a runtime update, or the reason why the update failed."""


@dataclass(frozen=True)
class HaproxyPlan:
    """A configuration for HAProxy, compared with the present configuration.

    ``decision`` is None if HAProxy does not run. ``file`` has the content ``document``; an unchanged document is in
    HAProxy's own file. ``directory`` has the TLS files.
    """

    bundle: Bundle
    before: Document | None
    document: Document
    wanted: Configuration
    directory: Path
    file: Path
    decision: Decision | None

    @property
    def changes_nothing(self) -> bool:
        return self.before == self.document and isinstance(self.decision, Unchanged)

    @property
    def actions(self) -> tuple[Action, ...] | None:
        """The actions of a runtime update; None for another decision."""
        return self.decision.actions if isinstance(self.decision, Runtime) else None


class HaproxyUpdate:
    """The steps that bring HAProxy to the configuration of a bundle. Not thread-safe."""

    def __init__(self, haproxy: Haproxy, swap: ConfigSwap, files: FileSets, paths: Paths) -> None:
        self._haproxy = haproxy
        self._swap = swap
        self._files = files
        self._paths = paths
        self._parsed: tuple[str, Configuration] | None = None

    def parse(self, text: str) -> Configuration:
        """Parse a text; the cached text of the last change saves time."""
        if self._parsed is not None and self._parsed[0] == text:
            return self._parsed[1]
        return config_parser.parse(text, self._parsed[1] if self._parsed is not None else None)

    def plan(
        self, bundle: Bundle, text: str, last: Bundle | None, served: Sequence[File], reload_reason: str
    ) -> HaproxyPlan:
        """Write the candidate and the TLS files of a bundle, and decide how HAProxy gets them.

        Args:
            last: the bundle that was confirmed last, even if its files are lost.
            served: the TLS files in use.
            reload_reason: the reason for a reload in any case; empty without such a reason.
        """
        before = self._swap.current()
        wanted, directory, document = self._compose(bundle, text, served)
        reach(Point.FILES)
        decision = self._decide(before, last, wanted, bundle, directory, reload_reason)
        file = self._haproxy.write_candidate(document, before)
        return HaproxyPlan(bundle, before, document, wanted, directory, file, decision)

    def _compose(self, bundle: Bundle, text: str, served: Sequence[File]) -> tuple[Configuration, Path, Document]:
        """Return the parsed and allowed text, the directory of the TLS files, and the document."""
        wanted = self.parse(text)
        bundle_check.refuse_directives(wanted, bundle.files)
        directory = self._files.create(bundle.files, served)
        document = self._haproxy.compose_document(text, wanted, bundle, directory)
        return wanted, directory, document

    def _decide(
        self,
        before: Document | None,
        last: Bundle | None,
        wanted: Configuration,
        bundle: Bundle,
        directory: Path,
        reload_reason: str,
    ) -> Decision | None:
        if not self._haproxy.is_running():
            return None
        if before is None or last is None or self._swap.is_interrupted:
            return Reload("an earlier change was interrupted")
        if reload_reason:
            return Reload(reload_reason)
        process_changes = []
        if replace(last.limits, workers=None) != replace(bundle.limits, workers=None):
            process_changes.append("the limits of the process changed")
        if config_file.peers(last.vrrp) != config_file.peers(bundle.vrrp):
            process_changes.append("the peers of its stick tables changed")
        try:
            running = self.parse(before.text)
            different = tls_diff.changed_names(last.files, bundle.files)
            files = tls_diff.compare_files(
                self._files.tls_state(running, last.files, before.files or directory, ()),
                self._files.tls_state(wanted, bundle.files, directory, different),
            )
            return compare_configurations(running, wanted, process_changes, files, self._haproxy.features())
        except (ConfigurationRefused, OSError):
            return Reload("the previous configuration cannot be compared")

    def validate(self, bundle: Bundle, text: str, served: Sequence[File]) -> None:
        """Have HAProxy check the configuration of a bundle, without a change. Raises AgentError."""
        wanted, _, document = self._compose(bundle, text, served)
        file = self._haproxy.write_candidate(document, self._swap.current())
        with self._haproxy.checking(document, file, wanted, bundle.files) as check:
            check.wait()

    def needs_check(self, plan: HaproxyPlan, actions: Sequence[Action]) -> bool:
        """Return whether another HAProxy has to check the candidate after these actions."""
        return plan.before is None or config_check.is_needed(plan.before, plan.document, plan.wanted, actions)

    def checking(self, plan: HaproxyPlan) -> AbstractContextManager[Check]:
        """Have another HAProxy check the candidate within the block."""
        accepted = None if plan.before is None or plan.actions is None else self.parse(plan.before.text)
        return self._haproxy.checking(plan.document, plan.file, plan.wanted, plan.bundle.files, accepted)

    def run_actions(self, plan: HaproxyPlan, actions: Sequence[Action]) -> HaproxyError | None:
        """Mark the change as unfinished and carry out the actions; return an error of HAProxy.

        Raises OSError if the mark cannot be written; HAProxy is then unchanged.
        """
        self._swap.mark_unfinished()
        haproxy, failed = self._haproxy, None
        try:
            features, counters = haproxy.features(), haproxy.counters
            ActionRunner(haproxy.worker, features, counters, plan.directory, haproxy.usage).run(actions)
        except HaproxyError as error:
            failed = error
        except OSError as error:
            failed = HaproxyError("change the running HAProxy", str(error))
        reach(Point.EARLY)
        return failed

    def verify_actions(self, plan: HaproxyPlan, actions: Sequence[Action]) -> RuntimeResult:
        """Read back the servers that the actions have changed."""
        try:
            return self._haproxy.verify(plan.wanted, touched=changed_servers(actions))
        except HaproxyError as error:
            return error

    def verify_unchanged(self, plan: HaproxyPlan) -> Loaded | None:
        """Return the configuration that HAProxy reports; None if that differs from the plan."""
        with suppress(HaproxyError):
            return self._haproxy.verify(plan.wanted, plan.directory)
        return None

    def commit(self, plan: HaproxyPlan) -> None:
        """Replace HAProxy's file by the checked candidate."""
        self._swap.mark_unfinished()
        if plan.before != plan.document:
            self._swap.commit()

    def apply(self, plan: HaproxyPlan, early: RuntimeResult | None) -> tuple[Change, Loaded]:
        """Start HAProxy, change it at run time, or reload it.

        `early` is the result of a runtime update before the exchange of the file.
        """
        decision = plan.decision
        if decision is None:
            self._haproxy.start()
            return Change("start", "HAProxy was not running"), self._haproxy.verify(plan.wanted)
        if isinstance(decision, Runtime):
            actions = decision.actions
            result = early or self.run_actions(plan, actions) or self.verify_actions(plan, actions)
            if isinstance(result, Loaded):
                return Change("runtime", decision.reason), result
            decision = Reload(f"{decision.reason}; at run time: {result.happened}")
        if isinstance(decision, Unchanged):
            loaded = self.verify_unchanged(plan)
            if loaded is not None:
                return UNCHANGED, loaded
            decision = NOT_AS_CONFIGURED
        change = Change("reload", decision.reason)
        self._reload(plan.wanted, change, plan.bundle.limits.workers)
        return change, self._haproxy.verify(plan.wanted)

    def remember(self, plan: HaproxyPlan) -> None:
        """Cache the parsed text, because the text of the next change is similar."""
        self._parsed = plan.document.text, plan.wanted

    def _reload(self, wanted: Configuration, change: Change, max_old_workers: int | None) -> None:
        _log.info("The agent reloads HAProxy for this reason: %s", change.reason)
        if not self._haproxy.is_running():
            # HAProxy crashed after the agent's decision to reload, so the agent starts HAProxy instead.
            self._haproxy.start()
            return
        before = self._swap.before
        drain = before.drain if before is not None else config_file.DRAIN_SECONDS
        self._haproxy.reload(wanted, drain=drain, max_old_workers=max_old_workers)

    def stop(self) -> tuple[Change, Loaded]:
        """Stop HAProxy and remove its file."""
        if self._swap.current() is None and not self._haproxy.is_running():
            return UNCHANGED, NOTHING_LOADED
        self._swap.mark_unfinished()
        self._swap.remove()
        self._haproxy.stop()
        return Change("stop", "no listener is wanted"), NOTHING_LOADED

    def undo(self, before: Document | None) -> None:
        """Revert an early runtime update after HAProxy refused the candidate."""
        try:
            self._return_to(before)
            self._paths.unfinished.unlink(missing_ok=True)
        except (AgentError, OSError) as error:
            _log.error(
                "The agent could not restore the previous configuration of HAProxy, and will reload HAProxy at the "
                "next change: %s",
                error,
            )

    def restore(self, before: Document | None) -> Change | None:
        """Bring HAProxy back to the restored file; return the change if HAProxy was reloaded."""
        if before is None:
            self._haproxy.stop()
            self._swap.finish()
        elif self._haproxy.is_running():
            return self._return_to(before)
        elif before.files is None or before.files.is_dir():
            self._haproxy.start()
        return None

    def _return_to(self, before: Document | None) -> Change | None:
        """Reload HAProxy unless it runs the earlier document; return the change."""
        configuration = self.parse("" if before is None else before.text)
        try:
            self._haproxy.verify(configuration, None if before is None else before.files)
        except HaproxyError as error:
            change = Change("reload", f"rollback: {error.happened}")
            self._reload(configuration, change, None)
            return change
        return None
