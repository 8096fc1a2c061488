# SPDX-License-Identifier: Apache-2.0
"""Octavia's real schema in SQLite, with a load balancer of Octavia's own provider."""

import datetime as dt
import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlalchemy as sa
from octavia.db import base_models, models
from unit.driver import octavia_objects
from unit.driver.octavia_objects import LB, LISTENER, NETWORK, POOL, SUBNET

from sandbox import octavia_schema

MEMBER, PROJECT = octavia_objects.member().member_id, "demo"
AMPHORAE = tuple(f"00000000-0000-4000-8000-00000000001{number}" for number in (1, 2))
VIP_PORT = "00000000-0000-4000-8000-000000000030"
VIP_ADDRESS = "198.51.100.5"
PORTS = {one: f"port-of-{one[-2:]}" for one in AMPHORAE}
# Octavia's columns have no time zone.
_BEFORE, _LATER = (dt.datetime.fromisoformat(f"{year}-01-01") for year in (2026, 2027))


def open_engine(url):
    """Return an engine that enforces foreign keys."""
    engine = sa.create_engine(url)

    @sa.event.listens_for(engine, "connect")
    def enforce(connection, _record):
        connection.execute("PRAGMA foreign_keys = ON")

    return engine


def write_database(path, *, pair=False):
    """Write a database with one load balancer, and return its engine. Every test gets a copy."""
    Path(path).write_bytes(_made(pair))
    return open_engine(f"sqlite:///{path}")


@lru_cache
def _made(pair):
    with TemporaryDirectory() as folder:
        engine = _create_schema(f"sqlite:///{folder}/octavia.sqlite")
        _insert_load_balancer(engine, pair=pair)
        engine.dispose()
        return Path(folder, "octavia.sqlite").read_bytes()


def fill(engine, *, pair=False):
    """Create the tables in an empty database, with one load balancer."""
    _create_tables(engine)
    _insert_load_balancer(engine, pair=pair)


def _create_schema(url):
    """Create Octavia's tables in a file; return the engine."""
    engine = open_engine(url)
    _create_tables(engine)
    return engine


def _create_tables(engine):
    """Create Octavia's tables with their lookup rows."""
    base_models.BASE.metadata.create_all(engine)
    with sa.orm.Session(engine) as session, session.begin():
        for model, names in octavia_schema.LOOKUPS:
            session.add_all(model(name=name) for name in names)


def _insert_load_balancer(engine, load_balancer_id=LB, *, pair=False, **more):
    """Insert a load balancer that serves HTTP; `more` are columns of its row."""
    ids = AMPHORAE if pair else AMPHORAE[:1]
    common = {"provisioning_status": "ACTIVE", "operating_status": "ONLINE", "enabled": True, "project_id": PROJECT}
    balancer = {"provider": "amphora", "topology": "ACTIVE_STANDBY" if pair else "SINGLE", "server_group_id": "group"}
    with sa.orm.Session(engine) as session, session.begin():
        session.add(models.LoadBalancer(id=load_balancer_id, **{**common, **balancer, **more}))
        session.flush()
        session.add(
            models.Vip(
                load_balancer_id=load_balancer_id,
                ip_address=VIP_ADDRESS,
                port_id=VIP_PORT,
                subnet_id=SUBNET,
                network_id=NETWORK,
                octavia_owned=True,
                vnic_type="normal",
            )
        )
        session.add(
            models.Pool(
                id=POOL, load_balancer_id=load_balancer_id, protocol="HTTP", lb_algorithm="ROUND_ROBIN", **common
            )
        )
        session.flush()
        session.add(
            models.Listener(
                id=LISTENER,
                load_balancer_id=load_balancer_id,
                protocol="HTTP",
                protocol_port=80,
                default_pool_id=POOL,
                connection_limit=-1,
                insert_headers={"X-Forwarded-For": "true"},
                client_authentication="NONE",
                **common,
            )
        )
        session.add(
            models.Member(
                id=MEMBER,
                pool_id=POOL,
                ip_address="192.0.2.5",
                protocol_port=8080,
                weight=1,
                backup=False,
                vnic_type="normal",
                **common,
            )
        )
        for number, one in enumerate(ids):
            session.add(
                models.Amphora(
                    id=one,
                    load_balancer_id=load_balancer_id,
                    compute_id=f"server-{number}",
                    lb_network_ip=f"203.0.113.{number}",
                    vrrp_ip=f"198.51.100.2{number}",
                    ha_ip=VIP_ADDRESS,
                    vrrp_port_id=PORTS[one],
                    ha_port_id=VIP_PORT,
                    cert_expiration=_LATER,
                    role=("MASTER", "BACKUP")[number] if pair else "STANDALONE",
                    status="ALLOCATED",
                    vrrp_priority=100 - 10 * number,
                )
            )
            session.flush()
            session.add(models.AmphoraHealth(amphora_id=one, last_update=_BEFORE))
            session.add(models.AmphoraMemberPort(port_id=f"member-{number}", amphora_id=one, network_id="members"))


def set_status(engine, status, load_balancer_id=LB):
    write(engine, f"UPDATE load_balancer SET provisioning_status = '{status}' WHERE id = '{load_balancer_id}'")


def write(engine, statement):
    with engine.begin() as connection:
        assert connection.exec_driver_sql(statement).rowcount == 1


def read(engine, statement):
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(statement)]


def rows(engine):
    """All rows of all tables that an adoption may touch, without times."""
    found = {}
    for name in ("load_balancer", "amphora", "amphora_member_port", "amphora_health", "listener", "pool", "member"):
        table = base_models.BASE.metadata.tables[name]
        with engine.connect() as connection:
            found[name] = sorted(
                json.dumps(
                    {key: value for key, value in row.items() if key not in {"updated_at", "last_update"}}, default=str
                )
                for row in connection.execute(sa.select(table)).mappings()
            )
    return found
