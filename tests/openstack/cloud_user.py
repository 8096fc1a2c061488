# SPDX-License-Identifier: Apache-2.0
"""A user of the complete cloud: networks, load balancers through Octavia's API with Keystone, requests of clients."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import os
import ssl
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cloud_lab import run_command
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from openstack.exceptions import NotFoundException

from amphora_driver.host import namespaces
from sandbox import demo_hosts

_ACTIVE_SECONDS = 240.0
# Beginnings of the names of security groups that stay after the last load balancer.
_STAY = ("default", "octavia-amphora-")


class CloudUser:
    """The user `demo` with a network of clients and VIPs, and a network of members.

    Args:
        stack: a started `ProviderStack`.
    """

    def __init__(self, stack):
        self.stack = stack
        self.cloud = stack.cloud
        self.project_id = self.cloud.projects["demo"]
        self.connection = self.cloud.connect("demo", "demo")
        self.balancers = self.connection.load_balancer
        self.admin = self.cloud.connect("admin", "admin")
        self.front, self.front_subnet = self.add_network("front", "198.51.100.0/24")
        self.back, self.back_subnet = self.add_network("back", "192.0.2.0/24")
        self.cloud.host("client", self.front, self.front_subnet)
        self.members = {
            name: stack.member(name, self.back, self.back_subnet).fixed_ips[0]["ip_address"]
            for name in ("member1", "member2")
        }

    def add_network(self, name, *cidrs):
        """Create a network of the user with these subnets; return network and subnets."""
        client = self.connection.network
        network = client.create_network(name=name)
        versions = [ipaddress.ip_network(cidr).version for cidr in cidrs]
        return network, *(
            client.create_subnet(network_id=network.id, name=name, ip_version=version, cidr=cidr)
            for cidr, version in zip(cidrs, versions, strict=True)
        )

    # --- load balancers ---------------------------------------------------------------------------------------------

    def load_balancer(self, name, **more):
        """Create a load balancer with a listener, a pool and both members; return it when it is ACTIVE."""
        return self.settled(self.request(name, **more).id)

    def request(self, name, **more):
        """Request a load balancer with a listener, a pool and both members; return at once."""
        wanted = {"name": name, "vip_subnet_id": self.front_subnet.id, "listeners": [self.listener(name)], **more}
        return self.balancers.create_load_balancer(**wanted)

    def listener(self, name, **more):
        """The body of a listener with a pool of both members."""
        common = {"protocol_port": demo_hosts.MEMBER_PORT, "subnet_id": self.back_subnet.id}
        members = [{"name": one, "address": address, **common} for one, address in self.members.items()]
        pool = {"name": name, "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "members": members}
        return {"name": name, "protocol": "HTTP", "protocol_port": 80, "default_pool": pool, **more}

    def store_certificate(self, issued):
        """Store certificate and key (`dataplane/pki.py`) in Barbican as PKCS #12; return the reference."""
        key = serialization.load_pem_private_key(issued.key_pem.encode(), None)
        bundle = pkcs12.serialize_key_and_certificates(
            b"www", key, issued.certificate, None, encryption_algorithm=serialization.NoEncryption()
        )
        secret = self.connection.key_manager.create_secret(
            name="www",
            secret_type="opaque",
            payload=base64.b64encode(bundle).decode(),
            payload_content_type="application/octet-stream",
            payload_content_encoding="base64",
        )
        return secret.secret_ref

    def active(self, balancer_id):
        """Wait for ACTIVE, also of a load balancer that is in ERROR meanwhile."""

        def ask():
            found = self.balancers.get_load_balancer(balancer_id)
            return found if found.provisioning_status == "ACTIVE" else None

        return self.until(ask, f"load balancer {balancer_id} is ACTIVE", _ACTIVE_SECONDS)

    def settled(self, balancer_id, status="ACTIVE", seconds=_ACTIVE_SECONDS):
        """Wait for ACTIVE or ERROR; the load balancer must have this status then."""
        found = self.until(
            lambda: (
                one if (one := self.balancers.get_load_balancer(balancer_id)).provisioning_status in ("ACTIVE", "ERROR")
                else None
            ),
            f"load balancer {balancer_id} is no longer pending",
            seconds,
        )  # fmt: skip
        assert found.provisioning_status == status, self.logs()
        return found

    def delete(self, balancer):
        """Delete a load balancer with its children; return when Octavia does not show it any more."""
        self.balancers.delete_load_balancer(balancer.id, cascade=True)

        def gone():
            with suppress(NotFoundException):
                return self.balancers.get_load_balancer(balancer.id).provisioning_status == "DELETED"
            return True

        self.until(gone, f"load balancer {balancer.id} is deleted", _ACTIVE_SECONDS)

    # --- requests ---------------------------------------------------------------------------------------------------

    def get(self, address, port=80, host="client", authority=None):
        """The body of an answer to one request over a new connection.

        Args:
            address: the address of the server.
            port: the port of the server.
            host: the client.
            authority: the PEM of the authority of the server's certificate; None for a connection without TLS.
        """

        def connect():
            if authority is None:
                return http.client.HTTPConnection(address, port, timeout=5)
            context = ssl.create_default_context(cadata=authority)
            context.check_hostname = False
            return http.client.HTTPSConnection(address, port, timeout=5, context=context)

        def request():
            with closing(connect()) as connection:
                connection.request("GET", "/")
                answer = connection.getresponse()
                assert answer.status == 200, answer.status
                return answer.read().decode().strip()

        return namespaces.run_inside(namespaces.path(self.cloud.namespace(host)), request)

    def answers(self, address, number=8, **more):
        """The answers of this number of requests, by member."""
        return Counter(self.get(address, **more) for _ in range(number))

    def served(self, address, **more):
        """Wait until the address answers."""

        def ask():
            with suppress(OSError, http.client.HTTPException, AssertionError):
                return self.get(address, **more)
            return None

        return self.until(ask, f"{address} answers", 30)

    # --- the command line -------------------------------------------------------------------------------------------

    def openstack(self, account, *words):
        """Run a command of the client `openstack` for an account and the project of the same name."""
        options = {f"OS_{name.upper()}": value for name, value in self.cloud.auth(account, account).items()}
        environment = {**os.environ, **options, "OS_IDENTITY_API_VERSION": "3"}
        return run_command(Path(sys.executable).with_name("openstack"), *words, environment=environment)

    # --- what is left -----------------------------------------------------------------------------------------------

    def servers(self):
        """All servers of the cloud by name."""
        return {one.name: one for one in self.admin.compute.servers(all_projects=True)}

    @contextmanager
    def unchanged(self):
        """Check that no object of the block is left after it."""
        before = self.objects()
        yield
        self.until(lambda: self.objects() <= before, "no object is left")

    def objects(self):
        """All servers, server groups, ports and security groups of the cloud, and what Placement has allocated.

        The groups that all load balancers of a deployment share stay, as does the default group of each project.
        """
        compute, network = self.admin.compute, self.admin.network
        found = {f"server {one.name} {one.id}" for one in self.servers().values()}
        found |= {f"server group {one.name}" for one in compute.server_groups(all_projects=True)}
        found |= {f"port {one.name} {one.id}" for one in network.ports()}
        groups = [one for one in network.security_groups() if not one.name.startswith(_STAY)]
        found |= {f"security group {one.name} {one.id}" for one in groups}
        for one in self.admin.placement.resource_providers():
            used = self.admin.placement.get(f"/resource_providers/{one.id}/usages").json()["usages"]
            found |= {f"{amount} {kind} of {one.name}" for kind, amount in used.items() if amount}
        return found

    def until(self, question, what, seconds=60.0):
        """Poll until the result is true; return it."""
        deadline = time.monotonic() + seconds
        while not (answer := question()):
            assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}\n{self.logs()}"
            time.sleep(0.3)
        return answer

    def logs(self):
        """The ends of the logs that explain a failure."""
        names = ("amphora-controller", "octavia", "octavia-driver-agent", "hypervisor", "compute0", "compute1")
        consoles = [
            f"--- console of {server}\n{self.cloud.ask('console', server=server)['text'][-2000:]}"
            for server in self.cloud.ask("guests")
        ]
        return "\n".join([*(f"--- {name}\n{self.cloud.log(name)}" for name in names), *consoles])
