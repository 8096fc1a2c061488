# SPDX-License-Identifier: Apache-2.0
"""The tables of load balancers and amphorae.

Invariant: the rows are authoritative. The memory of a process, a message or a cache may be lost at any moment; these
rows must not. Times are seconds since 1970 (UTC) as floating point numbers, equal on every database.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Id = sa.String(36)
# The JSON of a load balancer with a thousand objects exceeds the 64 KiB of MySQL's TEXT.
Body = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
# A chain of certificates may exceed the 64 KiB of MySQL's BLOB.
Sealed = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
# SQLite numbers rows automatically only with a primary key of the type INTEGER, not BIGINT.
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# Value of `job.due_at`: the job runs before all others. A claim sets `due_at` to zero. So the value URGENT at the end
# of a job comes from a newer event and must stay.
URGENT = -1.0

# One row for each object of a load balancer. `body` is the JSON of the object without its children; `refers_to` is the
# pool of a listener or L7 policy. The row of a removed object stays until every amphora has confirmed the removal and
# the removal has been reported to Octavia.
desired_object = sa.Table(
    "desired_object",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("parent_id", Id, nullable=True, index=True),
    sa.Column("refers_to", Id, nullable=True, index=True),
    sa.Column("created", sa.BigInteger, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("removed", sa.Boolean, nullable=False, default=False),
    sa.Column("body", Body, nullable=False),
)

# One row for each load balancer, with three generations (numbers of its configuration): desired (`generation`),
# `applied`, and `committed` by Octavia. `read_back` requests a read of the objects in `reread` from Octavia; `reread`
# is NULL for all objects. The database computes `exceptional` for an index, so that polls read few rows of a fleet:
# those that wait for Octavia or for a read, and those with another operation than APPLY.
_IS_EXCEPTIONAL = "committed < generation OR read_back OR op <> 'apply'"
job = sa.Table(
    "job",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("project_id", sa.String(64), nullable=True),
    # The backends of a load balancer never change. Only a resize changes `topology`.
    sa.Column("topology", sa.String(32), nullable=False, default="SINGLE"),
    sa.Column("compute", sa.String(64), nullable=True),
    sa.Column("network", sa.String(64), nullable=True),
    sa.Column("op", sa.String(16), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("committed", sa.BigInteger, nullable=False, default=0),
    sa.Column("applied", sa.BigInteger, nullable=False, default=0),
    sa.Column("read_back", sa.Boolean, nullable=False, default=False),
    sa.Column("reread", Body, nullable=True),
    # Options that the controller applied to the VIP port last, as JSON.
    sa.Column("vip_applied", Body, nullable=True),
    # As JSON: a generation, and the ids of the objects that its bundles omit, each with the reason.
    sa.Column("omitted", Body, nullable=True),
    # `spare_pool` is the pool from which the load balancer takes warm spares. A pool has its own row in this table, and
    # `spares` describes the pool as JSON.
    sa.Column("spare_pool", Id, nullable=True),
    sa.Column("spares", Body, nullable=True),
    # Whether a controller must run the job, now or at the time `due_at`.
    sa.Column("dirty", sa.Boolean, nullable=False, default=True),
    # Number of rotations of the keys for TLS session tickets (NULL: no keys), and the time of the next rotation.
    sa.Column("tickets", sa.BigInteger, nullable=True),
    sa.Column("tickets_due", sa.Double, nullable=True),
    # `owner` has the lease of the job until `leased_until`. `epoch` grows with each lease, so that a write under an
    # older lease changes no row (fencing).
    sa.Column("owner", sa.String(128), nullable=True),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    # Each write under a lease increments `writes`, because Galera detects conflicts only in changed rows. Otherwise, a
    # write could succeed although another node has granted a newer lease.
    sa.Column("writes", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Column("leased_until", sa.Double, nullable=True),
    sa.Column("due_at", sa.Double, nullable=False, default=0.0),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    # Number of processes that crashed or lost the lease during this job. Progress of the job sets this number to zero.
    sa.Column("crashes", sa.Integer, nullable=False, default=0, server_default="0"),
    sa.Column("error", sa.Text, nullable=True),
    sa.Column("exceptional", sa.Boolean, sa.Computed(_IS_EXCEPTIONAL, persisted=True), index=True),
    sa.Index("ix_job_dirty_due_at", "dirty", "due_at"),
)
# Value of `due_at` for a job that is due now. An URGENT job stays URGENT.
DUE_NOW = sa.case((job.c.due_at < 0.0, URGENT), else_=0.0)

# One row for each accepted call of Octavia. A row proves that the transaction of the call was committed.
request = sa.Table(
    "request",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("load_balancer_id", Id, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("object_id", Id, nullable=False),
    sa.Column("accepted_at", sa.Double, nullable=False),
    sa.Column("applied_at", sa.Double, nullable=True),
    sa.Column("outcome", sa.Text, nullable=True),
    sa.Index("ix_request_load_balancer_id", "load_balancer_id", "generation"),
)

# One row for each secret of an object, encrypted by the vault. `purpose` is certificate, ca, crl or tickets; `ref` is
# the reference in Octavia's API. `sealed` is NULL if Octavia did not deliver the secret or HAProxy cannot use it;
# `reason` then has the cause.
secret = sa.Table(
    "secret",
    metadata,
    sa.Column("object_id", Id, primary_key=True),
    sa.Column("purpose", sa.String(16), primary_key=True),
    sa.Column("ref", sa.String(255), primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("sealed", Sealed, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
    # End of a certificate's validity; NULL until housekeeping has read the certificate.
    sa.Column("expires_at", sa.Double, nullable=True, index=True),
)

# The newest statuses of each object. The object is PENDING until the amphorae confirm the generation `pending`.
# `version` counts changes of the row, `settled` is the version of the last provisioning status, and `reported` is the
# version that Octavia has. The database computes `unreported` for an index: no index finds rows by a comparison of two
# columns. SQLite does not store the column, because its ALTER TABLE adds virtual columns only.
object_status = sa.Table(
    "object_status",
    metadata,
    sa.Column("object_id", Id, primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("provisioning", sa.String(16), nullable=True),
    sa.Column("operating", sa.String(16), nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
    sa.Column("since", sa.Double, nullable=False, default=0.0),
    sa.Column("pending", sa.BigInteger, nullable=True),
    sa.Column("version", sa.BigInteger, nullable=False, default=0),
    sa.Column("settled", sa.BigInteger, nullable=False, default=0),
    sa.Column("reported", sa.BigInteger, nullable=False, default=0),
    sa.Column("unreported", sa.Boolean, sa.Computed("version > reported", persisted=True), nullable=True, index=True),
)

# Absolute counters of each listener and amphora. Rows of deleted amphorae stay, because the sums for Octavia must not
# decrease.
listener_statistics = sa.Table(
    "listener_statistics",
    metadata,
    sa.Column("listener_id", Id, primary_key=True),
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("active_connections", sa.BigInteger, nullable=False, default=0),
    sa.Column("bytes_in", sa.BigInteger, nullable=False, default=0),
    sa.Column("bytes_out", sa.BigInteger, nullable=False, default=0),
    sa.Column("request_errors", sa.BigInteger, nullable=False, default=0),
    sa.Column("total_connections", sa.BigInteger, nullable=False, default=0),
    sa.Column("version", sa.BigInteger, nullable=False, default=0),
    sa.Column("reported", sa.BigInteger, nullable=False, default=0),
    sa.Column("unreported", sa.Boolean, sa.Computed("version > reported", persisted=True), nullable=True),
    sa.Index("ix_listener_statistics_unreported", "unreported", "listener_id"),
)

# Notifications to other OpenStack services that no message bus has accepted yet. `payload` and `ready_at` are NULL
# until Octavia has accepted the result of the request.
notification = sa.Table(
    "notification",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("event", sa.String(16), nullable=False),
    sa.Column("message_id", Id, nullable=False),
    sa.Column("ready_at", sa.Double, nullable=True, index=True),
    sa.Column("payload", Body, nullable=True),
)

# `confirmed` is the newest generation that the agent has confirmed. The vault encrypts `heartbeat_key`. The database
# computes `unready` for an index. With an index of `state`, a server could use it to read almost all amphorae.
amphora = sa.Table(
    "amphora",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("compute_id", sa.String(128), nullable=True),
    sa.Column("management_address", sa.String(64), nullable=True),
    sa.Column("confirmed", sa.BigInteger, nullable=False, default=0),
    # Time at which the amphora first confirmed a generation. A new pair gets the VIPs some seconds later, and becomes
    # ACTIVE then.
    sa.Column("confirmed_at", sa.Double, nullable=True),
    sa.Column("heartbeat_key", sa.LargeBinary, nullable=False),
    # Attached ports with their subnets, and the VRRP peers in the confirmed configuration, both as JSON.
    sa.Column("plugged", Body, nullable=True),
    sa.Column("partners", Body, nullable=True),
    # Whether the controller has requested that this amphora hands its VIPs over to its partner.
    sa.Column("handed_over", sa.Boolean, nullable=False, default=False),
    # End of the connection drain after the handover of the VIPs; NULL while the amphora may hold VIPs.
    sa.Column("drains_until", sa.Double, nullable=True),
    sa.Column("certificate_expires_at", sa.Double, nullable=True),
    sa.Column("certificate_issued_at", sa.Double, nullable=True),
    # The CA that issued the amphora's certificate; NULL if the CA is in the configured files.
    sa.Column("certificate_authority", sa.BigInteger, nullable=True),
    # The CAs whose client certificates the agent accepts, in the notation of `certificates/ca_rotation.py`.
    sa.Column("trusts", sa.String(255), nullable=True),
    # Image of the amphora's machine, in the notation of the compute backend.
    sa.Column("image", sa.String(255), nullable=True),
    # Hypervisor and availability zone at the time of the agent's first answer.
    sa.Column("host", sa.String(255), nullable=True),
    sa.Column("zone", sa.String(255), nullable=True),
    # `drift` describes the last configuration drift, also after its repair. `drifts` is true until the repair.
    sa.Column("audited_at", sa.Double, nullable=True),
    sa.Column("drift", sa.Text, nullable=True),
    sa.Column("drifts", sa.Boolean, nullable=True, default=False),
    # Resources of which the amphora uses almost all, separated by commas.
    sa.Column("near_limit", sa.String(128), nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    # Time of the boot request, at which the boot time-out starts.
    sa.Column("booted_at", sa.Double, nullable=True),
    sa.Column("ready_at", sa.Double, nullable=True, index=True),
    sa.Column("reason", sa.Text, nullable=True),
    sa.Column("unready", sa.Boolean, sa.Computed("state <> 'ready'", persisted=True), index=True),
)

# This table is separate from `amphora`, because health managers write its rows in bulk every few seconds. `epoch` and
# `sequence` of the last heartbeat let a restarted health manager refuse repeated heartbeats. `holds_vip` comes from the
# heartbeat at `seen_at`; NULL means that overload prevented the read of this heartbeat's values. `generation` and
# `agent_version` come from the last heartbeat whose values were read.
amphora_heartbeat = sa.Table(
    "amphora_heartbeat",
    metadata,
    sa.Column("amphora_id", Id, primary_key=True),
    sa.Column("seen_at", sa.Double, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    sa.Column("sequence", sa.BigInteger, nullable=False, default=0),
    sa.Column("holds_vip", sa.Boolean, nullable=True),
    sa.Column("agent_version", sa.String(64), nullable=True),
)

# Leases of duties. A duty is a task that one process performs at a time, for example the status reports to Octavia.
duty = sa.Table(
    "duty",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(128), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
)

# VIP addresses of load balancers that Octavia has not created yet. Octavia may never send the creation, for example
# after a crash. Housekeeping then deletes the row and releases the addresses.
vip_claim = sa.Table(
    "vip_claim",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("network", sa.String(64), nullable=True),
    sa.Column("claimed_at", sa.Double, nullable=False),
    sa.Column("project_id", sa.String(64), nullable=True),
    # The VIP request as JSON while a slow network backend has not answered, and the reason of the delay.
    sa.Column("wanted", Body, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# Machines and ports that a backend lists and no other table mentions. Housekeeping deletes none before [amp_controller]
# orphan_grace, because a running step may not have written to the database yet.
orphan = sa.Table(
    "orphan",
    metadata,
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("backend", sa.String(64), primary_key=True),
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("found_at", sa.Double, nullable=False),
)

local_network = sa.Table(
    "local_network",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("name", sa.String(64), nullable=False, unique=True),
    sa.Column("bridge", sa.String(15), nullable=False, unique=True),
    sa.Column("mtu", sa.Integer, nullable=False, default=1500),
)

local_subnet = sa.Table(
    "local_subnet",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("network_id", Id, sa.ForeignKey("local_network.id", ondelete="CASCADE"), nullable=False),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("cidr", sa.String(64), nullable=False),
    sa.Column("gateway", sa.String(64), nullable=True),
    sa.Column("first_address", sa.String(64), nullable=False),
    sa.Column("last_address", sa.String(64), nullable=False),
)

local_port = sa.Table(
    "local_port",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("network_id", Id, sa.ForeignKey("local_network.id"), nullable=False),
    # An amphora id, "lb-<load balancer id>" for VIPs, or the name of a host of the sandbox.
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("mac", sa.String(17), nullable=False, unique=True),
    # False for a port that a user created. The network backend never deletes such a port.
    sa.Column("ours", sa.Boolean, nullable=False, default=True),
    sa.UniqueConstraint("owner", "network_id", name="uq_local_port_owner_network"),
)

# Options of VIPs for the local network backend: rates in kilobits per second, rules as JSON.
local_qos_policy = sa.Table(
    "local_qos_policy",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("egress_kbps", sa.BigInteger, nullable=True),
    sa.Column("ingress_kbps", sa.BigInteger, nullable=True),
)

local_security_group = sa.Table(
    "local_security_group",
    metadata,
    sa.Column("id", Id, primary_key=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("rules", Body, nullable=False),
)

# The applied VIP options of a load balancer, and the ids of its VIP ports as JSON.
local_vip_option = sa.Table(
    "local_vip_option",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("qos_policy_id", Id, nullable=True),
    sa.Column("security_group_ids", Body, nullable=False),
    sa.Column("port_ids", Body, nullable=False),
)

local_address = sa.Table(
    "local_address",
    metadata,
    sa.Column("subnet_id", Id, sa.ForeignKey("local_subnet.id"), primary_key=True),
    sa.Column("address", sa.String(64), primary_key=True),
    sa.Column("port_id", Id, sa.ForeignKey("local_port.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("ordinal", sa.Integer, nullable=False, default=0),
)
