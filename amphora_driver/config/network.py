# SPDX-License-Identifier: Apache-2.0
"""Options of the network backends: groups [amp_network] and [amp_network_local]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_network": {
        cfg.StrOpt("driver", default="local"): (
            "Network backend of new load balancers, for their VIPs and ports. A name of the entry point group "
            "amphora_driver.network."
        ),
        cfg.ListOpt("enabled_drivers", default=[]): (
            "Further network backends of existing load balancers, separated by commas. The default is none."
        ),
        cfg.FloatOpt("vip_timeout", default=300.0, min=0.0): (
            "Time limit in seconds for the network backend to allocate the VIP addresses of a load balancer. After it "
            "the load balancer has the provisioning status ERROR; retries continue. 0 or more."
        ),
    },
    "amp_network_local": {
        cfg.StrOpt("switch", default="amp-switch"): "Network namespace that holds the bridges of all networks.",
    },
}
