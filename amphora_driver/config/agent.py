# SPDX-License-Identifier: Apache-2.0
"""Options of the calls to the agents in the amphorae: group [amp_agent]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_agent": {
        cfg.PortOpt("port", default=9443): "TCP port of the agent's API in each amphora. 0 to 65535.",
        cfg.FloatOpt("connect_timeout", default=3.0, min=0.01): (
            "Time limit in seconds for the TCP connection and TLS handshake with an agent. At least 0.01."
        ),
        cfg.FloatOpt("request_timeout", default=60.0, min=0.01): (
            "Time limit in seconds for the response of an agent. The configuration of a large load balancer gets up to "
            "five times as long. At least 0.01."
        ),
        cfg.StrOpt("services", default="systemd", choices=["systemd", "supervisor"]): (
            "Service manager of HAProxy and keepalived inside an amphora. systemd: in a VM. supervisor: in a network "
            "namespace."
        ),
    },
}
