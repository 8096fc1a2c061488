# SPDX-License-Identifier: Apache-2.0
"""The tables of load balancers and amphorae.

Invariant: the rows are authoritative. The memory of a process, a message or a cache may be lost at any moment; these
rows must not. Times are seconds since 1970 (UTC) as floating point numbers, equal on every database.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    case,
)
from sqlalchemy.dialects import mysql

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Id = String(36)
# A load balancer with a thousand nested objects must fit: MySQL's TEXT is limited to 64 KiB.
Body = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
# A certificate chain or a CA bundle may be longer than MySQL's BLOB.
Sealed = LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
# SQLite increments automatically only INTEGER primary keys.
Serial = BigInteger().with_variant(Integer(), "sqlite")

# Value of `job.due_at`: due at once and before all other rows. A job that releases its lease writes the next due
# time, but never overwrites this value: it may have been written after the job read the row.
URGENT = -1.0

# --- desired state --------------------------------------------------------------------------------------------------

# One row per object of a load balancer; `body` is the JSON of the model class without children. `refers_to` is the pool
# of a listener or L7 policy: a query finds the listeners of a pool without reading bodies. A `removed` row stays until
# every amphora has confirmed the removal and Octavia has received it.
desired_object = Table(
    "desired_object",
    metadata,
    Column("id", Id, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("load_balancer_id", Id, nullable=False),
    Column("parent_id", Id, nullable=True),
    Column("refers_to", Id, nullable=True),
    Column("created", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("removed", Boolean, nullable=False, default=False),
    Column("body", Body, nullable=False),
    Index("ix_desired_object_load_balancer_id", "load_balancer_id"),
    Index("ix_desired_object_parent_id", "parent_id"),
    Index("ix_desired_object_refers_to", "refers_to"),
)

# One row per load balancer: its desired and applied generation, and the lease of a controller. `committed`: the newest
# generation for which Octavia's own transaction has ended. `read_back`: some objects arrived incomplete and must be
# read from Octavia after its commit: the listeners and pools in `reread` (JSON, [kind, id] each), or the complete tree
# if `reread` is NULL.
job = Table(
    "job",
    metadata,
    Column("load_balancer_id", Id, primary_key=True),
    Column("project_id", String(64), nullable=True),
    # Fixed at creation: the topology, and the compute and network backends (entry points).
    Column("topology", String(32), nullable=False, default="SINGLE"),
    Column("compute", String(64), nullable=True),
    Column("network", String(64), nullable=True),
    Column("op", String(16), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("committed", BigInteger, nullable=False, default=0),
    Column("applied", BigInteger, nullable=False, default=0),
    Column("read_back", Boolean, nullable=False, default=False),
    Column("reread", Body, nullable=True),
    # The last applied options of the VIP port (JSON: QoS policy, security groups); NULL if none were ever applied.
    Column("vip_applied", Body, nullable=True),
    # Objects that an unconfirmed generation omits (JSON: the generation, reasons by object id).
    Column("omitted", Body, nullable=True),
    # `spare_pool`: the row id of the pool of warm spares that this load balancer uses. `spares`: set in the row of such
    # a pool, its specification (JSON).
    Column("spare_pool", Id, nullable=True),
    Column("spares", Body, nullable=True),
    Column("dirty", Boolean, nullable=False, default=True),
    # Number of the current TLS ticket keys, and the time of their next rotation; NULL until the first keys.
    Column("tickets", BigInteger, nullable=True),
    Column("tickets_due", Double, nullable=True),
    Column("owner", String(128), nullable=True),
    Column("epoch", BigInteger, nullable=False, default=0),
    # Every write under the lease increments this. MariaDB does not replicate an update that changes no value. Galera
    # would then miss a collision with a claim on another node.
    Column("writes", BigInteger, nullable=False, default=0, server_default="0"),
    Column("leased_until", Double, nullable=True),
    Column("due_at", Double, nullable=False, default=0.0),
    Column("attempts", Integer, nullable=False, default=0),
    # Crashes and lost leases of processes that worked on this row, since the last progress.
    Column("crashes", Integer, nullable=False, default=0, server_default="0"),
    Column("error", Text, nullable=True),
    Index("ix_job_dirty_due_at", "dirty", "due_at"),
)
# Value for `due_at` that makes a row due now and keeps URGENT.
DUE_NOW = case((job.c.due_at < 0.0, URGENT), else_=0.0)

# One row per accepted call: the history of a load balancer, and the commit marker of the call.
request = Table(
    "request",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("load_balancer_id", Id, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("action", String(32), nullable=False),
    Column("object_id", Id, nullable=False),
    Column("accepted_at", Double, nullable=False),
    Column("applied_at", Double, nullable=True),
    Column("outcome", Text, nullable=True),
    Index("ix_request_load_balancer_id", "load_balancer_id", "generation"),
)

# One row per secret of an object: encrypted by the vault, never shared between objects, deleted with the last use.
# `purpose`: certificate, ca, crl or tickets. `ref`: the reference in Octavia's API. `reason`: why `sealed` is NULL:
# Octavia did not deliver the secret, or HAProxy cannot use it.
secret = Table(
    "secret",
    metadata,
    Column("object_id", Id, primary_key=True),
    Column("purpose", String(16), primary_key=True),
    Column("ref", String(255), primary_key=True),
    Column("load_balancer_id", Id, nullable=False),
    Column("sealed", Sealed, nullable=True),
    Column("reason", Text, nullable=True),
    Index("ix_secret_load_balancer_id", "load_balancer_id"),
)

# --- reports to Octavia ---------------------------------------------------------------------------------------------

# One row per object: the newest provisioning and operating status. `pending`: the object is PENDING_* in Octavia until
# this generation is confirmed. `version` grows with every change. `settled`: the version of the last change of the
# provisioning status. `reported`: the version Octavia has received.
object_status = Table(
    "object_status",
    metadata,
    Column("object_id", Id, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("load_balancer_id", Id, nullable=False),
    Column("provisioning", String(16), nullable=True),
    Column("operating", String(16), nullable=True),
    Column("reason", Text, nullable=True),
    Column("since", Double, nullable=False, default=0.0),
    Column("pending", BigInteger, nullable=True),
    Column("version", BigInteger, nullable=False, default=0),
    Column("settled", BigInteger, nullable=False, default=0),
    Column("reported", BigInteger, nullable=False, default=0),
    Index("ix_object_status_load_balancer_id", "load_balancer_id"),
)

# One row per listener and amphora that ever served it: absolute counters; Octavia receives the sums. Rows of deleted
# amphorae stay, so that totals never decrease. `version` and `reported`: see
# `object_status`.
listener_statistics = Table(
    "listener_statistics",
    metadata,
    Column("listener_id", Id, primary_key=True),
    Column("amphora_id", Id, primary_key=True),
    Column("load_balancer_id", Id, nullable=False),
    Column("active_connections", BigInteger, nullable=False, default=0),
    Column("bytes_in", BigInteger, nullable=False, default=0),
    Column("bytes_out", BigInteger, nullable=False, default=0),
    Column("request_errors", BigInteger, nullable=False, default=0),
    Column("total_connections", BigInteger, nullable=False, default=0),
    Column("version", BigInteger, nullable=False, default=0),
    Column("reported", BigInteger, nullable=False, default=0),
    Index("ix_listener_statistics_load_balancer_id", "load_balancer_id"),
)

# --- amphorae -------------------------------------------------------------------------------------------------------

# `confirmed`: the newest generation that the agent reports to serve. `heartbeat_key` is encrypted.
amphora = Table(
    "amphora",
    metadata,
    Column("id", Id, primary_key=True),
    Column("load_balancer_id", Id, nullable=False),
    Column("role", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("compute_id", String(128), nullable=True),
    Column("management_address", String(64), nullable=True),
    Column("confirmed", BigInteger, nullable=False, default=0),
    # Time of that confirmation: a new amphora of a pair takes the VIPs some seconds later.
    Column("confirmed_at", Double, nullable=True),
    Column("heartbeat_key", LargeBinary, nullable=False),
    # Ports of the machine with their subnets (JSON), confirmed by the network and compute backends.
    Column("plugged", Body, nullable=True),
    # Its VRRP peers at the confirmation (JSON).
    Column("partners", Body, nullable=True),
    # The controller has asked it to hand the VIPs over to its partner, before its removal.
    Column("handed_over", Boolean, nullable=False, default=False),
    # End of the connection drain after the handover; NULL while it may still hold VIPs.
    Column("drains_until", Double, nullable=True),
    Column("certificate_expires_at", Double, nullable=True),
    # Time of issue; the issuing CA (NULL: the configured files); the CAs of client certificates it accepts.
    Column("certificate_issued_at", Double, nullable=True),
    Column("certificate_authority", BigInteger, nullable=True),
    Column("trusts", String(255), nullable=True),
    # The image it was booted from, in the compute backend's notation.
    Column("image", String(255), nullable=True),
    # Time of the last drift audit; the last drift found, kept as history; whether the drift still exists.
    Column("audited_at", Double, nullable=True),
    Column("drift", Text, nullable=True),
    Column("drifts", Boolean, nullable=True, default=False),
    Column("created_at", Double, nullable=False),
    # Time of the boot request: the boot time-out starts here.
    Column("booted_at", Double, nullable=True),
    Column("ready_at", Double, nullable=True),
    Column("reason", Text, nullable=True),
    Index("ix_amphora_load_balancer_id", "load_balancer_id"),
)

# Written in bulk by the health managers, separate from `amphora`, which changes rarely. (epoch, sequence) identify the
# last accepted heartbeat: older ones are replays, also after a restart. `holds_vip`: reported by the amphora; NULL
# where it does not apply.
amphora_heartbeat = Table(
    "amphora_heartbeat",
    metadata,
    Column("amphora_id", Id, primary_key=True),
    Column("seen_at", Double, nullable=False),
    Column("generation", BigInteger, nullable=False, default=0),
    Column("epoch", BigInteger, nullable=False, default=0),
    Column("sequence", BigInteger, nullable=False, default=0),
    Column("holds_vip", Boolean, nullable=True),
    Column("agent_version", String(64), nullable=True),
)

# --- duties, claims, orphans ----------------------------------------------------------------------------------------

# A named duty that one process at a time performs (reports to Octavia, for example).
duty = Table(
    "duty",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("leased_until", Double, nullable=False),
)

# Addresses allocated for a load balancer before Octavia requests its creation. The request may never come: after
# `create_vip_port`, Octavia may refuse the user's request or crash.
vip_claim = Table(
    "vip_claim",
    metadata,
    Column("load_balancer_id", Id, primary_key=True),
    # The network backend (entry point) of the addresses.
    Column("network", String(64), nullable=True),
    Column("claimed_at", Double, nullable=False),
    Column("project_id", String(64), nullable=True),
    # A slow backend: the pending request (JSON) until its answer, and the reason for the delay.
    Column("wanted", Body, nullable=True),
    Column("reason", Text, nullable=True),
)

# Machines and ports of a backend that no row owns, with the time of discovery. A recent one may belong to a step in
# progress, because a step writes to two systems.
orphan = Table(
    "orphan",
    metadata,
    Column("kind", String(16), primary_key=True),
    Column("backend", String(64), primary_key=True),
    Column("id", String(128), primary_key=True),
    Column("found_at", Double, nullable=False),
)

# --- the embedded network backend (network/local.py) ----------------------------------------------------------------

local_network = Table(
    "local_network",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("bridge", String(15), nullable=False, unique=True),
    Column("mtu", Integer, nullable=False, default=1500),
)

local_subnet = Table(
    "local_subnet",
    metadata,
    Column("id", Id, primary_key=True),
    Column("network_id", Id, ForeignKey("local_network.id", ondelete="CASCADE"), nullable=False),
    Column("name", String(64), nullable=False),
    Column("cidr", String(64), nullable=False),
    Column("gateway", String(64), nullable=True),
    Column("first_address", String(64), nullable=False),
    Column("last_address", String(64), nullable=False),
)

local_port = Table(
    "local_port",
    metadata,
    Column("id", Id, primary_key=True),
    Column("network_id", Id, ForeignKey("local_network.id"), nullable=False),
    # An amphora's id, "lb-<load balancer id>" for VIPs, or the name of a sandbox host.
    Column("owner", String(64), nullable=False),
    Column("mac", String(17), nullable=False, unique=True),
    # False for a port of the user: the driver never deletes it.
    Column("ours", Boolean, nullable=False, default=True),
    UniqueConstraint("owner", "network_id", name="uq_local_port_owner_network"),
)

# Options of a VIP. Rates in kilobits (1000 bits) per second; rules as JSON.
local_qos_policy = Table(
    "local_qos_policy",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("egress_kbps", BigInteger, nullable=True),
    Column("ingress_kbps", BigInteger, nullable=True),
)

local_security_group = Table(
    "local_security_group",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("rules", Body, nullable=False),
)

# Applied options of a load balancer's VIPs, and their ports (JSON).
local_vip_option = Table(
    "local_vip_option",
    metadata,
    Column("load_balancer_id", Id, primary_key=True),
    Column("qos_policy_id", Id, nullable=True),
    Column("security_group_ids", Body, nullable=False),
    Column("port_ids", Body, nullable=False),
)

local_address = Table(
    "local_address",
    metadata,
    Column("subnet_id", Id, ForeignKey("local_subnet.id"), primary_key=True),
    Column("address", String(64), primary_key=True),
    Column("port_id", Id, ForeignKey("local_port.id", ondelete="CASCADE"), nullable=False),
    Column("ordinal", Integer, nullable=False, default=0),
    Index("ix_local_address_port_id", "port_id"),
)
