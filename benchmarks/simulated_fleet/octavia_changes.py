# SPDX-License-Identifier: Apache-2.0
"""Changes of members as Octavia's API makes them: rows and provider call in one transaction. A process of its own.

    python -m simulated_fleet.octavia_changes OPTIONS

`OPTIONS` is a JSON object, see `Plan`. The process prints one line of JSON for each change. Octavia's API itself does
not run, because it needs more processor time than all other processes together.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from octavia.common import service
from octavia.db import api, models
from octavia_lib.api.drivers import data_models

from amphora_driver.driver import AmphoraProviderDriver
from sandbox import octavia_start
from simulated_fleet import shape

_BUSY_PAUSE = 0.1
_PATIENCE = 60.0
_CREATE, _UPDATE, _DELETE = "create", "update", "delete"
_BALANCER, _LISTENER, _POOL, _MEMBER = (
    one.__table__ for one in (models.LoadBalancer, models.Listener, models.Pool, models.Member)
)


@dataclass(frozen=True)
class Plan:
    """The options.

    Attributes:
        numbers: the load balancers that change in turn.
        per_minute: number of changes in a minute.
        seconds: duration.
        large: a load balancer that changes again and again, each time as soon as Octavia permits it.
        first: number of the first new member; runs in one deployment need different ones.
    """

    numbers: list[int]
    per_minute: float
    seconds: float
    threads: int = 8
    large: int | None = None
    first: int = 0


class Changer:
    """Creates, updates and deletes one member of each load balancer, in this order."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._driver = AmphoraProviderDriver()
        self._engine = api.get_engine()
        self._steps = {number: itertools.count() for number in plan.numbers}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Make the changes at their times; a change that waits for an earlier one delays no other load balancer."""
        plan, begun = self._plan, time.monotonic()
        ended = threading.Event()
        large = threading.Thread(target=self._repeat, args=(plan.large, ended)) if plan.large is not None else None
        if large is not None:
            large.start()
        pause, numbers = 60.0 / plan.per_minute, itertools.cycle(plan.numbers)
        with ThreadPoolExecutor(plan.threads) as pool:
            for place in range(int(plan.seconds / pause)):
                time.sleep(max(0.0, begun + place * pause - time.monotonic()))
                pool.submit(self._change, next(numbers))
        ended.set()
        if large is not None:
            large.join()

    def _repeat(self, number: int, ended: threading.Event) -> None:
        self._steps[number] = itertools.count()
        while not ended.is_set():
            self._change(number)

    def _change(self, number: int) -> None:
        step = next(self._steps[number])
        try:
            self._attempt(number, step)
        except Exception as error:  # noqa: BLE001 - each failure is part of the result
            self._fail(number, step, f"{type(error).__name__}: {error}"[:300])

    def _fail(self, number: int, step: int, error: str) -> None:
        """Print a failure. The next change of this load balancer has a new member, as the state of this is unknown."""
        self._steps[number] = itertools.count(3 * (step // 3 + 1))
        self._print({"number": number, "error": error, "at": time.time()})

    def _attempt(self, number: int, step: int) -> None:
        kind, begun, busy = (_CREATE, _UPDATE, _DELETE)[step % 3], time.time(), 0
        while not (took := self._try(number, kind, self._plan.first + step // 3)):
            # Octavia's API answers 409 meanwhile, and its clients try again.
            busy += 1
            if time.time() > begun + _PATIENCE:
                self._fail(number, step, "not ACTIVE in time")
                return
            time.sleep(_BUSY_PAUSE)
        self._print({"number": number, "kind": kind, "at": time.time(), "call": took, "busy": busy})

    def _try(self, number: int, kind: str, index: int) -> float | None:
        """Return the seconds of the driver's call; None if the load balancer is not ACTIVE."""
        own, pool = shape.identifier("lb", number), shape.identifier("pool", number, 0)
        member = shape.identifier("changed", number, index)
        pending = {"provisioning_status": "PENDING_UPDATE"}
        with self._engine.begin() as connection:
            active = sa.and_(_BALANCER.c.id == own, _BALANCER.c.provisioning_status == "ACTIVE")
            if not connection.execute(_BALANCER.update().where(active).values(**pending)).rowcount:
                return None
            connection.execute(_LISTENER.update().where(_LISTENER.c.default_pool_id == pool).values(**pending))
            connection.execute(_POOL.update().where(_POOL.c.id == pool).values(**pending))
            self._write_member(connection, kind, member, number, index)
            begun = time.monotonic()
            self._call(kind, member, number, index)
            return time.monotonic() - begun

    def _write_member(self, connection: Any, kind: str, member: str, number: int, index: int) -> None:
        if kind == _CREATE:
            values = {"id": member, "pool_id": shape.identifier("pool", number, 0), "name": "changed", "backup": False}
            values |= {"ip_address": _address(index), "protocol_port": 8080, "weight": 1, "enabled": True}
            values |= {"project_id": f"{number % shape.PROJECTS:032x}", "operating_status": "NO_MONITOR"}
            connection.execute(_MEMBER.insert().values(provisioning_status="PENDING_CREATE", **values))
        else:
            own = _MEMBER.update().where(_MEMBER.c.id == member)
            changed = {"weight": 2} if kind == _UPDATE else {}
            status = "PENDING_UPDATE" if kind == _UPDATE else "PENDING_DELETE"
            connection.execute(own.values(provisioning_status=status, **changed))

    def _call(self, kind: str, member: str, number: int, index: int) -> None:
        pool = shape.identifier("pool", number, 0)
        if kind == _CREATE:
            new = {"address": _address(index), "protocol_port": 8080, "weight": 1, "backup": False, "name": "changed"}
            new |= {"admin_state_up": True, "project_id": f"{number % shape.PROJECTS:032x}"}
            self._driver.member_create(data_models.Member(member_id=member, pool_id=pool, **new))
        elif kind == _UPDATE:
            self._driver.member_update(None, data_models.Member(member_id=member, pool_id=pool, weight=2))
        else:
            self._driver.member_delete(data_models.Member(member_id=member, pool_id=pool))

    def _print(self, line: dict[str, Any]) -> None:
        with self._lock:
            print(json.dumps(line), flush=True)


def _address(index: int) -> str:
    return f"10.250.{index >> 8 & 255}.{index & 255}"


if __name__ == "__main__":
    octavia_start.prepare()
    service.prepare_service(["fleet", "--config-file", os.environ["OCTAVIA_CONF"]])
    Changer(Plan(**json.loads(sys.argv[1]))).run()
