# SPDX-License-Identifier: Apache-2.0
"""Example fleets for tests: as snapshots, and as rows."""

import json
import time
import uuid

from amphora_driver.database import tables, tables_fleet
from amphora_driver.telemetry.fleet_snapshot import AmphoraInfo, FleetSnapshot, LoadBalancerInfo, ProcessInfo

NOW = 1_800_000_000.0
INTERVAL = 3.0


def identifier(number):
    return str(uuid.UUID(int=number))


def balancer(number=1, **more):
    values = {
        "id": identifier(number),
        "name": f"shop-{number}",
        "project_id": "p",
        "addresses": ("198.51.100.7",),
        "topology": "SINGLE",
        "state": "ACTIVE",
        "operating": "ONLINE",
        "reason": None,
        "generation": 5,
        "applied": 5,
        "committed": 5,
        "attempts": 0,
        "error": None,
        "due": False,
        "due_at": 0.0,
        "owner": None,
    }
    return LoadBalancerInfo(**{**values, **more})


def machine(number=1001, of=1, **more):
    values = {
        "id": identifier(number),
        "load_balancer_id": identifier(of),
        "role": "STANDALONE",
        "state": "ready",
        "wanted": 5,
        "confirmed": 5,
        "created_at": NOW - 1000,
        "heard_at": NOW - 1,
        "holds_vip": None,
        "agent_version": "1",
        "image": None,
        "certificate_issued_at": NOW - 1000,
        "certificate_expires_at": NOW + 600_000,
        "certificate_authority": None,
        "drift": None,
        "reason": None,
    }
    return AmphoraInfo(**{**values, **more})


def process(kind, **more):
    values = {
        "name": f"{kind}:1",
        "kind": kind,
        "host": "host",
        "version": "1",
        "started_at": NOW - 500,
        "seen_at": NOW - 1,
        "draining": False,
        "jobs": 0,
    }
    return ProcessInfo(**{**values, **more})


PROCESSES = tuple(process(kind) for kind in ("controller", "health-manager", "provider-agent"))


def fleet(**more):
    values = {"at": NOW, "processes": PROCESSES, "balancers": (balancer(),), "amphorae": (machine(),)}
    return FleetSnapshot(**{**values, **more})


def rows(number, *, now=None):
    """Return rows of the given number of served pairs, with rows in all related tables."""
    at = time.time() if now is None else now
    found = {name: [] for name in ("job", "desired_object", "object_status", "amphora", "amphora_heartbeat")}
    for one in range(1, number + 1):
        of = identifier(one)
        found["job"].append(
            {"load_balancer_id": of, "project_id": "p", "topology": "ACTIVE_STANDBY", "op": "apply", "generation": 5}
            | {"committed": 5, "applied": 5, "dirty": False, "spare_pool": None, "spares": None}
        )
        vip = {"address": f"198.51.{one // 250}.{one % 250}", "subnet_id": "s", "network_id": "n", "port_id": "p"}
        body = {"id": of, "name": f"shop-{one}", "project_id": "p", "vip": vip}
        found["desired_object"].append(
            {"id": of, "kind": "loadbalancers", "load_balancer_id": of, "created": one, "generation": 5}
            | {"removed": False, "body": json.dumps(body)}
        )
        found["object_status"].append(
            {"object_id": of, "kind": "loadbalancers", "load_balancer_id": of, "provisioning": "ACTIVE"}
            | {"operating": "ONLINE", "version": 3, "settled": 3, "reported": 3, "since": at - 100}
        )
        for place, role in enumerate(("MASTER", "BACKUP")):
            amphora = identifier(100_000 + 2 * one + place)
            found["amphora"].append(
                {"id": amphora, "load_balancer_id": of, "role": role, "state": "ready", "confirmed": 5}
                | {"heartbeat_key": b"k", "created_at": at - 1000, "certificate_issued_at": at - 1000}
                | {"certificate_expires_at": at + 600_000, "drift": None, "drifts": None}
            )
            found["amphora_heartbeat"].append(
                {"amphora_id": amphora, "seen_at": at - 1, "generation": 5, "epoch": 1, "sequence": 9}
                | {"holds_vip": role == "MASTER", "agent_version": "1"}
            )
    return found


def write(database, found):
    """Insert rows by table name."""

    def insert(connection):
        for name, ones in found.items():
            table = getattr(tables, name, None)
            table = getattr(tables_fleet, name) if table is None else table
            connection.execute(table.insert(), ones)

    database.write(insert)
