# SPDX-License-Identifier: Apache-2.0
"""Options of keepalived: group [amp_vrrp]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, list[cfg.Opt]] = {
    "amp_vrrp": [
        cfg.FloatOpt(
            "advert_interval",
            default=1.0,
            min=0.05,
            max=40.0,
            help="Seconds between two VRRP advertisements of the amphora that holds the VIPs. The standby takes over "
            "after three to four missing advertisements. A flavor can set another value. 0.05 to 40.",
        ),
    ]
}
