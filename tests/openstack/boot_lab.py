# SPDX-License-Identifier: Apache-2.0
"""A deployment of the provider whose servers have no guests: real driver, controller, Nova and Neutron.

The test calls the driver as octavia-api does, and records the reports as octavia-driver-agent does. Between the
controller and the two services is a proxy that lets requests fail and kills the controller (`faulty_service.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress

import migrated
import sqlalchemy as sa
from cloud_lab import write_ini
from faulty_service import FaultyService
from octavia_lib.api.drivers import data_models, exceptions
from provider_stack import CONTROL
from whole_cloud import WITHOUT_GUEST

from amphora_driver import config, driver
from amphora_driver.controller import service
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job, object_status, vip_claim
from amphora_driver.host import namespaces
from amphora_driver.maintenance.housekeeping import Housekeeping
from amphora_driver.store import amphorae, status_outbox

DEPLOYMENT = "boots"
_CONTROLLER = "boots-controller"
_KILL_SECONDS = 30.0
# A request to Nova for this would use a tenth of the processor time of a boot.
_ACTIVE = sa.text("SELECT uuid FROM instances WHERE vm_state = 'active' AND deleted = 0")


class BootLab:
    """The deployment inside a with block.

    Args:
        stack: the other deployment of the cloud, which has the network of the amphorae and their image.
        faults: the faults of Nova and of Neutron, see `FaultyService`.
        options: options of the provider by group.

    Attributes:
        nova: the proxy of Nova; `neutron` is that of Neutron.
        starts: the times at which the controller was started (monotonic clock).
        active: the servers that run.
        ended: set when the test has failed or passed.
    """

    def __init__(self, stack, faults, options):
        self.starts, self.active, self.ended = [], frozenset(), threading.Event()
        self._stack = stack
        self._cloud = stack.cloud
        self._folder = stack.cloud.folder / DEPLOYMENT
        self._place = namespaces.path(stack.cloud.namespace(CONTROL))
        self._faults = faults
        self._options = options
        self._closing = ExitStack()
        self._killed = threading.Event()
        self._starting = threading.Lock()
        self._compute = stack.cloud.connect().compute
        self._nova_database = sa.create_engine(stack.cloud.databases["nova"])

    def __enter__(self):
        with self._closing:
            self._closing.callback(self._nova_database.dispose)
            self._folder.mkdir(mode=0o700)
            self.nova, self.neutron = (
                self._closing.enter_context(
                    FaultyService(self._cloud.ports[name], self._place, self._faults[name], self._kill)
                )
                for name in ("nova", "neutron")
            )
            self._file = self._folder / "boots.conf"
            write_ini(self._file, self._all_options())
            url = f"sqlite:///{self._folder}/boots.sqlite"
            migrated.write(url)
            self.database = Database(url)
            self._closing.callback(self.database.dispose)
            self._load_driver()
            self._start_controller()
            self._closing.callback(lambda: self._cloud.kill(_CONTROLLER))
            self._closing = self._closing.pop_all()
        return self

    def __exit__(self, *_):
        self._closing.close()

    def _all_options(self):
        found = self._stack.provider_options()
        ours = {
            "amp_database": {"connection": f"sqlite:///{self._folder}/boots.sqlite"},
            "amp_queue": {"socket_dir": self._folder / "sockets"},
            "amp_openstack": {
                "deployment_id": DEPLOYMENT,
                "compute_endpoint_override": f"{self.nova.address}/v2.1",
                "network_endpoint_override": self.neutron.address,
            },
            "amp_compute_nova": {"flavor": WITHOUT_GUEST},
        }
        for group in {*ours, *self._options}:
            found[group] = {**found.get(group, {}), **ours.get(group, {}), **self._options.get(group, {})}
        return found

    def _load_driver(self):
        """Load the driver with the file of this deployment, as octavia-api does at its start."""
        former = os.environ.get(config.FILE_VARIABLE)
        os.environ[config.FILE_VARIABLE] = str(self._file)
        for cached in (config.shared, driver._shared):
            cached.cache_clear()
        self._driver = driver.AmphoraProviderDriver()
        self._closing.callback(self._unload_driver, former)

    def _unload_driver(self, former):
        shared = driver._shared()
        adapter = shared.catalogue.network(None)._neutron._service._adapter
        if adapter is not None:
            # An open socket would fail a later test of this process with a ResourceWarning.
            adapter.session.session.close()
        shared.database.dispose()
        os.environ.pop(config.FILE_VARIABLE)
        if former is not None:
            os.environ[config.FILE_VARIABLE] = former
        for cached in (config.shared, driver._shared):
            cached.cache_clear()

    # --- the controller ---------------------------------------------------------------------------------------------

    def _start_controller(self):
        self._killed.clear()
        self.starts.append(time.monotonic())
        environment = {**os.environ, config.FILE_VARIABLE: str(self._file), "PYTHONUNBUFFERED": "1"}
        argv = ["nsenter", f"--net={self._place}", "--", sys.executable, "-m", service.__name__]
        self._cloud.run(_CONTROLLER, argv, environment)

    def _kill(self):
        """Kill the controller, called by a thread of a proxy; False if it is killed. `step` starts another one."""
        with self._starting:
            if self._killed.is_set():
                return False
            process = self._cloud._processes[_CONTROLLER]
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILL_SECONDS)
            self._killed.set()
        return True

    @contextmanager
    def until_the_end(self):
        """Set `ended` after the block: the threads of users must not wait if the block fails."""
        try:
            yield
        finally:
            self.ended.set()

    def step(self):
        """Do what other programs do beside the controller: restart it, report to Octavia, read which servers run."""
        with self._starting:
            if self._killed.is_set():
                # A process ends with the thread that has started it, so this thread starts it.
                self._cloud.kill(_CONTROLLER)
                self._start_controller()

        def report(connection):
            connection.execute(job.update().values(committed=job.c.generation))
            status_outbox.mark_reported(connection, status_outbox.list_due_reports(connection, 1000))

        self.database.write(report)
        with self._nova_database.connect() as connection:
            self.active = frozenset(connection.execute(_ACTIVE).scalars())

    # --- load balancers ---------------------------------------------------------------------------------------------

    def create(self, user):
        """Create a load balancer on the user's network as octavia-api does; None if its VIPs fail."""
        load_balancer_id = str(uuid.uuid4())
        wanted = {"vip_subnet_id": user.front_subnet.id, "vip_network_id": user.front.id}
        try:
            found, _ = self._call(lambda: self._driver.create_vip_port(load_balancer_id, user.project_id, wanted, []))
        except exceptions.DriverError:
            return None
        made = data_models.LoadBalancer(
            loadbalancer_id=load_balancer_id, project_id=user.project_id, name="boots", admin_state_up=True,
            additional_vips=[], **found,
        )  # fmt: skip
        self._call(lambda: self._driver.loadbalancer_create(made))
        return load_balancer_id

    def claim(self, user):
        """Allocate the VIPs of a load balancer that Octavia does not create."""
        wanted = {"vip_subnet_id": user.front_subnet.id, "vip_network_id": user.front.id}
        with suppress(exceptions.DriverError):
            self._call(lambda: self._driver.create_vip_port(str(uuid.uuid4()), user.project_id, wanted, []))

    def delete(self, load_balancer_id):
        """Delete a load balancer as octavia-api does."""
        known = data_models.LoadBalancer(loadbalancer_id=load_balancer_id)
        self._call(lambda: self._driver.loadbalancer_delete(known))

    def _call(self, work):
        """Call the driver in the namespace of the controller, where the proxies listen."""
        return namespaces.run_inside(self._place, work)

    def booted(self, load_balancer_id):
        """The servers of the amphorae of a load balancer."""
        found = self.database.read(lambda c: amphorae.load_amphorae(c, load_balancer_id))
        return {one.compute_id for one in found} - {None}

    def exists(self, load_balancer_id):
        """Whether the load balancer is recorded."""
        mine = sa.select(job.c.generation).where(job.c.load_balancer_id == load_balancer_id)
        return self.database.read(lambda c: c.execute(mine).first()) is not None

    # --- what is left -----------------------------------------------------------------------------------------------

    def servers(self):
        """The servers of the deployment in Nova."""
        return list(self._compute.servers(tags=f"amphora-deployment:{DEPLOYMENT}"))

    def rows(self):
        """The rows of load balancers and amphorae, without claims."""
        tables = job, amphora, object_status
        return self.database.read(lambda c: [row for table in tables for row in c.execute(sa.select(table))])

    def claims(self):
        """The load balancers with a claim."""
        return self.database.read(lambda c: c.execute(sa.select(vip_claim.c.load_balancer_id)).scalars().all())

    def release_unused_vips(self):
        """Run this part of the housekeeping as if the claims were old."""
        conf = config.shared()
        conf.set_override("forget_vip_after", 0, "amp_controller")
        catalogue = driver._shared().catalogue
        housekeeping = Housekeeping(conf, self.database, catalogue, "a test", None)
        self._call(housekeeping.release_unused_vips)

    def log(self):
        """The end of the controller's log."""
        return self._cloud.log(_CONTROLLER)
