# SPDX-License-Identifier: Apache-2.0
"""Many load balancers under load while their amphorae are replaced: their clients, and a counter."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import sqlalchemy as sa
from cloud import Cloud
from request_stream import request

from amphora_driver import config
from amphora_driver.database.tables import amphora
from amphora_driver.database.tables_fleet import failover, rotation_item
from amphora_driver.host import namespaces
from amphora_driver.store import rotations
from sandbox import topology

# Seconds between two requests of a client; half of that is the error of a measured outage.
_PAUSE = 0.1


class Clients:
    """One client per load balancer, with sequential requests, each over a new connection."""

    def __init__(self, cloud, balancers):
        self._cloud = cloud
        self._stopping = threading.Event()
        self.answered = {one.id: 0 for one in balancers}
        self.failed = {one.id: 0 for one in balancers}
        # The longest time without an answer, in seconds.
        self.outage = {one.id: 0.0 for one in balancers}
        self._threads = [threading.Thread(target=self._run, args=(one.id, one.vip_address)) for one in balancers]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self._cloud.until(lambda: all(number > 2 for number in self.answered.values()), "every client gets answers")
        return self

    def __exit__(self, *_):
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, name, address):
        host = namespaces.path(self._cloud.settings.host(topology.CLIENT))
        namespaces.run_inside(host, lambda: self._ask(name, address))

    def _ask(self, name, address):
        last = time.monotonic()
        while not self._stopping.wait(_PAUSE):
            if request(address, 1.0) == "200":
                now = time.monotonic()
                self.outage[name], last = max(self.outage[name], now - last), now
                self.answered[name] += 1
            else:
                self.failed[name] += 1


class Counting:
    """Polls the rows for the number of load balancers under concurrent replacement."""

    def __init__(self, database):
        self._database = database
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_turns = self.most_replaced = 0
        self.looks = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()
        assert self.looks > 10

    def _run(self):
        turns = sa.select(sa.func.count()).where(rotation_item.c.state == "running")
        # A draining amphora without VIPs only waits for its connections to end.
        going = amphora.c.state == "retiring", amphora.c.drains_until.is_(None)
        replaced = sa.select(sa.func.count(sa.distinct(amphora.c.load_balancer_id))).where(*going)
        while not self._stopping.wait(0.05):
            now = self._database.read(lambda c: (c.scalar(turns), c.scalar(replaced)))
            self.most_turns, self.most_replaced = max(self.most_turns, now[0]), max(self.most_replaced, now[1])
            self.looks += 1


class Fleet:
    """A cloud with load balancers, and an operator's view of its rotations."""

    def __init__(self, cloud):
        self.cloud = cloud
        self.settings = cloud.settings
        self.database = cloud.database

    def make(self, number, pairs, flavor):
        """Create load balancers with listener and pool, the first ones as pairs; wait for ACTIVE and ONLINE."""
        made = []
        for one in range(number):
            pool = {
                "name": "pool",
                "protocol": "HTTP",
                "lb_algorithm": "ROUND_ROBIN",
                "members": [self.cloud.member("member1")],
            }
            listener = {"name": "http", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
            more = {"flavor_id": flavor} if one < pairs else {}
            made.append(
                self.cloud.balancers.create_load_balancer(
                    name=f"rotated-{one}", vip_subnet_id=topology.VIP_SUBNET, listeners=[listener], **more
                )
            )
        time_limit = 60.0 + 10.0 * number
        for one in made:
            Cloud.until(lambda one=one: self.status(one) == ("ACTIVE", "ONLINE"), f"{one.name} is ONLINE", time_limit)
        return [self.cloud.balancers.get_load_balancer(one.id) for one in made]

    def status(self, balancer):
        found = self.cloud.balancers.get_load_balancer(balancer.id)
        return found.provisioning_status, found.operating_status

    def ctl(self, *words):
        """Run amphoractl; return its JSON output, if any."""
        shows = words[0] == "rotate" or words[-1] in ("list", "show") or "show" in words
        done = subprocess.run(
            [Path(sys.executable).with_name("amphoractl"), *words, *(("-f", "json") if shows else ())],
            env={**os.environ, config.FILE_VARIABLE: str(self.settings.driver_configuration)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if shows else None

    def rotate(self, most, **selection):
        """Request a rotation as the command does; return its number."""
        wanted = rotations.Selection(**selection)
        return self.database.write(lambda c: rotations.request_rotation(c, wanted, most, "a test")).id

    def rotation(self, number):
        return self.database.read(lambda c: rotations.get_rotation(c, number))

    def counts(self, number):
        return self.database.read(lambda c: rotations.count_items(c, number))

    def items(self, number):
        return self.database.read(lambda c: rotations.list_items(c, number))

    def ended(self, number, seconds):
        """Wait until the rotation has ended; a paused one fails with its reason."""

        def ask():
            found = self.rotation(number)
            assert found.state.value != "paused", found.reason
            return found if found.ended_at is not None else None

        return Cloud.until(ask, "the rotation has ended", seconds)

    def serving(self, balancers):
        """Return the amphorae of each load balancer that are not being replaced."""
        query = sa.select(amphora.c.load_balancer_id, amphora.c.id).where(amphora.c.state != "retiring")
        found = {one.id: set() for one in balancers}
        for row in self.database.read(lambda c: c.execute(query).all()):
            if row.load_balancer_id in found:
                found[row.load_balancer_id].add(row.id)
        return found

    def failovers(self, *rotation_ids):
        """Return the number of replaced amphorae for each load balancer."""
        query = (
            sa.select(failover.c.load_balancer_id, sa.func.count())
            .where(failover.c.rotation_id.in_(rotation_ids))
            .group_by(failover.c.load_balancer_id)
        )
        return dict(self.database.read(lambda c: c.execute(query).tuples().all()))
