# SPDX-License-Identifier: Apache-2.0
"""Initial schema."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from amphora_driver.database.migrations.repeatable import create_index, create_table

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(36)
BODY = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
SEALED = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    # The columns repeat those of `tables.py` and `tables_fleet.py`. A test compares the migrated schema with these
    # modules.
    create_table(
        "amphora",
        sa.Column("id", ID, nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("compute_id", sa.String(128), nullable=True),
        sa.Column("management_address", sa.String(64), nullable=True),
        sa.Column("confirmed", sa.BigInteger(), nullable=False),
        sa.Column("confirmed_at", sa.Double(), nullable=True),
        sa.Column("heartbeat_key", sa.LargeBinary(), nullable=False),
        sa.Column("plugged", BODY, nullable=True),
        sa.Column("partners", BODY, nullable=True),
        sa.Column("handed_over", sa.Boolean(), nullable=False),
        sa.Column("drains_until", sa.Double(), nullable=True),
        sa.Column("certificate_expires_at", sa.Double(), nullable=True),
        sa.Column("certificate_issued_at", sa.Double(), nullable=True),
        sa.Column("certificate_authority", sa.BigInteger(), nullable=True),
        sa.Column("trusts", sa.String(255), nullable=True),
        sa.Column("image", sa.String(255), nullable=True),
        sa.Column("audited_at", sa.Double(), nullable=True),
        sa.Column("drift", sa.Text(), nullable=True),
        sa.Column("drifts", sa.Boolean(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("booted_at", sa.Double(), nullable=True),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_amphora")),
    )
    create_index("ix_amphora_load_balancer_id", "amphora", ["load_balancer_id"])
    create_table(
        "amphora_heartbeat",
        sa.Column("amphora_id", ID, nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("holds_vip", sa.Boolean(), nullable=True),
        sa.Column("agent_version", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("amphora_id", name=op.f("pk_amphora_heartbeat")),
    )
    create_table(
        "certificate_authority",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("certificate", BODY, nullable=False),
        sa.Column("sealed_key", SEALED, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_certificate_authority")),
    )
    create_table(
        "circuit_breaker",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("silent", sa.Integer(), nullable=False),
        sa.Column("watched", sa.Integer(), nullable=False),
        sa.Column("trial_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_circuit_breaker")),
    )
    create_table(
        "desired_object",
        sa.Column("id", ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("parent_id", ID, nullable=True),
        sa.Column("refers_to", ID, nullable=True),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.Column("body", BODY, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_desired_object")),
    )
    create_index("ix_desired_object_load_balancer_id", "desired_object", ["load_balancer_id"])
    create_index("ix_desired_object_parent_id", "desired_object", ["parent_id"])
    create_index("ix_desired_object_refers_to", "desired_object", ["refers_to"])
    create_table(
        "drained_host",
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("asked_by", sa.String(128), nullable=True),
        sa.PrimaryKeyConstraint("host", name=op.f("pk_drained_host")),
    )
    create_table(
        "duty",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_duty")),
    )
    create_table(
        "failover",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("amphora_id", ID, nullable=True),
        sa.Column("cause", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("asked_by", sa.String(128), nullable=True),
        sa.Column("rotation_id", sa.BigInteger(), nullable=True),
        sa.Column("silent_since", sa.Double(), nullable=True),
        sa.Column("begun_at", sa.Double(), nullable=False),
        sa.Column("served_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(16), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_failover")),
    )
    create_index("ix_failover_begun_at", "failover", ["begun_at"])
    create_index("ix_failover_ended_at", "failover", ["ended_at"])
    create_index("ix_failover_load_balancer_id", "failover", ["load_balancer_id"])
    create_table(
        "failover_event",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("failover_id", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("word", sa.String(32), nullable=False),
        sa.Column("amphora_id", ID, nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_failover_event")),
    )
    create_index("ix_failover_event_failover_id", "failover_event", ["failover_id"])
    create_table(
        "job",
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("topology", sa.String(32), nullable=False),
        sa.Column("compute", sa.String(64), nullable=True),
        sa.Column("network", sa.String(64), nullable=True),
        sa.Column("op", sa.String(16), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("committed", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.BigInteger(), nullable=False),
        sa.Column("read_back", sa.Boolean(), nullable=False),
        sa.Column("reread", BODY, nullable=True),
        sa.Column("vip_applied", BODY, nullable=True),
        sa.Column("omitted", BODY, nullable=True),
        sa.Column("spare_pool", ID, nullable=True),
        sa.Column("spares", BODY, nullable=True),
        sa.Column("dirty", sa.Boolean(), nullable=False),
        sa.Column("tickets", sa.BigInteger(), nullable=True),
        sa.Column("tickets_due", sa.Double(), nullable=True),
        sa.Column("owner", sa.String(128), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("writes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=True),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), server_default="0", nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("load_balancer_id", name=op.f("pk_job")),
    )
    create_index("ix_job_dirty_due_at", "job", ["dirty", "due_at"])
    create_table(
        "listener_statistics",
        sa.Column("listener_id", ID, nullable=False),
        sa.Column("amphora_id", ID, nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("active_connections", sa.BigInteger(), nullable=False),
        sa.Column("bytes_in", sa.BigInteger(), nullable=False),
        sa.Column("bytes_out", sa.BigInteger(), nullable=False),
        sa.Column("request_errors", sa.BigInteger(), nullable=False),
        sa.Column("total_connections", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("reported", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("listener_id", "amphora_id", name=op.f("pk_listener_statistics")),
    )
    create_index("ix_listener_statistics_load_balancer_id", "listener_statistics", ["load_balancer_id"])
    create_table(
        "local_network",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("bridge", sa.String(15), nullable=False),
        sa.Column("mtu", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_local_network")),
        sa.UniqueConstraint("bridge", name=op.f("uq_local_network_bridge")),
        sa.UniqueConstraint("name", name=op.f("uq_local_network_name")),
    )
    create_table(
        "local_qos_policy",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("egress_kbps", sa.BigInteger(), nullable=True),
        sa.Column("ingress_kbps", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_local_qos_policy")),
    )
    create_table(
        "local_security_group",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("rules", BODY, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_local_security_group")),
    )
    create_table(
        "local_vip_option",
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("qos_policy_id", ID, nullable=True),
        sa.Column("security_group_ids", BODY, nullable=False),
        sa.Column("port_ids", BODY, nullable=False),
        sa.PrimaryKeyConstraint("load_balancer_id", name=op.f("pk_local_vip_option")),
    )
    create_table(
        "object_status",
        sa.Column("object_id", ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("provisioning", sa.String(16), nullable=True),
        sa.Column("operating", sa.String(16), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("pending", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("settled", sa.BigInteger(), nullable=False),
        sa.Column("reported", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("object_id", name=op.f("pk_object_status")),
    )
    create_index("ix_object_status_load_balancer_id", "object_status", ["load_balancer_id"])
    create_table(
        "orphan",
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("found_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "backend", "id", name=op.f("pk_orphan")),
    )
    create_table(
        "process",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("version", sa.String(64), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("jobs", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_process")),
    )
    create_table(
        "request",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("object_id", ID, nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("applied_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_request")),
    )
    create_index("ix_request_load_balancer_id", "request", ["load_balancer_id", "generation"])
    create_table(
        "resync",
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("asked_by", sa.String(128), nullable=True),
        sa.Column("remove_unknown", sa.Boolean(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(16), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("load_balancer_id", name=op.f("pk_resync")),
    )
    create_index("ix_resync_ended_at", "resync", ["ended_at"])
    create_table(
        "rotation",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("wanted", BODY, nullable=False),
        sa.Column("max_unavailable", sa.Integer(), nullable=False),
        sa.Column("asked_by", sa.String(128), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rotation")),
    )
    create_table(
        "rotation_item",
        sa.Column("rotation_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("amphorae", BODY, nullable=False),
        sa.Column("operating", sa.String(16), nullable=True),
        sa.Column("begun_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("rotation_id", "load_balancer_id", name=op.f("pk_rotation_item")),
    )
    create_table(
        "secret",
        sa.Column("object_id", ID, nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("ref", sa.String(255), nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("sealed", SEALED, nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("object_id", "purpose", "ref", name=op.f("pk_secret")),
    )
    create_index("ix_secret_load_balancer_id", "secret", ["load_balancer_id"])
    create_table(
        "silent_amphora",
        sa.Column("amphora_id", ID, nullable=False),
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("amphora_id", name=op.f("pk_silent_amphora")),
    )
    create_table(
        "unknown_amphora",
        sa.Column("amphora_id", ID, nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("amphora_id", name=op.f("pk_unknown_amphora")),
    )
    create_table(
        "vip_claim",
        sa.Column("load_balancer_id", ID, nullable=False),
        sa.Column("network", sa.String(64), nullable=True),
        sa.Column("claimed_at", sa.Double(), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("wanted", BODY, nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("load_balancer_id", name=op.f("pk_vip_claim")),
    )
    create_table(
        "local_port",
        sa.Column("id", ID, nullable=False),
        sa.Column("network_id", ID, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("mac", sa.String(17), nullable=False),
        sa.Column("ours", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["network_id"], ["local_network.id"], name=op.f("fk_local_port_network_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_local_port")),
        sa.UniqueConstraint("mac", name=op.f("uq_local_port_mac")),
        sa.UniqueConstraint("owner", "network_id", name=op.f("uq_local_port_owner_network")),
    )
    create_table(
        "local_subnet",
        sa.Column("id", ID, nullable=False),
        sa.Column("network_id", ID, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("cidr", sa.String(64), nullable=False),
        sa.Column("gateway", sa.String(64), nullable=True),
        sa.Column("first_address", sa.String(64), nullable=False),
        sa.Column("last_address", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["network_id"], ["local_network.id"], name=op.f("fk_local_subnet_network_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_local_subnet")),
    )
    create_table(
        "local_address",
        sa.Column("subnet_id", ID, nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("port_id", ID, nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["port_id"], ["local_port.id"], name=op.f("fk_local_address_port_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["subnet_id"], ["local_subnet.id"], name=op.f("fk_local_address_subnet_id")),
        sa.PrimaryKeyConstraint("subnet_id", "address", name=op.f("pk_local_address")),
    )
    create_index("ix_local_address_port_id", "local_address", ["port_id"])


def downgrade() -> None:
    raise NotImplementedError("a database schema can only be upgraded; for an older schema, restore a backup")

