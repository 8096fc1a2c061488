# SPDX-License-Identifier: Apache-2.0
"""Make this amphora what a bundle says.

Invariant: one bundle at a time; whatever step fails, the configuration that served before serves on, and the
file that HAProxy would start from is one that it has checked. A bundle is confirmed only after HAProxy has
said what it runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from amphora_agent import confirmed as disk
from amphora_agent.bundle import Bundle, Interface, parse
from amphora_agent.config import Settings
from amphora_agent.confirmed import Confirmed
from amphora_agent.errors import (
    AgentError,
    BundleRefused,
    ConfigurationRefused,
    HaproxyError,
    MachineError,
)
from amphora_agent.haproxy import configuration as text_of
from amphora_agent.haproxy.comparison import Reload, Runtime, Unchanged, Verdict, compare
from amphora_agent.haproxy.configuration import Configuration
from amphora_agent.haproxy.process import NOTHING, Haproxy, Loaded
from amphora_agent.haproxy.runtime import carry_out
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.watch import Watch
from amphora_agent.paths import Paths, write_atomically

_log = logging.getLogger(__name__)
# What came of changing the running HAProxy: what it runs now, or what it could not do.
Changed = Loaded | HaproxyError


@dataclass(frozen=True)
class Outcome:
    """What an apply did."""

    generation: int
    how: str
    reason: str
    loaded: Loaded

    def document(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "how": self.how,
            "reason": self.reason,
            "loaded": self.loaded.document(),
        }


class Applier:
    """The one way in which this amphora changes.

    Args:
        after: called after each bundle that was applied.
    """

    def __init__(
        self,
        settings: Settings,
        paths: Paths,
        haproxy: Haproxy,
        inner: Namespace,
        after: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._paths = paths
        self._haproxy = haproxy
        self._inner = inner
        self._after = after
        self._watch = Watch(inner)
        self._plugged: tuple[Interface, ...] | None = None
        self._read: tuple[str, Configuration] | None = None
        self._lock = threading.Lock()
        self._confirmed: Confirmed | None = None
        try:
            self._confirmed = disk.read(paths.confirmed)
        except MachineError as error:
            _log.error("%s", error)

    @property
    def confirmed(self) -> Confirmed | None:
        """The last confirmed bundle."""
        return self._confirmed

    @property
    def generation(self) -> int | None:
        confirmed = self._confirmed
        return confirmed.bundle.generation if confirmed is not None else None

    def apply(self, body: bytes) -> Outcome:
        """Apply a bundle as it came over the wire.

        Raises:
            AgentError: as in docs/agent-api.md; the last good configuration serves.
        """
        bundle = parse(body)
        with self._lock:
            self._refuse_stale(bundle)
            outcome = self._apply(bundle)
            # The same bundle again keeps the moment at which it was first confirmed.
            if self._confirmed is None or self._confirmed.body != body:
                self._confirm(disk.now_confirmed(bundle, body))
        _log.info("Generation %d: %s. %s", outcome.generation, outcome.how, outcome.reason)
        self._after()
        return outcome

    def apply_confirmed(self) -> bool:
        """Apply what was confirmed before this agent started.

        Returns:
            Whether there is nothing left to do.
        """
        with self._lock:
            if self._confirmed is None:
                return True
            try:
                outcome = self._apply(self._confirmed.bundle)
            except AgentError as error:
                _log.warning("%s", error)
                return False
        _log.info("Generation %d again: %s. %s", outcome.generation, outcome.how, outcome.reason)
        self._after()
        return True

    def _refuse_stale(self, bundle: Bundle) -> None:
        wanted = f"apply generation {bundle.generation}"
        if bundle.amphora_id != self._settings.amphora_id:
            raise BundleRefused(
                wanted,
                f"it is for amphora {bundle.amphora_id}, this is {self._settings.amphora_id}",
                generation=self.generation,
            )
        if self._confirmed is None:
            return
        applied = self._confirmed.bundle
        if bundle.load_balancer_id != applied.load_balancer_id:
            raise BundleRefused(
                wanted,
                f"this amphora serves load balancer {applied.load_balancer_id}",
                generation=self.generation,
            )
        if bundle.generation < applied.generation:
            raise BundleRefused(
                wanted,
                f"generation {applied.generation} is applied already",
                "A newer controller was here; read the wanted state again.",
                generation=self.generation,
            )
        if bundle.generation == applied.generation and bundle != applied:
            raise BundleRefused(
                wanted,
                "this generation is applied already, with another content",
                "Every change takes a new generation.",
                generation=self.generation,
            )

    def _confirm(self, confirmed: Confirmed) -> None:
        try:
            disk.write(self._paths.confirmed, confirmed)
        except OSError as error:
            raise MachineError("write the bundle down", str(error)) from error
        self._confirmed = confirmed

    # -- the steps ------------------------------------------------------------------------------------------

    def _apply(self, bundle: Bundle) -> Outcome:
        again = self._confirmed is not None and bundle == self._confirmed.bundle
        try:
            plugged = self._is_plugged(bundle.interfaces) and not again
            if bundle.haproxy is None:
                if not plugged:
                    self._plug(bundle.interfaces)
                how, reason, loaded = self._stop(self._serving())
            else:
                how, reason, loaded = self._serve(bundle.haproxy, None if plugged else bundle.interfaces)
        except OSError as error:
            raise MachineError(f"apply generation {bundle.generation}", str(error)) from error
        return Outcome(bundle.generation, how, reason, loaded)

    def _is_plugged(self, wanted: tuple[Interface, ...]) -> bool:
        """Whether the interfaces are as wanted and nobody has touched them since.

        What the last call of `_plug` did itself was announced as well: the next one goes over everything once more.
        """
        if self._watch.changed():
            self._plugged = None
        return wanted == self._plugged

    def _plug(self, wanted: tuple[Interface, ...]) -> None:
        self._plugged = None
        try:
            interfaces.apply(self._inner, wanted)
            self._plugged = wanted
        except AgentError:
            before = self._confirmed.bundle.interfaces if self._confirmed is not None else ()
            if before != wanted:
                with suppress(AgentError):  # the first error is the one to report
                    interfaces.apply(self._inner, before)
            raise

    def _serving(self) -> str | None:
        """The text HAProxy runs, or would start from."""
        try:
            return self._paths.configuration.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _serve(self, text: str, to_plug: tuple[Interface, ...] | None) -> tuple[str, str, Loaded]:
        """Have HAProxy serve a text.

        Args:
            to_plug: the interfaces to set up before; None if they are as wanted.
        """
        before, wanted = self._serving(), self._parsed(text)
        verdict = self._verdict(before, wanted)
        early: Changed | None = None
        if before == text and isinstance(verdict, Unchanged):
            if to_plug is not None:
                self._plug(to_plug)
            with suppress(HaproxyError):
                return "unchanged", "", self._haproxy.verify(wanted)
            verdict = Reload("HAProxy did not run what it was told to")
        else:
            with self._haproxy.checking(text, wanted) as check:
                if to_plug is None and isinstance(verdict, Runtime):
                    early = self._change_running(verdict, wanted)
                try:
                    check.end()
                except (AgentError, OSError):
                    if early is not None:
                        self._undo(before or "")
                    raise
            if to_plug is not None:
                self._plug(to_plug)
        # After a power cut HAProxy does not run and the confirmed bundle decides: neither the mark nor the switch
        # has to be on disk before that bundle is, and writing it syncs their directory.
        self._paths.unfinished.touch()
        if before != text:
            self._paths.candidate.replace(self._paths.configuration)
        try:
            outcome = self._bring_about(verdict, wanted, early)
        except (AgentError, OSError):
            self._restore(before)
            raise
        self._finished()
        self._read = text, wanted
        return outcome

    def _change_running(self, verdict: Runtime, wanted: Configuration) -> Changed:
        """Change the running HAProxy while another one checks the file; that file waits for the check."""
        self._paths.unfinished.touch()
        try:
            carry_out(verdict.steps, self._haproxy.worker)
            return self._haproxy.verify(wanted)
        except HaproxyError as error:
            return error

    def _undo(self, before: str) -> None:
        """Take back what was changed early: the file was refused. The one that was served is still in its place."""
        try:
            configuration = self._parsed(before)
            try:
                self._haproxy.verify(configuration)
            except HaproxyError:
                self._haproxy.reload(configuration)
            self._paths.unfinished.unlink(missing_ok=True)
        except (AgentError, OSError) as error:
            _log.error("Going back to the last good configuration: %s", error)

    def _verdict(self, before: str | None, wanted: Configuration) -> Verdict | None:
        """What HAProxy needs; None if it does not run."""
        if not self._haproxy.is_running():
            return None
        if before is None or self._paths.unfinished.exists():
            return Reload("an earlier change was interrupted")
        try:
            return compare(self._parsed(before), wanted)
        except ConfigurationRefused:
            return Reload("what was served before cannot be compared")

    def _parsed(self, text: str) -> Configuration:
        """A text as data; the one applied last was kept."""
        if self._read is not None and self._read[0] == text:
            return self._read[1]
        return text_of.parse(text)

    def _bring_about(
        self, verdict: Verdict | None, wanted: Configuration, early: Changed | None
    ) -> tuple[str, str, Loaded]:
        if verdict is None:
            self._haproxy.start(wanted)
            return "start", "HAProxy was not running", self._haproxy.verify(wanted)
        if isinstance(verdict, Runtime):
            done = self._change_running(verdict, wanted) if early is None else early
            if isinstance(done, Loaded):
                return "runtime", verdict.reason, done
            verdict = Reload(f"{verdict.reason}; at run time: {done.happened}")
        if isinstance(verdict, Unchanged):
            with suppress(HaproxyError):
                return "unchanged", "", self._haproxy.verify(wanted)
            verdict = Reload("HAProxy did not run what it was told to")
        self._haproxy.reload(wanted)
        return "reload", verdict.reason, self._haproxy.verify(wanted)

    def _stop(self, before: str | None) -> tuple[str, str, Loaded]:
        if before is None and not self._haproxy.is_running():
            return "unchanged", "", NOTHING
        self._haproxy.stop()
        self._paths.configuration.unlink(missing_ok=True)
        self._finished()
        return "stop", "no listener is wanted", NOTHING

    def _finished(self) -> None:
        self._paths.unfinished.unlink(missing_ok=True)
        self._paths.candidate.unlink(missing_ok=True)

    def _restore(self, before: str | None) -> None:
        """Go back to what served before. The mark of an unfinished change stays: the next one reloads."""
        try:
            if before is None:
                self._haproxy.stop()
                self._paths.configuration.unlink(missing_ok=True)
                self._finished()
                return
            write_atomically(self._paths.configuration, before)
            configuration = text_of.parse(before)
            if self._haproxy.is_running():
                try:
                    self._haproxy.verify(configuration)
                except HaproxyError:
                    self._haproxy.reload(configuration)
            else:
                self._haproxy.start(configuration)
        except (AgentError, OSError) as error:
            _log.error("Going back to the last good configuration: %s", error)
