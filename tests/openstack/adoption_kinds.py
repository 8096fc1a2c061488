# SPDX-License-Identifier: Apache-2.0
"""The kinds of load balancers that adoptions support, as requests of the user of the complete cloud."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dataplane.pki import Authority
from provider_stack import has_udp_port

from amphora_driver.host import namespaces
from sandbox import demo_hosts

SINGLE, PAIR = "SINGLE", "ACTIVE_STANDBY"
# The methods of `Kinds`.
NAMES = (
    *("pair", "tls", "own_port", "vips", "udp", "tcp", "monitored"),
    *("udp_pair", "tls_pair", "vips_pair"),
)
_DATAGRAMS = ("datagram", "flow")


class Kind(NamedTuple):
    """One kind: its name, its topology, further fields of the request, and where and how clients reach it."""

    name: str
    topology: str
    more: dict[str, Any]
    port: int = 80
    modes: tuple[str, ...] = ("",)
    host: str = "client"


class Kinds:
    """Makes requests for a user; the networks, certificates and UDP members of the kinds are created once.

    The former amphorae of UDP listeners forward datagrams in user space, without IPVS (`incumbent_udp.py`).
    """

    def __init__(self, user):
        self._user = user
        for name in user.members:
            self._serve_datagrams(name)
        network, *subnets = user.add_network("dual", "198.51.106.0/24", "198.51.107.0/24", "2001:db8:106::/64")
        user.cloud.host("guest", network, *subnets)
        self._subnets = subnets
        self._authority = Authority("adoption")
        self._certificate = None

    def _serve_datagrams(self, member):
        """Let a member also serve UDP, on the port of its web server."""
        cloud, name = self._user.cloud, f"{member}-udp"
        place, program = namespaces.path(cloud.namespace(member)), Path(__file__).with_name("datagram_echo.py")
        argv = ["nsenter", f"--net={place}", "--", sys.executable, "-S", program, demo_hosts.MEMBER_PORT]
        cloud.run(name, argv, os.environ)
        cloud.until(name, lambda: has_udp_port(cloud.namespace(member), demo_hosts.MEMBER_PORT))

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

    def udp_pair(self):
        """A pair with UDP."""
        return self.udp(PAIR)

    def udp(self, topology=SINGLE):
        """UDP with a health monitor."""
        wanted = self._user.listener("udp", protocol="UDP", protocol_port=53)
        monitor = {"name": "udp", "type": "UDP-CONNECT", "delay": 3, "timeout": 2, "max_retries": 1}
        wanted["default_pool"] |= {"protocol": "UDP", "healthmonitor": monitor}
        return Kind(f"UDP {topology}", topology, {"listeners": [wanted]}, 53, _DATAGRAMS)

    def tls_pair(self):
        """A pair with TLS."""
        return self.tls(PAIR)

    def tls(self, topology=SINGLE):
        """TLS with a certificate in Barbican."""
        if self._certificate is None:
            self._certificate = self._user.store_certificate(self._authority.issue("www.example.com"))
        secure = {"protocol": "TERMINATED_HTTPS", "protocol_port": 443, "default_tls_container_ref": self._certificate}
        return Kind(f"TLS {topology}", topology, {"listeners": [self._user.listener("tls", **secure)]}, 443, ("tls",))

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
        """Remove the certificate and the ports of the user, and end the UDP members."""
        for name in self._user.members:
            self._user.cloud.kill(f"{name}-udp")
        network = self._user.connection.network
        for one in list(network.ports(name="own")):
            network.delete_port(one)
        if self._certificate is not None:
            self._user.connection.key_manager.delete_secret(self._certificate.rpartition("/")[2])
