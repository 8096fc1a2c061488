# SPDX-License-Identifier: Apache-2.0
"""An additional network of the lab with members, which can be attached to an amphora and detached.

Invariant: every created object is in the lab's namespaces or has its prefix, and `close` removes it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from amphora_lab import Member, Network, ip

from amphora_agent.network.namespace import Namespace


class MemberNetwork:
    """192.0.2.0/24 and 2001:db8:2::/64 on a separate bridge."""

    ADDRESSES = ("192.0.2.110/24", "2001:db8:2::110/64", "192.0.2.1/24", "2001:db8:2::1/64")
    MAC = "02:00:00:00:5e:22"

    def __init__(self, network: Network) -> None:
        self._switch, self._amphora = network.name("sw"), network.name("amp")
        self._name = network.name("net2")
        self._members: list[Member] = []
        self._thread: Namespace | None = None
        try:
            ip(
                f"netns add {self._name}",
                f"-n {self._name} link set lo up",
                f"-n {self._switch} link add net2 type bridge forward_delay 0 stp_state 0 mcast_snooping 0",
                f"-n {self._switch} link set net2 up",
                f"-n {self._switch} link add mem2 type veth peer name eth0 netns {self._name}",
                f"-n {self._switch} link set mem2 master net2 up",
                f"-n {self._name} link set eth0 up",
            )
            for address in self.ADDRESSES:
                ip(f"-n {self._name} addr add {address} dev eth0" + (" nodad" if ":" in address else ""))
            self._thread = Namespace(Path("/run/netns") / self._name)
        except BaseException:
            self.close()
            raise

    def interface(self, **more):
        """Return the interface's entry in a bundle."""
        return {
            "mac": self.MAC,
            "name": "m02000000005e22",
            "mtu": 1500,
            "addresses": ["192.0.2.11/24", "2001:db8:2::11/64"],
            "vips": [],
            "routes": [],
            **more,
        }

    def start(self, name: str, address: str = "192.0.2.110") -> None:
        self._members.append(self._thread.run(Member, name, address))

    def plug(self) -> None:
        """Attach the network to the amphora, as the compute backend does."""
        ip(
            f"-n {self._switch} link add port2 type veth peer name new2 netns {self._amphora} address {self.MAC}",
            f"-n {self._switch} link set port2 master net2 up",
        )

    def unplug(self) -> None:
        subprocess.run(["ip", "-n", self._switch, "link", "del", "port2"], check=False, capture_output=True)

    def close(self) -> None:
        for member in self._members:
            member.close()
        if self._thread is not None:
            self._thread.close()
        self.unplug()
        for link in ("mem2", "net2"):
            subprocess.run(["ip", "-n", self._switch, "link", "del", link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self._name], check=False, capture_output=True)
