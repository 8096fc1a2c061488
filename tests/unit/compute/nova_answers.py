# SPDX-License-Identifier: Apache-2.0
"""Answers of Nova, Glance and a network backend for tests of the compute backend `nova`."""

import uuid

from amphora_driver.compute.interface import BootRequest
from amphora_driver.model.network import FixedAddress, Port
from amphora_driver.openstack.errors import ApiError
from amphora_driver.secret import Secret

AMPHORA, LOAD_BALANCER = str(uuid.UUID(int=1, version=4)), str(uuid.UUID(int=2, version=4))
TAGS = ["amphora-deployment:one", f"amphora:{AMPHORA}"]
KEY = "the private key"
FIND = f"GET /servers/detail?tags={TAGS[0]},{TAGS[1]}"
NOTHING = {"servers": []}
FLAVOR = ("GET /flavors/amphora", {"flavor": {"id": "amphora", "name": "amphora"}})
POST = "POST /servers"
MADE = (POST, {"server": {"id": "server-9"}})
# The requests of a boot.
CREATED = [(FIND, NOTHING), FLAVOR, MADE]
GONE = ApiError("GET /servers", 404, "itemNotFound", "Instance could not be found")


def server(server_id="server-1", status="ACTIVE", **values):
    """A server as Nova 34 sends it with microversion 2.67; only the fields that are read."""
    return {
        "id": server_id,
        "name": f"octavia-amphora-{AMPHORA}",
        "status": status,
        "created": "2026-11-24T10:00:00Z",
        "hostId": "hash-1",
        "OS-EXT-AZ:availability_zone": "az1",
        "OS-EXT-STS:task_state": None,
        "image": {"id": "image-0"},
        "metadata": {"amphora_image": "image-0", "amphora_management_address": "192.0.2.7"},
        "tags": TAGS,
        **values,
    }


def failed(server_id="server-1", message="No valid host was found. There are not enough hosts available.", **values):
    return server(server_id, "ERROR", fault={"code": 500, "message": message}, hostId="", **values)


def listed(*servers):
    return {"servers": list(servers)}


def refused(status, message, kind="badRequest"):
    return ApiError("POST /servers", status, kind, message)


def delete(server_id):
    return f"DELETE /servers/{server_id}"


def boot_request(**values):
    files = {
        "agent.conf": Secret(b"[agent]\nbind_address = {management_address}\n"),
        "server.pem": Secret(KEY.encode()),
    }
    return BootRequest(**{"amphora_id": AMPHORA, "load_balancer_id": LOAD_BALANCER, "files": files, **values})


def port(port_id="vip-port", addresses=("198.51.100.5",), network_id="front"):
    fixed = tuple(FixedAddress(subnet_id=f"subnet-{one}", address=one) for one in addresses)
    return Port(id=port_id, network_id=network_id, mac="fa:16:3e:00:00:01", mtu=1450, addresses=fixed)


class Script:
    """A `Service` that answers requests in the order of a script, and records their bodies.

    The last answer of a script is repeated if it is a query, so that a wait ends at its time limit.
    """

    def __init__(self, answers):
        self._answers = list(answers)
        self._next = 0
        self._used = 0
        self.requests = []
        self.bodies = []
        self.logged = []

    def project_id(self):
        return "project"

    def continue_with(self, *answers):
        """Replace the answers that are left."""
        self._answers[self._used :] = answers
        self._next = self._used

    def request(self, method, path, *, params=(), json=None, headers=None, secret=False):
        assert headers == {"OpenStack-API-Version": "compute 2.67"}
        query = "&".join(f"{name}={value}" for name, value in params)
        made = f"{method} {path}{'?' + query if query else ''}"
        self.requests.append(made)
        if json is not None:
            self.bodies.append(json)
        if not secret:
            self.logged.append(made)
        wanted, answer = self._answers[self._next]
        assert made == wanted, f"after {self.requests[:-1]}"
        self._used = self._next + 1
        if self._used < len(self._answers) or method != "GET":
            self._next += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def finished(self):
        """Whether each answer was used."""
        return self._used == len(self._answers)


class Glance:
    """A `Service` of images: the ids of the newest image of each query."""

    def __init__(self, images):
        self.images = list(images)
        self.params = []

    def request(self, method, path, *, params):
        assert (method, path) == ("GET", "/images")
        self.params.append(dict(params))
        if isinstance(self.images[0], Exception):
            raise self.images[0]
        return {"images": [{"id": one, "owner": dict(params)["owner"]} for one in self.images[:1] if one]}


class Network:
    """The part of a network backend that the compute backend uses."""

    def __init__(self):
        self.addresses = ("192.0.2.7",)
        self.ensured = []
        self.deleted = []
        self.error = None
        self.missing = None

    def ensure_port(self, request):
        if self.error:
            raise self.error
        self.ensured.append(request)
        return port(f"port-{request.network_id}", self.addresses, request.network_id)

    def management_ports(self, amphora_id):
        return tuple(port(f"port-{one.network_id}", self.addresses, one.network_id) for one in self.ensured)

    def delete_port(self, port_id):
        self.deleted.append(port_id)

    def require_network(self, network_id):
        if self.missing:
            raise self.missing
