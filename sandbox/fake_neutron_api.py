# SPDX-License-Identifier: Apache-2.0
"""The part of Neutron's API that the clients of load balancers need.

Invariant: the API shows the tables of the local network backend. The API changes only ports of users. Lists accept any
attribute as a filter, because clients use filters to convert a name to an id.

``python -m sandbox.fake_neutron_api`` needs a listening socket as descriptor 3.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.errors import AmphoraDriverError, Conflict
from amphora_driver.model.network import FixedAddress, Port
from amphora_driver.network.local import LocalNetwork
from sandbox.local_requests import rejection_reason

_SINGULAR = {f"{name}s": name for name in ("network", "subnet", "port")}
_SINGULAR |= {"security-groups": "security_group", "policies": "policy"}
# Clients also list these kinds of objects. The fake Neutron answers with an empty list.
_EMPTY = {"extensions", "subnetpools", "routers"}
_PROJECT = {"project_id": "sandbox", "tenant_id": "sandbox"}
_Row = dict[str, Any]


class Resources:
    """The resources of the local network backend in the format of Neutron."""

    def __init__(self, network: LocalNetwork) -> None:
        self._network = network

    def networks(self) -> list[_Row]:
        return [
            {
                "id": segment.id, "name": segment.name, "mtu": segment.mtu, "status": "ACTIVE", "admin_state_up": True,
                "shared": True, "subnets": [subnet.id for subnet in self._network.subnets(segment.id)], **_PROJECT,
            }
            for segment in self._network.networks()
        ]  # fmt: skip

    def subnets(self) -> list[_Row]:
        return [
            {
                "id": subnet.id, "name": subnet.name, "network_id": subnet.network_id, "cidr": subnet.cidr,
                "ip_version": subnet.version, "gateway_ip": subnet.gateway, "enable_dhcp": False, "host_routes": [],
                "allocation_pools": [{"start": subnet.first, "end": subnet.last}], "dns_nameservers": [], **_PROJECT,
            }
            for subnet in self._network.subnets()
        ]  # fmt: skip

    def ports(self) -> list[_Row]:
        return [self.port(port) for port in self._network.all_ports()]

    def port(self, port: Port) -> _Row:
        owner = self._network.owner(port.id) or ""
        free = owner == f"user-{port.id}"
        return {
            "id": port.id, "name": "" if free else owner, "network_id": port.network_id, "mac_address": port.mac,
            "device_id": "" if free else owner, "status": "ACTIVE", "admin_state_up": True,
            "fixed_ips": [{"subnet_id": one.subnet_id, "ip_address": one.address} for one in port.addresses],
            **_PROJECT,
        }  # fmt: skip

    def security_groups(self) -> list[_Row]:
        return [
            {
                "id": group.id, "name": group.name, "description": "", "stateful": False,
                "security_group_rules": [
                    {
                        "direction": "ingress", "protocol": rule.protocol, "port_range_min": rule.first_port,
                        "port_range_max": rule.last_port, "remote_ip_prefix": rule.remote,
                    }
                    for rule in group.rules
                ],
                **_PROJECT,
            }
            for group in self._network.port_security.groups()
        ]  # fmt: skip

    def policies(self) -> list[_Row]:
        return [
            {
                "id": policy.id, "name": policy.name, "shared": True,
                "rules": [
                    {"type": "bandwidth_limit", "direction": direction, "max_kbps": rate}
                    for direction, rate in (("egress", policy.egress_kbps), ("ingress", policy.ingress_kbps))
                    if rate is not None
                ],
                **_PROJECT,
            }
            for policy in self._network.port_security.policies()
        ]  # fmt: skip

    def create_port(self, body: _Row) -> _Row:
        wanted = [
            FixedAddress(subnet_id=one["subnet_id"], address=one.get("ip_address", ""))
            for one in body.get("fixed_ips") or ()
        ]
        return self.port(self._network.create_port(body["network_id"], wanted))

    def delete_port(self, port_id: str) -> None:
        self._network.remove_user_port(port_id)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    resources: Resources

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        reason = rejection_reason(self.headers.get("Host"), self.headers.get("Origin"))
        if reason is not None:
            # The body of a refused request is not read, so the connection cannot carry another request.
            self.close_connection = True
            self._respond(403, _error(reason))
        return reason is None

    def do_GET(self) -> None:
        parts, query = self._request()
        if not parts:
            link = {"rel": "self", "href": f"http://{self.headers.get('Host')}/v2.0/"}
            return self._respond(200, {"versions": [{"id": "v2.0", "status": "CURRENT", "links": [link]}]})
        kind = parts[0]
        if kind in _EMPTY and not parts[1:]:
            return self._respond(200, {_key(kind): []})
        if kind not in _SINGULAR:
            return self._respond(404, _error(f"the sandbox has no {kind}"))
        rows: list[_Row] = getattr(self.resources, _key(kind))()
        if parts[1:]:
            found = [row for row in rows if row["id"] == parts[1]]
            if not found:
                return self._respond(404, _error(f"{_SINGULAR[kind]} {parts[1]} could not be found"))
            return self._respond(200, {_SINGULAR[kind]: found[0]})
        wanted = {name: value for name, value in query if rows and name in rows[0]}
        kept = [row for row in rows if all(str(row[name]) == value for name, value in wanted.items())]
        return self._respond(200, {_key(kind): kept})

    def do_POST(self) -> None:
        parts, _ = self._request()
        if parts != ["ports"]:
            return self._respond(404, _error("the sandbox can create ports only"))
        return self._change(201, lambda: {"port": self.resources.create_port(self.body["port"])})

    def do_DELETE(self) -> None:
        parts, _ = self._request()
        if len(parts) != 2 or parts[0] != "ports":
            return self._respond(404, _error("the sandbox can delete ports only"))
        return self._change(204, lambda: self.resources.delete_port(parts[1]))

    def _change(self, status: int, work: Callable[[], _Row | None]) -> None:
        try:
            self._respond(status, work())
        except (KeyError, TypeError) as error:
            self._respond(400, _error(f"the request has no {error}"))
        except AmphoraDriverError as error:
            self._respond(409 if isinstance(error, Conflict) else 400, _error(str(error)))

    def _request(self) -> tuple[list[str], list[tuple[str, str]]]:
        length = int(self.headers.get("Content-Length") or 0)
        self.body: _Row = json.loads(self.rfile.read(length) or b"{}")
        url = urlsplit(self.path)
        parts = [part for part in url.path.split("/") if part]
        return [part for part in parts[1:] if part != "qos"], parse_qsl(url.query)

    def _respond(self, status: int, body: _Row | None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _key(kind: str) -> str:
    return kind.replace("-", "_")


def _error(message: str) -> _Row:
    return {"NeutronError": {"type": "Error", "message": message, "detail": ""}}


def serve(listener: socket.socket, network: LocalNetwork) -> None:
    """Serve requests on a listening socket until the process ends."""
    handler = type("Handler", (_Handler,), {"resources": Resources(network)})
    server = ThreadingHTTPServer(listener.getsockname()[:2], handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever()


if __name__ == "__main__":
    conf = config.load()
    with socket.socket(fileno=3) as inherited:
        serve(inherited, LocalNetwork(conf, Database(conf.amp_database.connection)))
    sys.exit(0)
