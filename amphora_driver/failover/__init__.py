# SPDX-License-Identifier: Apache-2.0
"""Failure detection: finds silent amphorae, probes them, and requests automatic fail-overs.

One controller at a time holds the duty `detection` and runs `failure_detector`. A new heartbeat returns an amphora to
HEARD from every state before REQUESTED. A blind detector moves no amphora.

    HEARD (a READY amphora without any heartbeat starts here too)
      | no heartbeat for about 1.5 intervals        Phase.OVERDUE
    OVERDUE: counts as the possible next of many silent amphorae
      | no heartbeat for 0.65 x silent_after        Phase.LATE
    LATE: `reachability_probe` asks its agent
      | no heartbeat for silent_after               Phase.SILENT
    SILENT: `failure_rules.judge_silence` combines the silence and the probe result
      |-- WAITING: no probe result yet; the controller cannot probe; the network is suspected;
      |            or the agent answers and mute_after is not over
      | PROBED: cause SILENT or NEVER_SPOKE (no answer from the agent), or MUTE (it answers)
      |-- HELD: `circuit_breaker.FailoverPermit` (automatic, operator, breaker, most_at_once) or `FailoverBackoff`
    REQUESTED: one transaction repeats the check of the silence and opens the fail-over

States of the circuit breaker (`circuit_breaker.next_breaker`):

    CLOSED --> OPEN    too many amphorae fell silent within breaker_window
    OPEN   --> TRIAL   breaker_trial_after has passed: one fail-over at a time
    TRIAL  --> OPEN    the replacement is dead too, or does not serve in time
    OPEN, TRIAL --> CLOSED   few amphorae are silent for breaker_close_after, or an operator closes the breaker
"""
