# SPDX-License-Identifier: Apache-2.0
"""Compute and network backend of the simulated fleet, loaded by entry point (see `deployment.write_entry_points`).

A machine is an amphora of the process `agents`. Networks answer at once.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, ClassVar

from amphora_driver.compute.interface import Location, Machine, MachineState
from amphora_driver.network.interface import Owners
from simulated_fleet import shape

VARIABLE = "SIMULATED_FLEET"


def command(path: str, **request: Any) -> Any:
    """Let the process of the agents execute one command."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answer:
            return json.loads(answer.readline())


class FleetCompute:
    """Machines of the simulated fleet."""

    supports: ClassVar[frozenset[str]] = frozenset()
    wiring: ClassVar[str] = "fleet"
    plugs_while_booting: ClassVar[bool] = True
    listing_interval = 300.0
    default_zones = ()

    def __init__(self, _conf: Any, _network: Any) -> None:
        self._control = os.environ[VARIABLE]

    def validate_profile(self, metadata: Any) -> None:
        pass

    def can_separate(self, _partners: Any, _zones: Any) -> bool:
        return True

    def boot(self, request: Any) -> Machine:
        files = {name: one.reveal().decode() for name, one in request.files.items()}
        key, certificate = files["heartbeat.key"].strip(), files["server.pem"]
        address = self._ask(do="boot", amphora_id=request.amphora_id, key=key, certificate=certificate)
        return self._machine(request.amphora_id, address)

    def image(self, _tag: str | None) -> str | None:
        return "fleet"

    def machines(self) -> frozenset[str]:
        return frozenset(self._ask(do="machines"))

    def get(self, amphora_id: str) -> Machine | None:
        address = self._ask(do="get", amphora_id=amphora_id)
        return None if address is None else self._machine(amphora_id, address)

    def locations(self) -> dict[str, Location]:
        return {}

    def host_names(self, _name: str) -> frozenset[str]:
        return frozenset()

    def release_load_balancer(self, load_balancer_id: str) -> None:
        pass

    def attach(self, amphora_id: str, port: Any) -> None:
        pass

    def detach(self, amphora_id: str, port: Any) -> None:
        pass

    def destroy(self, amphora_id: str) -> None:
        self._ask(do="destroy", amphora_id=amphora_id)

    def _machine(self, amphora_id: str, address: str) -> Machine:
        state = MachineState.RUNNING
        return Machine(compute_id=amphora_id, state=state, management_address=address, image="fleet")

    def _ask(self, **request: Any) -> Any:
        return command(self._control, **request)


class FleetNetwork:
    """Networks with unlimited addresses; all ports follow from the ids of the amphorae."""

    supports: ClassVar[frozenset[str]] = frozenset()
    wiring: ClassVar[str] = "fleet"
    listener_rules = False
    listing_interval = 300.0

    def __init__(self, _conf: Any, _database: Any) -> None:
        pass

    def allocate_vip(self, load_balancer_id: str, project_id: str, wanted: Any, machines: Any = ()) -> Any:
        raise NotImplementedError("a simulated fleet creates no load balancers")

    def release_load_balancer(self, load_balancer_id: str) -> None:
        pass

    def apply_vip_options(self, *arguments: Any) -> None:
        pass

    def direct_answers_allowed(self, _port_ids: Any) -> bool:
        return True

    def ensure_port(self, request: Any) -> Any:
        return shape.port_of(request.amphora_id)

    def ports(self, amphora_id: str) -> tuple[Any, ...]:
        return (shape.port_of(amphora_id),)

    def delete_port(self, port_id: str) -> None:
        pass

    def owners(self) -> Owners:
        return Owners(amphorae=frozenset(), load_balancers=frozenset())

    def subnet(self, subnet_id: str, _project_id: str | None = None) -> Any:
        return shape.SUBNETS[subnet_id]
