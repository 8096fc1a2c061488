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
# MySQL's TEXT is limited to 64 KiB, which is too short for a load balancer with a thousand nested objects.
Body = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
# A certificate chain or a CA bundle may be longer than MySQL's BLOB.
Sealed = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
# SQLite increments only INTEGER primary keys automatically.
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# `job.due_at` URGENT makes a row due at once and before all other rows. A job that releases its lease never overwrites
# URGENT, because another transaction may have written it after the job read the row.
URGENT = -1.0

# One row per object of a load balancer; `body` is the JSON of the model class without children. `refers_to` is the pool
# of a listener or L7 policy: a query finds the listeners of a pool without reading bodies. A `removed` row stays until
# every amphora has confirmed the removal and Octavia has received it.
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

# One row per load balancer: its desired and applied generation, and the lease of a controller. `committed`: the newest
# generation for which Octavia's own transaction has ended. `read_back`: the provider agent must read incomplete objects
# from Octavia: the listeners and pools in `reread` (JSON), or the complete tree if `reread` is NULL.
job = sa.Table(
    "job",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("project_id", sa.String(64), nullable=True),
    # The topology and the backends (entry points) are fixed at the creation of the load balancer.
    sa.Column("topology", sa.String(32), nullable=False, default="SINGLE"),
    sa.Column("compute", sa.String(64), nullable=True),
    sa.Column("network", sa.String(64), nullable=True),
    sa.Column("op", sa.String(16), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("committed", sa.BigInteger, nullable=False, default=0),
    sa.Column("applied", sa.BigInteger, nullable=False, default=0),
    sa.Column("read_back", sa.Boolean, nullable=False, default=False),
    sa.Column("reread", Body, nullable=True),
    # `vip_applied`: the last applied options of the VIP port (JSON); NULL if no options were ever applied.
    sa.Column("vip_applied", Body, nullable=True),
    # `omitted`: the objects that an unconfirmed generation omits (JSON: the generation, reasons by object id).
    sa.Column("omitted", Body, nullable=True),
    # `spare_pool`: the pool of warm spares of a load balancer. `spares`: the specification (JSON) of such a pool.
    sa.Column("spare_pool", Id, nullable=True),
    sa.Column("spares", Body, nullable=True),
    sa.Column("dirty", sa.Boolean, nullable=False, default=True),
    # `tickets`: number of the current TLS ticket keys. `tickets_due`: time of their next rotation.
    sa.Column("tickets", sa.BigInteger, nullable=True),
    sa.Column("tickets_due", sa.Double, nullable=True),
    sa.Column("owner", sa.String(128), nullable=True),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    # Every write under the lease increments `writes`. MariaDB does not replicate an update that changes no value, and
    # Galera would then miss a collision with a claim on another node.
    sa.Column("writes", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Column("leased_until", sa.Double, nullable=True),
    sa.Column("due_at", sa.Double, nullable=False, default=0.0),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    # `crashes` counts crashes and lost leases of processes that worked on this row, since the last progress.
    sa.Column("crashes", sa.Integer, nullable=False, default=0, server_default="0"),
    sa.Column("error", sa.Text, nullable=True),
    sa.Index("ix_job_dirty_due_at", "dirty", "due_at"),
)
# `job.due_at` DUE_NOW makes a row due at once, and keeps an URGENT row urgent.
DUE_NOW = sa.case((job.c.due_at < 0.0, URGENT), else_=0.0)

# One row per accepted call: the history of a load balancer, and the commit marker of the call.
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

# One row per secret of an object: encrypted by the vault, never shared between objects, deleted with the last use.
# `purpose`: certificate, ca, crl or tickets. `ref`: the reference in Octavia's API. `reason`: why `sealed` is NULL:
# Octavia did not deliver the secret, or HAProxy cannot use it.
secret = sa.Table(
    "secret",
    metadata,
    sa.Column("object_id", Id, primary_key=True),
    sa.Column("purpose", sa.String(16), primary_key=True),
    sa.Column("ref", sa.String(255), primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("sealed", Sealed, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# One row per object: the newest provisioning and operating status. `pending`: the object is PENDING_* in Octavia until
# this generation is confirmed. `version` grows with every change. `settled`: the version of the last change of the
# provisioning status. `reported`: the version Octavia has received.
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
)

# One row per listener and amphora that ever served it: absolute counters; Octavia receives the sums. Rows of deleted
# amphorae stay, so that totals never decrease. `version` and `reported`: see `object_status`.
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
)

# `confirmed`: the newest generation that the agent reports to serve. `heartbeat_key` is encrypted.
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
    # A new amphora of a pair takes the VIPs some seconds after the confirmation.
    sa.Column("confirmed_at", sa.Double, nullable=True),
    sa.Column("heartbeat_key", sa.LargeBinary, nullable=False),
    # `plugged`: the attached ports with their subnets (JSON). `partners`: the VRRP peers at the confirmation (JSON).
    sa.Column("plugged", Body, nullable=True),
    sa.Column("partners", Body, nullable=True),
    # `handed_over`: the controller has asked the amphora to hand the VIPs over to its partner.
    sa.Column("handed_over", sa.Boolean, nullable=False, default=False),
    # `drains_until`: end of the connection drain after the handover; NULL while the amphora may still hold VIPs.
    sa.Column("drains_until", sa.Double, nullable=True),
    sa.Column("certificate_expires_at", sa.Double, nullable=True),
    # `certificate_authority`: the issuing CA (NULL: the configured files). `trusts`: the accepted CAs of clients.
    sa.Column("certificate_issued_at", sa.Double, nullable=True),
    sa.Column("certificate_authority", sa.BigInteger, nullable=True),
    sa.Column("trusts", sa.String(255), nullable=True),
    # `image`: the image of the machine, in the compute backend's notation.
    sa.Column("image", sa.String(255), nullable=True),
    # `drift`: the last drift found, kept as history. `drifts`: the drift still exists.
    sa.Column("audited_at", sa.Double, nullable=True),
    sa.Column("drift", sa.Text, nullable=True),
    sa.Column("drifts", sa.Boolean, nullable=True, default=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # The boot time-out starts at `booted_at`, the time of the boot request.
    sa.Column("booted_at", sa.Double, nullable=True),
    sa.Column("ready_at", sa.Double, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# The health managers write these rows in bulk; rows of `amphora` change rarely. (epoch, sequence) identify the last
# accepted heartbeat: older heartbeats are replays, also after a restart.
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

# One process at a time performs a named duty (reports to Octavia, for example).
duty = sa.Table(
    "duty",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(128), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
)

# One row per load balancer whose VIP addresses are allocated before Octavia requests its creation. Octavia may refuse
# the user's request after `create_vip_port` or crash, so the request for the creation may never come.
vip_claim = sa.Table(
    "vip_claim",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("network", sa.String(64), nullable=True),
    sa.Column("claimed_at", sa.Double, nullable=False),
    sa.Column("project_id", sa.String(64), nullable=True),
    # `wanted`: the pending request (JSON) until a slow backend answers. `reason`: the reason for the delay.
    sa.Column("wanted", Body, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# One row per machine or port of a backend that no row owns. A recent orphan may belong to a step in progress, because a
# step writes to two systems.
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
    # The owner is an amphora's id, "lb-<load balancer id>" for VIPs, or the name of a sandbox host.
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("mac", sa.String(17), nullable=False, unique=True),
    # A port of the user is not `ours`, and the driver never deletes it.
    sa.Column("ours", sa.Boolean, nullable=False, default=True),
    sa.UniqueConstraint("owner", "network_id", name="uq_local_port_owner_network"),
)

# These tables hold options of VIPs. Rates are in kilobits (1000 bits) per second; rules are JSON.
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

# One row per load balancer: the applied options of the VIPs, and the ports of the VIPs (JSON).
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
