# SPDX-License-Identifier: Apache-2.0
"""Settings of HAProxy and of the kernel, each compared with the value that amphorae have, in the same alternation.

Both sides are plain HAProxies with the lines of an amphora; one of them has one more line, or one line less. For UDP,
both sides have the same table of nftables, and the interface has other offloads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_plane.kinds import Changes
from data_plane.place import processors

_OURS = Changes(
    process=("tune.ssl.default-dh-param 2048", "tune.ssl.cachesize 0"),
    defaults=(
        "retries 3",
        "option redispatch",
        "option dontlognull",
        "option tcpka",
        "option splice-auto",
        "option splice-response",
    ),
)
AMPHORA = _OURS
"""The lines of an amphora that can change the speed (`amphora_agent/templates`)."""


_GRO, _UDP_GRO = "gro", "rx-udp-gro-forwarding"
NO_OFFLOADS = replace(_OURS, offloads=(_GRO, "on", _UDP_GRO, "off"))
"""The offloads that an interface of a virtual machine has by default."""


@dataclass(frozen=True)
class Setting:
    """A setting: its text in the table, the lines with it, and the names of the cases in which it could matter."""

    name: str
    changes: Changes
    cases: tuple[str, ...]


def _process(line: str) -> Changes:
    return replace(_OURS, process=(*_OURS.process, line))


def _defaults(line: str) -> Changes:
    return replace(_OURS, defaults=(*_OURS.defaults, line))


def _without(line: str) -> Changes:
    return replace(
        _OURS,
        process=tuple(one for one in _OURS.process if one != line),
        defaults=tuple(one for one in _OURS.defaults if one != line),
    )


SETTINGS = (
    Setting(
        "without `option splice-response`",
        _without("option splice-response"),
        ("requests", "medium bodies", "throughput", "TCP throughput"),
    ),
    Setting("without `option tcpka`", _without("option tcpka"), ("connections",)),
    Setting("`option idle-close-on-response`", _defaults("option idle-close-on-response"), ("requests",)),
    Setting("`http-reuse always`", _defaults("http-reuse always"), ("connections",)),
    Setting("`tune.bufsize 32768`", _process("tune.bufsize 32768"), ("throughput",)),
    Setting("`tune.maxaccept 200`", _process("tune.maxaccept 200"), ("connections",)),
    Setting("`tune.runqueue-depth 50`", _process("tune.runqueue-depth 50"), ("requests",)),
    Setting("`tune.sched.low-latency on`", _process("tune.sched.low-latency on"), ("latency",)),
    Setting("`busy-polling`", _process("busy-polling"), ("latency",)),
    Setting("`tune.ssl.cachesize 20000`", _without("tune.ssl.cachesize 0"), ("TLS resumed",)),
    Setting("`no-tls-tickets`", replace(_OURS, bind=" no-tls-tickets"), ("TLS resumed",)),
    Setting("`tune.ssl.maxrecord 1400`", _process("tune.ssl.maxrecord 1400"), ("TLS requests",)),
    Setting("one thread more", _process(f"nbthread {len(processors()[0]) + 1}"), ("requests", "connections")),
    Setting(f"`{_UDP_GRO} on`", replace(_OURS, offloads=(_GRO, "on", _UDP_GRO, "on")), ("UDP packets", "UDP bulk")),
)
