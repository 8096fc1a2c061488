# SPDX-License-Identifier: Apache-2.0
"""A complete OpenStack on loopback: Keystone, Neutron, Placement, Glance, Nova with two compute hosts, and Barbican.

`provider_stack.py` adds Octavia with the provider `haproxy`. Invariant: each process ends with this one. All namespaces
have the prefix of the cloud, and all files are in its folder. The compute hosts run real amphorae (`hypervisor.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path

import claimed
import mariadb
import rabbitmq
import sqlalchemy as sa
from cloud_lab import HERE, VENV, run_command, write_ini
from plugins import lab_socket
from whole_cloud_options import ServiceOptions

from amphora_driver.host import namespaces

ZONES = {"compute0": "az1", "compute1": "az2"}
FLAVOR, IMAGE_TAG = "amphora", "amphora"
# Flavors of servers without a guest (plugins/nova_virt/lab.py). The second one needs half of the memory of a host.
WITHOUT_GUEST, BALLAST = "without-guest", "without-guest-ballast"
_DATABASES = ("keystone", "neutron", "placement", "glance", "barbican", "nova_api", "nova", "nova_cell0")
_MORE_DATABASES = ("octavia", "octavia_persistence", "provider", "heat")
# Below the ephemeral ports of the kernel: the services start many connections before the last one listens.
_FIRST_PORT, _PORTS = 22000, 10
_NOVA_CONTROL = {"nova-conductor": "Starting conductor node", "nova-scheduler": "Starting scheduler node"}


class WholeCloud(ServiceOptions):
    """The services, the hypervisor, and hosts on the networks of the cloud.

    Attributes:
        prefix: the first part of the names of its namespaces.
    """

    def __init__(self, folder, databases, ports, prefix, transport):
        super().__init__(folder, databases, ports, transport)
        self.prefix = prefix
        self.hypervisor = str(folder / "hypervisor.sock")

    # --- start and stop ---------------------------------------------------------------------------------------------

    def start(self):
        """Prepare the databases side by side, and start each service as soon as its tables exist."""
        self._write_configuration()
        self._start_hypervisor()
        with ThreadPoolExecutor(3) as threads:
            services = {
                threads.submit(self.prepare_keystone): ("keystone",),
                threads.submit(self._prepare_services): ("placement", "glance", "nova", *_NOVA_CONTROL, "barbican"),
                threads.submit(self.prepare_neutron): ("neutron",),
            }
            for prepared in as_completed(services):
                prepared.result()
                for name in services[prepared]:
                    self.serve(name)
                if "keystone" in services[prepared]:
                    self.await_answer("keystone")
                    self._make_users()
        # nova-compute waits ten seconds for an answer of a conductor that does not listen yet.
        for name, line in _NOVA_CONTROL.items():
            self.until(name, lambda name=name, line=line: line in self.log(name))
        for name in ("placement", "neutron"):
            self.await_answer(name)
        for host in ZONES:
            self.serve(host)
        for name in self.threads:
            self.await_answer(name)
        self._make_zones()

    def serve(self, name):
        """Start an API server, a service of Nova, or a compute host by its name."""
        if name in self.threads:
            super().serve(name)
            return
        if name in ZONES:
            program = [VENV / "bin/python", HERE / "run_nova_compute.py"]
            files = [self.file("nova"), self.folder / f"{name}.conf"]
        else:
            program, files = [VENV / f"bin/{name}"], [self.file("nova")]
        self.run(name, [*program, *(word for file in files for word in ("--config-file", file))], self._environment({}))

    def stop(self):
        for name in reversed(list(self._processes)):
            if name != "hypervisor":
                self.kill(name)
        if "hypervisor" in self._processes:
            # It removes namespaces and interfaces itself.
            self._processes["hypervisor"].terminate()
            self._processes.pop("hypervisor").wait(60)
        super().stop()
        assert namespaces.names(f"{self.prefix}-") == []

    def application(self, name):
        application, variables, words = super().application(name)
        if name == "nova":
            # Nova loads the first of these files as its paste file, and reads its options from the arguments.
            variables = {"OS_NOVA_CONFIG_FILES": str(VENV / "etc/nova/api-paste.ini")}
            return "nova.wsgi.osapi_compute", variables, ["--config-file", self.file("nova")]
        if name == "barbican":
            # Barbican's own application reads its paste file from /etc.
            return str(VENV / "etc/barbican/barbican-api-paste.ini"), {}, []
        return application, variables, words

    def _environment(self, more):
        # Some programs of Nova still replace threads by those of eventlet otherwise.
        ours = {"LAB_HYPERVISOR": self.hypervisor, "OS_NOVA_DISABLE_EVENTLET_PATCHING": "1"}
        return super()._environment({**ours, **more})

    def _start_hypervisor(self):
        place = self.folder / "guests"
        place.mkdir()
        python = os.environ.get("AMPHORA_AGENT_PYTHON", sys.executable)
        argv = [sys.executable, HERE / "hypervisor.py", self.hypervisor, self.prefix, place, python]
        self.run("hypervisor", argv, os.environ)
        self.until("hypervisor", Path(self.hypervisor).exists)

    def _prepare_services(self):
        told = {"databases": self.databases, "hosts": list(ZONES)}
        program = VENV / "bin/python", HERE / "prepare_services.py", self.file("nova")
        run_command(*program, environment=self._environment({}), written=json.dumps(told))

    def _write_configuration(self):
        super()._write_configuration()
        # The names of configuration files that no option changes.
        (self.folder / ".barbican").symlink_to(self.folder / "barbican")
        (self.folder / "glance/glance-api.conf").symlink_to("glance.conf")
        for host in ZONES:
            place = self.folder / host
            place.mkdir()
            write_ini(self.folder / f"{host}.conf", {"DEFAULT": {"host": host, "state_path": place}})

    def _make_zones(self):
        operator = self.connect("admin", "admin")
        compute = operator.compute

        def hosts():
            return {one.host for one in compute.services() if one.binary == "nova-compute" and one.state == "up"}

        def is_described(provider):
            # nova-compute writes inventory and traits. Until then, Placement can refuse the aggregate of the host with
            # a deadlock of its database, and Nova only logs this error.
            path = f"/resource_providers/{provider.id}/traits"
            return operator.placement.get(path, microversion="1.6").json()["traits"]

        def described():
            return sum(1 for one in operator.placement.resource_providers() if is_described(one)) == len(ZONES)

        self.until("nova", lambda: hosts() >= set(ZONES) and described())
        for host, zone in ZONES.items():
            compute.create_aggregate(name=zone, availability_zone=zone)
            self.set_zone(host, zone)
        for name, ram in ((FLAVOR, 64), (WITHOUT_GUEST, 64), (BALLAST, 32768)):
            compute.create_flavor(name=name, ram=ram, vcpus=1, disk=1)

    def set_zone(self, host, zone):
        """Move a host without servers to a zone."""
        operator = self.connect("admin", "admin")
        aggregates = {one.name: one for one in operator.compute.aggregates()}
        for one in aggregates.values():
            if host in (one.hosts or ()):
                operator.compute.remove_host_from_aggregate(one, host)
        operator.compute.add_host_to_aggregate(aggregates[zone], host)
        [node] = [one for one in operator.compute.hypervisors(details=True) if one.service_details["host"] == host]
        found = operator.placement.get(f"/resource_providers/{node.id}/aggregates", microversion="1.1").json()
        # Nova only logs an error of Placement, and then finds no host in the zone.
        assert found["aggregates"] == [aggregates[zone].uuid], f"host {host}, zone {zone}: {found}"

    # --- the hypervisor ---------------------------------------------------------------------------------------------

    def ask(self, verb, **request):
        """Send a request to the hypervisor."""
        return lab_socket.ask(self.hypervisor, verb, **request)

    def host(self, name, network, *subnets):
        """Connect a new namespace `PREFIX-NAME` to a network with an address of each subnet; return the port."""
        admin = self.connect("admin", "admin").network
        fixed = [{"subnet_id": one.id} for one in subnets]
        port = admin.create_port(
            network_id=network.id, name=name, fixed_ips=fixed, device_id=name, device_owner="lab:host",
            binding_host_id="lab", project_id=network.project_id,
        )  # fmt: skip
        prefixes = {one.id: int(one.cidr.rpartition("/")[2]) for one in subnets}
        addresses = [{"address": one["ip_address"], "prefix": prefixes[one["subnet_id"]]} for one in port.fixed_ips]
        told = {"id": port.id, "mac": port.mac_address, "network_id": network.id, "mtu": network.mtu}
        self.ask("plug", name=self.namespace(name), port={**told, "addresses": addresses})
        return port

    def namespace(self, name):
        """The namespace of a host that `host` has connected."""
        return f"{self.prefix}-{name}"


@contextmanager
def whole_cloud():
    """Run a complete cloud while the block does. AMPHORA_KEEP_LOGS names a folder for its logs."""
    with ExitStack() as closing:
        number = closing.enter_context(claimed.number(_free))
        folder = Path(tempfile.mkdtemp(prefix="adw-"))
        closing.callback(shutil.rmtree, folder)
        names = (*_DATABASES, *_MORE_DATABASES)
        with ThreadPoolExecutor(2) as threads:
            broker = threads.submit(closing.enter_context, rabbitmq.server())
            urls = closing.enter_context(mariadb.server(*names))
        _tune(urls[0])
        ports = dict(zip(("octavia", "heat", *WholeCloud.threads), _ports(number), strict=False))
        transport = broker.result().url.replace("amqp:", "rabbit:").rstrip("/") + "/"
        made = WholeCloud(folder, dict(zip(names, urls, strict=True)), ports, _prefix(number), transport)
        try:
            made.start()
            yield made
        finally:
            made.stop()
            keep = os.environ.get("AMPHORA_KEEP_LOGS")
            if keep:
                place = Path(keep, folder.name)
                place.mkdir(parents=True)
                for log in folder.glob("**/*.log"):
                    shutil.copy(log, place / str(log.relative_to(folder)).replace("/", "-"))


def _tune(url):
    """Permit the connections of all services, and lose the last second after a power cut."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for option in ("max_connections = 1000", "innodb_flush_log_at_trx_commit = 0"):
            connection.exec_driver_sql(f"SET GLOBAL {option}")
    engine.dispose()


def _prefix(number):
    return f"w{number}"


def _ports(number):
    return range(_FIRST_PORT + _PORTS * number, _FIRST_PORT + _PORTS * (number + 1))


def _free(number):
    """Whether this number has no remains of a killed test."""
    return not namespaces.names(f"{_prefix(number)}-")
