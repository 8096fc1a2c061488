# SPDX-License-Identifier: Apache-2.0
"""Whole load balancers with hostile text in every string field, and the expected number of lines.

The expectation uses the model and counts lines; it does not depend on the renderer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address

import trees
from hypothesis import strategies as st
from reading import Words
from texts import anything, printable

from amphora_driver.model.enums import (
    Algorithm,
    L7Action,
    L7Compare,
    L7RuleType,
    ListenerProtocol,
    MonitorType,
    PersistenceType,
)
from amphora_driver.model.loadbalancer import L7Policy, L7Rule, Listener, LoadBalancer, Pool

Make = Callable[[int], LoadBalancer]
HTTP = (ListenerProtocol.HTTP, ListenerProtocol.TERMINATED_HTTPS)
REDIRECTS = (L7Action.REDIRECT_TO_URL, L7Action.REDIRECT_PREFIX)
PLAIN = tuple(kind for kind in L7RuleType if not kind.value.startswith("SSL_"))
COMPARES = tuple(compare for compare in L7Compare if compare is not L7Compare.REGEX)
HEADERS = ("X-Forwarded-For", "X-Forwarded-Port", "X-Forwarded-Proto", "X-Real-IP")


# Hypothesis takes longer to build a strategy than to draw from it.
@lru_cache
def value(*good: str) -> st.SearchStrategy[str]:
    """Return mostly valid text, so that the renderer serves most of a load balancer."""
    usual = st.sampled_from(good)
    return st.integers(0, 15).flatmap(lambda n: usual if n < 14 else anything if n == 14 else printable)


@lru_cache
def several(*good: str) -> st.SearchStrategy[list[str]]:
    return st.lists(value(*good), max_size=3).map(lambda found: list(dict.fromkeys(found)))


@lru_cache
def perhaps(*good: str) -> st.SearchStrategy[str | None]:
    return st.none() | value(*good)


any_text = st.one_of(st.none(), anything)
cidrs = st.lists(value("203.0.113.0/24", "2001:db8::/32", "192.0.2.1"), max_size=3)
more_vips = st.lists(value("2001:db8::5"), max_size=1)
mostly = st.sampled_from((True, True, True, False))
actions, kinds, compares = st.sampled_from(L7Action), st.sampled_from(PLAIN), st.sampled_from(COMPARES)
protocols = st.sampled_from((*HTTP, ListenerProtocol.TCP))
monitors = st.sampled_from((MonitorType.HTTP, MonitorType.TCP, MonitorType.PING))
persistences = st.sampled_from((None, *PersistenceType))
algorithms = st.sampled_from((Algorithm.ROUND_ROBIN, Algorithm.LEAST_CONNECTIONS))

member_words = {
    "address": value("192.0.2.7", "2001:db8::7"),
    "monitor_address": perhaps("192.0.2.8"),
    "name": any_text,
    "subnet_id": any_text,
    "vnic_type": perhaps("normal"),
}


@st.composite
def members(draw, n: str, p: int):
    many = range(draw(st.integers(0, 3)))
    return tuple(
        trees.member(
            0, id=f"m{n}-{p}-{i}", protocol_port=i + 1, **{name: draw(kind) for name, kind in member_words.items()}
        )
        for i in many
    )


@st.composite
def pools(draw, n: str, p: int):
    monitor = None
    if draw(st.booleans()):
        monitor = trees.monitor(
            0,
            id=f"h{n}-{p}",
            type=draw(monitors),
            http_method=draw(perhaps("GET", "HEAD")),
            url_path=draw(value("/", "/a?b=c&d#e'f\"g$h")),
            expected_codes=draw(value("200", "200, 202-204")),
            domain_name=draw(perhaps("www.example.com")),
            name=draw(any_text),
        )
    kept = draw(persistences)
    persistence = None
    if kept is not None:
        name = None if kept is PersistenceType.SOURCE_IP else draw(value("JSESSIONID", "a'b#c$d%e"))
        persistence = trees.SessionPersistence(type=kept, cookie_name=name)
    return trees.pool(
        0,
        id=f"p{n}-{p}",
        name=draw(any_text),
        lb_algorithm=draw(algorithms),
        members=draw(members(n, p)),
        healthmonitor=monitor,
        session_persistence=persistence,
    )


@st.composite
def policies(draw, n: str, number: int):
    rules = []
    for i in range(draw(st.integers(0, 2))):
        kind = draw(kinds)
        named = kind in (L7RuleType.HEADER, L7RuleType.COOKIE)
        rules.append(
            trees.rule(
                0,
                id=f"r{n}-{number}-{i}",
                type=kind,
                compare_type=draw(compares),
                value=draw(value("x", "a b", "\u00e9&'\"#$%{}\\")),
                key=draw(value("X-Key", "a'b#c$d%e")) if named else None,
                invert=draw(st.booleans()),
                admin_state_up=draw(mostly),
            )
        )
    return trees.policy(
        0,
        id=f"y{n}-{number}",
        position=number + 1,
        action=draw(actions),
        name=draw(any_text),
        redirect_pool_id=f"p{n}-0",
        redirect_url=draw(value("https://www.example.com/?a=1&b='2'#%")),
        redirect_prefix=draw(value("https://www.example.com")),
        admin_state_up=draw(mostly),
        rules=tuple(rules),
    )


@st.composite
def listeners(draw, n: str, i: int):
    protocol = draw(protocols)
    http = protocol in HTTP
    make = trees.secure_listener if protocol is ListenerProtocol.TERMINATED_HTTPS else trees.listener
    more = {}
    if protocol is ListenerProtocol.TERMINATED_HTTPS:
        more = {"default_tls_container_ref": draw(value("ref")), "tls_ciphers": None}
        more["alpn_protocols"] = tuple(draw(several("h2", "http/1.1")))
    return make(
        0,
        id=f"l{n}-{i}",
        protocol=protocol,
        protocol_port=i + 1,
        name=draw(any_text),
        default_pool_id=f"p{n}-{draw(st.integers(0, 1))}" if http else None,
        insert_headers=tuple(draw(several(*HEADERS))) if http else None,
        allowed_cidrs=tuple(draw(cidrs)),
        l7policies=tuple(draw(policies(f"{n}-{i}", k)) for k in range(draw(st.integers(0, 3)))) if http else (),
        **more,
    )


@st.composite
def wholes(draw, n: str = "0"):
    """A load balancer with one or two listeners and two pools."""
    raw = [draw(listeners(n, i)) for i in range(draw(st.integers(1, 2)))]
    fixed = tuple(
        trees.change(one, l7policies=tuple(trees.change(p, redirect_pool_id=f"p{n}-0") for p in one.l7policies))
        for one in raw
    )
    return trees.LoadBalancer(
        id=f"b{n}",
        project_id=draw(anything),
        name=draw(any_text),
        description=draw(any_text),
        vip=trees.vip(),
        additional_vips=tuple(trees.vip(address=one) for one in draw(more_vips)),
        listeners=fixed,
        pools=tuple(draw(pools(n, p)) for p in range(2)),
    )


# -- expected directives -----------------------------------------------------------------------------------------------


def expected(tree: LoadBalancer, refused: set[str]) -> dict[Words, Counter]:
    """Return, for each section by its head, the number of lines that begin with these words."""
    sections: dict[Words, Counter] = {}
    addresses = [vip.address for vip in tree.vips if _is_address(vip.address)]
    served = {pool.id: pool for pool in tree.pools if pool.id not in refused}
    for listener in tree.listeners:
        if listener.id in refused:
            continue
        front, named = _frontend(listener, served, len(addresses))
        sections["frontend", listener.id] = front
        for pool_id in named:
            sections["backend", f"{pool_id}:{listener.id}"] = _backend(served[pool_id], refused)
    return sections


def _frontend(listener: Listener, served: dict[str, Pool], addresses: int) -> tuple[Counter, list[str]]:
    found = Counter({"mode": 1, "timeout client": 1, "timeout http-request": 1, "bind": addresses})
    if listener.protocol in HTTP:
        found.update(("option idle-close-on-response", "option http-ignore-probes", "timeout http-keep-alive"))
    for name in listener.insert_headers or ():
        found["option forwardfor" if name == "X-Forwarded-For" else "http-request set-header"] += 1
    active = [p for p in listener.l7policies if p.admin_state_up and any(r.admin_state_up for r in p.rules)]
    named = [listener.default_pool_id] if listener.default_pool_id in served else []
    for number, policy in enumerate(active):
        found += _policy(policy, last=all(_to(p, served) for p in active[number:]), served=served)
        named += [policy.redirect_pool_id] if _to(policy, served) else []
    rules = [rule for policy in active for rule in policy.rules if rule.admin_state_up]
    found["acl"] += sum(map(_alternatives, rules))
    found["http-request set-var(txn.extension)"] += any(rule.type is L7RuleType.FILE_TYPE for rule in rules)
    found["use_backend"] += found["http-request allow"] > 0
    found["default_backend"] += listener.default_pool_id in served
    return +found, list(dict.fromkeys(named))


def _to(policy: L7Policy, served: dict[str, Pool]) -> bool:
    return policy.action is L7Action.REDIRECT_TO_POOL and policy.redirect_pool_id in served


def _policy(policy: L7Policy, *, last: bool, served: dict[str, Pool]) -> Counter:
    if policy.action in REDIRECTS:
        return Counter({"http-request redirect": 1})
    if not _to(policy, served):
        return Counter({"http-request deny": 1})
    return Counter({"use_backend": 1} if last else {"http-request set-var(txn.pool)": 1, "http-request allow": 1})


def _alternatives(rule: L7Rule) -> int:
    """Return the number of lines of a rule: with and without a port, a header's line and its values."""
    if rule.type is L7RuleType.HOST_NAME:
        return 2
    return 2 if rule.type is L7RuleType.HEADER and rule.compare_type is not L7Compare.CONTAINS else 1


def _backend(pool: Pool, refused: set[str]) -> Counter:
    found = Counter({"mode": 1, "log": 1, "balance": 1, "timeout connect": 1, "timeout server": 1, "timeout tunnel": 1})
    monitor = pool.healthmonitor
    if monitor is not None and monitor.id not in refused:
        found.update(("load-server-state-from-file", "timeout check"))
        if monitor.type is not MonitorType.TCP:
            found.update(("option httpchk", "http-check send", "http-check expect"))
    kept = pool.session_persistence
    if kept is None:
        found["option redispatch"] += 1
    elif kept.type is PersistenceType.HTTP_COOKIE:
        found.update(("cookie", "dynamic-cookie-key"))
    else:
        by_address = kept.type is PersistenceType.SOURCE_IP
        found.update(("stick-table", *(("stick on",) if by_address else ("stick match", "stick store-response"))))
    for member in pool.members:
        if member.id not in refused:
            address = ip_address(member.address)
            host = f"[{address}]" if address.version == 6 else str(address)
            found[f"server {member.id} {host}:{member.protocol_port}"] += 1
    return found


def _is_address(text: str) -> bool:
    try:
        return "%" not in text and not ip_address(text).is_unspecified
    except ValueError:
        return False


ONE_WORD = ("mode", "bind", "acl", "use_backend", "default_backend", "log", "balance", "cookie", "dynamic-cookie-key")
ONE_WORD += ("stick-table", "load-server-state-from-file")


def counted(lines: list[tuple[Words, Words]]) -> dict[Words, Counter]:
    """Return the same numbers for parsed directives."""
    sections: dict[Words, Counter] = {}
    for head, words in lines:
        if head == words:
            assert head == ("defaults",) or head not in sections, f"{head} exists twice"
            sections[head] = Counter()
        elif words[0] == "server":
            sections[head][" ".join(words[:3])] += 1
        else:
            sections[head][words[0] if words[0] in ONE_WORD else " ".join(words[:2])] += 1
    return sections
