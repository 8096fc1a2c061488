# SPDX-License-Identifier: Apache-2.0
"""Make this amphora what a bundle says.

Invariant: one bundle at a time; whatever step fails, the configuration that served before serves on, and the
file that HAProxy would start from is one that it has checked, with all files it names. A bundle is confirmed only
after HAProxy has said what it runs; a confirmed one whose files are gone is not said to be served.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from amphora_agent.apply import confirmed_bundle as disk
from amphora_agent.apply import generation_check, recovery
from amphora_agent.apply.apply_queue import Turns
from amphora_agent.apply.change_log import UNCHANGED, Deed, Tally
from amphora_agent.apply.config_swap import Switch
from amphora_agent.apply.confirmed_bundle import Confirmed, Draft
from amphora_agent.apply.file_sets import FileSets
from amphora_agent.apply.haproxy_update import Serving
from amphora_agent.apply.result import Outcome
from amphora_agent.apply.udp_update import VirtualServing
from amphora_agent.apply.udp_update import difference as virtual_difference
from amphora_agent.bundle import Bundle, Host, VrrpInstance, digest, parse
from amphora_agent.config import Settings
from amphora_agent.drift.check import FILE_WORDS, Eye
from amphora_agent.drift.report import Difference
from amphora_agent.errors import AgentError, HaproxyError, MachineError
from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy import runtime_update
from amphora_agent.haproxy.config_diff import Reload, Runtime, Unchanged
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.haproxy.runtime_state import Loaded
from amphora_agent.haproxy.runtime_update import Changed
from amphora_agent.keepalived.process import Keepalived
from amphora_agent.network import firewall
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.plumbing import Plumbing
from amphora_agent.octavia_api_v1.stored_state import OCTAVIA
from amphora_agent.paths import Paths

_log = logging.getLogger(__name__)


class Applier:
    """The one way in which this amphora changes.

    Args:
        after: called after each bundle that was applied.
        tell_pings: is given the addresses to ping, by member, whenever they change.
        virtual: has UDP and SCTP listeners served.
    """

    def __init__(
        self,
        settings: Settings,
        paths: Paths,
        haproxy: Haproxy,
        keepalived: Keepalived,
        inner: Namespace,
        after: Callable[[], None],
        tell_pings: Callable[[Mapping[str, Host]], None],
        *,
        virtual: VirtualServing,
    ) -> None:
        self._settings = settings
        self._paths = paths
        self._haproxy = haproxy
        self._keepalived = keepalived
        self._after = after
        self._plumbing = Plumbing(inner)
        self._lock = threading.Lock()
        self._turns: Turns[Outcome] = Turns()
        self._switch = Switch(paths)
        self._tally = Tally()
        self._healer = recovery.Healer(lambda: not self._switch.is_interrupted or self.apply_confirmed())
        self._files = FileSets(paths)
        self._serving = Serving(haproxy, self._switch, self._files, paths)
        self._virtual = virtual
        self._eye = Eye(paths, haproxy, keepalived, self._plumbing, self._files, self._serving, self._virtual)
        self._has_applied = False
        self._confirmed: Confirmed | None = None
        self._lost: Confirmed | None = None
        try:
            self._confirmed = disk.read(paths.confirmed, paths.configuration)
        except MachineError as error:
            _log.error("%s", error)
        found = self._confirmed
        if found is not None and not self._files.holds(found.bundle.files):
            self._confirmed, self._lost = None, found
            _log.warning("The files of generation %d are gone; it has to be pushed again", found.bundle.generation)
        self._tell_pings = tell_pings
        self._pings: Mapping[str, Host] = {}
        self._have_confirmed_pinged()

    @property
    def confirmed(self) -> Confirmed | None:
        """The last confirmed bundle."""
        return self._confirmed

    def changes(self) -> dict[str, Any]:
        """What was done to HAProxy since this agent began, and how many wait to change it."""
        return {**self._tally.document(), "waiting": self._turns.waiting}

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

    def _have_pinged(self, pings: Mapping[str, Host]) -> None:
        """Have these members pinged: those of the confirmed bundle and of one that is being applied."""
        try:
            self._tell_pings(pings)
        except OSError as error:
            raise MachineError("tell the responder whom to ping", str(error)) from error
        self._pings = pings

    def _have_confirmed_pinged(self) -> None:
        """Have no others pinged than those of the confirmed bundle.

        If that fails, too many are, which harms nobody. If nothing is confirmed, HAProxy may still serve what only
        the responder knows of.
        """
        if self._confirmed is not None:
            with suppress(MachineError):
                self._have_pinged(self._confirmed.bundle.pings)

    @property
    def elected(self) -> VrrpInstance | None:
        """What this amphora takes part in with partners; None if it is on its own, or serves nothing."""
        confirmed = self._confirmed
        return None if confirmed is None else confirmed.bundle.vrrp_instance

    @property
    def _last(self) -> Bundle | None:
        """The bundle that was confirmed last, whether or not it can be served."""
        last = self._confirmed or self._lost
        return None if last is None else last.bundle

    def apply(self, body: bytes) -> Outcome:
        """Apply a bundle as it came over the wire. Raises what `apply_bundle` does, and `MalformedBundle`."""
        return self.apply_bundle(parse(body), digest(body))

    def apply_bundle(self, bundle: Bundle, received: str) -> Outcome:
        """Apply a bundle, or learn that a newer one was applied while this one waited.

        Args:
            received: the digest to remember it by.

        Returns:
            What was done for this generation, or for a newer one.

        Raises:
            AgentError: as in docs/agent-api.md; the last good configuration serves.
        """
        generation_check.refuse_foreign(bundle, self._settings.amphora_id, self._last)
        outcome = self._turns.take(
            bundle.generation, bundle.load_balancer_id, lambda: self._apply_in_turn(bundle, received)
        )
        if outcome.generation != bundle.generation:
            _log.info("Generation %d was not applied: %d is", bundle.generation, outcome.generation)
        return outcome

    def _apply_in_turn(self, bundle: Bundle, received: str) -> Outcome:
        with self._lock:
            reach(Point.TAKEN)
            generation_check.refuse_stale(bundle, self._last, lost=self._lost is not None)
            # The same bundle again keeps the moment at which it was first confirmed.
            same = self._confirmed is not None and self._confirmed.digest == received
            draft = None if same else Draft(self._paths.confirmed, disk.as_of_now(bundle, received))
            try:
                self._have_pinged({**self._pings, **bundle.pings})
                outcome = self._apply(bundle, draft)
            except AgentError:
                if self._confirmed is not None:
                    self._healer.start()
                raise
            finally:
                self._have_confirmed_pinged()
                self._tidy()
        _log.info("Generation %d: %s. %s", outcome.generation, outcome.how, outcome.reason)
        self._after()
        return outcome

    def check(self, bundle: Bundle) -> None:
        """Have HAProxy read what a bundle would give it, and change nothing.

        Raises:
            AgentError: HAProxy, or we on its behalf, refuse it.
        """
        if bundle.haproxy is None:
            return
        with self._lock:
            try:
                wanted = self._serving.accepted(bundle.haproxy, bundle.files)
                served = self._confirmed.bundle.files if self._confirmed is not None else ()
                directory = self._files.lay_out(bundle.files, served)
                document = self._haproxy.document(
                    bundle.haproxy, wanted, bundle.files, directory, bundle.limits, bundle.vrrp
                )
                place = self._haproxy.lay_down(document, self._switch.serving())
                with self._haproxy.checking(document, place, wanted, bundle.files) as check:
                    check.end()
            except OSError as error:
                raise MachineError("check the configuration", str(error)) from error
            finally:
                self._paths.candidate.unlink(missing_ok=True)
                self._tidy()

    def apply_confirmed(self) -> bool:
        """Apply what was confirmed before this agent started.

        Returns:
            Whether there is nothing left to do.
        """
        with self._lock:
            # A push may have been faster.
            if self._confirmed is None or (self._has_applied and not self._switch.is_interrupted):
                return True
            try:
                outcome = self._apply(self._confirmed.bundle, None)
            except AgentError as error:
                _log.warning("%s", error)
                return False
            finally:
                self._tidy()
        _log.info("Generation %d again: %s. %s", outcome.generation, outcome.how, outcome.reason)
        self._after()
        return True

    # -- what was changed by hand ---------------------------------------------------------------------------

    def differences(self) -> tuple[Difference, ...] | None:
        """What of this machine is not as confirmed.

        Returns:
            None while a change is under way or waits, and where nothing is confirmed that this agent has applied.

        Raises:
            AgentError: it cannot be found out.
        """
        if self._turns.waiting or not self._lock.acquire(blocking=False):
            return None
        try:
            bundle = self._auditable()
            return None if bundle is None else self._eye.look(bundle)
        except OSError as error:
            raise MachineError("look for what was changed by hand", str(error)) from error
        finally:
            self._lock.release()

    def _auditable(self) -> Bundle | None:
        bundle = self._served
        # What Octavia drives is Octavia's to look after.
        ours = bundle is not None and bundle.load_balancer_id != OCTAVIA
        return bundle if ours and self._has_applied and not self._switch.is_interrupted else None

    def mend(self, found: Sequence[Difference]) -> None:
        """Apply the confirmed bundle once more, because of what was found; does nothing if that is a past one.

        Raises:
            AgentError: it cannot be mended with what is here.
        """
        with self._lock:
            bundle, confirmed = self._auditable(), self._confirmed
            if bundle is None or confirmed is None:
                return
            touched = next((one.sentence for one in found if one.word in FILE_WORDS), "")
            self._serving.touched = touched
            try:
                outcome = self._apply(bundle, None)
                if touched and bundle.haproxy is not None:
                    disk.keep_text(self._paths.confirmed, confirmed, self._paths.configuration)
            except OSError as error:
                raise MachineError("mend what was changed by hand", str(error)) from error
            except AgentError:
                self._healer.start()
                raise
            finally:
                self._serving.touched = ""
                self._have_confirmed_pinged()
                self._tidy()
        _log.info("Generation %d once more: %s. %s", outcome.generation, outcome.how, outcome.reason)

    # -- the steps ------------------------------------------------------------------------------------------

    def _apply(self, bundle: Bundle, draft: Draft | None) -> Outcome:
        """Do all of it, and confirm it; or leave, as far as can be, what was before.

        Args:
            draft: what is to be confirmed; None if it is confirmed already.
        """
        again = self._confirmed is not None and bundle == self._confirmed.bundle
        elected = bundle.vrrp_instance
        try:
            if not self._has_applied and bundle.haproxy is not None:
                self._haproxy.claim()
            self._eye.forget()
            if again:
                self._plumbing.invalidate()
                self._files.doubt()
                self._switch.doubt()
                self._virtual.doubt()
            self._virtual.check(bundle)
            plumbed = self._plumbing.matches(bundle)
            if bundle.haproxy is None:
                if not plumbed:
                    self._plumbing.prepare(bundle, self._served, may_lack=draft is None)
                self._keepalived.check_configuration(elected)
                self._reserve(draft, None)
                deed, loaded = self._serving.stop()
                if not plumbed:
                    self._finish_plumbing(bundle, may_lack=draft is None)
                deed = self._unchanged(bundle) if deed == UNCHANGED else deed
            else:
                deed, loaded = self._serve(bundle, bundle.haproxy, draft, plumbed=plumbed)
            deed = self._forward(bundle, deed)
            # Last: a node may be given the VIPs only when it serves.
            self._keepalived.apply(elected)
            self._confirm(draft)
        except (AgentError, OSError) as error:
            self._go_back(draft, bundle)
            if isinstance(error, AgentError):
                raise
            raise MachineError(f"apply generation {bundle.generation}", str(error)) from error
        self._count(deed)
        self._has_applied = True
        return Outcome(bundle.generation, deed, loaded)

    def _reserve(self, draft: Draft | None, file: Path | None) -> None:
        """Have room on disk for everything that will have to be there: after this, no step takes any.

        Args:
            file: what will be HAProxy's.
        """
        self._switch.reserve()
        if draft is not None:
            draft.reserve(file)
        reach(Point.RESERVED)

    def _confirm(self, draft: Draft | None) -> None:
        reach(Point.LOADED)
        if draft is not None:
            draft.confirm()
            self._confirmed, self._lost = draft.confirmed, None
        reach(Point.CONFIRMED)
        self._switch.finish()
        reach(Point.FINISHED)

    def _count(self, deed: Deed) -> None:
        self._tally.count(deed)
        while self._haproxy.ended:
            self._tally.count_ended_worker(self._haproxy.ended.pop())

    @property
    def _served(self) -> Bundle | None:
        return self._confirmed.bundle if self._confirmed is not None else None

    def _finish_plumbing(self, bundle: Bundle, *, may_lack: bool) -> None:
        """Args: may_lack: what is confirmed already is served with the interfaces that are still there."""
        if bundle.virtual_servers:  # before the neighbours are told of VIPs
            self._virtual.bring_about(bundle)
        leaves = bundle.vrrp_instance is None and self._keepalived.is_running()
        self._plumbing.commit(bundle, may_lack=may_lack, ending=self._keepalived.stop if leaves else None)

    def _forward(self, bundle: Bundle, deed: Deed) -> Deed:
        """Have the virtual servers served; what was done for the bundle is told with what changed of them."""
        self._virtual.bring_about(bundle)
        served = self._served.virtual_servers if self._served is not None else ()
        reason = virtual_difference(served, bundle.virtual_servers)
        if not reason:
            return deed
        return Deed("runtime", reason) if deed == UNCHANGED else Deed(deed.how, f"{deed.reason}; {reason}")

    def _unchanged(self, bundle: Bundle) -> Deed:
        """What is said of a bundle that leaves HAProxy alone; who may connect is decided in front of it."""
        before = firewall.UNRESTRICTED if self._served is None else firewall.restrictions_of(self._served)
        reason = firewall.describe_change(before, firewall.restrictions_of(bundle))
        return Deed("runtime", reason) if reason else UNCHANGED

    def _serve(self, bundle: Bundle, text: str, draft: Draft | None, *, plumbed: bool) -> tuple[Deed, Loaded]:
        """Have HAProxy serve a bundle's text.

        Args:
            plumbed: whether the network is as wanted; otherwise what is needed is added before and the rest goes after.
        """
        elected = bundle.vrrp_instance
        before, wanted = self._switch.serving(), self._serving.accepted(text, bundle.files)
        served = self._confirmed.bundle.files if self._confirmed is not None else ()
        directory = self._files.lay_out(bundle.files, served)
        document = self._haproxy.document(text, wanted, bundle.files, directory, bundle.limits, bundle.vrrp)
        reach(Point.FILES)
        verdict = self._serving.verdict(before, self._last, wanted, bundle, directory)
        early: Changed | None = None
        place = self._haproxy.lay_down(document, before)
        if before == document and isinstance(verdict, Unchanged):
            self._reserve(draft, place)
            if not plumbed:  # who may not come in is kept out before anything is forwarded
                self._plumbing.prepare(bundle, self._served, may_lack=draft is None)
                reach(Point.PLUGGED)
                self._finish_plumbing(bundle, may_lack=draft is None)
            with suppress(HaproxyError):
                return self._unchanged(bundle), self._haproxy.verify(wanted, directory)
            verdict = Reload("HAProxy did not run what it was told to")
        else:
            reach(Point.CHECKING)
            self._reserve(draft, place)
            at_once = verdict if plumbed and isinstance(verdict, Runtime) else None
            running = self._serving.parsed(before.text) if before is not None and isinstance(verdict, Runtime) else None
            try:
                early = self._serving.change_running(at_once, directory) if at_once is not None else None
                with self._haproxy.checking(document, place, wanted, bundle.files, running) as check:
                    if at_once is not None:
                        early = early or runtime_update.outcome(self._haproxy, at_once.steps, wanted)
                    disk.settle(draft, place)
                    check.end()
                reach(Point.CHECKED)
                if plumbed:
                    self._keepalived.check_configuration(elected)
            except (AgentError, OSError):
                if at_once is not None:
                    self._serving.undo(before)
                raise
            if not plumbed:
                self._plumbing.prepare(bundle, self._served, may_lack=draft is None)
                self._keepalived.check_configuration(elected)
                reach(Point.PLUGGED)
        self._switch.mark()
        if before != document:
            self._switch.go()
        outcome = self._serving.bring_about(verdict, wanted, early, bundle.limits, directory)
        if not plumbed:
            self._finish_plumbing(bundle, may_lack=draft is None)
        self._serving.keep(text, wanted)
        return outcome

    def _tidy(self) -> None:
        """Remove the files that neither the last confirmed bundle nor a start of HAProxy would need."""
        try:
            needed = set()
            if self._confirmed is not None:
                needed.add(self._files.place(self._confirmed.bundle.files))
            if (serving := self._switch.serving()) is not None and serving.files is not None:
                needed.add(serving.files)
            self._files.keep_only(needed)
        except OSError as error:
            _log.error("Removing files that are not needed any more: %s", error)
        reach(Point.TIDIED)

    def _go_back(self, draft: Draft | None, failed: Bundle) -> None:
        """Go back to what served before. The mark of an unfinished change stays: the next one reloads."""
        try:
            if draft is not None:
                draft.discard()
            if self._switch.gone:
                deed = self._serving.restore(self._switch.go_back())
                if deed is not None:
                    self._count(deed)
        except (AgentError, OSError) as error:
            _log.error("Going back to the last good configuration: %s", error)
        finally:
            self._virtual.go_back(self._served, failed)
            self._plumbing.roll_back(self._served)
