# SPDX-License-Identifier: Apache-2.0
"""Decides how HAProxy gets from one configuration to another: by nothing, at run time, or by a reload.

Invariant: pure. The actions of `Runtime` bring a running HAProxy 2.6 to the state that a start with the new text would
produce. In case of doubt the result is `Reload`, always with a reason.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from amphora_agent.haproxy import runtime_actions as act
from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration, Section, Server, changed_range
from amphora_agent.haproxy.features import MINIMAL_FEATURES, Features
from amphora_agent.haproxy.tls_diff import TlsChanges

# Keywords of servers that are not added to a running HAProxy. HAProxy 2.6 refuses most of them, HAProxy 3.0 refuses
# `enabled`, and `track` is untested.
_NOT_AT_RUNTIME = {
    "cookie", "enabled", "init-addr", "log-proto", "max-reuse", "namespace", "no-check", "no-check-send-proxy",
    "no-check-ssl", "no-ssl", "non-stick", "redir", "resolve-net", "resolve-opts", "resolve-prefer", "resolvers",
    "socks4", "stick", "tcp-ut", "track",
}  # fmt: skip
# Maximum number of servers in a backend whose dynamic cookies are computed without a reload. The computation stops
# HAProxy 2.6 for 22 ms with 1,000 servers.
MAX_COOKIE_SERVERS = 1500
# Balancing methods that always accept new servers at run time. A hash method accepts new servers only with `hash-type
# consistent`.
_DYNAMIC_METHODS = {"roundrobin", "leastconn", "first", "random"}
# If a change replaces more servers than this number, the agent reloads HAProxy, because a reload is faster.
MAX_REPLACED = 20
# Keywords of a server that runtime commands can change.
_SETTABLE = ("weight", "maxconn", "addr", "port")


@dataclass(frozen=True)
class Unchanged:
    """The configurations are equivalent for HAProxy."""


@dataclass(frozen=True)
class Runtime:
    """Actions change the running HAProxy."""

    actions: tuple[act.Action, ...]
    reason: str


@dataclass(frozen=True)
class Reload:
    """HAProxy has to reload the file."""

    reason: str


Decision = Unchanged | Runtime | Reload


def compare_configurations(
    old: Configuration,
    new: Configuration,
    process_changes: Sequence[str] = (),
    files: TlsChanges = tls_diff.NO_CHANGES,
    features: Features = MINIMAL_FEATURES,
) -> Decision:
    """Return how HAProxy gets from `old` to `new`; `process_changes` are other reasons for a reload."""
    if outside := [*process_changes, *_other_changes(old, new)]:
        return Reload(_summary([*outside, *files.reasons]))
    if files.obstacles:
        return Reload(_summary(list(files.obstacles)))
    actions: list[act.Action] = list(files.before)
    reasons: list[str] = list(files.reasons)
    order_only = False
    for before, after in zip(old.sections, new.sections, strict=True):
        if before.servers is after.servers and before.lines is after.lines:
            # The parser reuses the objects of unchanged lines, so identical objects mean an unchanged section.
            continue
        was, now = changed_range(before.servers, after.servers)
        change = _section_actions(before, after, {server.name: server for server in was}, now, new, features)
        if isinstance(change, Reload):
            return change
        limits = [_limit(before), _limit(after)]
        if limits[0] != limits[1]:
            reason = f"listener {after.name} accepts {limits[1] or 'all'} connections"
            if not features.limits:
                return Reload(reason)
            actions.append(act.SetFrontendMaxconn(after.name, limits[1]))
            reasons.append(reason)
        actions += change.actions
        reasons += [change.reason] if change.reason else []
        order_only = order_only or [s.name for s in was] != [s.name for s in now]
    if (replaced := sum(isinstance(action, act.ReplaceServer) for action in actions)) > MAX_REPLACED:
        return Reload(f"the keywords of {replaced} members differ")
    actions += files.after
    if actions or reasons:
        return Runtime(tuple(actions), _summary(reasons))
    return Runtime((), "only the order of servers differs") if order_only else Unchanged()


def _other_changes(old: Configuration, new: Configuration) -> list[str]:
    """Return the differences that no change of servers can explain."""
    before = {(s.kind, s.name): s for s in old.sections}
    after = {(s.kind, s.name): s for s in new.sections}
    reasons = [f"{kind} {name} added" for kind, name in after if (kind, name) not in before]
    reasons += [f"{kind} {name} removed" for kind, name in before if (kind, name) not in after]
    for key, section in after.items():
        was = before.get(key)
        if was is not None and was.lines is not section.lines and _words(was) != _words(section):
            reasons.append(f"{' '.join(key).strip()} changed: {_describe_change(was, section)}")
    if not reasons and list(before) != list(after):
        return ["the order of sections differs"]
    return reasons


def _words(section: Section) -> list[tuple[str, ...]]:
    """Return the lines of a section that no runtime action can change."""
    limit = _limit(section)
    return [line.words for line in section.lines if limit is None or line.words[0] != "maxconn"]


def _limit(section: Section) -> int | None:
    """Return the connection limit of a listener, if a runtime action can change it."""
    found = [line.words for line in section.lines if line.words[0] == "maxconn"]
    if section.kind != "frontend" or len(found) != 1 or len(found[0]) != 2 or not found[0][1].isdecimal():
        return None
    return int(found[0][1])


def _describe_change(old: Section, new: Section) -> str:
    before, after = _words(old), _words(new)
    for words in after:
        if words not in before:
            return f"'{' '.join(words)[:80]}' is new"
    for words in before:
        if words not in after:
            return f"'{' '.join(words)[:80]}' was removed"
    return "the order of its lines"


def _summary(reasons: list[str]) -> str:
    return "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")


def _section_actions(
    old: Section,
    new: Section,
    before: dict[str, Server],
    changed: Sequence[Server],
    wanted: Configuration,
    features: Features,
) -> Runtime | Reload:
    """Return the actions for one section; actions that remove capacity come last.

    `before` and `changed` are the servers of the old and the new section that may differ.
    """
    after = {server.name: server for server in changed}
    actions: list[act.Action] = []
    removing: list[act.Action] = []
    reasons: list[str] = []
    key = "" if features.cookies else _cookie_key(new, wanted)
    waiting = tuple(s.name for s in changed if s.name not in before and not s.disabled) if key else ()
    for name, server in after.items():
        was = before.get(name)
        if was is server:
            # The parser reuses the object of an unchanged server, so an identical object means no change.
            continue
        if was is None:
            why = _not_addable(new, server, wanted, features)
            awaits_check = features.init_state and _may_await_check(server, old, new)
            actions.append(act.AddServer(new.name, server, name in waiting, awaits_check))
            reasons.append(f"member {name} added")
        elif _fixed_keywords(was, server) != _fixed_keywords(server, was):
            why = _not_replaceable(new, was, server, wanted, features)
            actions.append(_replacement(new, old, was, server))
            reasons.append(f"member {name} has other keywords")
        else:
            why = _unchangeable(new, was, server, wanted)
            for action, reason in _server_actions(new.name, was, server):
                (removing if _removes_capacity(action) else actions).append(action)
                reasons.append(f"member {name} {reason}")
        if why:
            return Reload(f"member {name} of {new.name}: {why}")
    if any(isinstance(action, act.AddServer | act.ReplaceServer) for action in actions) and key:
        actions.append(act.ComputeCookies(new.name, key, waiting))
    actions += removing
    for name, server in before.items():
        if name not in after:
            actions.append(act.RemoveServer(new.name, name, server.disabled))
            reasons.append(f"member {name} removed")
    return Runtime(tuple(actions), _summary(reasons))


def _may_await_check(server: Server, old: Section, new: Section) -> bool:
    """Whether a new server can wait for its first check, because another server stays."""
    if not server.checked or server.disabled:
        return False
    after = {one.name for one in new.servers if not one.disabled}
    return any(not one.disabled and one.name in after for one in old.servers)


def _server_actions(backend: str, old: Server, new: Server) -> Iterable[tuple[act.ServerChange, str]]:
    name = new.name
    if old.address != new.address and (place := _endpoint(new)) is not None:
        yield act.SetAddress(backend, name, *place), f"is at {new.address}"
    if _check_endpoint(old) != _check_endpoint(new):
        address, port = _check_endpoint(new)
        yield act.SetCheck(backend, name, address, port), "is monitored elsewhere"
    if old.maxconn != new.maxconn:
        yield act.SetServerMaxconn(backend, name, new.maxconn), f"accepts {new.maxconn or 'all'} connections"
    if old.weight != new.weight:
        yield act.SetWeight(backend, name, new.weight), f"has weight {new.weight}"
    if old.disabled != new.disabled:
        yield act.SetMaintenance(backend, name, new.disabled), "disabled" if new.disabled else "enabled"


def _removes_capacity(action: act.ServerChange) -> bool:
    stops = isinstance(action, act.SetMaintenance) and action.maintenance
    return stops or (isinstance(action, act.SetWeight) and action.weight == 0)


def _replacement(section: Section, former: Section, old: Server, new: Server) -> act.ReplaceServer:
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
    return act.ReplaceServer(section.name, new, others, old.disabled)


def _not_replaceable(section: Section, old: Server, new: Server, wanted: Configuration, features: Features) -> str:
    """Return why a server cannot be removed and added again; empty if it can."""
    if why := _not_addable(section, new, wanted, features):
        return f"its keywords differ; {why}"
    if old.disabled and (new.disabled or not _cookie_key(section, wanted)):
        return ""
    if any(line.words[0] in ("cookie", "stick") for line in section.lines):
        return "its keywords differ, and its removal would move its clients to other members"
    if len(section.servers) == 1:
        return "its keywords differ, and no other member could serve meanwhile"
    return ""


def _unchangeable(section: Section, old: Server, new: Server, configuration: Configuration) -> str:
    """Return why the running HAProxy cannot change a server; empty if it can."""
    if old.address != new.address and None in (_endpoint(old), _endpoint(new)):
        return f"its address is {new.address}"
    if old.weight != new.weight and not _is_dynamic(section, configuration):
        return "weights are fixed with its balancing method"
    return ""


def _endpoint(server: Server) -> tuple[str, int] | None:
    """Return an address and a port in the syntax of HAProxy's sockets; None for another text."""
    try:
        return str(ipaddress.ip_address(server.endpoint[0])), int(server.endpoint[1])
    except ValueError:
        return None


def _check_endpoint(server: Server) -> tuple[str | None, int | None]:
    address, port = server.value("addr") or None, server.value("port")
    return address, int(port) if port.isdecimal() else None


def _fixed_keywords(server: Server, other: Server) -> tuple[str, ...]:
    """Return the keywords whose values no command can change to the values of the other server."""
    words = list(server.keywords)
    for keyword in _SETTABLE:
        # No runtime command can remove the address or port of a health check. So a removed address or port counts as a
        # fixed keyword.
        is_check = keyword in ("addr", "port")
        if is_check and not (keyword in other.keywords and server.checked and "agent-check" not in words):
            continue
        if keyword in words:
            place = words.index(keyword)
            del words[place : place + 2]
    return tuple(word for word in words if word != "disabled")


def _effective(section: Section, configuration: Configuration, first: str) -> tuple[str, ...] | None:
    """Return a setting of a backend, or of its ``defaults`` section."""
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
    """Return the key of the dynamic cookies; empty without dynamic cookies."""
    found = _effective(section, configuration, "dynamic-cookie-key")
    return found[0] if found and _has_dynamic_cookie(section, configuration) else ""


def _not_addable(section: Section, server: Server, wanted: Configuration, features: Features) -> str:
    """Return why a server cannot be added at run time; empty if it can."""
    if not server.line.plain:
        return "its line needs quoting, and HAProxy's runtime API interprets quotes differently"
    never = _NOT_AT_RUNTIME - {"cookie"} if features.cookies else _NOT_AT_RUNTIME
    if refused := sorted(never.intersection(server.keywords)):
        return f"'{refused[0]}' cannot be given at run time"
    if not _is_dynamic(section, wanted):
        return "its balancing method accepts no new servers at run time"
    if _effective(section, wanted, "default-server") is not None:
        return "'default-server' does not reach servers added at run time"
    if _has_dynamic_cookie(section, wanted) and not features.cookies:
        if len(section.servers) > MAX_COOKIE_SERVERS:
            return f"HAProxy would serve no client while it computes the cookies of {len(section.servers)} members"
        lines = [line for s in (section, *wanted.sections) for line in s.lines if line.words[0] == "dynamic-cookie-key"]
        if not lines or not all(line.plain for line in lines):
            return "the agent cannot set the key of its dynamic cookie at run time"
    return ""
