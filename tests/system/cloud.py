# SPDX-License-Identifier: Apache-2.0
"""Creates load balancers through Octavia's API, waits for them, and sends client requests."""

import http.client
import time
from collections import Counter
from contextlib import contextmanager, suppress

import sqlalchemy as sa
from openstack.exceptions import NotFoundException

from amphora_driver.database import tables
from amphora_driver.errors import StoreError
from amphora_driver.host import namespaces
from amphora_driver.store import amphorae, circuit_breaker, status_outbox
from sandbox import demo, topology

TIME_LIMIT = 60.0


class Cloud:
    """One sandbox as a user sees it.

    Args:
        settings: the sandbox's.
        connection: openstacksdk's.
        database: the provider's own.
    """

    def __init__(self, settings, connection, database):
        self.database = database
        self.settings = settings
        self.connection = connection
        self.balancers = connection.load_balancer

    # --- creation -----------------------------------------------------------------------------------------------------

    def load_balancer(self, name, **more):
        made = self.balancers.create_load_balancer(name=name, **{"vip_subnet_id": topology.VIP_SUBNET, **more})
        return self.active(made.id)

    def served(self, name, members=("member1", "member2"), *, monitor=None, listener=None, **more):
        """Create a load balancer with one listener and pool in one request; wait for ACTIVE."""
        pool = {
            "name": f"{name}-pool",
            "protocol": "HTTP",
            "lb_algorithm": "ROUND_ROBIN",
            "members": [self.member(one) for one in members],
        }
        if monitor:
            pool["healthmonitor"] = monitor
        values = {"name": f"{name}-http", "protocol": "HTTP", "protocol_port": 80, "default_pool": pool}
        return self.load_balancer(name, listeners=[{**values, **(listener or {})}], **more)

    @staticmethod
    def member(name, **more):
        number = topology.MEMBERS[name]
        values = {
            "name": name,
            "address": f"192.0.2.{number}",
            "protocol_port": 8080,
            "subnet_id": topology.MEMBER_SUBNET,
        }
        return {**values, **more}

    def pool_of(self, balancer):
        return next(iter(self.balancers.pools(loadbalancer_id=balancer.id)))

    def listener_of(self, balancer):
        return next(iter(self.balancers.listeners(load_balancer_id=balancer.id)))

    def url(self, path):
        """Return the URL of a resource without a method in openstacksdk."""
        return f"{self.settings.endpoint}/v2.0/lbaas/{path}"

    def put(self, path, body):
        """Update attributes that openstacksdk does not know."""
        answer = self.balancers.put(self.url(path), json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path, body):
        """Create an object with attributes that openstacksdk does not know."""
        answer = self.balancers.post(self.url(path), json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def amphorae(self, balancer):
        """Return the ids of the amphorae of a load balancer."""
        return set(self.database.read(lambda c: [one.id for one in amphorae.load_amphorae(c, balancer.id)]))

    def clean(self):
        """Delete every load balancer in any state."""
        there = list(self.balancers.load_balancers())
        for balancer in there:
            self.await_report(balancer.id)
            # The test may have requested its deletion already.
            with suppress(NotFoundException):
                self.until(
                    lambda one=balancer: (
                        self.balancers.get_load_balancer(one.id).provisioning_status in ("ACTIVE", "ERROR")
                    ),
                    f"{balancer.name} can be deleted",
                )
                self.balancers.delete_load_balancer(balancer.id, cascade=True)
        for balancer in there:
            self.await_report(balancer.id)
        self.until(lambda: not list(self.balancers.load_balancers()), "all load balancers are deleted")
        # Octavia keeps listeners that the provider does not report as DELETED.
        assert [one.name for one in self.balancers.listeners()] == []

    @contextmanager
    def without_automatic_failover(self):
        """Disable automatic fail-over in this block, so that a test can keep an amphora silent."""
        self.database.write(
            lambda c: circuit_breaker.hold_breaker_open(c, "a test keeps an amphora silent", self.database.now())
        )
        try:
            yield
        finally:
            self.database.write(lambda c: circuit_breaker.close_breaker(c, "the test is over", self.database.now()))

    # --- waiting ------------------------------------------------------------------------------------------------------

    @staticmethod
    def until(question, what, seconds=TIME_LIMIT):
        """Poll until the result is true; return it.

        The interval grows: an answer of Octavia's API takes ten milliseconds or more of processor time.
        """
        begun = time.monotonic()
        while True:
            answer = question()
            if answer:
                return answer
            waited = time.monotonic() - begun
            assert waited < seconds, f"not in {seconds:.0f} s: {what}"
            time.sleep(min(max(0.1, waited / 5), 0.3))

    def await_report(self, load_balancer_id):
        """Wait until the last request is reported to Octavia, or an attempt has failed.

        It reads the provider's database, because an answer of Octavia's API takes 20 times as much processor time.
        It makes no assertion, because every caller polls Octavia's API afterwards.
        """
        mine = sa.select(tables.job).where(tables.job.c.load_balancer_id == load_balancer_id)

        def reported(connection):
            row = connection.execute(mine).one_or_none()
            if row is None or row.error is not None:
                return True
            told = row.applied >= row.generation and row.committed >= row.generation and not row.read_back
            return told and not any(
                one.load_balancer_id == load_balancer_id for one in status_outbox.list_due_reports(connection, 100)
            )

        deadline = time.monotonic() + TIME_LIMIT
        while time.monotonic() < deadline:
            try:
                if self.database.read(reported):
                    return
            except StoreError:  # a test may have stopped the database
                return
            time.sleep(0.05)

    def active(self, load_balancer_id):
        self.await_report(load_balancer_id)

        def ask():
            found = self.balancers.get_load_balancer(load_balancer_id)
            assert found.provisioning_status != "ERROR", "the load balancer is in ERROR"
            return found if found.provisioning_status == "ACTIVE" else None

        return self.until(ask, "the load balancer is ACTIVE")

    def online(self, load_balancer_id):
        return self.operating(lambda: self.balancers.get_load_balancer(load_balancer_id), "ONLINE")

    def operating(self, fetch, status):
        return self.until(lambda: (found := fetch()).operating_status == status and found, f"the status is {status}")

    def gone(self, load_balancer_id):
        self.await_report(load_balancer_id)
        self.until(
            lambda: all(one.id != load_balancer_id for one in self.balancers.load_balancers()),
            "the load balancer is deleted",
        )

    # --- client requests ----------------------------------------------------------------------------------------------

    def get(self, address, path="/", port=80, host=topology.CLIENT):
        return demo.get(self.settings, address, path, port, host)

    def answers(self, address, number=12, port=80):
        """Count answers of this number of requests by member, one per connection; failures by their error."""

        def ask():
            return Counter(_answer(address, port) for _ in range(number))

        return namespaces.run_inside(namespaces.path(self.settings.host(topology.CLIENT)), ask)

    def balanced(self, address, weights):
        """Assert that requests follow these weights exactly after HAProxy's first round."""
        rounds = 4
        wanted = {name: weight * rounds for name, weight in weights.items()}
        self.until(lambda: self.answers(address, sum(wanted.values())) == wanted, f"the weights are {weights}", 30)


def _answer(address, port):
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        body = answer.read().decode().strip()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    else:
        return body if answer.status == 200 else str(answer.status)
    finally:
        connection.close()
