# SPDX-License-Identifier: Apache-2.0
"""The processes of cluster membership on the complete cloud, and servers of Nova that answer requests."""

from __future__ import annotations

import json
import os
import sys
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from cloud_lab import run_command
from cluster_deployment import ClusterDeployment
from cluster_scenarios import WEB, Cluster
from openstack.exceptions import NotFoundException
from provider_stack import has_tcp_port
from request_stream import RequestStream
from whole_cloud import WITHOUT_GUEST

from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.model import TAG_PREFIX
from amphora_driver.host import namespaces
from amphora_driver.secret import Secret
from sandbox import demo_hosts

# On a busy machine, one check of a serving member can be late. HAProxy before 3.1 considers a new member down after its
# first failed check.
MONITOR = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 3}
_MICROVERSION = "2.67"  # tags of servers need 2.26 at least
_CONTROLLER, _API = "amphora-cluster", "amphora-cluster-api"
_MODULES = {_CONTROLLER: "amphora_cluster.controller.service", _API: "amphora_cluster.api.server"}


class ClusterService(ClusterDeployment):
    """One controller and the API, with the options of an operator, on the services of a cloud.

    Args:
        user: the owner of all groups.
        folder: of the files.
        credential: an application credential of the owner.
        options: of the controller.
    """

    def __init__(self, user, folder, credential, **options):
        self.cloud = user.cloud
        bus = self.cloud.transport.replace("rabbit:", "amqp:")
        own = {
            "amp_cluster": {"poll_interval": 1, "retry_most": 2, "notification_url": bus, **options},
            "amp_cluster_cloud": {"auth_url": self.cloud.auth_url, "region_name": "RegionOne"},
        }
        super().__init__(folder, own, project_id=user.project_id, subnet_id=user.back_subnet.id, credential=credential)

    def start(self):
        for name in _MODULES:
            self._run(name)
        self.cloud.until(_API, self.answers)

    def restart(self, **options):
        """Kill the controller, and start it with these options."""
        self.cloud.kill(_CONTROLLER)
        self.configure(**options)
        self._run(_CONTROLLER)

    def stop(self):
        for name in _MODULES:
            self.cloud.kill(name)
        self.database.dispose()

    def log(self):
        return self.cloud.log(_CONTROLLER)

    def amphoractl(self, *words):
        """Run `amphoractl group …`; return its JSON output."""
        program = Path(sys.executable).with_name("amphoractl")
        return json.loads(run_command(program, "--config-file", self.configuration, "group", *words, "-f", "json"))

    def _run(self, name):
        environment = {**os.environ, "AMPHORA_CLUSTER_CONFIG": str(self.configuration)}
        self.cloud.run(name, [sys.executable, "-m", _MODULES[name]], environment)


@contextmanager
def running(user, folder, **options):
    """Run the processes inside the block, with an application credential of the user in `credential.json`."""
    identity, user_id = user.connection.identity, user.connection.current_user_id
    made = identity.create_application_credential(user_id, uuid.uuid4().hex)
    try:
        path = folder / "credential.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"id": made.id, "secret": made.secret, "project_id": user.project_id}))
        credential = ApplicationCredential(id=made.id, secret=Secret(made.secret.encode()))
        service = ClusterService(user, folder, credential, **options)
        service.start()
        try:
            yield service
        finally:
            service.stop()
    finally:
        identity.delete_application_credential(user_id, made)


class NovaCluster(Cluster):
    """Servers in Nova without guests on the network of members; a web server at the address of each has its id.

    Args:
        user: the owner.
        balancer: a load balancer of the owner.
        pool_id: its pool.
    """

    def __init__(self, user, balancer, pool_id):
        super().__init__(user.balancers, balancer, pool_id)
        self._user, self._compute = user, user.connection.compute
        self._flavor = self._compute.find_flavor(WITHOUT_GUEST).id
        self._image = user.connection.image.create_image(
            name="web", data=b"no guest reads it", disk_format="raw", container_format="bare", allow_duplicates=True
        )
        self._present = []

    def create(self, number=1, *, tag=WEB):
        made = [self._boot() for _ in range(number)]
        self._present += made
        for one in made:
            self._compute.wait_for_server(self._compute.get_server(one), interval=0.3, wait=240)
            serve_requests(self._user, one)
        # A server of a cluster answers before it joins.
        for one in made:
            self.add_tag(one, tag)
        return made

    def delete(self, *server_ids):
        for one in server_ids:
            self._compute.delete_server(one)
        for one in server_ids:
            with suppress(NotFoundException):
                self._compute.wait_for_delete(self._compute.get_server(one), interval=0.3, wait=120)
            self._user.cloud.kill(_web_server(one))
            self._present.remove(one)

    def add_tag(self, server_id, tag):
        answer = self._compute.put(f"/servers/{server_id}/tags/{tag}", microversion=_MICROVERSION)
        assert answer.status_code in (201, 204), answer.text

    def member_of(self, server_id):
        [addresses] = self._compute.get_server(server_id).addresses.values()
        return {
            "address": addresses[0]["addr"],
            "protocol_port": demo_hosts.MEMBER_PORT,
            "subnet_id": self._user.back_subnet.id,
        }

    def answers(self, number=12):
        return set(self._user.answers(self.balancer.vip_address, number))

    def traffic(self, **more):
        return traffic(self._user, self.balancer.vip_address, **more)

    def active(self):
        self._user.settled(self.balancer.id)

    def empty(self):
        """Delete all servers and foreign members."""
        self.delete(*self._present)
        for one in self.balancers.members(self.pool_id):
            if not any(tag.startswith(TAG_PREFIX) for tag in one.tags):
                self.active()
                self.balancers.delete_member(one.id, self.pool_id)

    def remove(self):
        """Delete the image, after the servers."""
        self._user.connection.image.delete_image(self._image)

    def _boot(self):
        body = {
            "server": {
                "name": "web", "flavorRef": self._flavor, "imageRef": self._image.id,
                "networks": [{"uuid": self._user.back.id}],
            }
        }  # fmt: skip
        answer = self._compute.post("/servers", json=body, microversion=_MICROVERSION)
        assert answer.status_code == 202, answer.text
        return answer.json()["server"]["id"]


def serve_requests(user, server_id):
    """Run a web server, which answers with the id, at the address of a server without a guest."""
    cloud, admin = user.cloud, user.admin.network
    [port] = admin.ports(device_id=server_id)
    network = admin.get_network(port.network_id)
    addresses = [
        {"address": one["ip_address"], "prefix": int(admin.get_subnet(one["subnet_id"]).cidr.rpartition("/")[2])}
        for one in port.fixed_ips
    ]
    told = {"id": port.id, "mac": port.mac_address, "network_id": network.id, "mtu": network.mtu}
    name = _web_server(server_id)
    namespace = cloud.namespace(name)
    cloud.ask("plug", name=namespace, port={**told, "addresses": addresses})
    program = (sys.executable, "-S", demo_hosts.__file__, server_id, str(demo_hosts.MEMBER_PORT))
    cloud.run(name, ["nsenter", f"--net={namespaces.path(namespace)}", "--", *program], os.environ)
    cloud.until(name, lambda: has_tcp_port(namespace, demo_hosts.MEMBER_PORT))


def traffic(user, address, **more):
    """Return a `RequestStream` of the user's client; `more` are its keyword arguments."""
    # The services of the cloud use the processors too, so an answer may be late.
    return RequestStream(user.cloud.namespace("client"), address, user.until, **{"pause": 0.05, "timeout": 5.0, **more})


def balancer_without_members(user):
    """Create a load balancer whose pool has a health monitor and no member; return it with the id of the pool."""
    pool = {"name": "web", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "healthmonitor": MONITOR}
    made = user.load_balancer("web", listeners=[user.listener("web", default_pool=pool)])
    return made, next(iter(user.balancers.pools(loadbalancer_id=made.id))).id


def _web_server(server_id):
    return f"s{server_id[:6]}"
