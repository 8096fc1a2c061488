# SPDX-License-Identifier: Apache-2.0
"""Options of the log targets of amphorae: group [amp_logs]."""

from __future__ import annotations

from oslo_config import cfg

from amphora_agent.log_settings import DEFAULT_QUEUE, LARGEST_QUEUE, SMALLEST_QUEUE

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_logs": {
        cfg.ListOpt("admin_targets", default=[]): (
            "Targets of the administrative log lines of all amphorae, separated by commas: udp://ADDRESS:PORT, "
            "tcp://ADDRESS:PORT and tls://ADDRESS:PORT for syslog (RFC 5424), https://ADDRESS:PORT/PATH for JSON "
            "lines. Addresses are IP addresses; at most four targets. Each target gets each line. A change reaches "
            "running amphorae without a rotation. A flavor can set other targets. The default is none."
        ),
        cfg.ListOpt("tenant_targets", default=[]): (
            "Targets of the flow logs of all listeners, with the same syntax. Listeners have a flow log with "
            "[amp_haproxy] connection_logging only. A flavor can set other targets. The default is none."
        ),
        cfg.StrOpt("ca_certificate"): (
            "PEM file with the CA certificates of tls and https targets. The certificate of a target must contain its "
            "IP address. Default: no such targets are possible."
        ),
        cfg.StrOpt("authorization_file"): (
            "File whose content is the value of the HTTP header Authorization, for example Bearer TOKEN. Only https "
            "targets of this group get it, targets of flavors do not. Default: no such header."
        ),
        cfg.StrOpt("client_certificate"): (
            "PEM file with the certificate that amphorae show to tls and https targets, its chain, and its private key "
            "without a passphrase. Targets of flavors do not get it. A changed file reaches running amphorae without a "
            "restart of the controller. Default: amphorae show no certificate."
        ),
        cfg.IntOpt("queue_bytes", default=DEFAULT_QUEUE, min=SMALLEST_QUEUE, max=LARGEST_QUEUE): (
            "Memory in bytes for waiting lines, for each target in each amphora. A full queue loses new lines, and "
            f"counts them. The default is 4 MiB. {SMALLEST_QUEUE} to {LARGEST_QUEUE}."
        ),
    }
}
