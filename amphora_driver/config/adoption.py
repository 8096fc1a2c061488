# SPDX-License-Identifier: Apache-2.0
"""Options of adoptions: group [amp_adoption]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_adoption": {
        cfg.StrOpt("octavia_connection", default="", secret=True): (
            "SQLAlchemy URL of Octavia's database, as in [database] connection of octavia.conf. Only adoptions use it. "
            "The account needs to read all tables, to change the tables load_balancer and amphora, and to insert and "
            "delete rows of the tables amphora, amphora_health and amphora_member_port. Empty: this process adopts no "
            "load balancer."
        ),
        cfg.FloatOpt("remove_after", default=86400.0, min=0.0): (
            "Seconds between an adoption and the removal of the former amphorae. Until then, the adoption can be "
            "reverted. 0 or more."
        ),
        cfg.FloatOpt("prepare_timeout", default=900.0, min=1.0): (
            "Time limit in seconds for the new amphorae to boot and to accept the configuration. After it the adoption "
            "is reverted. At least 1."
        ),
        cfg.FloatOpt("take_timeout", default=20.0, min=1.0): (
            "Time limit in seconds for the new amphorae to take the VIPs, after the former amphorae are disabled. "
            "After it the adoption is reverted. At least 1."
        ),
    }
}
