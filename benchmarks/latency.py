# SPDX-License-Identifier: Apache-2.0
"""Measures the latency of API operations for a user, in a separate sandbox with the real Octavia API.

    .sandbox/venv/bin/python benchmarks/latency.py [--state DIR] [--times N]

Prints, in milliseconds, p50, p90 and the worst of:

* POST member: until Octavia's response; until the first response of the new member to a client; until ACTIVE
* a change of members: from the record in the provider's transaction until the first step of a controller (in whole
  milliseconds, from its log; the controller reads job, lease and tree before)
* POST loadbalancer (alone): until Octavia's response; until ACTIVE
* POST loadbalancer (with listener, pool, members): until ACTIVE; until the first response to a client
"""

import argparse
import datetime as dt
import http.client
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import sqlalchemy as sa

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import request
from amphora_driver.host import namespaces
from sandbox import demo, topology
from sandbox import settings as sandbox_settings
from sandbox.stack import Stack

_PATIENCE = 60.0
_AGENT = Path(__file__).parent.parent / ".sandbox" / "agent-venv" / "bin" / "python"


def main():
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, help="state directory of the sandbox; default: a temporary one")
    parser.add_argument("--times", type=int, default=20, help="repetitions of the member measurement")
    parser.add_argument("--agent-python", default=str(_AGENT), help="Python interpreter of the agents")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adb-") as folder:
        settings = sandbox_settings.load_or_create_settings(chosen.state or Path(folder), None, chosen.agent_python)
        stack = Stack(settings)
        try:
            stack.up()
            _measure(stack, chosen.times)
        finally:
            stack.down()
    return 0


def _measure(stack, times):
    settings = stack.settings
    connection = demo.connect(settings)
    balancers = connection.load_balancer
    rows = {}
    alone = []
    for number in range(5):
        began = time.perf_counter()
        made = balancers.create_load_balancer(name=f"alone-{number}", vip_subnet_id=topology.VIP_SUBNET)
        _note(rows, "loadbalancer: accepted", began)
        _until_active(balancers, made.id)
        _note(rows, "loadbalancer: ACTIVE", began)
        alone.append(made)
    for made in alone:
        balancers.delete_load_balancer(made.id)
    for number in range(3):
        name = f"whole-{number}"
        began = time.perf_counter()
        made = balancers.create_load_balancer(
            name=name, vip_subnet_id=topology.VIP_SUBNET, listeners=[_listener(name, topology.MEMBERS)]
        )
        watch = _Watch(settings, made.vip_address, lambda answer: answer is not None)
        _until_active(balancers, made.id)
        _note(rows, "whole tree: ACTIVE", began)
        watch.wait()
        rows.setdefault("whole tree: first answer", []).append((watch.seen_at - began) * 1e3)
        balancers.delete_load_balancer(made.id, cascade=True)
    _begun(stack, _members(settings, balancers, rows, times), rows)
    print(f"{'milliseconds':34}{'p50':>8}{'p90':>8}{'worst':>8}{'n':>5}")
    for name, values in rows.items():
        values.sort()
        high = values[min(len(values) - 1, round(0.9 * len(values)))]
        print(f"{name:34}{statistics.median(values):8.0f}{high:8.0f}{values[-1]:8.0f}{len(values):5}")


def _members(settings, balancers, rows, times):
    """Create a pool with two members, then add and remove a third; returns the load balancer's id."""
    first = dict(list(topology.MEMBERS.items())[:2])
    made = balancers.create_load_balancer(
        name="members", vip_subnet_id=topology.VIP_SUBNET, listeners=[_listener("members", first)]
    )
    _until_active(balancers, made.id)
    pool = next(iter(balancers.pools(loadbalancer_id=made.id)))
    for _ in range(times):
        watch = _Watch(settings, made.vip_address, lambda answer: answer == "member3")
        began = time.perf_counter()
        member = balancers.create_member(
            pool, address=f"192.0.2.{topology.MEMBERS['member3']}", protocol_port=8080,
            subnet_id=topology.MEMBER_SUBNET,
        )  # fmt: skip
        _note(rows, "member: accepted", began)
        _until_active(balancers, made.id)
        _note(rows, "member: ACTIVE", began)
        watch.wait()
        rows.setdefault("member: first request served", []).append((watch.seen_at - began) * 1e3)
        balancers.delete_member(member, pool)
        _until_active(balancers, made.id)
    return made.id


def _begun(stack, load_balancer_id, rows):
    """The delay of each change until the controller's first step."""
    mine = sa.select(request.c.generation, request.c.accepted_at).where(
        request.c.load_balancer_id == load_balancer_id, request.c.action.in_(("create member", "delete member"))
    )
    database = Database(stack.settings.database_url)
    accepted = dict(map(tuple, database.read(lambda connection: connection.execute(mine).all())))
    database.dispose()
    line = rf"^(\S+ \S+) .*\[lb={load_balancer_id} gen=(\d+)\] .*: the controller starts step Push "
    step = re.compile(line, re.MULTILINE)
    for at, generation in step.findall(stack.supervision.log("amphora-controller").read_text(encoding="utf-8")):
        # Use the first push only: it may be repeated.
        since = accepted.pop(int(generation), None)
        if since is not None:
            waited = dt.datetime.fromisoformat(at).timestamp() - since
            rows.setdefault("member: accepted until begun", []).append(waited * 1e3)


class _Watch:
    """A client that repeats a request until it gets the expected response."""

    def __init__(self, settings, address, wanted):
        self.seen_at = 0.0
        self._arguments = (settings, address, wanted)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self):
        self._thread.join()

    def _run(self):
        settings, address, wanted = self._arguments
        # One thread stays in the client's namespace, because entering it costs more than a request.
        namespaces.run_inside(namespaces.path(settings.host(topology.CLIENT)), lambda: self._ask(address, wanted))

    def _ask(self, address, wanted):
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if wanted(_answer(address)):
                self.seen_at = time.perf_counter()
                return
            time.sleep(0.005)


def _answer(address):
    connection = http.client.HTTPConnection(address, 80, timeout=2)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        body = answer.read().decode().strip()
    except (OSError, http.client.HTTPException):
        return None
    else:
        return body if answer.status == 200 else None
    finally:
        connection.close()


def _listener(name, members):
    return {
        "name": f"{name}-http",
        "protocol": "HTTP",
        "protocol_port": 80,
        "default_pool": {
            "name": f"{name}-pool",
            "protocol": "HTTP",
            "lb_algorithm": "ROUND_ROBIN",
            "members": [
                {"address": f"192.0.2.{number}", "protocol_port": 8080, "subnet_id": topology.MEMBER_SUBNET}
                for number in members.values()
            ],
        },
    }


def _until_active(balancers, load_balancer_id):
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        found = balancers.get_load_balancer(load_balancer_id).provisioning_status
        if found == "ACTIVE":
            return
        assert found != "ERROR", "the load balancer is in ERROR"
        # Poll slowly: frequent requests would load the API.
        time.sleep(0.02)
    raise AssertionError("not ACTIVE in time")


def _note(rows, name, began):
    rows.setdefault(name, []).append((time.perf_counter() - began) * 1e3)


if __name__ == "__main__":
    sys.exit(main())
