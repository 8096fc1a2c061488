# SPDX-License-Identifier: Apache-2.0
"""Octavia's own provider `amphora` beside this one: worker, health manager, housekeeping, and amphorae with its agent.

The programs are those of the package `octavia`, unchanged. They run on the management network, as this provider's
controller does. `guests.py` starts the amphorae, because their image has the name of `INCUMBENT_IMAGE`.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from cloud_lab import merged, write_ini
from cryptography.hazmat.primitives import serialization
from guests import INCUMBENT_IMAGE
from provider_stack import CONTROL, HERE, has_udp_port, write_private

from amphora_driver.certificates.ca import Authority
from amphora_driver.database.tables_fleet import adoption
from amphora_driver.host import namespaces
from amphora_driver.secret import Secret

PROGRAMS = ("octavia-worker", "octavia-health-manager", "octavia-housekeeping")
HEARTBEAT_PORT = 5555
# Seconds. A former amphora that is silent for so long would be replaced.
HEARTBEAT_TIMEOUT = 20
_KEY = "a key of the operator"
_POLLING = HERE.parent / "dataplane/polling_client.py"
# Below the second after which a client repeats a lost SYN, so that each loss counts.
_REQUEST_SECONDS = 0.9
# Clients can have the MAC address of a former amphora for a minute.
_ANSWER_SECONDS = 90.0


class IncumbentStack:
    """Octavia's provider on a started `ProviderStack`, which can adopt its load balancers.

    Attributes:
        octavia: the engine of Octavia's database.
    """

    def __init__(self, stack):
        self.stack, self.cloud = stack, stack.cloud
        self.octavia = sa.create_engine(stack.cloud.databases["octavia"])
        # Each read begins a transaction, and must see the latest commits of the controller.
        self._provider = sa.create_engine(stack.database_url, isolation_level="READ COMMITTED")
        self._configuration = stack.folder / "incumbent.conf"

    def start(self):
        """Start the three programs, and restart the others with the options for both providers."""
        stack = self.stack
        stack.incumbent = True
        stack.options = {**stack.options, "amp_adoption": {"octavia_connection": self.cloud.databases["octavia"]}}
        self.cloud.connect().image.create_image(
            name=INCUMBENT_IMAGE, data=b"no guest reads it", disk_format="raw", container_format="bare",
            tags=[INCUMBENT_IMAGE],
        )  # fmt: skip
        # The default quota of Nova is ten servers.
        quota = dict.fromkeys(("instances", "cores", "ram", "server_groups", "server_group_members"), -1)
        self.cloud.connect("admin", "admin").compute.update_quota_set(self.cloud.projects["service"], **quota)
        write_ini(stack.configuration, stack.provider_options())
        write_ini(stack.octavia_configuration, stack.octavia_options())
        write_ini(self._configuration, self._options())
        if "octavia-worker" in self.cloud.running():
            self.cloud.kill("octavia-worker")
        for name in PROGRAMS:
            self._serve(name)
        # A request that the API sends before the queue of the worker exists is lost.
        ready = {
            "octavia-worker": lambda: "Starting V2 consumer" in self.cloud.log("octavia-worker"),
            "octavia-health-manager": lambda: has_udp_port(self.cloud.namespace(CONTROL), HEARTBEAT_PORT),
        }
        for name, question in ready.items():
            self.cloud.until(name, question)
        for name in ("octavia", "amphora-controller"):
            stack.restart(name)

    def stop(self):
        """End the three programs."""
        for name in PROGRAMS:
            self.cloud.kill(name)
        self.octavia.dispose()
        self._provider.dispose()

    def _serve(self, name):
        program = Path(sys.executable).parent / name
        words = [word for file in (self.stack.octavia_configuration, self._configuration)
                 for word in ("--config-file", file)]  # fmt: skip
        place = namespaces.path(self.cloud.namespace(CONTROL))
        argv = ["nsenter", f"--net={place}", "--", program, *words]
        self.cloud.run(name, argv, {**os.environ, "PYTHONUNBUFFERED": "1"})

    def _options(self):
        """The options of Octavia's three programs."""
        stack, place = self.stack, self.stack.folder
        options = stack.worker_options()
        key = serialization.load_pem_private_key((place / "incumbent.key").read_bytes(), self.cloud.password.encode())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        authority = Authority((place / "incumbent.pem").read_bytes(), Secret(pem))
        write_private(place / "incumbent-client.pem", authority.issue_client("octavia", 30).bundle().reveal())
        address = stack.deployment.control
        ours = {
            "controller_worker": {
                "amphora_driver": "amphora_haproxy_rest_driver",
                "amp_image_tag": INCUMBENT_IMAGE,
                "amp_image_owner_id": stack.deployment.project_id,
                # A busy machine needs minutes for several boots.
                "amp_active_retries": 300,
            },
            "haproxy_amphora": {
                "client_cert": place / "incumbent-client.pem",
                "server_ca": place / "incumbent.pem",
                "connection_max_retries": 240,
                "connection_retry_interval": 1,
                # HAProxy opens two files for each connection; this machine may limit a process to 20,000 files.
                "default_connection_limit": 2000,
            },
            "health_manager": {
                "bind_ip": address,
                "bind_port": HEARTBEAT_PORT,
                "heartbeat_key": _KEY,
                "heartbeat_interval": 2,
                "heartbeat_timeout": HEARTBEAT_TIMEOUT,
                "health_check_interval": 2,
                "controller_ip_port_list": f"{address}:{HEARTBEAT_PORT}",
            },
            "house_keeping": {"cleanup_interval": 5, "cert_interval": 5},
        }
        return merged(options, ours)

    # --- Octavia's tables -------------------------------------------------------------------------------------------

    def rows(self, balancer_id):
        """The rows of the amphorae of a load balancer, without their times."""
        query = sa.text("SELECT * FROM amphora WHERE load_balancer_id = :id ORDER BY id")
        with self.octavia.connect() as connection:
            found = [dict(one) for one in connection.execute(query, {"id": balancer_id}).mappings()]
        return [{key: value for key, value in one.items() if key not in ("updated_at", "created_at")} for one in found]

    def health(self, amphora_id):
        """The row of the heartbeats of an amphora, or None."""
        query = sa.text("SELECT * FROM amphora_health WHERE amphora_id = :id")
        with self.octavia.connect() as connection:
            return connection.execute(query, {"id": amphora_id}).mappings().first()

    # --- adoptions --------------------------------------------------------------------------------------------------

    def adopt(self, *words):
        """Run `amphoractl loadbalancer adopt`; return its output."""
        return self.stack.amphoractl("loadbalancer", "adopt", *words)

    def plan(self, *words):
        """The steps and texts of a plan."""
        found = json.loads(self.adopt("plan", *words, "-f", "json"))
        return [(one["Step"], one["Action"]) for one in found]

    def steps(self):
        """The steps of all adoptions by load balancer, and whether some of those that wait are paused."""
        with self._provider.connect() as connection:
            found = connection.execute(sa.select(adoption.c.load_balancer_id, adoption.c.step, adoption.c.paused)).all()
        return {one.load_balancer_id: one.step for one in found}, any(
            one.paused and one.step == "waiting" for one in found
        )

    def step(self, balancer_id):
        """The step and the reason of an adoption."""
        columns = (adoption.c.step, adoption.c.reason)
        [found] = self.stack.read(sa.select(*columns).where(adoption.c.load_balancer_id == balancer_id))
        return found.step, found.reason


class Requests:
    """Requests every `interval` seconds, while the block runs (`polling_client.py`).

    Args:
        cloud: the cloud.
        address: a VIP.
        port: the port of the listener.
        host: the client.
        mode: empty for HTTP, else a mode of the program.
        interval: seconds.

    Attributes:
        found: start (s), duration (s) and result of each request, from the first answer on. A new pair of Octavia takes
            its VIPs seconds after it is ACTIVE, because keepalived first checks HAProxy twice.
    """

    def __init__(self, cloud, address, port=80, host="client", *, mode="", interval=0.01):
        place = namespaces.path(cloud.namespace(host))
        words = [sys.executable, _POLLING, address, port, interval, _REQUEST_SECONDS, *([mode] if mode else [])]
        self._argv = ["nsenter", f"--net={place}", "--", *map(str, words)]
        self._answer = "echo" if mode in ("datagram", "flow") else "200"
        self.mode = mode
        self.found = []

    @contextmanager
    def running(self):
        """Send requests while the block runs."""
        with self._answered() as process:
            yield self
            said, _ = process.communicate(timeout=60)
        found = json.loads(said)
        served = [began for began, _, result in found if result == self._answer]
        self.found = [one for one in found if one[0] >= served[0]]

    def await_answer(self):
        """Wait until a further client on the host gets an answer."""
        with self._answered():
            pass

    @contextmanager
    def _answered(self):
        """Run the program; the block begins after the first answer."""
        process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert select.select([process.stdout], [], [], _ANSWER_SECONDS)[0], f"no answer: {self._argv}"
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                process.communicate()

    @property
    def outage(self):
        """The longest time between two successful requests (their starts), in seconds."""
        moments = [began for began, _, result in self.found if result == self._answer]
        return max(after - before for before, after in itertools.pairwise(moments))

    @property
    def failed(self):
        """The number of requests in `found` without an answer of a member."""
        return sum(result != self._answer for _, _, result in self.found)

    @property
    def is_served(self):
        """Whether one of the last requests has been answered. On a busy machine, one may run into its time limit."""
        return any(result == self._answer for _, _, result in self.found[-50:])
