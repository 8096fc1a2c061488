# SPDX-License-Identifier: Apache-2.0
"""A namespace whose firewall admits one client, and a peer that sends raw IP packets."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from amphora_lab import ip
from fragments import TCP
from wire import bundle, eth1, mac

from amphora_agent.network import firewall, nft_apply
from amphora_agent.network.firewall import Port, Restrictions, VrrpPeers

VIP = {4: "198.51.100.5", 6: "2001:db8:1::5"}
OWN = {4: "198.51.100.11", 6: "2001:db8:1::11"}
ALLOWED = {4: "198.51.100.12", 6: "2001:db8:1::12"}
FORBIDDEN = {4: "198.51.100.13", 6: "2001:db8:1::13"}
ETHERTYPE = {4: 0x0800, 6: 0x86DD}
FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
SECONDS = 10.0
SYN_ACK, RST, FLAGS = 0x12, 0x04, 0x17
BACKLOG = 4096


def restrictions(version: int, *, udp: bool) -> Restrictions:
    """Return rules for one client of port 80, for one partner, and optionally for a UDP listener."""
    one = (int(ipaddress.ip_address(ALLOWED[version])),) * 2
    ranges = {"ipv4": (one,), "ipv6": ()} if version == 4 else {"ipv4": (), "ipv6": (one,)}
    ports = [Port(80, **ranges)] + ([Port(53, **ranges, protocol="udp")] if udp else [])
    pair = VrrpPeers(ipaddress.ip_address(OWN[version]), (ipaddress.ip_address(ALLOWED[version]),), 1500)
    return Restrictions(tuple(ports), pair, forwards=udp)


class Link:
    """The peer's raw socket, which sends IP packets and receives the replies."""

    def __init__(self, wire, version: int) -> None:
        self._version = version
        self._socket = wire.spaces["peer"].run(self._open)

    def _open(self) -> socket.socket:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETHERTYPE[self._version]))
        opened.bind(("far1", ETHERTYPE[self._version]))
        opened.settimeout(SECONDS)
        return opened

    def send(self, packets: list[bytes]) -> None:
        own = self._socket.getsockname()[4]
        for packet in packets:
            frame = bytes.fromhex(mac(1).replace(":", "")) + own
            self._socket.send(frame + ETHERTYPE[self._version].to_bytes(2, "big") + packet)

    def replies(self, until: int) -> dict[int, int]:
        """Return TCP flags by destination port, after a reply to port `until`."""
        found: dict[int, int] = {}
        head, at = (20, 9) if self._version == 4 else (40, 6)
        while until not in found:
            frame = self._socket.recv(2048)
            packet = frame[14:]
            ours = frame[6:12] == bytes.fromhex(mac(1).replace(":", ""))
            if ours and packet[at] == TCP:
                found.setdefault(int.from_bytes(packet[head + 2 : head + 4], "big"), packet[head + 13] & FLAGS)
        return found

    def close(self) -> None:
        self._socket.close()


@contextmanager
def serving(wire, version: int, address: str, port: int) -> Iterator[None]:
    with wire.inner.run(socket.socket, FAMILY[version], socket.SOCK_STREAM) as opened:
        opened.bind((address, port))
        opened.listen(BACKLOG)
        yield


def restrict(wire, version: int, *, udp: bool) -> None:
    """Apply the rules, and add the addresses of both clients to the peer."""
    wire.change(bundle(eth1()))
    for address in (ALLOWED[version], FORBIDDEN[version]):
        more = "/64 dev far1 nodad" if version == 6 else "/24 dev far1"
        ip(f"-n {wire.prefix}-peer addr add {address}{more}")
    assert wire.inner.run(nft_apply.replace_table, firewall.render(restrictions(version, udp=udp)))
