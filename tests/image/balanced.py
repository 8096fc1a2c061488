# SPDX-License-Identifier: Apache-2.0
"""A load balancer with members, served by guests of the image.

Invariant: a push takes the production path: the model, `render`, the virtual servers, the controller's bundle and the
agents of the guests. No configuration is written by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from contextlib import suppress

from amphora_lab import eventually
from guest_lab import TIME_LIMIT
from http_clients import HttpClient
from peers import WebServer
from served import _content
from wanted import VIP, VIP6, listener, load_balancer, member, monitor, pool

from amphora_driver.render.bundle import BundleFile, BundlePartner, BundleVrrp, bundle
from amphora_driver.render.bundle import Served as Given
from amphora_driver.render.haproxy import render
from amphora_driver.render.udp import virtual_servers
from amphora_driver.secret import Secret

# Guests under emulation stall for seconds; after three missed advertisements the VIPs would move.
ADVERT = 3.0
PRIORITIES = (254, 253)


class Balanced:
    """The load balancer, its guests, its members and a client."""

    def __init__(self, guest_lab, *guests) -> None:
        self.guest_lab = guest_lab
        self.guests = list(guests)
        self.generations = itertools.count(int(time.time()))
        self.members = guest_lab.socket_factory("members")
        self.client = HttpClient(guest_lab.socket_factory("client"))
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.client.close)

    def close(self) -> None:
        self._closing.close()

    def start(self, peer):
        self._closing.callback(peer.close)
        return peer

    def web(self, name: str, address: str, port: int = 0) -> WebServer:
        return self.start(WebServer(self.members, name, address, port))

    def udp(self, name: str, address: str, port: int = 53) -> UdpEcho:
        return self.start(UdpEcho(self.members, name, address, port))

    # -- pushes ------------------------------------------------------------------------------------------------

    def push(self, tree, secrets: dict[str, str] | None = None) -> list[dict]:
        """Push a load balancer; return the answer of each agent."""
        pair = len(self.guests) > 1
        rendered = render(tree, shared_tickets=False)
        virtual = virtual_servers(tree)
        assert not rendered.refused + virtual.refused, [str(one) for one in rendered.refused + virtual.refused]
        files = tuple(
            BundleFile(name=each.name, content=Secret(_content(each, secrets or {}).encode()))
            for each in rendered.files
        )
        given = Given(text=rendered.text, files=files, pings=dict(rendered.pings), virtual=virtual.servers)
        generation, found = next(self.generations), []
        for guest in self.guests:
            document = bundle(tree, generation, guest.id, guest.plugged, given, self._vrrp(guest) if pair else None)
            status, answer = guest.call("PUT", "/v2/bundle", document)
            assert status == 200, f"{guest}: {status}: {json.dumps(answer, indent=1)}\n{rendered.text}"
            found.append(answer)
        return found

    def _vrrp(self, guest) -> BundleVrrp:
        return BundleVrrp(
            interface="eth1",
            router_id=1,
            priority=PRIORITIES[self.guests.index(guest)],
            advert_interval=ADVERT,
            local=_partner(guest),
            peers=tuple(_partner(one) for one in self.guests if one is not guest),
        )

    # -- client requests ---------------------------------------------------------------------------------------

    def fetch(self, **more):
        """Return an HTTP answer, or None without one."""
        with suppress(OSError, EOFError):
            return self.client.fetch(**{"timeout": 5.0, **more})
        return None

    def serves(self, **more) -> bool:
        answer = self.fetch(**more)
        return answer is not None and answer.status == 200

    def answers_of(self, count: int, **more) -> set[str]:
        """Return the members that answer this number of requests."""
        found = [self.fetch(**more) for _ in range(count)]
        return {"" if one is None else one.member if one.status == 200 else str(one.status) for one in found}

    def datagram(self, address: str = VIP, port: int = 53, seconds: float = 3.0) -> str:
        """Return the member that answers a datagram of a new client; empty without an answer."""
        with self.guest_lab.socket_factory("client").socket(address, socket.SOCK_DGRAM) as sending:
            sending.settimeout(seconds)
            with suppress(OSError):
                sending.connect((address, port))
                sending.send(b"name?")
                return sending.recv(100).decode()
        return ""

    def until(self, condition, what: str, seconds: float = TIME_LIMIT):
        return eventually(condition, what, seconds)


class UdpEcho:
    """A member that answers every datagram with its name."""

    def __init__(self, socket_factory, name: str, address: str, port: int) -> None:
        self.name, self.address, self.port = name, address, port
        self._socket = socket_factory.socket(address, socket.SOCK_DGRAM)
        self._socket.bind((address, port))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                _, client = self._socket.recvfrom(2048)
                if client is None:  # it was shut down
                    return
                self._socket.sendto(self.name.encode(), client)

    def close(self) -> None:
        # Only data or a shutdown wakes another thread that reads from the socket (socket(7)).
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def _partner(guest) -> BundlePartner:
    return BundlePartner(name=guest.id, address=guest.plugged[0].port.addresses[0].address)


__all__ = ["VIP", "VIP6", "Balanced", "UdpEcho", "listener", "load_balancer", "member", "monitor", "pool"]
