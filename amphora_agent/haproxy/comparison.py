# SPDX-License-Identifier: Apache-2.0
"""What it takes to get from one configuration to another.

Invariant: pure. `Runtime` is returned only if its steps, carried out one by one, leave a running HAProxy 2.6
in the state in which it would have started from the new text; in all doubt it is `Reload`, and never without
a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amphora_agent.bundle import File
from amphora_agent.haproxy.configuration import FILES, Configuration, Section, Server

# What HAProxy 2.6 refuses on a server added at run time (tests/dataplane asks it), what 3.0 refuses ("enabled"), and
# what was not tried: "track".
_NOT_AT_RUNTIME = {
    "cookie",
    "enabled",
    "init-addr",
    "log-proto",
    "max-reuse",
    "namespace",
    "no-check",
    "no-check-send-proxy",
    "no-check-ssl",
    "no-ssl",
    "non-stick",
    "redir",
    "resolve-net",
    "resolve-opts",
    "resolve-prefer",
    "resolvers",
    "socks4",
    "stick",
    "tcp-ut",
    "track",
}
# Servers of a backend with a dynamic cookie: computing it compares each with each, 22 ms for 1,000 (HAProxy 2.6).
MOST_COOKIES = 1500
# Load-balancing methods to which servers can be added; any other one only with a consistent hash.
_DYNAMIC_METHODS = {"roundrobin", "leastconn", "first", "random"}


@dataclass(frozen=True)
class AddServer:
    """A server that is new. One that `waits` gets no requests before a later step lets it have some."""

    backend: str
    server: Server
    waits: bool = False


@dataclass(frozen=True)
class RemoveServer:
    """A server that is no longer wanted; one that was disabled has nothing to drain."""

    backend: str
    name: str
    disabled: bool


@dataclass(frozen=True)
class SetWeight:
    """A server whose share changes."""

    backend: str
    name: str
    weight: int


@dataclass(frozen=True)
class SetMaintenance:
    """A server that is disabled, or no longer."""

    backend: str
    name: str
    maintenance: bool


@dataclass(frozen=True)
class NameServers:
    """The new servers' values of the dynamic cookie are to be computed, and then they get requests."""

    backend: str
    key: str
    names: tuple[str, ...]


Step = AddServer | NameServers | RemoveServer | SetWeight | SetMaintenance


@dataclass(frozen=True)
class Unchanged:
    """HAProxy would notice no difference."""


@dataclass(frozen=True)
class Runtime:
    """The running HAProxy can be changed, step by step."""

    steps: tuple[Step, ...]
    reason: str


@dataclass(frozen=True)
class Reload:
    """A new worker has to read the file."""

    reason: str


Verdict = Unchanged | Runtime | Reload


def compare(old: Configuration, new: Configuration, elsewhere: Sequence[str] = ()) -> Verdict:
    """What HAProxy needs to serve `new` where it serves `old`.

    Args:
        elsewhere: what differs besides the texts, and needs a new worker.
    """
    if outside := [*elsewhere, *_outside_servers(old, new)]:
        return Reload(_shortened(outside))
    steps: list[Step] = []
    reasons: list[str] = []
    order_only = False
    for before, after in zip(old.sections, new.sections, strict=True):
        change = _servers(before, after, old, new)
        if isinstance(change, Reload):
            return change
        steps += change.steps
        reasons += [change.reason] if change.reason else []
        order_only = order_only or [s.name for s in before.servers] != [s.name for s in after.servers]
    if steps:
        return Runtime(tuple(steps), _shortened(reasons))
    return Runtime((), "only the order of servers differs") if order_only else Unchanged()


def file_changes(old: Sequence[File], new: Sequence[File], configuration: Configuration) -> list[str]:
    """What differs between the files of two bundles, in words."""
    before = {file.name: file for file in old}
    after = {file.name: file for file in new}
    changes = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        what = "is new" if name not in before else "is gone" if name not in after else "has another content"
        owner = (after.get(name) or before[name]).object_id
        kind = "listener" if owner in configuration.frontends else "pool"
        changes.append(f"file {name} of {kind} {owner} {what}")
    return changes


def _outside_servers(old: Configuration, new: Configuration) -> list[str]:
    """Why the difference is not one of servers alone."""
    before = {(s.kind, s.name): s for s in old.sections}
    after = {(s.kind, s.name): s for s in new.sections}
    reasons = [f"{kind} {name} added" for kind, name in after if (kind, name) not in before]
    reasons += [f"{kind} {name} removed" for kind, name in before if (kind, name) not in after]
    for key, section in after.items():
        was = before.get(key)
        if was is not None and _words(was) != _words(section):
            reasons.append(f"{' '.join(key).strip()} changed: {_first_difference(was, section)}")
    if not reasons and list(before) != list(after):
        return ["the order of sections differs"]
    return reasons


def _words(section: Section) -> list[tuple[str, ...]]:
    return [line.words for line in section.lines]


def _first_difference(old: Section, new: Section) -> str:
    before, after = _words(old), _words(new)
    for words in after:
        if words not in before:
            return f"'{' '.join(words)[:80]}' is new"
    for words in before:
        if words not in after:
            return f"'{' '.join(words)[:80]}' is gone"
    return "the order of its lines"


def _shortened(reasons: list[str]) -> str:
    return "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")


def _servers(old: Section, new: Section, running: Configuration, wanted: Configuration) -> Runtime | Reload:
    """Steps for one section; what takes from the pool comes last, so that it is never emptier than wanted."""
    before = {server.name: server for server in old.servers}
    after = {server.name: server for server in new.servers}
    steps: list[Step] = []
    taking: list[Step] = []
    reasons: list[str] = []
    key = _cookie_key(new, wanted)
    waiting = tuple(s.name for s in new.servers if s.name not in before and not s.disabled) if key else ()
    for name, server in after.items():
        was = before.get(name)
        why = _not_addable(new, server, running, wanted) if was is None else _unchangeable(new, was, server, wanted)
        if why:
            return Reload(f"member {name} of {new.name}: {why}")
        if was is None:
            steps.append(AddServer(new.name, server, waits=name in waiting))
            reasons.append(f"member {name} added")
            continue
        if was.weight != server.weight:
            (steps if server.weight else taking).append(SetWeight(new.name, name, server.weight))
            reasons.append(f"member {name} has weight {server.weight}")
        if was.disabled != server.disabled:
            (taking if server.disabled else steps).append(SetMaintenance(new.name, name, server.disabled))
            reasons.append(f"member {name} {'disabled' if server.disabled else 'enabled'}")
    if any(isinstance(step, AddServer) for step in steps) and key:
        steps.append(NameServers(new.name, key, waiting))
    steps += taking
    for name, server in before.items():
        if name not in after:
            steps.append(RemoveServer(new.name, name, server.disabled))
            reasons.append(f"member {name} removed")
    return Runtime(tuple(steps), _shortened(reasons))


def _unchangeable(section: Section, old: Server, new: Server, configuration: Configuration) -> str:
    """Why the running HAProxy cannot make one server of the other; empty if it can."""
    if old.address != new.address:
        return f"its address is {new.address}"
    if _others(old) != _others(new):
        return "its keywords differ"
    if old.weight != new.weight and not _is_dynamic(section, configuration):
        return "weights are fixed with its balancing method"
    return ""


def _others(server: Server) -> tuple[str, ...]:
    """The keywords other than those with a runtime command of their own."""
    words = list(server.keywords)
    if "weight" in words:
        place = words.index("weight")
        del words[place : place + 2]
    return tuple(word for word in words if word != "disabled")


def _effective(section: Section, configuration: Configuration, first: str) -> tuple[str, ...] | None:
    """A setting of a backend, or of the ``defaults`` section that it takes its settings from."""
    own = section.setting(first)
    if own is not None:
        return own
    defaults = None
    for candidate in configuration.sections:
        if candidate is section:
            break
        defaults = candidate if candidate.kind == "defaults" else defaults
    return defaults.setting(first) if defaults else None


def _is_dynamic(section: Section, configuration: Configuration) -> bool:
    method = (_effective(section, configuration, "balance") or ("roundrobin",))[0].partition("(")[0]
    hashing = _effective(section, configuration, "hash-type") or ("map-based",)
    return method in _DYNAMIC_METHODS or (method != "static-rr" and hashing[0] == "consistent")


def _has_dynamic_cookie(section: Section, configuration: Configuration) -> bool:
    return "dynamic" in (_effective(section, configuration, "cookie") or ())


def _cookie_key(section: Section, configuration: Configuration) -> str:
    """The key from which HAProxy computes servers' cookies; empty if it does not."""
    found = _effective(section, configuration, "dynamic-cookie-key")
    return found[0] if found and _has_dynamic_cookie(section, configuration) else ""


def _not_addable(section: Section, server: Server, running: Configuration, wanted: Configuration) -> str:
    """Why a server cannot be added at run time; empty if it can."""
    if not server.line.plain:
        return "its line needs quoting, for which the runtime API has other rules"
    if refused := sorted(_NOT_AT_RUNTIME.intersection(server.keywords)):
        return f"'{refused[0]}' cannot be given at run time"
    for keyword in FILES:
        # Files are read only at the start of a worker. One that another server uses is in its memory.
        if keyword in server.keywords and (keyword, server.value(keyword)) not in running.server_files:
            return f"'{keyword} {server.value(keyword)}' is not in HAProxy's memory"
    if not _is_dynamic(section, wanted):
        return "servers cannot join its balancing method at run time"
    if _effective(section, wanted, "default-server") is not None:
        return "'default-server' does not reach servers added at run time"
    if _has_dynamic_cookie(section, wanted):
        if len(section.servers) > MOST_COOKIES:
            return f"computing the cookies of {len(section.servers)} members would halt HAProxy"
        lines = [line for s in (section, *wanted.sections) for line in s.lines if line.words[0] == "dynamic-cookie-key"]
        if not lines or not all(line.plain for line in lines):
            return "its dynamic cookie is not computed at run time"
    return ""
