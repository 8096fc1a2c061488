# SPDX-License-Identifier: Apache-2.0
"""Options of the heartbeats: group [amp_health]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_health": {
        cfg.StrOpt("bind_address", default="0.0.0.0"): (
            "Local address on which the health manager receives heartbeats. The default is all IPv4 addresses."
        ),
        cfg.PortOpt("bind_port", default=9879): "UDP port on which the health manager receives heartbeats. 0 to 65535.",
        cfg.IntOpt("receivers", default=1, min=1, max=64): (
            "Number of processes of this health manager that receive heartbeats on bind_port. Each process handles a "
            "part of the load balancers. The first process serves its status page on health_bind_port, the second one "
            "on health_bind_port + 101, the third one on health_bind_port + 102, and so on. One process receives about "
            "10,000 small heartbeats per second. 1 to 64."
        ),
        cfg.ListOpt("targets", default=[]): (
            "Addresses of all health managers as address:port, separated by commas. Every amphora sends its heartbeats "
            "to each of them. A change reaches running amphorae without a rotation. Use the same value for all "
            "controllers. The default is none: no heartbeat is sent."
        ),
        cfg.FloatOpt("interval", default=3.0, min=0.1): (
            "Seconds between two heartbeats of an amphora. A change reaches running amphorae without a rotation. At "
            "least 0.1."
        ),
        cfg.FloatOpt("flush_interval", default=0.5, min=0.05): (
            "Seconds between two writes to the database. Status changes in between are written together. At least 0.05."
        ),
        cfg.FloatOpt("statistics_interval", default=2.0, min=0.0): (
            "Seconds between two writes of the statistics of one load balancer. Counters in between are added in "
            "memory. 10 is suitable for thousands of amphorae. With cluster membership, the sum of this option, "
            "interval and 11 seconds must stay below [amp_cluster] statistics_age. At least 0."
        ),
        cfg.IntOpt("near_limit", default=85, min=50, max=100): (
            "Percentage of a limit (connections, CPU, memory, file descriptors, tracked connections) from which an "
            "amphora counts as near its limit, after ten heartbeats. The mark disappears after ten heartbeats "
            "that are more than ten percentage points lower. 50 to 100."
        ),
    }
}
