# SPDX-License-Identifier: Apache-2.0
"""Options of automatic fail-over and of spare amphorae: groups [amp_failover] and [amp_spares]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_failover": {
        cfg.BoolOpt("automatic", default=True): (
            "Whether the controller replaces silent amphorae without a request of an operator."
        ),
        cfg.FloatOpt("silent_after", default=7.0, min=0.2): (
            "Seconds without a heartbeat after which an amphora is silent. The controller replaces it if its agent "
            "does not answer a probe. Use more than two heartbeat intervals. Time in which no health manager received "
            "heartbeats does not count. At least 0.2."
        ),
        cfg.FloatOpt("mute_after", default=120.0, min=0.0): (
            "Seconds without a heartbeat after which an amphora is replaced even if its agent answers. 0 or more; a "
            "value below silent_after means silent_after."
        ),
        cfg.FloatOpt("probe_timeout", default=2.0, min=0.1): (
            "Time limit in seconds for a probe of the agent of a silent amphora. At least 0.1."
        ),
        cfg.ListOpt("witnesses", default=[]): (
            "TCP services on the management network that are always reachable, as host:port, separated by commas. If "
            "none of them is reachable, the controller assumes a network fault and replaces no amphora. The default is "
            "none: while no amphora sends heartbeats, fail-overs then begin later."
        ),
        cfg.FloatOpt("breaker_percent", default=20.0, min=0.0, max=100.0): (
            "The circuit breaker opens if more than this percentage of all amphorae fall silent within breaker_window. "
            "No automatic fail-over begins while it is open. 0 to 100."
        ),
        cfg.IntOpt("breaker_min", default=3, min=1): (
            "Smallest number of silent amphorae to which breaker_percent applies. At least 1."
        ),
        cfg.IntOpt("breaker_max", default=50, min=1): (
            "The circuit breaker opens if more than this number of amphorae fall silent within breaker_window. At "
            "least 1."
        ),
        cfg.FloatOpt("breaker_window", default=120.0, min=1.0): (
            "Time window in seconds in which the circuit breaker counts amphorae that fell silent. At least 1."
        ),
        cfg.FloatOpt("breaker_close_after", default=30.0, min=0.0): (
            "Seconds for which the number of silent amphorae must stay below both limits before the circuit breaker "
            "closes. 0 or more."
        ),
        cfg.FloatOpt("breaker_trial_after", default=600.0, min=0.0): (
            "Seconds after which an open circuit breaker permits one trial fail-over at a time. If the trial succeeds, "
            "more fail-overs follow. 0 or more."
        ),
        cfg.IntOpt("most_at_once", default=5, min=1): (
            "Largest number of automatic fail-overs in progress at the same time. At least 1."
        ),
        cfg.FloatOpt("backoff_first", default=60.0, min=0.0): (
            "Back-off in seconds between two automatic fail-overs of the same load balancer; each further fail-over "
            "doubles it. 0 or more."
        ),
        cfg.FloatOpt("backoff_max", default=3600.0, min=0.0): (
            "Longest back-off in seconds between two automatic fail-overs of the same load balancer. 0 or more."
        ),
        cfg.FloatOpt("keep_history", default=7_776_000.0, min=0.0): (
            "Seconds for which records of past fail-overs are kept. The default is 90 days. 0 or more."
        ),
    },
    "amp_spares": {
        cfg.IntOpt("number", default=0, min=0, max=100): (
            "Number of spare amphorae that the controller keeps booted for each kind of machine in use. They shorten a "
            "fail-over by the boot time. A flavor can set another value. 0 to 100; 0 keeps no spares."
        )
    },
}
