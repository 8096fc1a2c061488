# SPDX-License-Identifier: Apache-2.0
"""Octavia's own rows of the fleet, so that octavia-driver-agent accepts the reports. Runs in a process of its own.

python -m simulated_fleet.octavia_rows NUMBER MEMBERS

`MEMBERS` is a JSON object: the number of members of the first pool, by number of the load balancer.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from octavia.common import service
from octavia.db import api, models

from sandbox import octavia_schema, octavia_start
from simulated_fleet import shape

_BATCH = 200
_STATUS = {"provisioning_status": "ACTIVE", "operating_status": "ONLINE", "enabled": True}


def main(number: int, members: dict[int, int]) -> None:
    """Create Octavia's tables and the rows of the first load balancers."""
    octavia_start.prepare()
    service.prepare_service(["fleet", "--config-file", os.environ["OCTAVIA_CONF"]])
    octavia_schema.ensure_schema()
    engine = api.get_engine()
    for begin in range(0, number, _BATCH):
        rows: dict[Any, list[dict[str, Any]]] = {}
        for one in range(begin, min(begin + _BATCH, number)):
            _add(shape.load_balancer(one, members.get(one)), rows)
        with engine.begin() as connection:
            for model, some in rows.items():
                connection.execute(model.__table__.insert(), some)


def _add(tree: Any, rows: dict[Any, list[dict[str, Any]]]) -> None:
    common = {**_STATUS, "project_id": tree.project_id}
    owned = {**common, "load_balancer_id": tree.id}
    topology = tree.profile.topology.value
    balancer = {**common, "id": tree.id, "name": tree.name, "topology": topology, "provider": "haproxy"}
    rows.setdefault(models.LoadBalancer, []).append(balancer)
    rows.setdefault(models.Vip, []).append(
        {
            "load_balancer_id": tree.id,
            "ip_address": tree.vip.address,
            "port_id": tree.vip.port_id,
            "subnet_id": tree.vip.subnet_id,
            "network_id": tree.vip.network_id,
            "octavia_owned": False,
        }
    )
    for pool in tree.pools:
        values = {"id": pool.id, "name": pool.name, "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN"}
        rows.setdefault(models.Pool, []).append({**owned, **values})
        monitor = pool.healthmonitor
        rows.setdefault(models.HealthMonitor, []).append(
            {
                **common,
                "id": monitor.id,
                "pool_id": pool.id,
                "type": "HTTP",
                "delay": monitor.delay,
                "timeout": monitor.timeout,
                "fall_threshold": 3,
                "rise_threshold": 3,
                "http_method": "GET",
                "url_path": "/",
                "expected_codes": "200",
            }
        )
        rows.setdefault(models.Member, []).extend(
            {
                **common,
                "id": one.id,
                "pool_id": pool.id,
                "ip_address": one.address,
                "name": one.name,
                "protocol_port": one.protocol_port,
                "weight": 1,
                "backup": False,
            }
            for one in pool.members
        )
    for one in tree.listeners:
        values = {"id": one.id, "name": one.name, "protocol": "HTTP", "protocol_port": one.protocol_port}
        rows.setdefault(models.Listener, []).append(
            {**owned, **values, "default_pool_id": one.default_pool_id, "connection_limit": -1}
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), {int(one): count for one, count in json.loads(sys.argv[2]).items()})
