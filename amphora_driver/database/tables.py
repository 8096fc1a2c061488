# SPDX-License-Identifier: Apache-2.0
"""Every table, in one place.

Invariant: the rows are the truth. Whatever a process keeps in memory, a message says or a flow remembers may be lost
at any moment; what these tables say may not. Times are seconds since 1970 (UTC) as floating point numbers: the same
on every database.
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
# A load balancer with a thousand nested objects in one body must fit: MySQL's TEXT stops at 64 KiB.
Body = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
# A chain of certificates or a bundle of authorities may be longer than MySQL's BLOB.
Sealed = LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
# SQLite counts up by itself only for INTEGER primary keys.
Serial = BigInteger().with_variant(Integer(), "sqlite")

# In `work.free_at`: at once and before all others, and whoever works on it just now is not to forget it. A job that
# gives its lease back writes when it is due next: what it has not seen may not get lost by that.
URGENT = -1.0

# --- what users want ------------------------------------------------------------------------------------------------

# One row per object of a load balancer, its own attributes only (JSON of the model class, children left out).
# `refers_to` is the pool a listener or L7 policy points at, so that the listeners of a pool are found without reading
# bodies. `removed` rows wait for the removal to be confirmed by every amphora and reported to Octavia.
wanted_object = Table(
    "wanted_object",
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
    Index("ix_wanted_object_load_balancer_id", "load_balancer_id"),
    Index("ix_wanted_object_parent_id", "parent_id"),
    Index("ix_wanted_object_refers_to", "refers_to"),
)

# One row per load balancer: what generation is wanted and served, and which controller works on it.
# `committed` is the newest generation of which Octavia's own transaction is known to have ended;
# `read_back` asks for something to be read from Octavia after that, because it arrived incomplete: the listeners and
# pools in `reread` (JSON, [kind, id] each), or the whole tree where that is empty.
work = Table(
    "work",
    metadata,
    Column("load_balancer_id", Id, primary_key=True),
    Column("project_id", String(64), nullable=True),
    # Chosen at creation, for good: the topology, and the backends (entry points) its amphorae and ports are with.
    Column("topology", String(32), nullable=False, default="SINGLE"),
    Column("compute", String(64), nullable=True),
    Column("network", String(64), nullable=True),
    Column("op", String(16), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("committed", BigInteger, nullable=False, default=0),
    Column("applied", BigInteger, nullable=False, default=0),
    Column("read_back", Boolean, nullable=False, default=False),
    Column("reread", Body, nullable=True),
    # What the VIPs' port was given last besides addresses (JSON: QoS policy, security groups); empty if never anything.
    Column("vip_applied", Body, nullable=True),
    # What a generation that is not confirmed yet is served without (JSON: the generation, reasons by object id).
    Column("left_out", Body, nullable=True),
    # The pool of warm spares it takes amphorae from (the id of another row); of such a pool itself: how many of what
    # (JSON).
    Column("spare_pool", Id, nullable=True),
    Column("spares", Body, nullable=True),
    Column("dirty", Boolean, nullable=False, default=True),
    # How often its TLS ticket keys were made or rotated, and when that is due again; both empty until it needs some.
    Column("tickets", BigInteger, nullable=True),
    Column("tickets_due", Double, nullable=True),
    Column("owner", String(128), nullable=True),
    Column("epoch", BigInteger, nullable=False, default=0),
    # Every write under the lease adds one. MariaDB replicates no row whose values stay the same, and without the row
    # Galera notices no collision with a claim on another node.
    Column("writes", BigInteger, nullable=False, default=0, server_default="0"),
    Column("leased_until", Double, nullable=True),
    Column("free_at", Double, nullable=False, default=0.0),
    Column("attempts", Integer, nullable=False, default=0),
    # How many processes have ended, or lost their lease, while they worked on it; since one of them has got somewhere.
    Column("deaths", Integer, nullable=False, default=0, server_default="0"),
    Column("error", Text, nullable=True),
    Index("ix_work_dirty_free_at", "dirty", "free_at"),
)
# What makes a row due writes this into `free_at`: at once, and what is urgent already stays so.
AT_ONCE = case((work.c.free_at < 0.0, URGENT), else_=0.0)

# One row per accepted call: the history of a load balancer, and the proof that nothing accepted was lost.
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

# One row per secret an object uses: sealed by the vault, never shared between objects, gone with the last use.
# `purpose` says what it is for (certificate, ca, crl, tickets); `ref` is the name Octavia's users know it by. `reason`
# says why nothing is in it, where Octavia could not hand it over or what came cannot be served.
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

# --- what Octavia is told -------------------------------------------------------------------------------------------

# One row per object: the newest provisioning and operating status. `pending` is the generation whose confirmation the
# object's PENDING_* waits for. `version` grows with every change, `settled` is the version at which the provisioning
# status changed last, `reported` is the version Octavia has taken.
status = Table(
    "status",
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
    Index("ix_status_load_balancer_id", "load_balancer_id"),
)

# One row per listener and amphora that ever served it: absolute counters, summed up for Octavia. Rows of amphorae
# that are gone stay, so that totals never fall. `version`/`reported` as above.
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

# `confirmed` is the newest generation the agent itself said it serves; `heartbeat_key` is encrypted.
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
    # When it confirmed that: one of a pair that begins takes the VIPs a while later.
    Column("confirmed_at", Double, nullable=True),
    Column("heartbeat_key", LargeBinary, nullable=False),
    # The ports the machine has, with their subnets (JSON), as network and compute backends confirmed them.
    Column("plugged", Body, nullable=True),
    # Those it knew to be its partners when it confirmed (JSON).
    Column("partners", Body, nullable=True),
    # It was asked to give the VIPs to its partner, because it is about to go.
    Column("handed_over", Boolean, nullable=False, default=False),
    # It did, and connections it still has may go on until then; empty while its VIPs may still be there.
    Column("drains_until", Double, nullable=True),
    Column("certificate_expires_at", Double, nullable=True),
    # When that was issued, by which authority (empty: the one of the files), and whose client certificates it accepts.
    Column("certificate_issued_at", Double, nullable=True),
    Column("certificate_authority", BigInteger, nullable=True),
    Column("trusts", String(255), nullable=True),
    # What it was booted from, as the compute backend names it.
    Column("image", String(255), nullable=True),
    # When it was compared with what is wanted last, and what differed: history, which stays. Whether it still does.
    Column("audited_at", Double, nullable=True),
    Column("drift", Text, nullable=True),
    Column("drifts", Boolean, nullable=True, default=False),
    Column("created_at", Double, nullable=False),
    # When its machine was ordered: its agent is waited for from then on.
    Column("booted_at", Double, nullable=True),
    Column("ready_at", Double, nullable=True),
    Column("reason", Text, nullable=True),
    Index("ix_amphora_load_balancer_id", "load_balancer_id"),
)

# Written in bulk by the health managers and read by everybody: kept apart from `amphora`, which changes seldom.
# (epoch, sequence) is the place of the last heartbeat taken in: what comes before it is a replay, also after a restart.
# `holds_vip` is what it said of itself; empty where that is no question.
amphora_seen = Table(
    "amphora_seen",
    metadata,
    Column("amphora_id", Id, primary_key=True),
    Column("seen_at", Double, nullable=False),
    Column("generation", BigInteger, nullable=False, default=0),
    Column("epoch", BigInteger, nullable=False, default=0),
    Column("sequence", BigInteger, nullable=False, default=0),
    Column("holds_vip", Boolean, nullable=True),
    Column("agent_version", String(64), nullable=True),
)

# --- who does what --------------------------------------------------------------------------------------------------

# A named duty that one process at a time performs (reporting to Octavia, for example).
duty = Table(
    "duty",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("leased_until", Double, nullable=False),
)

# Addresses taken for a load balancer whose creation Octavia has not asked us for yet, and perhaps never will: it may
# refuse the rest of the request, or die, after `create_vip_port`.
vip_claim = Table(
    "vip_claim",
    metadata,
    Column("load_balancer_id", Id, primary_key=True),
    # The network backend (entry point) they were taken from.
    Column("network", String(64), nullable=True),
    Column("claimed_at", Double, nullable=False),
    Column("project_id", String(64), nullable=True),
    # Where the backend needs time: what was asked of it (JSON), until it has answered; and what has kept it so far.
    Column("wanted", Body, nullable=True),
    Column("reason", Text, nullable=True),
)

# What a backend has and no row of ours owns: a machine, a port. When it was noticed first, because a crash between two
# systems looks the same as a step that is being taken.
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
    # False for a port a user brought: it is never deleted by us.
    Column("ours", Boolean, nullable=False, default=True),
    UniqueConstraint("owner", "network_id", name="uq_local_port_owner_network"),
)

# What a VIP may have besides its address. Rates in kilobits (1000 bits) per second; rules as JSON.
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

# What the VIPs of a load balancer obey, and on which ports (JSON).
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
