# SPDX-License-Identifier: Apache-2.0
"""Options of the certificates between controllers and agents: group [amp_certificates]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_certificates": {
        cfg.StrOpt("ca_certificate", default="/etc/amphora-driver/amphora_ca.pem"): (
            "PEM file with the certificate of the CA that signs the amphorae's certificates."
        ),
        cfg.StrOpt("ca_private_key", default="/etc/amphora-driver/amphora_ca.key"): (
            "PEM file with the private key of that CA."
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
