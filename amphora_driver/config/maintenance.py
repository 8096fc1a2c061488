# SPDX-License-Identifier: Apache-2.0
"""Options of the drift audit and of image rotation: groups [amp_drift] and [amp_rotation]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_drift": {
        cfg.FloatOpt("interval", default=600.0, min=1.0): (
            "Seconds between two comparisons of an amphora's configuration with the desired state. At least 1."
        ),
        cfg.IntOpt("most_at_once", default=4, min=1): (
            "Largest number of amphorae that are compared at the same time. At least 1."
        ),
        cfg.FloatOpt("renderer_pause", default=10.0, min=0.0): (
            "Seconds between two load balancers that are updated only because a new version or new options render them "
            "differently. 0 or more."
        ),
        cfg.FloatOpt("agent_interval", default=30.0, min=0.1): (
            "Seconds between two drift checks of an agent, which compares its machine with the confirmed "
            "configuration. A change reaches running amphorae without a rotation. At least 0.1."
        ),
    },
    "amp_rotation": {
        cfg.FloatOpt("settle", default=10.0, min=0.0): (
            "Seconds for which a rotation observes the new amphorae of a load balancer before it continues with the "
            "next load balancer. 0 or more."
        ),
        cfg.FloatOpt("replacement_timeout", default=900.0, min=1.0): (
            "Time limit in seconds to replace the amphorae of one load balancer. After it the load balancer has "
            "failed, and the rotation pauses. At least 1."
        ),
        cfg.IntOpt("image_days", default=90, min=0): (
            "Age of an image in days from which `amphoractl status check` warns. 0 disables the warning."
        ),
    },
}
