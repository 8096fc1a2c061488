# SPDX-License-Identifier: Apache-2.0
"""Octavia and the processes of the provider `haproxy` on a cloud (`whole_cloud.py`).

octavia-api and octavia-driver-agent run as on a controller host. The controller and the health manager run in a
namespace with an address on the management network; a forwarder connects them to the services on loopback.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cloud_lab import merged, run_command, write_ini
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import serialization
from whole_cloud import FLAVOR, IMAGE_TAG, ZONES

from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.host import namespaces
from sandbox import demo_hosts, forward_out

HERE = Path(__file__).parent
CONTROL, WITNESS = "control", "witness"
_HEALTH_PORT, _WITNESS_PORT = 9879, 22
_SOCKETS = ("status", "stats", "get")
_PROGRAMS = {
    "amphora-controller": "amphora_driver.controller.service",
    "amphora-health-manager": "amphora_driver.health.service",
}


class Deployment(msgspec.Struct, frozen=True):
    """What an operator prepares in the cloud: ids in Neutron, Keystone and Glance."""

    network_id: str
    project_id: str
    image_id: str
    control: str
    witness: str


class ProviderStack:
    """One deployment of the provider, with the name `deployment_id` in OpenStack.

    Attributes:
        options: options of the provider by group; they override the usual ones.
        incumbent: whether Octavia's own provider `amphora` runs too, with octavia-worker. Its amphorae have no agent:
            the worker uses its driver without operation.
    """

    def __init__(self, cloud, options=None, *, incumbent=False):
        self.cloud = cloud
        self.incumbent = incumbent
        self.deployment_id = "lab"
        self.folder = cloud.folder / "provider"
        self.options = options or {}
        self.configuration = self.folder / "amphora-driver.conf"
        self.octavia_configuration = self.folder / "octavia.conf"
        self.database_url = cloud.databases["provider"]
        self.deployment = None

    # --- start ------------------------------------------------------------------------------------------------------

    def start(self):
        """Prepare the cloud as an operator does, and start all programs side by side."""
        (self.folder / "sockets").mkdir(parents=True, mode=0o700)
        self.deployment = self._prepare_cloud()
        write_private(self.folder / "encryption.keys", Fernet.generate_key())
        _write_certificates(self.folder)
        write_ini(self.configuration, self.provider_options())
        write_ini(self.octavia_configuration, self.octavia_options())
        (self.folder / "policy.yaml").write_text("{}\n")
        migrate.upgrade(self.database_url)
        names = ("forward-out", "octavia", "octavia-driver-agent", *_PROGRAMS)
        if self.incumbent:
            write_ini(self.folder / "worker.conf", self.worker_options())
            # A request that the API sends before the queue of the worker exists is lost.
            self.serve("octavia-worker")
            self.await_ready("octavia-worker")
        for name in names:
            self.serve(name)
        for name in names:
            self.await_ready(name)

    def serve(self, name):
        """Start one program."""
        cloud = self.cloud
        environment = {
            **os.environ,
            "AMPHORA_DRIVER_CONFIG": str(self.configuration),
            "OCTAVIA_CONF": str(self.octavia_configuration),
            "PYTHONUNBUFFERED": "1",
        }
        python = (sys.executable, "-m")
        if name == "forward-out":
            argv = [*python, forward_out.__name__, cloud.namespace(CONTROL), *map(str, self.forwarded())]
        elif name == "octavia":
            bind = f"127.0.0.1:{cloud.ports['octavia']}"
            argv = [*python, "gunicorn", "--bind", bind, "--threads", "8", "--timeout", "120", "--no-control-socket"]
            argv += ["--chdir", HERE, "serve_octavia:api()"]
        elif name in ("octavia-driver-agent", "octavia-worker"):
            argv = [Path(sys.executable).parent / name, "--config-file", self.octavia_configuration]
            argv += ["--config-file", self.folder / "worker.conf"] if name == "octavia-worker" else []
        else:
            argv = ["nsenter", f"--net={namespaces.path(cloud.namespace(CONTROL))}", "--", *python, _PROGRAMS[name]]
        cloud.run(name, argv, environment)

    def await_ready(self, name):
        """Wait until a program serves."""
        cloud, control = self.cloud, self.cloud.namespace(CONTROL)
        if name == "octavia":
            cloud.await_answer(name)
            return
        ready = {
            "forward-out": lambda: forward_out.is_listening(control, tuple(self.forwarded())),
            "octavia-driver-agent": lambda: self._has_sockets("reporter") and self._agent_listens(),
            "amphora-controller": lambda: self._has_sockets("controller"),
            "octavia-worker": lambda: "Starting V2 consumer" in cloud.log(name),
            "amphora-health-manager": lambda: has_udp_port(control, _HEALTH_PORT),
        }
        cloud.until(name, ready[name])

    def restart(self, name):
        """Kill a program and start it again."""
        self.cloud.kill(name)
        for path in (self.folder / "sockets").glob(f"{name.partition('-')[2]}-*"):
            path.unlink()
        self.serve(name)
        self.await_ready(name)

    @contextmanager
    def controller_options(self, options):
        """Run the controller with these options by group while the block does."""
        former, self.options = self.options, merged(self.options, options)
        try:
            self._restart_controller()
            yield
        finally:
            self.options = former
            self._restart_controller()

    def _restart_controller(self):
        write_ini(self.configuration, self.provider_options())
        self.restart("amphora-controller")

    def forwarded(self):
        """The ports on loopback that programs in a namespace need."""
        broker = forward_out.loopback_ports(self.cloud.transport)
        return [*(port for name, port in self.cloud.ports.items() if name != "heat"), *broker]

    def _has_sockets(self, role):
        return any((self.folder / "sockets").glob(f"{role}-*"))

    def _agent_listens(self):
        return all((self.folder / f"{name}.sock").exists() for name in _SOCKETS)

    # --- the operator -----------------------------------------------------------------------------------------------

    def amphoractl(self, *words):
        """Run a command of the operator; return its standard output."""
        # A separate process: the backends that some commands use leave their connections open until it ends.
        program = Path(sys.executable).with_name("amphoractl")
        return run_command(program, "--config-file", self.configuration, *words)

    def read(self, query):
        """Return the rows of a query of the provider's database."""
        database = Database(self.database_url)
        try:
            return database.read(lambda connection: connection.execute(query).all())
        finally:
            database.dispose()

    # --- the cloud --------------------------------------------------------------------------------------------------

    def _prepare_cloud(self):
        cloud = self.cloud
        client = cloud.connect()
        network = client.network.create_network(name="lb-mgmt")
        subnet = client.network.create_subnet(
            network_id=network.id, name="lb-mgmt", ip_version=4, cidr="203.0.113.0/24", gateway_ip=None,
            is_dhcp_enabled=False,
        )  # fmt: skip
        control, witness = (cloud.host(name, network, subnet).fixed_ips[0]["ip_address"] for name in (CONTROL, WITNESS))
        image = client.image.create_image(
            name="amphora", data=b"no guest reads it", disk_format="raw", container_format="bare", tags=[IMAGE_TAG]
        )
        return Deployment(network.id, cloud.projects["service"], image.id, control, witness)

    # --- options ----------------------------------------------------------------------------------------------------

    def provider_options(self):
        """The options of the provider by group."""
        place, deployment = self.folder, self.deployment
        ours = {
            "amp_database": {"connection": self.database_url, "encryption_key_file": place / "encryption.keys"},
            "amp_queue": {"socket_dir": place / "sockets"},
            # All controllers run on one machine: one that has not renewed its leases for 3 s has ended.
            # A final error is repeated after the longest back-off.
            "amp_controller": {"lease": 3, "retry_most": 5},
            "amp_rotation": {"settle": 1},
            "amp_agent": {"services": "supervisor"},
            "amp_octavia": {f"{name}_socket": place / f"{name}.sock" for name in _SOCKETS},
            "amp_health": {
                "bind_address": deployment.control,
                "bind_port": _HEALTH_PORT,
                "targets": f"{deployment.control}:{_HEALTH_PORT}",
                "interval": 1,
            },
            "amp_failover": {"witnesses": f"{deployment.witness}:{_WITNESS_PORT}"},
            "amp_status_page": {"bind_port": 0, "health_bind_port": 0},
            "amp_compute": {"driver": "nova"},
            "amp_network": {"driver": "neutron"},
            "amp_openstack": {"deployment_id": self.deployment_id, **self.cloud.auth()},
            "amp_compute_nova": {
                "management_networks": deployment.network_id,
                "image_owner": deployment.project_id,
                "image_tag": IMAGE_TAG,
                "flavor": FLAVOR,
                "zones": ",".join(ZONES.values()),
            },
            "amp_certificates": {
                "ca_certificate": place / "amphora_ca.pem",
                "ca_private_key": place / "amphora_ca.key",
                "client_ca": place / "controller_ca.pem",
                "client_certificate": place / "controller.pem",
            },
        }
        return {group: {**ours.get(group, {}), **self.options.get(group, {})} for group in {**ours, **self.options}}

    def octavia_options(self):
        """The options of Octavia's programs by group."""
        place, cloud = self.folder, self.cloud
        return {
            "DEFAULT": {"transport_url": cloud.transport, "use_stderr": True},
            "oslo_messaging_notifications": {"driver": "noop"},
            "oslo_concurrency": {"lock_path": place / "locks"},
            "oslo_policy": {"policy_file": place / "policy.yaml"},
            "database": {"connection": cloud.databases["octavia"], "max_pool_size": 5, "max_overflow": 20},
            "api_settings": {
                "auth_strategy": "keystone",
                "api_base_uri": f"http://127.0.0.1:{cloud.ports['octavia']}",
                "enabled_provider_drivers": ",".join(
                    ["haproxy: HAProxy and keepalived in amphorae", *(["amphora: Octavia"] if self.incumbent else [])]
                ),
                "default_provider_driver": "haproxy",
            },
            "keystone_authtoken": cloud.token("octavia"),
            "service_auth": cloud.auth(),
            "neutron": cloud.auth(),
            # Octavia copies its own time-outs into each listener; those of a flavor then have no effect.
            "haproxy_amphora": {f"timeout_{one}": 0 for one in ("client_data", "member_connect", "member_data")},
            "certificates": {"cert_manager": "barbican_cert_manager", "barbican_auth": "barbican_acl_auth"},
            "driver_agent": {
                **{f"{name}_socket_path": place / f"{name}.sock" for name in _SOCKETS},
                "enabled_provider_agents": "haproxy",
                "provider_agent_shutdown_timeout": 5,
            },
        }

    def worker_options(self):
        """The further options of octavia-worker by group, with an authority for its amphorae."""
        place = self.folder
        certificate, key = create_authority("incumbent")
        write_private(place / "incumbent.pem", certificate)
        # Octavia reads only encrypted keys.
        encrypted = serialization.load_pem_private_key(key.reveal(), None).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.BestAvailableEncryption(self.cloud.password.encode()),
        )
        write_private(place / "incumbent.key", encrypted)
        compute = self.cloud.connect().compute
        return {
            "certificates": {
                "cert_generator": "local_cert_generator",
                "ca_certificate": place / "incumbent.pem",
                "ca_private_key": place / "incumbent.key",
                "ca_private_key_passphrase": self.cloud.password,
            },
            "controller_worker": {
                "workers": 1,
                "amphora_driver": "amphora_noop_driver",
                "amp_image_tag": IMAGE_TAG,
                "amp_flavor_id": next(one.id for one in compute.flavors() if one.name == FLAVOR),
                "amp_boot_network_list": self.deployment.network_id,
                "client_ca": place / "incumbent.pem",
                "amp_active_retries": 60,
                "amp_active_wait_sec": 1,
            },
            # A replaced amphora of a pair boots before the end of the former one, and the cloud has two hosts.
            "nova": {"enable_anti_affinity": True, "anti_affinity_policy": "soft-anti-affinity"},
        }

    # --- hosts of the tests -----------------------------------------------------------------------------------------

    def member(self, name, network, *subnets):
        """Start a web server that answers with its name; return its port in Neutron."""
        port = self.cloud.host(name, network, *subnets)
        server = (sys.executable, "-S", demo_hosts.__file__, name, str(demo_hosts.MEMBER_PORT))
        place = namespaces.path(self.cloud.namespace(name))
        self.cloud.run(name, ["nsenter", f"--net={place}", "--", *server], os.environ)
        self.cloud.until(name, lambda: has_tcp_port(self.cloud.namespace(name), demo_hosts.MEMBER_PORT))
        return port


def _write_certificates(folder):
    certificate, key = create_authority("lab amphorae")
    write_private(folder / "amphora_ca.pem", certificate)
    write_private(folder / "amphora_ca.key", key.reveal())
    certificate, key = create_authority("lab controllers")
    write_private(folder / "controller_ca.pem", certificate)
    client = Authority(certificate, key).issue_client("lab controller", 30)
    write_private(folder / "controller.pem", client.bundle().reveal())


def write_private(path, content):
    path.touch(mode=0o600)
    path.write_bytes(content)


def has_udp_port(namespace, port):
    return _has_port(namespace, ("udp", "udp6"), port)


def has_tcp_port(namespace, port):
    """Whether a socket of the namespace has this TCP port."""
    return _has_port(namespace, ("tcp", "tcp6"), port)


def _has_port(namespace, tables, port):
    """Whether the namespace has a socket with this port (proc(5), /proc/net/tcp)."""

    def read():
        return "".join(Path(f"/proc/thread-self/net/{one}").read_text(encoding="ascii") for one in tables)

    return f":{port:04X} " in namespaces.run_inside(namespaces.path(namespace), read)
