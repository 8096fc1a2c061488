# SPDX-License-Identifier: Apache-2.0
"""What HAProxy itself has to do for a change, and how it gets back.

Invariant: whatever is done has a reason in words, and ends with HAProxy saying that it runs what it should; a change at
run time that HAProxy does not take as it should becomes a reload. Everything here reads the file that is in its place:
`apply` decides which one that is, and when.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from amphora_agent.apply import directive_check
from amphora_agent.apply.change_log import UNCHANGED, Deed
from amphora_agent.apply.config_swap import Switch
from amphora_agent.apply.file_sets import FileSets
from amphora_agent.bundle import Bundle, File, Limits
from amphora_agent.errors import AgentError, ConfigurationRefused, HaproxyError
from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy import config_file as document_of
from amphora_agent.haproxy import config_parser as text_of
from amphora_agent.haproxy import runtime_update, tls_diff
from amphora_agent.haproxy.config_diff import Reload, Runtime, Unchanged, Verdict, compare
from amphora_agent.haproxy.config_file import Document
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.haproxy.runtime_state import NOTHING, Loaded
from amphora_agent.haproxy.runtime_update import Changed
from amphora_agent.paths import Paths

_log = logging.getLogger(__name__)


class Serving:
    """HAProxy, and what its files are and were.

    Attributes:
        touched: what was found of somebody else in HAProxy's files, so that it may run anything; empty for nothing.
    """

    def __init__(self, haproxy: Haproxy, switch: Switch, files: FileSets, paths: Paths) -> None:
        self._haproxy = haproxy
        self._switch = switch
        self._files = files
        self._paths = paths
        self._read: tuple[str, Configuration] | None = None
        self.touched = ""

    def keep(self, text: str, configuration: Configuration) -> None:
        """Remember what was read from a text: the next one is mostly the same."""
        self._read = text, configuration

    def parsed(self, text: str) -> Configuration:
        """A text as data; the one applied last was kept."""
        if self._read is not None and self._read[0] == text:
            return self._read[1]
        return text_of.parse(text, self._read[1] if self._read is not None else None)

    def accepted(self, text: str, files: Iterable[File]) -> Configuration:
        """A text that HAProxy is to serve with these files, as data.

        Raises:
            ConfigurationRefused: it would have HAProxy do what no load balancer may (`directives.judgement`).
        """
        wanted = self.parsed(text)
        directive_check.check(wanted, files)
        return wanted

    def verdict(
        self, before: Document | None, last: Bundle | None, wanted: Configuration, bundle: Bundle, directory: Path
    ) -> Verdict | None:
        """What HAProxy needs; None if it does not run.

        Args:
            before: what is in HAProxy's file.
            last: the bundle that was confirmed last.
            directory: of the files that the text names.
        """
        if not self._haproxy.is_running():
            return None
        if before is None or last is None or self._switch.is_interrupted:
            return Reload("an earlier change was interrupted")
        if self.touched:
            return Reload(self.touched)
        elsewhere = []
        if replace(last.limits, workers=None) != replace(bundle.limits, workers=None):
            elsewhere.append("the limits of the process changed")
        if document_of.peers(last.vrrp) != document_of.peers(bundle.vrrp):
            elsewhere.append("who shares its stick tables changed")
        try:
            running = self.parsed(before.text)
            different = tls_diff.changed(last.files, bundle.files)
            files = tls_diff.changes(
                self._files.side(running, last.files, before.files or directory, ()),
                self._files.side(wanted, bundle.files, directory, different),
            )
            return compare(running, wanted, elsewhere, files, self._haproxy.abilities())
        except (ConfigurationRefused, OSError):
            return Reload("what was served before cannot be compared")

    def change_running(self, verdict: Runtime, directory: Path) -> HaproxyError | None:
        """Change the running HAProxy, before another one checks the file; that file waits for the check."""
        self._switch.mark()
        failed = runtime_update.make(self._haproxy, verdict.steps, directory)
        reach(Point.EARLY)
        return failed

    def bring_about(
        self, verdict: Verdict | None, wanted: Configuration, early: Changed | None, limits: Limits, files: Path
    ) -> tuple[Deed, Loaded]:
        """Have HAProxy run what its file says by now.

        Args:
            early: what came of a change at run time, where that was begun before the file was in its place.
            files: the directory of those that the text names.
        """
        if verdict is None:
            self._haproxy.start()
            return Deed("start", "HAProxy was not running"), self._haproxy.verify(wanted)
        if isinstance(verdict, Runtime):
            done = early or self.change_running(verdict, files)
            done = done or runtime_update.outcome(self._haproxy, verdict.steps, wanted)
            if isinstance(done, Loaded):
                return Deed("runtime", verdict.reason), done
            verdict = Reload(f"{verdict.reason}; at run time: {done.happened}")
        if isinstance(verdict, Unchanged):
            with suppress(HaproxyError):
                return UNCHANGED, self._haproxy.verify(wanted, files)
            verdict = Reload("HAProxy did not run what it was told to")
        deed = Deed("reload", verdict.reason)
        self._reload(wanted, deed, limits.workers)
        return deed, self._haproxy.verify(wanted)

    def _reload(self, wanted: Configuration, deed: Deed, most: int | None) -> None:
        """Have a new worker read the file that is there."""
        _log.info("A new worker of HAProxy, because: %s", deed.reason)
        if not self._haproxy.is_running():  # it has died a moment ago
            self._haproxy.start()
            return
        before = self._switch.before
        self._haproxy.reload(wanted, drain=before.drain if before is not None else document_of.DRAIN_SECONDS, most=most)

    def undo(self, before: Document | None) -> None:
        """Take back what was changed early: the file was refused. The one that was served is still in its place."""
        try:
            configuration = self.parsed(before.text if before is not None else "")
            try:
                self._haproxy.verify(configuration, before.files if before is not None else None)
            except HaproxyError as error:
                self._reload(configuration, Deed("reload", f"back to what was served: {error.happened}"), None)
            self._paths.unfinished.unlink(missing_ok=True)
        except (AgentError, OSError) as error:
            _log.error("Going back to the last good configuration: %s", error)

    def restore(self, before: Document | None) -> Deed | None:
        """Have HAProxy run what its file says again; what was done for it, if it was noticeable."""
        if before is None:
            self._haproxy.stop()
            self._switch.finish()
            return None
        configuration = self.parsed(before.text)
        if self._haproxy.is_running():
            try:
                self._haproxy.verify(configuration, before.files if before is not None else None)
            except HaproxyError as error:
                deed = Deed("reload", f"back to what was served: {error.happened}")
                self._reload(configuration, deed, None)
                return deed
        elif before.files is None or before.files.is_dir():
            self._haproxy.start()
        return None

    def stop(self) -> tuple[Deed, Loaded]:
        """Without HAProxy, and without a file that it would start from."""
        if self._switch.serving() is None and not self._haproxy.is_running():
            return UNCHANGED, NOTHING
        self._switch.mark()
        self._switch.forget()
        self._haproxy.stop()
        return Deed("stop", "no listener is wanted"), NOTHING
