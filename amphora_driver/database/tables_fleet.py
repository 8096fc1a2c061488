# SPDX-License-Identifier: Apache-2.0
"""Tables about the fleet: fail-overs, silent amphorae, image rotations, processes, CAs.

Invariant: as in `tables`, the rows are authoritative. Findings (`silent_amphora`, `unknown_amphora`,
`circuit_breaker`) may be lost, because they are detected again. Requests and history must not be lost.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, String, Table, Text

from amphora_driver.database.tables import Body, Id, Sealed, Serial, metadata

__all__ = [
    "certificate_authority",
    "circuit_breaker",
    "drained_host",
    "failover",
    "failover_event",
    "metadata",
    "process",
    "resync",
    "rotation",
    "rotation_item",
    "silent_amphora",
    "unknown_amphora",
]

# One row per replacement of an amphora (`amphora_id`; NULL: all amphorae of the load balancer).
# `cause`: silent, never_spoke, mute, asked (by Octavia), operator, rotation, drift, machine.
# `silent_since`: time of the last heartbeat. `served_at`: time from which all desired amphorae served users again.
# `ended_at`: time of the end of all work. `outcome`: done, gone (load balancer deleted), superseded, recovered.
failover = Table(
    "failover",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("load_balancer_id", Id, nullable=False),
    Column("amphora_id", Id, nullable=True),
    Column("cause", String(32), nullable=False),
    Column("reason", Text, nullable=True),
    Column("asked_by", String(128), nullable=True),
    Column("rotation_id", BigInteger, nullable=True),
    Column("silent_since", Double, nullable=True),
    Column("begun_at", Double, nullable=False),
    Column("served_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    Column("outcome", String(16), nullable=True),
    Index("ix_failover_load_balancer_id", "load_balancer_id"),
    Index("ix_failover_ended_at", "ended_at"),
    Index("ix_failover_begun_at", "begun_at"),
)

# The time line of a fail-over: time, event (`word`), amphora.
failover_event = Table(
    "failover_event",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("failover_id", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("word", String(32), nullable=False),
    Column("amphora_id", Id, nullable=True),
    Column("detail", Text, nullable=True),
    Index("ix_failover_event_failover_id", "failover_id"),
)

# Amphorae without heartbeats, as the failure detector sees them now. `kind`: silent, mute (its agent answers),
# never_spoke. `verdict`: the action that follows, or the reason for no action, as text.
silent_amphora = Table(
    "silent_amphora",
    metadata,
    Column("amphora_id", Id, primary_key=True),
    Column("load_balancer_id", Id, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("since", Double, nullable=False),
    Column("verdict", Text, nullable=True),
)

# Senders of heartbeats with an unknown amphora id. No known key signs them: hints for an operator, never proof.
unknown_amphora = Table(
    "unknown_amphora",
    metadata,
    Column("amphora_id", Id, primary_key=True),
    Column("address", String(64), nullable=False),
    Column("first_at", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    Column("verdict", Text, nullable=True),
)

# The circuit breaker of automatic fail-overs. `state`: closed, open, trial.
circuit_breaker = Table(
    "circuit_breaker",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("since", Double, nullable=False),
    Column("silent", Integer, nullable=False),
    Column("watched", Integer, nullable=False),
    Column("trial_at", Double, nullable=True),
    Column("reason", Text, nullable=True),
)

# An image rotation over many load balancers. `wanted` (JSON): the selection. `state`: running, paused, aborted, done.
rotation = Table(
    "rotation",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("state", String(16), nullable=False),
    Column("wanted", Body, nullable=False),
    Column("max_unavailable", Integer, nullable=False),
    Column("asked_by", String(128), nullable=True),
    Column("created_at", Double, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    Column("reason", Text, nullable=True),
)

# The load balancers of a rotation, in order of `place`. `state`: waiting, running, done, failed, skipped. `amphorae`
# (JSON): amphorae to replace, selected at the request. `operating`: the load balancer's status at its start.
rotation_item = Table(
    "rotation_item",
    metadata,
    Column("rotation_id", BigInteger, primary_key=True, autoincrement=False),
    Column("load_balancer_id", Id, primary_key=True),
    Column("place", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("amphorae", Body, nullable=False),
    Column("operating", String(16), nullable=True),
    Column("begun_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    Column("reason", Text, nullable=True),
)

# Processes of the control plane; each updates its own row every few seconds. `beat` grows only while the process works:
# a health manager's while it receives its own test heartbeats. `draining`: it accepts no new jobs.
process = Table(
    "process",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("host", String(255), nullable=False),
    Column("version", String(64), nullable=True),
    Column("started_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("beat", BigInteger, nullable=False, default=0),
    Column("draining", Boolean, nullable=False, default=False),
    Column("jobs", Integer, nullable=False, default=0),
)

# Drained hosts: their controllers accept no new jobs, also controllers that start later.
drained_host = Table(
    "drained_host",
    metadata,
    Column("host", String(255), primary_key=True),
    Column("since", Double, nullable=False),
    Column("asked_by", String(128), nullable=True),
)

# CAs for amphorae (`kind` amphora) or for controllers (controller). Before the first rotation of a kind there is no
# row, and the configured files are used. `state`: next (trusted, signs nothing), current (signs), former (still
# trusted), leaving (being removed from the amphorae's trust stores), gone.
certificate_authority = Table(
    "certificate_authority",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("certificate", Body, nullable=False),
    Column("sealed_key", Sealed, nullable=True),
    Column("created_at", Double, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
)

# The last resynchronization of each load balancer: read it from Octavia completely, report all statuses to Octavia.
# `outcome` (store/resyncs.py) is NULL until the end. `detail`: the differences, or the reason for waiting.
# `remove_unknown`: remove a load balancer that Octavia does not know.
resync = Table(
    "resync",
    metadata,
    Column("load_balancer_id", Id, primary_key=True),
    Column("asked_at", Double, nullable=False),
    Column("asked_by", String(128), nullable=True),
    Column("remove_unknown", Boolean, nullable=False, default=False),
    Column("ended_at", Double, nullable=True),
    Column("outcome", String(16), nullable=True),
    Column("detail", Text, nullable=True),
    Index("ix_resync_ended_at", "ended_at"),
)
