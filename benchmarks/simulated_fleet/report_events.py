# SPDX-License-Identifier: Apache-2.0
"""The tables of changes and events, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_PARTS = {"alone": "changes", "beside": "beside the large load balancer"}
_NAMES = {
    "controller0": "controller 1",
    "controller1": "controller 2",
    "controller2": "controller 3",
    "health": "health manager",
    "reporter": "provider agent",
    "octavia": "octavia-driver-agent",
    "database": "database",
    "balancer": "HAProxy in front of the database",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, and an empty line."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def describe_changes(found: dict[str, Any], database: str, size: int) -> list[str]:
    """Return the section about changes of members."""
    options, alone = found["options"], found["alone"]
    hints = "RabbitMQ and local sockets" if options["broker"] else "local sockets"
    lines = [f"## Changes of members, {database}, {size:,} load balancers", ""]
    rate = f"{found['per_minute']:g} changes in a minute of {found['balancers']} load balancers"
    lines += [
        f"{rate}, {found['controllers']} controllers, hints over {hints}.",
        f"The large load balancer has {found['members']:,} members, and changes without a pause.",
        (
            "*Served* is the time until the last amphora has applied the change, *confirmed* until the controller has "
            "recorded it."
        ),
        "Load average: " + ", ".join(f"{found[one]['load_average']:.1f}" for one in _PARTS) + ".",
        "",
    ]
    names = list(dict.fromkeys(name for one in _PARTS for name in found[one]["delays"]))
    rows = [["changes; later ones because of an earlier one", *(_counts(found[one]) for one in _PARTS)]]
    rows += [
        [f"{name}: p50, p99, longest (ms)", *(_milliseconds(found[one]["delays"].get(name)) for one in _PARTS)]
        for name in names
    ]
    rows += [["call of the driver: p50, p99, longest (ms)", *(_milliseconds(found[one]["call"]) for one in _PARTS)]]
    rows += [["failed; not served", *(f"{found[one]['failures']}; {found[one]['not_served']}" for one in _PARTS)]]
    for name, text in {"due": "jobs without a controller", "running": "jobs at work", "unreported": "outbox"}.items():
        rows.append([f"largest number: {text}", *(str(found[one]["samples"]["largest"][name]) for one in _PARTS)])
    if "deadlocks" in alone["locks"]:
        rows.append(["deadlocks", *(f"{found[one]['locks']['deadlocks']:.0f}" for one in _PARTS)])
    if "waits" in alone["locks"]:
        rows.append(
            ["waits for row locks (number; longest since the start, s)", *(_locks(found[one]) for one in _PARTS)]
        )
    rows += _conflicts(found)
    rows.append(["longest wait of the provider for a lock (s)", *(_own_wait(found[one]) for one in _PARTS)])
    rows += [
        [f"processor: {text}", *(f"{found[one]['cpu'][name]:.2f}" for one in _PARTS)]
        for name, text in _NAMES.items()
        if name in alone["cpu"]
    ]
    return [*lines, *table(["", *_PARTS.values()], rows)]


def _conflicts(found: dict[str, Any]) -> list[list[str]]:
    """Return the rows about repeated transactions, which measurements before these rows do not have."""
    parts = [found[one].get("conflicts", {}) for one in _PARTS]
    rows = []
    if "refused" in parts[0]:
        cells = [f"{one['refused']:.0f}; {one['aborted']:.0f}; {one['write_sets']:,.0f}" for one in parts]
        rows.append(["Galera: refused at the commit; aborted by another node; write sets", *cells])
        rows.append(["Galera: pauses of flow control (s)", *(f"{one['paused']:.2f}" for one in parts)])
    if "retries" in parts[0]:
        cells = [f"{one['retries']:.0f}; {found[name]['attempts']}" for one, name in zip(parts, _PARTS, strict=True)]
        rows.append(["repeated transactions; most attempts of one since the start", *cells])
    return rows


def _counts(part: dict[str, Any]) -> str:
    return f"{part['changes']:,}; {part['waited']}"


def _milliseconds(values: dict[str, float] | None) -> str:
    if not values or not values["number"]:
        return ""
    return ", ".join(f"{1000 * values[name]:,.0f}" for name in ("p50", "p99", "most"))


def _locks(part: dict[str, Any]) -> str:
    return f"{part['locks']['waits']:.0f}; {part['locks']['longest']:.2f}"


def _own_wait(part: dict[str, Any]) -> str:
    """Octavia's transactions belong to the user root: the barrier waits for them on purpose."""
    return f"{max((value for user, value in part['samples']['lock_waits'].items() if user != 'root'), default=0.0):.2f}"


def describe_events(results: dict[str, Any], database: str, size: int) -> list[str]:
    """Return the section about events."""
    lines: list[str] = []
    found = {name: results.get(f"{name}/{database}/{size}") for name in ("renewal", "rotation", "loss", "outage")}
    if not any(found.values()):
        return lines
    lines += [f"## Events, {database}, {size:,} load balancers", ""]
    rows: list[list[str]] = []
    rest = results.get(f"rest/{database}/{size}")
    if rest and rest.get("spread"):
        rows.append(["drift audits at rest in a second: mean; largest", _spread(rest["spread"]["drift audits"])])
    for name, describe in (
        ("renewal", _renewal),
        ("rotation", _rotation),
        ("loss", _loss),
        ("outage", _outage),
    ):
        # A cluster has the loss of a node instead of an outage.
        if found[name] and "killed" not in found[name]:
            rows += describe(found[name])
    return [*lines, *(table(["event", "figure"], rows) if rows else []), *_node_outage(found["outage"])]


def _spread(values: list[int]) -> str:
    return f"{sum(values) / max(1, len(values)):.1f}; {max(values, default=0)}"


def _renewal(found: dict[str, Any]) -> list[list[str]]:
    return [
        ["certificates that are due at once; renewed; seconds", _joined(found, "due", "renewed", "seconds")],
        ["renewals in a second: mean; largest", _spread(found["spread"])],
    ]


def _rotation(found: dict[str, Any]) -> list[list[str]]:
    rate = 60 * found["balancers"] / found["seconds"]
    return [
        ["rotation: load balancers at once; largest number; failed",
         f"{found['at_once']}; {found['samples']['largest']['rotating']}; {found['failed']}"],
        ["rotation: load balancers in a minute", f"{rate:.0f}"],
        ["rotation: one load balancer, p50; longest (s)", (f"{found['each'].get('p50', 0):.1f}; "
         f"{found['each'].get('most', 0):.1f}")],
        ["rotation: processors of the first controller; database",
         f"{found['cpu']['controller0']:.2f}; {found['cpu'].get('database', 0):.2f}"],
    ]  # fmt: skip


def _loss(found: dict[str, Any]) -> list[list[str]]:
    opened = "opened" if found["breaker_opened"] else "stayed closed"
    return [
        ["amphorae lost at once; of", f"{found['lost']:,}; {found['amphorae']:,}"],
        ["all detected after (s); circuit breaker", f"{_seconds(found['detected'])}; {opened}"],
        ["fail-overs before an operator closed the circuit breaker", str(found["begun_before_decision"])],
        ["all replaced after its closing (s)", _seconds(found["replaced"])],
        ["fail-overs; of others; not served", _joined(found, "failovers", "wrong", "unserved")],
        ["one fail-over until it is served: p50; p99 (s)",
         f"{found['served'].get('p50', 0):.2f}; {found['served'].get('p99', 0):.2f}"],
        ["largest number in progress", str(found["samples"]["largest"]["open failovers"])],
    ]  # fmt: skip


def _outage(found: dict[str, Any]) -> list[list[str]]:
    used = [
        [f"processor: {text}", f"{found['cpu'][name]:.2f}"] for name, text in _NAMES.items() if name in found["cpu"]
    ]
    grown = max((after - before for before, after in found["memory"].values()), default=0.0)
    delays = found["change"]["delays"].get("others served")
    return [
        ["seconds without the database", f"{found['seconds']:.0f}"],
        *used,
        ["largest growth of a process meanwhile (MiB)", f"{grown:.0f}"],
        ["lines of the logs meanwhile", str(sum(found["log_lines"].values()))],
        ["all processes healthy; new heartbeats of all amphorae (s after the start)",
         f"{_seconds(found['healthy'])}; {_seconds(found['since_start'])}"],
        ["fail-overs; silent amphorae; lost amphorae", _joined(found, "failovers", "silent", "lost")],
        ["next change of a member until served (ms)", _milliseconds(delays)],
        ["drift audits in a second afterwards: mean; largest", _spread(found["spread"])],
    ]  # fmt: skip


def _node_outage(found: dict[str, Any] | None) -> list[str]:
    """Return the table about the loss of one Galera node."""
    if not found or "killed" not in found:
        return []
    parts = [found["killed"], found["frozen"]]
    lines = [
        f"One of three nodes is lost for {parts[0]['seconds']:.0f} s: that of Octavia, the driver and a controller.",
        f"Meanwhile {found['balancers']} load balancers change, {found['per_minute']:g} changes in a minute.",
        "A frozen node keeps its connections open, as after a loss of power.",
        "",
    ]
    rows = [
        ["load average", *(f"{one['load_average']:.1f}" for one in parts)],
        ["changes; failed", *(f"{one['changes']:,}; {one['failures']}" for one in parts)],
        ["failed by error", *(", ".join(f"{n} {name}" for name, n in one["kinds"].items()) or "none" for one in parts)],
        ["longest time without an accepted change (s)", *(_seconds(one["gap"]) for one in parts)],
        [
            "served: p50, p99, longest (ms)",
            *(_milliseconds(one["delays"].get("others served")) for one in parts),
        ],
        ["accepted, but not served; PENDING at the end", *(_joined(one, "not_served", "pending") for one in parts)],
        ["processes not healthy; until (s after the loss)", *(_unhealthy(one["unhealthy"]) for one in parts)],
        ["node joined again after its start (s)", *(_seconds(one["joined"]) for one in parts)],
        ["repeated transactions", *(f"{one['retries']:.0f}" for one in parts)],
        ["fail-overs; silent amphorae; lost amphorae", *(_joined(one, "failovers", "silent", "lost") for one in parts)],
        [
            "next change of a member until served (ms)",
            *(_milliseconds(one["change"]["delays"].get("others served")) for one in parts),
        ],
    ]
    return [*lines, *table(["loss of one node", "killed", "frozen"], rows)]


def _unhealthy(found: dict[str, float]) -> str:
    return ", ".join(f"{_NAMES.get(name, name)}: {until:.0f}" for name, until in found.items()) or "none"


def _seconds(value: float | None) -> str:
    return "not in time" if value is None else f"{value:.1f}"


def _joined(found: dict[str, Any], *names: str) -> str:
    return "; ".join(f"{found[name]:,.0f}" for name in names)
