# SPDX-License-Identifier: Apache-2.0
"""Tables about the fleet: fail-overs, silent amphorae, image rotations, processes, CAs.

Invariant: as in `tables`, the rows are authoritative. Findings (`silent_amphora`, `unknown_amphora`,
`circuit_breaker`) may be lost, because they are detected again. Requests and history must not be lost.
"""

from __future__ import annotations

import sqlalchemy as sa

from amphora_driver.database.tables import Body, Id, Sealed, Serial, metadata

__all__ = ["metadata"]

# One row per replacement of an amphora (`amphora_id`; NULL: all amphorae of the load balancer).
# `cause`: silent, never_spoke, mute, asked (by Octavia), operator, rotation, drift, machine.
# `silent_since`: time of the last heartbeat. `served_at`: time from which all desired amphorae served users again.
# `ended_at`: time of the end of all work. `outcome`: done, gone (load balancer deleted), superseded, recovered.
failover = sa.Table(
    "failover",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("amphora_id", Id, nullable=True),
    sa.Column("cause", sa.String(32), nullable=False),
    sa.Column("reason", sa.Text, nullable=True),
    sa.Column("asked_by", sa.String(128), nullable=True),
    sa.Column("rotation_id", sa.BigInteger, nullable=True),
    sa.Column("silent_since", sa.Double, nullable=True),
    sa.Column("begun_at", sa.Double, nullable=False, index=True),
    sa.Column("served_at", sa.Double, nullable=True),
    sa.Column("ended_at", sa.Double, nullable=True, index=True),
    sa.Column("outcome", sa.String(16), nullable=True),
)

# One row per event (`word`) in the time line of a fail-over.
failover_event = sa.Table(
    "failover_event",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("failover_id", sa.BigInteger, nullable=False, index=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("word", sa.String(32), nullable=False),
    sa.Column("amphora_id", Id, nullable=True),
    sa.Column("detail", sa.Text, nullable=True),
)

# Amphorae without heartbeats, as the failure detector sees them now. `kind`: silent, mute (its agent answers),
# never_spoke. `verdict`: the action that follows, or the reason for no action, as text.
silent_amphora = sa.Table(
    "silent_amphora",
    metadata,
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("verdict", sa.Text, nullable=True),
)

# One row per sender of heartbeats with an unknown amphora id. The rows are hints for an operator, never proof, because
# no known key signs these heartbeats.
unknown_amphora = sa.Table(
    "unknown_amphora",
    metadata,
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("address", sa.String(64), nullable=False),
    sa.Column("first_at", sa.Double, nullable=False),
    sa.Column("last_at", sa.Double, nullable=False),
    sa.Column("verdict", sa.Text, nullable=True),
)

# The circuit breaker of automatic fail-overs. `state`: closed, open, trial.
circuit_breaker = sa.Table(
    "circuit_breaker",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("silent", sa.Integer, nullable=False),
    sa.Column("watched", sa.Integer, nullable=False),
    sa.Column("trial_at", sa.Double, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# An image rotation over many load balancers. `wanted` (JSON): the selection. `state`: running, paused, aborted, done.
rotation = sa.Table(
    "rotation",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("wanted", Body, nullable=False),
    sa.Column("max_unavailable", sa.Integer, nullable=False),
    sa.Column("asked_by", sa.String(128), nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("changed_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# The load balancers of a rotation, in order of `place`. `state`: waiting, running, done, failed, skipped. `amphorae`
# (JSON): amphorae to replace, selected at the request. `operating`: the load balancer's status at its start.
rotation_item = sa.Table(
    "rotation_item",
    metadata,
    sa.Column("rotation_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("place", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("amphorae", Body, nullable=False),
    sa.Column("operating", sa.String(16), nullable=True),
    sa.Column("begun_at", sa.Double, nullable=True),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# Processes of the control plane; each updates its own row every few seconds. `beat` grows only while the process works:
# a health manager's while it receives its own test heartbeats. `draining`: it accepts no new jobs.
process = sa.Table(
    "process",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("version", sa.String(64), nullable=True),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("seen_at", sa.Double, nullable=False),
    sa.Column("beat", sa.BigInteger, nullable=False, default=0),
    sa.Column("draining", sa.Boolean, nullable=False, default=False),
    sa.Column("jobs", sa.Integer, nullable=False, default=0),
)

# Drained hosts: their controllers accept no new jobs, also controllers that start later.
drained_host = sa.Table(
    "drained_host",
    metadata,
    sa.Column("host", sa.String(255), primary_key=True),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("asked_by", sa.String(128), nullable=True),
)

# CAs for amphorae (`kind` amphora) or for controllers (controller). Before the first rotation of a kind there is no
# row, and the configured files are used. `state`: next (trusted, signs nothing), current (signs), former (still
# trusted), leaving (being removed from the amphorae's trust stores), gone.
certificate_authority = sa.Table(
    "certificate_authority",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("certificate", Body, nullable=False),
    sa.Column("sealed_key", Sealed, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("changed_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
)

# The last resynchronization of each load balancer: read it from Octavia completely, report all statuses to Octavia.
# `outcome` (store/resyncs.py) is NULL until the end. `detail`: the differences, or the reason for waiting.
# `remove_unknown`: remove a load balancer that Octavia does not know.
resync = sa.Table(
    "resync",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("asked_at", sa.Double, nullable=False),
    sa.Column("asked_by", sa.String(128), nullable=True),
    sa.Column("remove_unknown", sa.Boolean, nullable=False, default=False),
    sa.Column("ended_at", sa.Double, nullable=True, index=True),
    sa.Column("outcome", sa.String(16), nullable=True),
    sa.Column("detail", sa.Text, nullable=True),
)
