# SPDX-License-Identifier: Apache-2.0
"""Options of the exchange with octavia-driver-agent: group [amp_octavia]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_octavia": {
        cfg.StrOpt("provider", default="haproxy"): (
            "Name of this provider in Octavia's enabled_provider_drivers. `amphoractl status check` looks for it in "
            "the list of providers of Octavia's API."
        ),
        cfg.StrOpt("status_socket", default="/var/run/octavia/status.sock"): (
            "Unix socket on which octavia-driver-agent receives statuses. The same as its status_socket_path."
        ),
        cfg.StrOpt("stats_socket", default="/var/run/octavia/stats.sock"): (
            "Unix socket on which octavia-driver-agent receives statistics. The same as its stats_socket_path."
        ),
        cfg.StrOpt("get_socket", default="/var/run/octavia/get.sock"): (
            "Unix socket on which octavia-driver-agent answers reads of objects. The same as its get_socket_path."
        ),
        cfg.FloatOpt("commit_timeout", default=30.0, min=0.1): (
            "Seconds to wait until a new load balancer exists in Octavia's database. After this time Octavia has "
            "rolled its transaction back, and the load balancer is deleted. At least 0.1."
        ),
        cfg.FloatOpt("audit_after", default=5.0, min=0.0): (
            "Seconds between a change of a load balancer and its comparison with Octavia's database. Octavia can roll "
            "a change back after the provider driver accepted it. 0 or more."
        ),
        cfg.FloatOpt("audit_interval", default=5.0, min=0.0): (
            "Shortest time in seconds between two comparisons with Octavia's database (audit_after), for all load "
            "balancers together. 0 or more."
        ),
    }
}
