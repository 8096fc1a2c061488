# SPDX-License-Identifier: Apache-2.0
"""The kinds of load balancers that adoptions support, as requests of the user of the complete cloud."""

from __future__ import annotations

from typing import Any, NamedTuple

from dataplane.pki import Authority

SINGLE, PAIR = "SINGLE", "ACTIVE_STANDBY"
# The methods of `Kinds`.
NAMES = ("pair", "tls", "own_port", "vips", "tcp", "monitored", "tls_pair", "vips_pair")


class Kind(NamedTuple):
    """One kind: its name, its topology, further fields of the request, and where a client reaches it."""

    name: str
    topology: str
    more: dict[str, Any]
    port: int = 80
    tls: bool = False
    host: str = "client"


class Kinds:
    """Makes requests for a user; the networks and certificates of the kinds are created once.

    UDP is missing: the agent of Octavia's provider needs IPVS, which the kernel of many test machines does not have.
    """

    def __init__(self, user):
        self._user = user
        network, *subnets = user.add_network("dual", "198.51.106.0/24", "198.51.107.0/24", "2001:db8:106::/64")
        user.cloud.host("guest", network, *subnets)
        self._subnets = subnets
        self._authority = Authority("adoption")
        self._certificate = None

    def many(self, number):
        """This number of requests of all kinds in turn."""
        return [getattr(self, NAMES[place % len(NAMES)])() for place in range(number)]

    def pair(self):
        return Kind("pair", PAIR, {})

    def monitored(self):
        """HTTP with a health monitor, persistence, a header and a policy."""
        wanted = self._user.listener("monitored", insert_headers={"X-Forwarded-For": "true"})
        wanted["default_pool"] |= {
            "session_persistence": {"type": "SOURCE_IP"},
            "healthmonitor": {"name": "monitored", "type": "HTTP", "delay": 2, "timeout": 1, "max_retries": 1},
        }
        rule = {"type": "PATH", "compare_type": "STARTS_WITH", "value": "/private"}
        wanted["l7policies"] = [{"name": "private", "action": "REJECT", "rules": [rule]}]
        return Kind("HTTP", SINGLE, {"listeners": [wanted]})

    def tcp(self):
        wanted = self._user.listener("tcp", protocol="TCP")
        wanted["default_pool"]["protocol"] = "TCP"
        return Kind("TCP", SINGLE, {"listeners": [wanted]})

    def tls_pair(self):
        """A pair with TLS."""
        return self.tls(PAIR)

    def tls(self, topology=SINGLE):
        """TLS with a certificate in Barbican."""
        if self._certificate is None:
            self._certificate = self._user.store_certificate(self._authority.issue("www.example.com"))
        secure = {"protocol": "TERMINATED_HTTPS", "protocol_port": 443, "default_tls_container_ref": self._certificate}
        return Kind(f"TLS {topology}", topology, {"listeners": [self._user.listener("tls", **secure)]}, 443, tls=True)

    def vips_pair(self):
        """A pair with three VIPs."""
        return self.vips(PAIR)

    def vips(self, topology=SINGLE):
        """Three VIPs of both families."""
        first, *others = self._subnets
        more = {"vip_subnet_id": first.id, "additional_vips": [{"subnet_id": one.id} for one in others]}
        return Kind(f"three VIPs {topology}", topology, more, host="guest")

    def own_port(self):
        """A VIP port of the user."""
        network = self._user.connection.network
        port = network.create_port(network_id=self._user.front.id, name="own")
        return Kind("port of the user", SINGLE, {"vip_port_id": port.id})

    def remove(self):
        """Remove the certificate, and the ports of the user."""
        network = self._user.connection.network
        for one in list(network.ports(name="own")):
            network.delete_port(one)
        if self._certificate is not None:
            self._user.connection.key_manager.delete_secret(self._certificate.rpartition("/")[2])
