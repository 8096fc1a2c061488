# SPDX-License-Identifier: Apache-2.0
"""Tables about the fleet: fail-overs, silent amphorae, image rotations, adoptions, processes, CAs.

Invariant: as in `tables`, the rows are authoritative. Findings (`silent_amphora`, `unknown_amphora`,
`circuit_breaker`) may be lost, because they are detected again. Requests and history must not be lost.
"""

from __future__ import annotations

import sqlalchemy as sa

from amphora_driver.database.tables import Body, Id, Sealed, Serial, metadata

__all__ = ["metadata"]

# One row for each fail-over of the amphora `amphora_id`, or of all amphorae of the load balancer if `amphora_id` is
# NULL. `served_at` is the time when all amphorae serve users again, and `ended_at` is the end of the work. `outcome` is
# done, gone (load balancer deleted), superseded or recovered.
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

# Events in the time line of a fail-over; `word` names the event.
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

# Amphorae that send no heartbeats at present. `kind` is silent, never_spoke, or mute (the agent answers the
# controller). `verdict` is the next action of the failure detector, or the reason for no action.
silent_amphora = sa.Table(
    "silent_amphora",
    metadata,
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("verdict", sa.Text, nullable=True),
)

# Unknown amphora ids in received heartbeats. No key can verify these heartbeats, so the rows are only hints for an
# operator.
unknown_amphora = sa.Table(
    "unknown_amphora",
    metadata,
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("address", sa.String(64), nullable=False),
    sa.Column("first_at", sa.Double, nullable=False),
    sa.Column("last_at", sa.Double, nullable=False),
    sa.Column("verdict", sa.Text, nullable=True),
)

# The circuit breaker stops automatic fail-overs. `state` is closed, open (no fail-overs) or trial (one fail-over shows
# whether fail-overs succeed).
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

# Image rotations. `wanted` is the operator's selection as JSON; `state` is running, paused, aborted or done.
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

# Load balancers of an image rotation in the order of `place`. `state` is waiting, running, done, failed or skipped.
# `amphorae` lists the amphorae to replace as JSON. `operating` is the operating status before the replacement.
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

# Processes of the control plane. `beat` grows only while the process works. A process with `draining` accepts no jobs.
# `schema_revision` is the newest revision of the schema that the process knows.
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
    sa.Column("schema_revision", sa.String(32), nullable=True),
)

# Hosts whose controllers accept no jobs, including controllers that start later.
drained_host = sa.Table(
    "drained_host",
    metadata,
    sa.Column("host", sa.String(255), primary_key=True),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("asked_by", sa.String(128), nullable=True),
)

# CAs for amphorae and for controllers. Before the first CA rotation, the table is empty and the configured files apply.
# `state` is next (trusted, signs nothing), current (signs), former (still trusted), leaving (being removed from
# amphorae) or gone.
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

# The last complete read of each load balancer from Octavia, with a report of all statuses. `outcome` is NULL until the
# end of the read; with `remove_unknown`, a load balancer that does not exist in Octavia is removed.
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

# The table `schema_minimum` lists the contract migrations that have begun. A process that does not know all of them
# refuses the database.
schema_minimum = sa.Table("schema_minimum", metadata, sa.Column("revision", sa.String(32), primary_key=True))

# The table `adoption` has one row per load balancer that an operator moves from Octavia's provider `amphora` to this
# provider. The column `step` is a value of `adoption.records.Step`. While `vips_held` is set, the new amphorae have no
# VIPs. While `reporting` is not set, Octavia receives no status of the load balancer. The column `paused` delays the
# start, and `revert` requests the way back. The column `state` holds Octavia's rows before the adoption as JSON.
adoption = sa.Table(
    "adoption",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("step", sa.String(16), nullable=False),
    sa.Column("vips_held", sa.Boolean, nullable=False, default=True),
    sa.Column("reporting", sa.Boolean, nullable=False, default=False),
    sa.Column("paused", sa.Boolean, nullable=False, default=False),
    sa.Column("revert", sa.Boolean, nullable=False, default=False),
    sa.Column("state", Body, nullable=True),
    sa.Column("max_in_progress", sa.Integer, nullable=False),
    sa.Column("remove_after", sa.Double, nullable=False),
    sa.Column("asked_by", sa.String(128), nullable=True),
    sa.Column("asked_at", sa.Double, nullable=False),
    sa.Column("step_at", sa.Double, nullable=False),
    sa.Column("committed_at", sa.Double, nullable=True),
    sa.Column("ended_at", sa.Double, nullable=True, index=True),
    sa.Column("reason", sa.Text, nullable=True),
)
