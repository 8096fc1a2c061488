# SPDX-License-Identifier: Apache-2.0
"""Tables about the fleet: why amphorae were replaced, who keeps silent, what is rolled out, and which processes live.

Invariant: as in `tables`, rows are the truth. What is only a finding (who is silent, a zombie, the breaker) may be
lost and is found again; what somebody asked for, or what has happened, may not.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, String, Table, Text

from amphora_driver.database.tables import Body, Id, Sealed, Serial, metadata

__all__ = [
    "authority",
    "breaker",
    "drained_host",
    "failover",
    "failover_event",
    "metadata",
    "process",
    "resync",
    "rotation",
    "rotation_item",
    "silence",
    "zombie",
]

# One row per replacement of an amphora (`amphora_id`; empty where all of a load balancer are meant), with its cause:
# silent, never_spoke, mute, asked (Octavia), operator, rotation, drift, machine. `silent_since` is when it was heard
# last, `served_at` when users were served again by all that is wanted, `ended_at` when nothing of it is left to do.
# `outcome`: done, gone (the load balancer went), superseded, recovered.
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

# Its time line: what happened when, and to which amphora.
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

# Amphorae that are not heard, as the detector sees it now. `kind`: silent, mute (its agent answers), never_spoke.
# `verdict` says in words what follows from that, and why nothing does where nothing does.
silence = Table(
    "silence",
    metadata,
    Column("amphora_id", Id, primary_key=True),
    Column("load_balancer_id", Id, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("since", Double, nullable=False),
    Column("verdict", Text, nullable=True),
)

# Who sends heartbeats under an id that nobody has. Not signed by a key of ours: hints for an operator, never proof.
zombie = Table(
    "zombie",
    metadata,
    Column("amphora_id", Id, primary_key=True),
    Column("address", String(64), nullable=False),
    Column("first_at", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    Column("verdict", Text, nullable=True),
)

# Whether amphorae are replaced unasked. `state`: closed, open, trial.
breaker = Table(
    "breaker",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("since", Double, nullable=False),
    Column("silent", Integer, nullable=False),
    Column("watched", Integer, nullable=False),
    Column("trial_at", Double, nullable=True),
    Column("reason", Text, nullable=True),
)

# A roll-out over many load balancers. `wanted` (JSON) says which, and why; `state`: running, paused, aborted, done.
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

# Its load balancers, in their order. `state`: waiting, running, done, failed, skipped. `amphorae` (JSON) are those that
# were not as wanted when it was asked for; `operating` is the load balancer's status when its turn came.
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

# Processes of the control plane, written by themselves each few seconds. `beat` grows only while the process does its
# duty: a health manager's while it hears itself. `draining`: it is to take up nothing new.
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

# Hosts whose controllers take up nothing new, those that start there later too.
drained_host = Table(
    "drained_host",
    metadata,
    Column("host", String(255), primary_key=True),
    Column("since", Double, nullable=False),
    Column("asked_by", String(128), nullable=True),
)

# Authorities that vouch for amphorae (`kind` amphora) or for controllers (controller), once one was rotated; before
# that the files of the configuration are the only ones. `state`: next (trusted, signs nothing yet), current (signs),
# former (still trusted), gone.
authority = Table(
    "authority",
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

# Load balancers that are to be read from Octavia as a whole and told to it as a whole, one row for each, of the last
# time it was asked for. `outcome` (done, unread, unknown, adopted, removed, nowhere) is empty until it was done;
# `detail` says what differed, or what it waits for. `remove_unknown`: if Octavia does not know it, it is removed here.
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
