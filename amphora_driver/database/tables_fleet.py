# SPDX-License-Identifier: Apache-2.0
"""Tables about the fleet: fail-overs, silent amphorae, image rotations, processes, CAs.

Invariant: as in `tables`, the rows are authoritative. Findings (`silent_amphora`, `unknown_amphora`,
`circuit_breaker`) may be lost, because they are detected again. Requests and history must not be lost.
"""

from __future__ import annotations

import sqlalchemy as sa

from amphora_driver.database.tables import Body, Id, Sealed, Serial, metadata

__all__ = ["metadata"]

# The table `failover` has one row per replacement of the amphora `amphora_id`; NULL means all amphorae of the load
# balancer. The column `cause` is silent, never_spoke, mute, asked (requested through Octavia), operator, rotation,
# drift or machine. The column `silent_since` is the time of the last heartbeat. The column `served_at` is the time when
# the load balancer serves users with all amphorae again. The column `ended_at` is the end of all work. The column
# `outcome` is done, gone (load balancer deleted), superseded or recovered.
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

# The table `failover_event` has one row per event in the time line of a fail-over; the column `word` names the event.
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

# The table `silent_amphora` lists the amphorae from which the health managers currently receive no heartbeats. The
# column `kind` is silent, mute (the agent still answers the controller) or never_spoke. The column `verdict` is a text:
# the next action of the failure detector, or the reason for no action.
silent_amphora = sa.Table(
    "silent_amphora",
    metadata,
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("verdict", sa.Text, nullable=True),
)

# The table `unknown_amphora` has one row per unknown amphora id in received heartbeats. The driver has no key to verify
# these heartbeats, so the rows are only hints for an operator.
unknown_amphora = sa.Table(
    "unknown_amphora",
    metadata,
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("address", sa.String(64), nullable=False),
    sa.Column("first_at", sa.Double, nullable=False),
    sa.Column("last_at", sa.Double, nullable=False),
    sa.Column("verdict", sa.Text, nullable=True),
)

# The table `circuit_breaker` holds the state of the circuit breaker that stops automatic fail-overs. The column `state`
# of the breaker is closed, open (no fail-overs) or trial (one fail-over tests whether fail-overs succeed).
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

# The table `rotation` has one row per image rotation over many load balancers. The column `wanted` is the operator's
# selection as JSON, and `state` is running, paused, aborted or done.
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

# The table `rotation_item` lists the load balancers of an image rotation in the order of the column `place`. The column
# `state` is waiting, running, done, failed or skipped. The column `amphorae` lists the amphorae to replace as JSON. The
# driver selects the amphorae when the operator requests the rotation. The column `operating` is the operating status of
# the load balancer at the start of the replacement.
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

# Each process of the control plane updates one row of the table `process` every few seconds. The column `beat` grows
# only while the process works. A health manager works while it receives its own test datagrams and writes to the
# database. A process with `draining` set accepts no new jobs.
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

# The table `drained_host` lists hosts whose controllers accept no new jobs. The drain also applies to controllers that
# start later on the host.
drained_host = sa.Table(
    "drained_host",
    metadata,
    sa.Column("host", sa.String(255), primary_key=True),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("asked_by", sa.String(128), nullable=True),
)

# The table `certificate_authority` lists CAs for amphorae (`kind` amphora) and for controllers (`kind` controller). A
# kind has no row before the first CA rotation of the kind. Until then, the driver uses the configured CA files. The
# column `state` is next (trusted, signs nothing), current (signs) or former (still trusted). The last states are
# leaving (being removed from the trust stores of the amphorae) and gone.
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

# The table `resync` records the last resynchronization of each load balancer: a complete read from Octavia and a report
# of all statuses. The column `outcome` is NULL until the end. The column `detail` holds the differences, or the reason
# for waiting. If `remove_unknown` is set, the provider agent removes a load balancer that Octavia does not know.
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
