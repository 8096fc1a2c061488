# SPDX-License-Identifier: Apache-2.0
"""Options of the connections to the agents in the amphorae: groups [amp_agent] and [amp_certificates]."""

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
    "amp_certificates": {
        cfg.StrOpt("ca_certificate", default="/etc/amphora-driver/amphora_ca.pem"): (
            "PEM file with the certificate of the CA that signs the amphorae's certificates."
        ),
        cfg.StrOpt("ca_private_key", default="/etc/amphora-driver/amphora_ca.key"): (
            "PEM file with the private key of the CA in ca_certificate."
        ),
        cfg.StrOpt("client_ca", default="/etc/amphora-driver/controller_ca.pem"): (
            "PEM file with the certificate of the CA that signs the controllers' certificates. Agents accept only "
            "clients of this CA."
        ),
        cfg.StrOpt("client_certificate", default="/etc/amphora-driver/controller.pem"): (
            "PEM file with the controllers' certificate and private key."
        ),
        cfg.IntOpt("validity_days", default=7, min=1): "Validity of an amphora's certificate in days. At least 1.",
        cfg.FloatOpt("renew_at", default=0.5, min=0.01, max=0.99): (
            "Fraction of its validity after which an amphora's certificate is renewed. 0.01 to 0.99."
        ),
        cfg.FloatOpt("settle", default=90.0, min=1.0): (
            "Shortest duration in seconds of each step of a CA rotation. Use more than 75, the time-out of an idle "
            "connection to an agent, so that no connection from before the previous step exists. At least 1."
        ),
    },
}
