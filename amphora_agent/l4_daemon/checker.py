# SPDX-License-Identifier: Apache-2.0
"""Members of virtual servers are checked, and the engine is told.

Invariant: what is served is always what was wanted last and could be brought about; a wish that cannot be fulfilled
leaves the one before it in force. A state that changes is in the kernel before anything else is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from amphora_agent.errors import AgentError
from amphora_agent.l4 import model, stat_rows
from amphora_agent.l4.engine import Engine, MemberCounters, Place
from amphora_agent.l4.event_loop import Loop, Timer
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4.monotonic_counters import SUMMED
from amphora_agent.l4_checks import member_state
from amphora_agent.l4_checks.check import Kind, target
from amphora_agent.l4_checks.member_state import Key, States, Status
from amphora_agent.l4_checks.schedule import Schedule
from amphora_agent.l4_daemon import persisted_state
from amphora_agent.l4_daemon.persisted_state import Record, Wish
from amphora_agent.l4_flow_log.writer import FlowLog

FIRST_RETRY, LAST_RETRY = 0.5, 30.0
# How often it is looked who has the fewest flows.
_BALANCE_SECONDS = 1.0
# What changes no member's status may be lost if this process is killed.
_NOTE_SECONDS = 1.0


class Checker:
    """States of members, and what follows from them. Used by one thread.

    Args:
        kinds: as `Schedule` has it.
        version: of the code that runs, for whoever asks.
    """

    def __init__(
        self,
        loop: Loop,
        engine: Engine,
        kept: Record,
        kinds: Mapping[str, Callable[[Loop], Kind]],
        version: str = "",
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._flow_log = FlowLog(loop)
        self._record = kept
        self._version = version
        self._schedule = Schedule(loop, kinds, self._verdict)
        left = kept.read()
        self._wish = left.wish
        self._counted = left.counted
        self._states = member_state.carried(left.states, (), left.wish.servers, time.time())
        self._monitors: dict[Key, model.Monitor] = {}
        # What the engine was told last; until then what the one before has noted.
        self._told = member_state.may_serve(left.wish.servers, self._states)
        self._changed = bool(left.wish.servers)  # the kernel may hold what nobody has noted
        self._noted = True
        self._trouble: str | None = None
        self._retry: Timer | None = None
        self._notes: Timer | None = None
        self._balancing: Timer | None = None
        self._rests_until = 0.0
        self._patience = FIRST_RETRY
        self._look_after(self._wish.servers)

    # -- checks ---------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Wait for the next thing and do all that is due."""
        rest = self._rests_until - time.monotonic()
        if self._changed and self._retry is None and rest <= 0:
            self._follow()
            return
        self._loop.turn(rest if self._changed and self._retry is None else None)
        if not self._noted and self._notes is None:
            self._notes = self._loop.at(time.monotonic() + _NOTE_SECONDS, self._note)

    def _verdict(self, key: Key, good: bool, seen: str) -> None:
        before, monitor = self._states.get(key), self._monitors.get(key)
        if before is None or monitor is None:
            return
        state = member_state.after(
            before, good=good, reason=seen, rise=monitor.rise, fall=monitor.fall, now=time.time()
        )
        if state == before:
            return
        self._states[key] = state
        self._noted = False
        if state.up != before.up:
            self._changed = True
            _say(f"member {key[1]} of pool {key[0]} is {Status.UP if state.up else Status.DOWN}: {seen}")

    def _follow(self) -> None:
        """Have the engine do what the states say; again a while later if it cannot.

        Where many change, half of the time is left for checks.
        """
        begun = time.monotonic()
        try:
            self._bring_about(self._wish, self._states)
        except Exception as error:  # noqa: BLE001 (members are to be checked whatever the kernel says)
            text = str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
            if text != self._trouble:
                _say(text)
            self._trouble = text
            self._retry = self._loop.at(time.monotonic() + self._patience, self._again)
            self._patience = min(LAST_RETRY, 2 * self._patience)
        else:
            self._done()
        self._note()
        self._rests_until = 2 * time.monotonic() - begun

    def _again(self) -> None:
        self._retry = None

    def _done(self) -> None:
        self._changed, self._trouble, self._patience = False, None, FIRST_RETRY
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _note(self) -> None:
        self._noted = True
        if self._notes is not None:
            self._notes.cancel()
            self._notes = None
        self._record.knows(self._states, self._counted)

    def _bring_about(self, wish: Wish, known: States) -> None:
        """What is counted until the kernel's table is another one, and what that one begins with, is told apart."""
        self._count()
        up = member_state.may_serve(wish.servers, known)
        self._flow_log.listen(wish.servers)
        begun, done = time.time_ns(), False
        try:
            if wish.servers:
                self._engine.bring_about(wish.servers, up, paired=wish.paired)
            else:
                self._engine.release()
            done = True
        finally:
            self._flow_log.follow(wish.servers, up, begun, done=done)
        self._told = up
        self._count()

    def _count(self) -> None:
        with suppress(AgentError):
            if self._counted.read(self._engine.counters()):
                self._noted = False

    def _look_after(self, servers: Sequence[VirtualServer]) -> None:
        """Check the members of these."""
        found = member_state.checked(servers)
        self._monitors = {key: server.monitor for key, (server, _) in found.items() if server.monitor is not None}
        self._schedule.want({key: target(found[key][1], monitor) for key, monitor in self._monitors.items()})
        if self._balancing is None:
            self._again_in_a_second()

    def _again_in_a_second(self) -> None:
        self._balancing = None
        if self._counts:
            self._balancing = self._loop.at(time.monotonic() + _BALANCE_SECONDS, self._balance)

    @property
    def _counts(self) -> bool:
        """Whether how many flows there are decides anything."""
        return any(one.algorithm == "LEAST_CONNECTIONS" for one in self._wish.servers)

    def _balance(self) -> None:
        if self._counts and not self._changed:
            try:
                self._engine.balance(self._wish.servers, self._told, paired=self._wish.paired)
            except AgentError:
                self._changed = True  # all of it is brought about once more, and what happens is said
        self._again_in_a_second()

    # -- questions ------------------------------------------------------------------------------------------

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any] | str:
        """What the control socket says.

        Raises:
            AgentError: the engine refuses, or fails.
            KeyError, TypeError, ValueError: it is no question.
        """
        operation = question["op"]
        if operation == "version":
            return {"version": self._version}
        if operation == "state":
            return self._state(with_members=question.get("members") is True)
        if operation == "rows":
            return stat_rows.compose(self._state(with_members=True)["servers"])
        if operation not in ("check", "serve", "differs"):
            raise ValueError(f"there is no {operation!r}")
        if operation == "check":
            self._engine.check(model.parse(question["servers"]))
            return {}
        if operation == "differs":
            return {"differs": self._differs(persisted_state.wish(question))}
        self._serve(persisted_state.wish(question))
        return self._state()

    def _serve(self, wish: Wish) -> None:
        before = self._wish
        known = member_state.carried(self._states, before.servers, wish.servers, time.time())
        self._engine.check(wish.servers)
        try:
            self._bring_about(wish, known)
            self._record.serves(wish)
        except Exception:
            with suppress(AgentError):
                self._bring_about(before, self._states)
            raise
        self._wish, self._states = wish, known
        self._done()
        self._note()
        self._look_after(wish.servers)

    def _differs(self, wish: Wish) -> list[str]:
        """A member's change that waits for its turn is nobody's hand."""
        if not wish.servers and not self._wish.servers:
            return []
        if wish.digest != self._wish.digest:
            return ["the checker serves other virtual servers than those of the last confirmed bundle"]
        return list(self._engine.differs(wish.servers, self._told, paired=wish.paired))

    def _state(self, *, with_members: bool = False) -> dict[str, Any]:
        """All there is to tell; what each member has been given costs more, and is for who asks for it."""
        self._count()
        given: Mapping[Place, MemberCounters] = {}
        if with_members:
            with suppress(AgentError):
                given = self._engine.member_counters()
        present = {server.id for server in self._wish.servers}
        return {
            "digest": self._wish.digest,
            "error": self._trouble,
            "birth": self._counted.birth,
            "flow_log": self._flow_log.counts,
            "servers": {server.id: self._of(server, given) for server in self._wish.servers},
            "former": {name: self._sums(name) for name in sorted(self._counted.names - present)},
        }

    def _sums(self, name: str) -> dict[str, int]:
        found = self._counted.visible(name)
        return {field: getattr(found, field) for field in SUMMED}

    def _of(self, server: VirtualServer, given: Mapping[Place, MemberCounters]) -> dict[str, Any]:
        active = self._counted.visible(server.id).active_connections
        full = server.connection_limit is not None and active >= server.connection_limit
        pool = None
        if server.pool_id is not None:
            members = {}
            for member in server.members:
                since, reason = member_state.reason(server, member, self._states)
                status = member_state.word(server, member, self._states)
                found = given.get((server.id, member.address, member.port))
                counted = {} if found is None else asdict(found)
                plain = {"status": status, "since": since, "reason": reason, "weight": member.weight}
                members[member.id] = {**plain, **counted}
            pool = {"id": server.pool_id, "status": member_state.pool_word(server, self._states), "members": members}
        status = Status.FULL if full else Status.OPEN
        return {"status": status, "active_connections": active, **self._sums(server.id), "pool": pool}

    def close(self) -> None:
        """Check nobody any more. The kernel goes on as it is."""
        self._count()
        self._note()
        self._flow_log.close()
        self._schedule.close()


def _say(text: str) -> None:
    sys.stderr.write(f"checker: {text}\n")
    sys.stderr.flush()
