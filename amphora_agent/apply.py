# SPDX-License-Identifier: Apache-2.0
"""Make this amphora what a bundle says.

Invariant: one bundle at a time; whatever step fails, the configuration that served before serves on, and the
file that HAProxy would start from is one that it has checked, with all files it names. A bundle is confirmed only
after HAProxy has said what it runs; a confirmed one whose files are gone is not said to be served.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from amphora_agent import confirmed as disk
from amphora_agent.bundle import Bundle, Host, Interface, digest, parse
from amphora_agent.config import Settings
from amphora_agent.confirmed import Confirmed
from amphora_agent.errors import (
    AgentError,
    BundleRefused,
    ConfigurationRefused,
    HaproxyError,
    MachineError,
)
from amphora_agent.files import FileSets
from amphora_agent.haproxy import configuration as text_of
from amphora_agent.haproxy import document as document_of
from amphora_agent.haproxy.comparison import Reload, Runtime, Unchanged, Verdict, compare, file_changes
from amphora_agent.haproxy.configuration import Configuration
from amphora_agent.haproxy.document import Document
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
        self._files = FileSets(paths)
        self._confirmed: Confirmed | None = None
        self._lost: Confirmed | None = None
        try:
            self._confirmed = disk.read(paths.confirmed)
        except MachineError as error:
            _log.error("%s", error)
        if self._confirmed is not None and not self._files.holds(self._confirmed.bundle.files):
            self._confirmed, self._lost = None, self._confirmed
            _log.warning("The files of generation %d are gone; it has to be pushed again", self._highest)
        self._pings: Mapping[str, Host] = self._confirmed.bundle.pings if self._confirmed is not None else {}

    @property
    def confirmed(self) -> Confirmed | None:
        """The last confirmed bundle."""
        return self._confirmed

    @property
    def lost(self) -> Confirmed | None:
        """The last confirmed bundle if it cannot be served because its files are gone."""
        return self._lost

    @property
    def generation(self) -> int | None:
        """The confirmed generation; 0 if its files are gone, None before the first one."""
        confirmed = self._confirmed
        if confirmed is None:
            return 0 if self._lost is not None else None
        return confirmed.bundle.generation

    @property
    def pings(self) -> Mapping[str, Host]:
        """The addresses to ping, by member: those of the confirmed bundle and of one that is being applied."""
        return self._pings

    @property
    def _highest(self) -> int | None:
        """The highest generation that was ever confirmed."""
        last = self._confirmed or self._lost
        return last.bundle.generation if last is not None else None

    def apply(self, body: bytes) -> Outcome:
        """Apply a bundle as it came over the wire.

        Raises:
            AgentError: as in docs/agent-api.md; the last good configuration serves.
        """
        bundle = parse(body)
        with self._lock:
            self._refuse_stale(bundle)
            try:
                self._pings = {**self._pings, **bundle.pings}
                outcome = self._apply(bundle)
                # The same bundle again keeps the moment at which it was first confirmed.
                received = digest(body)
                if self._confirmed is None or self._confirmed.digest != received:
                    self._confirm(disk.now_confirmed(bundle, received))
                self._finished()
            finally:
                self._pings = self._confirmed.bundle.pings if self._confirmed is not None else {}
                self._tidy()
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
                self._finished()
            except AgentError as error:
                _log.warning("%s", error)
                return False
            finally:
                self._tidy()
        _log.info("Generation %d again: %s. %s", outcome.generation, outcome.how, outcome.reason)
        self._after()
        return True

    def _refuse_stale(self, bundle: Bundle) -> None:
        wanted = f"apply generation {bundle.generation}"
        if bundle.amphora_id != self._settings.amphora_id:
            raise BundleRefused(
                wanted,
                f"it is for amphora {bundle.amphora_id}, this is {self._settings.amphora_id}",
                generation=self._highest,
            )
        last = self._confirmed or self._lost
        if last is None:
            return
        applied = last.bundle
        if bundle.load_balancer_id != applied.load_balancer_id:
            raise BundleRefused(
                wanted,
                f"this amphora serves load balancer {applied.load_balancer_id}",
                generation=self._highest,
            )
        if bundle.generation < applied.generation:
            raise BundleRefused(
                wanted,
                f"generation {applied.generation} is applied already",
                "A newer controller was here; read the wanted state again.",
                generation=self._highest,
            )
        if bundle.generation == applied.generation and bundle != applied and self._lost is None:
            raise BundleRefused(
                wanted,
                "this generation is applied already, with another content",
                "Every change takes a new generation.",
                generation=self._highest,
            )

    def _confirm(self, confirmed: Confirmed) -> None:
        try:
            disk.write(self._paths.confirmed, confirmed)
        except OSError as error:
            raise MachineError("write the bundle down", str(error)) from error
        self._confirmed, self._lost = confirmed, None

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
                how, reason, loaded = self._serve(bundle, bundle.haproxy, None if plugged else bundle.interfaces)
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

    def _serving(self) -> Document | None:
        """What HAProxy runs, or would start from."""
        try:
            return document_of.read(self._paths.configuration.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def _serve(self, bundle: Bundle, text: str, to_plug: tuple[Interface, ...] | None) -> tuple[str, str, Loaded]:
        """Have HAProxy serve a bundle's text.

        Args:
            to_plug: the interfaces to set up before; None if they are as wanted.
        """
        before, wanted = self._serving(), self._parsed(text)
        served = self._confirmed.bundle.files if self._confirmed is not None else ()
        directory = self._files.lay_out(bundle.files, served)
        document = self._haproxy.document(text, wanted, bundle.files, directory, bundle.limits)
        verdict = self._verdict(before, wanted, bundle)
        early: Changed | None = None
        if before == document and isinstance(verdict, Unchanged):
            if to_plug is not None:
                self._plug(to_plug)
            with suppress(HaproxyError):
                return "unchanged", "", self._haproxy.verify(wanted)
            verdict = Reload("HAProxy did not run what it was told to")
        else:
            with self._haproxy.checking(document, wanted, bundle.files) as check:
                if to_plug is None and isinstance(verdict, Runtime):
                    early = self._change_running(verdict, wanted)
                try:
                    check.end()
                except (AgentError, OSError):
                    if early is not None:
                        self._undo(before)
                    raise
            if to_plug is not None:
                self._plug(to_plug)
        # After a power cut HAProxy does not run and the confirmed bundle decides: neither the mark nor the switch
        # has to be on disk before that bundle is, and writing it syncs their directory.
        self._paths.unfinished.touch()
        if before != document:
            self._paths.candidate.replace(self._paths.configuration)
        try:
            outcome = self._bring_about(verdict, wanted, early)
        except (AgentError, OSError):
            self._restore(before)
            raise
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

    def _undo(self, before: Document | None) -> None:
        """Take back what was changed early: the file was refused. The one that was served is still in its place."""
        try:
            configuration = self._parsed(before.text if before is not None else "")
            try:
                self._haproxy.verify(configuration)
            except HaproxyError:
                self._haproxy.reload(configuration)
            self._paths.unfinished.unlink(missing_ok=True)
        except (AgentError, OSError) as error:
            _log.error("Going back to the last good configuration: %s", error)

    def _verdict(self, before: Document | None, wanted: Configuration, bundle: Bundle) -> Verdict | None:
        """What HAProxy needs; None if it does not run."""
        if not self._haproxy.is_running():
            return None
        last = self._confirmed or self._lost
        if before is None or last is None or self._paths.unfinished.exists():
            return Reload("an earlier change was interrupted")
        elsewhere = file_changes(last.bundle.files, bundle.files, wanted)
        if last.bundle.limits != bundle.limits:
            elsewhere.append("the limits of the process changed")
        try:
            return compare(self._parsed(before.text), wanted, elsewhere)
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
            self._haproxy.start()
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

    def _stop(self, before: Document | None) -> tuple[str, str, Loaded]:
        if before is None and not self._haproxy.is_running():
            return "unchanged", "", NOTHING
        self._haproxy.stop()
        self._paths.configuration.unlink(missing_ok=True)
        return "stop", "no listener is wanted", NOTHING

    def _finished(self) -> None:
        self._paths.unfinished.unlink(missing_ok=True)
        self._paths.candidate.unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove the files that neither the last confirmed bundle nor a start of HAProxy would need."""
        try:
            needed = set()
            if self._confirmed is not None:
                needed.add(self._files.place(self._confirmed.bundle.files))
            if (serving := self._serving()) is not None and serving.files is not None:
                needed.add(serving.files)
            self._files.keep_only(needed)
        except OSError as error:
            _log.error("Removing files that are not needed any more: %s", error)

    def _restore(self, before: Document | None) -> None:
        """Go back to what served before. The mark of an unfinished change stays: the next one reloads."""
        try:
            if before is None:
                self._haproxy.stop()
                self._paths.configuration.unlink(missing_ok=True)
                self._finished()
                return
            write_atomically(self._paths.configuration, before.content)
            configuration = text_of.parse(before.text)
            if self._haproxy.is_running():
                try:
                    self._haproxy.verify(configuration)
                except HaproxyError:
                    self._haproxy.reload(configuration)
            elif before.files is None or before.files.is_dir():
                self._haproxy.start()
        except (AgentError, OSError) as error:
            _log.error("Going back to the last good configuration: %s", error)
