# SPDX-License-Identifier: Apache-2.0
"""What it takes to get from one configuration to another.

Invariant: pure. `Runtime` is returned only if its steps, carried out one by one, leave a running HAProxy 2.6
in the state in which it would have started from the new text; in all doubt it is `Reload`, and never without
a reason.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_

from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration, Line, Section, Server
from amphora_agent.haproxy.features import FEWEST, Abilities
from amphora_agent.haproxy.runtime_actions import (
    AddServer,
    NameServers,
    RemoveServer,
    ReplaceServer,
    ServerStep,
    SetAddress,
    SetCheck,
    SetFrontendMaxconn,
    SetMaintenance,
    SetServerMaxconn,
    SetWeight,
    Step,
)
from amphora_agent.haproxy.tls_diff import Changes

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


# More than these are not replaced one by one: a new worker has them sooner.
MOST_REPLACED = 20
# Keywords of a server that have a command of their own, each with its value.
_SETTABLE = ("weight", "maxconn", "addr", "port")


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


def compare(
    old: Configuration,
    new: Configuration,
    elsewhere: Sequence[str] = (),
    files: Changes = tls_diff.NONE,
    abilities: Abilities = FEWEST,
) -> Verdict:
    """What HAProxy needs to serve `new` where it serves `old`.

    Args:
        elsewhere: what differs besides the texts, and needs a new worker.
        files: what differs between the files that they name.
        abilities: what this HAProxy can do.
    """
    if outside := [*elsewhere, *_outside_servers(old, new)]:
        return Reload(_shortened([*outside, *files.reasons]))
    if files.hindrances:
        return Reload(_shortened(list(files.hindrances)))
    steps: list[Step] = list(files.before)
    reasons: list[str] = list(files.reasons)
    order_only = False
    for before, after in zip(old.sections, new.sections, strict=True):
        if before.servers is after.servers and before.lines is after.lines:
            continue  # read from the same text: most of 50 pools, most of the time
        was, now = _unlike(before.servers, after.servers)
        change = _servers(before, after, {server.name: server for server in was}, now, new, abilities)
        if isinstance(change, Reload):
            return change
        limits = list(_listener_limit(before, after))
        if limits and not abilities.limits:
            return Reload(f"listener {after.name} takes {limits[0].maxconn or 'all'} connections")
        steps += [*limits, *change.steps]
        reasons += [f"listener {after.name} takes {limits[0].maxconn or 'all'} connections"] if limits else []
        reasons += [change.reason] if change.reason else []
        order_only = order_only or [s.name for s in was] != [s.name for s in now]
    if (replaced := sum(isinstance(step, ReplaceServer) for step in steps)) > MOST_REPLACED:
        return Reload(f"the keywords of {replaced} members differ")
    steps += files.after
    if steps or reasons:
        return Runtime(tuple(steps), _shortened(reasons))
    return Runtime((), "only the order of servers differs") if order_only else Unchanged()


def _outside_servers(old: Configuration, new: Configuration) -> list[str]:
    """Why the difference is not one of servers alone."""
    before = {(s.kind, s.name): s for s in old.sections}
    after = {(s.kind, s.name): s for s in new.sections}
    reasons = [f"{kind} {name} added" for kind, name in after if (kind, name) not in before]
    reasons += [f"{kind} {name} removed" for kind, name in before if (kind, name) not in after]
    for key, section in after.items():
        was = before.get(key)
        if was is not None and was.lines is not section.lines and _words(was) != _words(section):
            reasons.append(f"{' '.join(key).strip()} changed: {_first_difference(was, section)}")
    if not reasons and list(before) != list(after):
        return ["the order of sections differs"]
    return reasons


def _words(section: Section) -> list[tuple[str, ...]]:
    """What cannot be changed in a section that is served."""
    limit = _limit(section)
    return [line.words for line in section.lines if line is not limit]


def _limit(section: Section) -> Line | None:
    """The line that limits a listener's connections, if it is one that can be changed."""
    found = [line for line in section.lines if line.words[0] == "maxconn"]
    if section.kind != "frontend" or len(found) != 1 or len(found[0].words) != 2 or not found[0].words[1].isdecimal():
        return None
    return found[0]


def _listener_limit(old: Section, new: Section) -> Iterable[SetFrontendMaxconn]:
    before, after = (None if (line := _limit(each)) is None else int(line.words[1]) for each in (old, new))
    if before != after:
        yield SetFrontendMaxconn(new.name, after)


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


def _unlike(old: Sequence[Server], new: Sequence[Server]) -> tuple[Sequence[Server], Sequence[Server]]:
    """Without the servers at both ends that were read from the same lines: one of 10,000 is left."""
    first = _alike(old, new)
    old, new = old[first:], new[first:]
    last = _alike(old[::-1], new[::-1])
    return old[: len(old) - last], new[: len(new) - last]


def _alike(old: Sequence[Server], new: Sequence[Server]) -> int:
    """How many of the first ones are the same."""
    alike = list(map(is_, old, new))
    return len(alike) if all(alike) else alike.index(False)


def _servers(
    old: Section,
    new: Section,
    before: dict[str, Server],
    changed: Sequence[Server],
    wanted: Configuration,
    abilities: Abilities,
) -> Runtime | Reload:
    """Steps for one section; what takes from the pool comes last, so that it is never emptier than wanted.

    Args:
        before: the servers of the old section that may differ.
        changed: those of the new one.
    """
    after = {server.name: server for server in changed}
    steps: list[Step] = []
    taking: list[Step] = []
    reasons: list[str] = []
    key = "" if abilities.cookies else _cookie_key(new, wanted)
    waiting = tuple(s.name for s in changed if s.name not in before and not s.disabled) if key else ()
    for name, server in after.items():
        was = before.get(name)
        if was is server:
            continue  # read from the same line
        if was is None:
            why = _not_addable(new, server, wanted, abilities)
            steps.append(
                AddServer(new.name, server, name in waiting, abilities.init_state and _may_wait(server, old, new))
            )
            reasons.append(f"member {name} added")
        elif _others(was, server) != _others(server, was):
            why = _not_replaceable(new, was, server, wanted, abilities)
            steps.append(_replaced(new, old, was, server))
            reasons.append(f"member {name} has other keywords")
        else:
            why = _unchangeable(new, was, server, wanted)
            for step, reason in _set(new.name, was, server):
                (taking if _takes(step) else steps).append(step)
                reasons.append(f"member {name} {reason}")
        if why:
            return Reload(f"member {name} of {new.name}: {why}")
    if any(isinstance(step, AddServer | ReplaceServer) for step in steps) and key:
        steps.append(NameServers(new.name, key, waiting))
    steps += taking
    for name, server in before.items():
        if name not in after:
            steps.append(RemoveServer(new.name, name, server.disabled))
            reasons.append(f"member {name} removed")
    return Runtime(tuple(steps), _shortened(reasons))


def _may_wait(server: Server, old: Section, new: Section) -> bool:
    """Whether a new server can wait for its first good check, because somebody is there who stays."""
    if not server.checked or server.disabled:
        return False
    after = {one.name for one in new.servers if not one.disabled}
    return any(not one.disabled and one.name in after for one in old.servers)


def _set(backend: str, old: Server, new: Server) -> Iterable[tuple[ServerStep, str]]:
    """The steps that make one server of the other, each with its reason."""
    name = new.name
    if old.address != new.address and (place := _place(new.address)) is not None:
        yield SetAddress(backend, name, *place), f"is at {new.address}"
    if _check_place(old) != _check_place(new):
        address, port = _check_place(new)
        yield SetCheck(backend, name, address, port), "is monitored elsewhere"
    if old.maxconn != new.maxconn:
        yield SetServerMaxconn(backend, name, new.maxconn), f"takes {new.maxconn or 'all'} connections"
    if old.weight != new.weight:
        yield SetWeight(backend, name, new.weight), f"has weight {new.weight}"
    if old.disabled != new.disabled:
        yield SetMaintenance(backend, name, new.disabled), "disabled" if new.disabled else "enabled"


def _takes(step: ServerStep) -> bool:
    """Whether a step takes a server from those that get requests."""
    match step:
        case SetWeight(weight=0) | SetMaintenance(maintenance=True):
            return True
        case _:
            return False


def _replaced(section: Section, former: Section, old: Server, new: Server) -> ReplaceServer:
    before = {server.name: server for server in former.servers}
    others = frozenset(
        server.name
        for server in section.servers
        if server.name != new.name
        and before.get(server.name) == server
        and server.weight
        and not server.disabled
        and "backup" not in server.keywords
    )
    return ReplaceServer(section.name, new, others, old.disabled)


def _not_replaceable(
    section: Section, old: Server, new: Server, configuration: Configuration, abilities: Abilities
) -> str:
    """Why a server cannot be taken away and added again; empty if that can be tried."""
    if why := _not_addable(section, new, configuration, abilities):
        return f"its keywords differ; {why}"
    if old.disabled and (new.disabled or not _cookie_key(section, configuration)):
        return ""
    if any(line.words[0] in ("cookie", "stick") for line in section.lines):
        return "its keywords differ, and while it were away its clients would be given to others"
    if len(section.servers) == 1:
        return "its keywords differ, and nobody could serve while it were away"
    return ""


def _unchangeable(section: Section, old: Server, new: Server, configuration: Configuration) -> str:
    """Why the running HAProxy cannot make one server of the other; empty if it can."""
    if old.address != new.address and (_place(old.address) is None or _place(new.address) is None):
        return f"its address is {new.address}"
    if old.weight != new.weight and not _is_dynamic(section, configuration):
        return "weights are fixed with its balancing method"
    return ""


def _place(address: str) -> tuple[str, int] | None:
    """An address and a port as HAProxy's sockets take them; None for anything else."""
    host, _, port = address.rpartition(":")
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port)
    except ValueError:
        return None


def _check_place(server: Server) -> tuple[str | None, int | None]:
    address, port = server.value("addr") or None, server.value("port")
    return address, int(port) if port.isdecimal() else None


def _others(server: Server, other: Server) -> tuple[str, ...]:
    """The keywords other than those that a command makes the same as the other server's."""
    words = list(server.keywords)
    for keyword in _SETTABLE:
        # Where a check goes can be changed, but not forgotten again, and only while there is one.
        checks = keyword in ("addr", "port")
        if checks and not (keyword in other.keywords and server.checked and "agent-check" not in words):
            continue
        if keyword in words:
            place = words.index(keyword)
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


def _not_addable(section: Section, server: Server, wanted: Configuration, abilities: Abilities) -> str:
    """Why a server cannot be added at run time; empty if it can."""
    if not server.line.plain:
        return "its line needs quoting, for which the runtime API has other rules"
    never = _NOT_AT_RUNTIME - {"cookie"} if abilities.cookies else _NOT_AT_RUNTIME
    if refused := sorted(never.intersection(server.keywords)):
        return f"'{refused[0]}' cannot be given at run time"
    if not _is_dynamic(section, wanted):
        return "servers cannot join its balancing method at run time"
    if _effective(section, wanted, "default-server") is not None:
        return "'default-server' does not reach servers added at run time"
    if _has_dynamic_cookie(section, wanted) and not abilities.cookies:
        if len(section.servers) > MOST_COOKIES:
            return f"computing the cookies of {len(section.servers)} members would halt HAProxy"
        lines = [line for s in (section, *wanted.sections) for line in s.lines if line.words[0] == "dynamic-cookie-key"]
        if not lines or not all(line.plain for line in lines):
            return "its dynamic cookie is not computed at run time"
    return ""
