# SPDX-License-Identifier: Apache-2.0
"""Options of the controller: group [amp_controller]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_controller": {
        cfg.IntOpt("threads", default=8, min=1): (
            "Number of load balancers that one controller processes at the same time. At least 1."
        ),
        cfg.FloatOpt("lease", default=15.0, min=1.0): (
            "Seconds until the lease of a job expires if its controller does not renew it. Another controller can then "
            "take over the job. At least 1."
        ),
        cfg.FloatOpt("operation_timeout", default=300.0, min=1.0): (
            "Seconds that one attempt of a job may take, including all calls to agents and backends. The boot of "
            "amphorae does not count. At least 1."
        ),
        cfg.FloatOpt("boot_timeout", default=300.0, min=0.0): (
            "Seconds from the boot of an amphora to the first answer of its agent. After this time the load balancer "
            "has the provisioning status ERROR, and the controller boots another amphora. 0 or more."
        ),
        cfg.StrOpt("loadbalancer_topology", default="SINGLE", choices=["SINGLE", "ACTIVE_STANDBY"]): (
            "Topology of new load balancers whose flavor does not name one. Existing load balancers keep theirs."
        ),
        cfg.FloatOpt("drain_timeout", default=300.0, min=0.0, max=86_000.0): (
            "Longest time in seconds that open connections continue through the new amphora when an amphora of an "
            "ACTIVE_STANDBY pair is replaced on request. The old amphora is deleted after the last connection ends. 0 "
            "to 86000; 0 closes the connections at once."
        ),
        cfg.FloatOpt("retry_first", default=0.5, min=0.0): (
            "Seconds before the first retry of a failed job; each further retry doubles it. 0 or more."
        ),
        cfg.FloatOpt("retry_most", default=60.0, min=0.0): "Longest back-off between retries in seconds. 0 or more.",
        cfg.FloatOpt("forget_vip_after", default=600.0, min=0.0): (
            "Seconds until VIP addresses are released if Octavia allocated them but never created the load balancer. 0 "
            "or more."
        ),
        cfg.FloatOpt("orphan_grace", default=900.0, min=0.0): (
            "Seconds for which a machine, port or VIP without a database record must exist before it is an orphan. The "
            "cleanup then deletes it. 0 or more."
        ),
        cfg.FloatOpt("housekeeping_interval", default=30.0, min=0.1): (
            "Seconds between two runs of the housekeeping: orphans, expired records, certificates. At least 0.1."
        ),
        cfg.IntOpt("give_up_after", default=8, min=1): (
            "Number of failed attempts, or of controller crashes, after which the load balancer has the provisioning "
            "status ERROR. Retries continue. At least 1."
        ),
    }
}
