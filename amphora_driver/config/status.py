# SPDX-License-Identifier: Apache-2.0
"""Options of the status pages: group [amp_status_page]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_status_page": {
        cfg.StrOpt("bind_address", default="127.0.0.1"): (
            "Local address of the status page and of the metrics, for all processes."
        ),
        cfg.PortOpt("bind_port", default=9878, min=0): (
            "TCP port of the controller's status page. 0 to 65535; 0 disables the page."
        ),
        cfg.PortOpt("health_bind_port", default=9877, min=0): (
            "TCP port of the health manager's status page. 0 to 65535; 0 disables the page."
        ),
        cfg.PortOpt("provider_agent_port", default=0, min=0): (
            "TCP port of the provider agent's status page. 0 to 65535; 0 disables the page. It is disabled by default "
            "because the provider agent runs inside octavia-driver-agent on Octavia's hosts."
        ),
        cfg.StrOpt("token_file"): (
            "File with an access token in its first line. Clients send it as a bearer token or by basic authentication "
            "with any user name. Default: no token; the page answers only requests of its own host."
        ),
        cfg.StrOpt("certificate"): (
            "PEM file with the server certificate and its private key. Default: HTTP without TLS."
        ),
    }
}
