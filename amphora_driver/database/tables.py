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
# MySQL's TEXT holds at most 64 KiB, but the JSON of a load balancer with a thousand nested objects is longer. So the
# type on MySQL and MariaDB is MEDIUMTEXT.
Body = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
# MySQL's BLOB holds at most 64 KiB, but a certificate chain or a CA bundle may be longer. So the type on MySQL and
# MariaDB is MEDIUMBLOB.
Sealed = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
# SQLite assigns row numbers automatically only to a primary key of the type INTEGER, not to one of the type BIGINT.
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# A `job` row with the `due_at` value URGENT is due immediately and before all other rows. Another transaction may write
# URGENT while a controller works on the job. So a controller that returns the lease never overwrites URGENT.
URGENT = -1.0

# The table `desired_object` has one row per object of a load balancer. The column `body` is the JSON of the object
# without child objects. In the row of a listener or L7 policy, the column `refers_to` is the id of the pool. A row with
# `removed` set stays until every amphora has confirmed the removal and Octavia knows of the removal.
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

# The table `job` has one row per load balancer: the desired generation, the applied generation, and the lease of a
# controller. A generation is the number of a version of the configuration. The columns `generation` and `applied` are
# the desired and the applied generation. The column `committed` is the newest generation for which Octavia's own
# transaction has ended. If `read_back` is set, the provider agent must read objects from Octavia. The column `reread`
# then lists these objects as JSON; NULL means the complete load balancer.
job = sa.Table(
    "job",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("project_id", sa.String(64), nullable=True),
    # The compute backend and the network backend of a load balancer never change after the creation. A resize changes
    # the column `topology`, and also the load balancer's profile in the table `desired_object`.
    sa.Column("topology", sa.String(32), nullable=False, default="SINGLE"),
    sa.Column("compute", sa.String(64), nullable=True),
    sa.Column("network", sa.String(64), nullable=True),
    sa.Column("op", sa.String(16), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("committed", sa.BigInteger, nullable=False, default=0),
    sa.Column("applied", sa.BigInteger, nullable=False, default=0),
    sa.Column("read_back", sa.Boolean, nullable=False, default=False),
    sa.Column("reread", Body, nullable=True),
    # The column `vip_applied` holds the last options that the controller applied to the VIP port as JSON. NULL means
    # that no options were ever applied.
    sa.Column("vip_applied", Body, nullable=True),
    # The column `omitted` lists the objects that the controller omits from a generation. For each object id, the JSON
    # contains the generation and the reason.
    sa.Column("omitted", Body, nullable=True),
    # The column `spare_pool` is the id of the pool from which a load balancer takes warm spares. A spare pool also has
    # a row in this table, and the column `spares` of that row describes the pool as JSON.
    sa.Column("spare_pool", Id, nullable=True),
    sa.Column("spares", Body, nullable=True),
    # The column `dirty` is set while a controller must run the job, now or at the time in `due_at`.
    sa.Column("dirty", sa.Boolean, nullable=False, default=True),
    # The column `tickets` counts the rotations of the keys for TLS session tickets; NULL means that no keys exist. The
    # column `tickets_due` is the time of the next rotation.
    sa.Column("tickets", sa.BigInteger, nullable=True),
    sa.Column("tickets_due", sa.Double, nullable=True),
    # The column `owner` is the process with the lease of the job, until the time in `leased_until`. The column `epoch`
    # grows with every new lease. A write under an older lease therefore changes no row (fencing).
    sa.Column("owner", sa.String(128), nullable=True),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    # Every write under a lease increments `writes`, so that the write always changes a value. MariaDB does not
    # replicate an update that changes no value. Without the increment, Galera would not notice that another node has
    # granted the lease to another controller.
    sa.Column("writes", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.Column("leased_until", sa.Double, nullable=True),
    sa.Column("due_at", sa.Double, nullable=False, default=0.0),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    # The column `crashes` counts the processes that crashed or lost the lease while they worked on the load balancer.
    # Progress resets the column to zero.
    sa.Column("crashes", sa.Integer, nullable=False, default=0, server_default="0"),
    sa.Column("error", sa.Text, nullable=True),
    sa.Index("ix_job_dirty_due_at", "dirty", "due_at"),
)
# The expression DUE_NOW sets `due_at` so that a job is due immediately. Controllers claim jobs with a negative `due_at`
# (URGENT) before all others, so the expression keeps that value.
DUE_NOW = sa.case((job.c.due_at < 0.0, URGENT), else_=0.0)

# The table `request` has one row per accepted call of Octavia, as the history of a load balancer. The row also proves
# that the transaction of the call was committed.
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

# The table `secret` has one row per secret of an object, encrypted by the vault. Two objects with the same secret have
# two rows. The driver deletes the row when the object no longer uses the secret. The column `purpose` is certificate,
# ca, crl or tickets, and `ref` is the reference in Octavia's API. If `sealed` is NULL, Octavia did not deliver the
# secret, or HAProxy cannot use the secret; `reason` says why.
secret = sa.Table(
    "secret",
    metadata,
    sa.Column("object_id", Id, primary_key=True),
    sa.Column("purpose", sa.String(16), primary_key=True),
    sa.Column("ref", sa.String(255), primary_key=True),
    sa.Column("load_balancer_id", Id, nullable=False, index=True),
    sa.Column("sealed", Sealed, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
    # The column `expires_at` is the end of a certificate's validity. NULL means that housekeeping has not read the
    # certificate yet, or that the secret is no certificate.
    sa.Column("expires_at", sa.Double, nullable=True, index=True),
)

# The table `object_status` has one row per object, with the newest provisioning and operating status. While `pending`
# contains a generation, the object is PENDING in Octavia, until the amphorae confirm that generation. The column
# `version` grows with every change of the row. The column `settled` is the version at the last change of the
# provisioning status. The column `reported` is the version that Octavia has received.
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

# The table `listener_statistics` has one row of absolute counters per listener and amphora; Octavia receives the sums
# over all amphorae. Rows of deleted amphorae stay, so that the totals never decrease. The columns `version` and
# `reported` have the same meaning as in the table `object_status`.
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

# The table `notification` has one row per notification for other OpenStack services that no message bus has accepted
# yet. The column `event` is create, update or delete, and `generation` belongs to the request. While `ready_at` is
# NULL, the row waits until Octavia has accepted the result of the request. Then `payload` is the content as JSON.
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

# In the table `amphora`, the column `confirmed` is the newest generation that the amphora serves according to the
# agent. The vault encrypts the column `heartbeat_key`.
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
    # The column `confirmed_at` is the time when the agent confirmed the generation. In a pair, a new amphora takes over
    # the VIPs some seconds after that time.
    sa.Column("confirmed_at", sa.Double, nullable=True),
    sa.Column("heartbeat_key", sa.LargeBinary, nullable=False),
    # The column `plugged` lists, as JSON, the network ports that are attached to the amphora's machine, each with its
    # subnets. The column `partners` lists, as JSON, the VRRP peers in the configuration that the agent confirmed last.
    sa.Column("plugged", Body, nullable=True),
    sa.Column("partners", Body, nullable=True),
    # The column `handed_over` says whether the controller has asked the amphora to hand the VIPs over to the partner
    # amphora.
    sa.Column("handed_over", sa.Boolean, nullable=False, default=False),
    # The column `drains_until` is the end of the connection drain after the handover of the VIPs. NULL means that the
    # amphora may still hold VIPs.
    sa.Column("drains_until", sa.Double, nullable=True),
    sa.Column("certificate_expires_at", sa.Double, nullable=True),
    # The column `certificate_authority` is the CA that issued the amphora's certificate; NULL means the CA in the
    # configured files. The column `trusts` is the trust list of the agent: the CAs whose client certificates the agent
    # accepts, in the notation of `certificates/ca_rotation.py`.
    sa.Column("certificate_issued_at", sa.Double, nullable=True),
    sa.Column("certificate_authority", sa.BigInteger, nullable=True),
    sa.Column("trusts", sa.String(255), nullable=True),
    # The column `image` names the image of the amphora's machine, in the notation of the compute backend.
    sa.Column("image", sa.String(255), nullable=True),
    # The columns `host` and `zone` are the hypervisor and the availability zone when the agent first answered.
    sa.Column("host", sa.String(255), nullable=True),
    sa.Column("zone", sa.String(255), nullable=True),
    # The column `drift` describes the last configuration drift of the amphora, even after the repair. The column
    # `drifts` says whether the drift still exists.
    sa.Column("audited_at", sa.Double, nullable=True),
    sa.Column("drift", sa.Text, nullable=True),
    sa.Column("drifts", sa.Boolean, nullable=True, default=False),
    # The column `near_limit` lists the resources of which the amphora uses almost all, separated by commas.
    sa.Column("near_limit", sa.String(128), nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    # The column `booted_at` is the time of the boot request. The boot time-out starts at that time.
    sa.Column("booted_at", sa.Double, nullable=True),
    sa.Column("ready_at", sa.Double, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# The table `amphora_heartbeat` is separate from `amphora`, because the health managers write its rows in bulk every few
# seconds. The columns `epoch` and `sequence` identify the last accepted heartbeat of an amphora. With them, a health
# manager refuses a repeated older heartbeat, even after a restart of the health manager.
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

# A duty is a task that only one process of the control plane performs at a time, for example the status reports to
# Octavia. The table `duty` has the lease of each duty, with the same columns as the lease of a job.
duty = sa.Table(
    "duty",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(128), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
)

# Octavia requests the VIP addresses of a load balancer before it requests the creation. The table `vip_claim` has one
# row for each load balancer between these two requests. The second request may never come: Octavia may crash after
# `create_vip_port`, or refuse the user's request. Housekeeping deletes the old claims of existing load balancers. The
# deletion of a load balancer deletes a younger claim.
vip_claim = sa.Table(
    "vip_claim",
    metadata,
    sa.Column("load_balancer_id", Id, primary_key=True),
    sa.Column("network", sa.String(64), nullable=True),
    sa.Column("claimed_at", sa.Double, nullable=False),
    sa.Column("project_id", sa.String(64), nullable=True),
    # While a slow network backend has not answered, the column `wanted` holds the VIP request as JSON. The column
    # `reason` says why the answer is delayed.
    sa.Column("wanted", Body, nullable=True),
    sa.Column("reason", sa.Text, nullable=True),
)

# An orphan is a machine or port that a backend lists and that no other table mentions. The table `orphan` has one row
# per orphan. A young orphan may belong to a step in progress, which has not yet written to the database.
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
    # The column `owner` of a local port is an amphora id, "lb-<load balancer id>" for VIPs, or the name of a sandbox
    # host.
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("mac", sa.String(17), nullable=False, unique=True),
    # The column `ours` is false for a port that a user created. The driver never deletes a port of a user.
    sa.Column("ours", sa.Boolean, nullable=False, default=True),
    sa.UniqueConstraint("owner", "network_id", name="uq_local_port_owner_network"),
)

# The tables `local_qos_policy` and `local_security_group` hold options of VIPs for the local network backend. Rates are
# in kilobits (1000 bits) per second, and rules are JSON.
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

# The table `local_vip_option` has one row per load balancer: the applied VIP options, and the ids of the VIP ports as
# JSON.
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
