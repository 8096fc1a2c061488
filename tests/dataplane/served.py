# SPDX-License-Identifier: Apache-2.0
"""The lab that verifies every feature of the model on the wire.

Invariant: a push takes the production path: the model, `render`, the controller's bundle, a real agent and a real
HAProxy. No configuration is written by hand. One amphora serves a whole run, with increasing generations; members
and connections end with their test.

    def test_something(served):                                   # fixture of conftest.py
        web = served.web("web")                                   # a member that reports its requests
        served.push(load_balancer(listener(80), pool("pool", member(web))))
        assert served.client.fetch("/x").seen.values("Host") == ["www.example.com"]

Builders are in `wanted`, members in `peers`, clients in `http_clients`, certificates in `pki`. Secrets are given to
`push` by reference: `served.push(tree, {"cert": certificate.pem})` for a listener with
`default_tls_container_ref="cert"`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from amphora_lab import DEADLINE, FIXED, FIXED6, MAC, Amphora, Network, eventually, ip
from http_clients import HttpClient
from peers import MEMBER, EchoServer, FullServer, Peer, SilentServer, SocketFactory, WebServer
from wanted import LB, NETWORK, SUBNET, SUBNET6, id_of

from amphora_driver.errors import ModelError
from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.render.bundle import BundleFile, bundle
from amphora_driver.render.bundle import Served as Given
from amphora_driver.render.haproxy import Rendered, render
from amphora_driver.render.tls import File
from amphora_driver.secret import Secret

MEMBER_ADDRESSES = (
    *(f"198.51.100.{n}/24" for n in range(110, 120)),
    *(f"2001:db8:1::{n}/64" for n in range(110, 120)),
)
CLIENT_ADDRESSES = ("198.51.100.21/24", "198.51.100.22/24", "2001:db8:1::21/64", "2001:db8:1::22/64")
_PLUGGED = AttachedPort(
    port=Port(
        id="port",
        network_id=NETWORK,
        mac=MAC,
        mtu=1500,
        addresses=(
            FixedAddress(subnet_id=SUBNET, address=FIXED),
            FixedAddress(subnet_id=SUBNET6, address=FIXED6),
        ),
    ),
    subnets=(
        Subnet(id=SUBNET, network_id=NETWORK, cidr="198.51.100.0/24", gateway="198.51.100.1"),
        Subnet(id=SUBNET6, network_id=NETWORK, cidr="2001:db8:1::/64", gateway=None),
    ),
)


@dataclass(frozen=True)
class Pushed:
    """The agent's result of a push."""

    status: int
    answer: dict
    rendered: Rendered

    @property
    def how(self) -> str:
        return self.answer["how"]

    @property
    def reason(self) -> str:
        return self.answer["reason"]

    @property
    def refused(self) -> dict[str | None, ModelError]:
        """The errors of objects that `render` refused, by the object's id."""
        return {error.object_id: error for error in self.rendered.refused}


class Lab:
    """One amphora with its networks, for a whole run.

    Benchmarks have no failpoints: the agent searches their files about 15 times in each change.
    """

    def __init__(self, prefix: str, directory: Path, authority, *, failpoints: bool = True) -> None:
        self.network = Network(prefix)
        self.generations = itertools.count(1)
        self.amphora: Amphora | None = None
        try:
            self._build(directory, authority, failpoints)
        except BaseException:
            self.close()
            raise

    def _build(self, directory: Path, authority, failpoints: bool) -> None:
        for short, addresses in (("mem", MEMBER_ADDRESSES), ("cl", CLIENT_ADDRESSES)):
            for address in addresses:
                # Deprecated addresses are used on request only: the first one stays the source of clients.
                more = " nodad preferred_lft 0" if ":" in address else ""
                ip(f"-n {self.network.name(short)} addr replace {address} dev eth0{more}")
        self.network.plug()
        self.amphora = Amphora(self.network, directory, authority, interval=5)
        self.amphora.failpoints = failpoints
        self.amphora.load_balancer_id = LB
        self.amphora.start()
        eventually(self.amphora.answers, "the agent answers")
        self.members = SocketFactory(self.network.thread("mem"))
        self.clients = SocketFactory(self.network.thread("cl"))

    def close(self) -> None:
        if self.amphora is not None:
            self.amphora.power_off()
        self.network.unplug()
        self.network.close()


class Served:
    """The served load balancer of one test."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.amphora = lab.amphora
        self.client = HttpClient(lab.clients)
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.client.close)

    def close(self) -> None:
        self._closing.close()

    # -- members -----------------------------------------------------------------------------------------------

    def start(self, peer: Peer) -> Peer:
        self._closing.callback(peer.close)
        return peer

    def web(self, name: str = "web", address: str = MEMBER, **more) -> WebServer:
        return self.start(WebServer(self.lab.members, name, address, **more))

    def echo(self, name: str = "echo", address: str = MEMBER, **more) -> EchoServer:
        return self.start(EchoServer(self.lab.members, name, address, **more))

    def silent(self, name: str = "silent", address: str = MEMBER, **more) -> SilentServer:
        return self.start(SilentServer(self.lab.members, name, address, **more))

    def full(self, name: str = "full", address: str = MEMBER, **more) -> FullServer:
        return self.start(FullServer(self.lab.members, name, address, **more))

    # -- pushing -----------------------------------------------------------------------------------------------

    def push(
        self,
        tree: LoadBalancer,
        secrets: dict[str, str] | None = None,
        *,
        refused=(),
        failed=(),
        status: int = 200,
        tickets: str | None = None,
    ) -> Pushed:
        """Render a load balancer and push it.

        Args:
            secrets: PEM by reference, for everything the tree refers to.
            refused: ids of the objects that cannot be rendered; any other refusal fails the test.
            failed: ids of objects that HAProxy has refused before.
            status: the expected status of the agent's answer.
            tickets: TLS ticket keys, if they are shared.
        """
        rendered = render(tree, failed=failed, shared_tickets=tickets is not None)
        secrets = {**(secrets or {}), **({} if tickets is None else {"": tickets})}
        assert {error.object_id for error in rendered.refused} == set(refused), [str(e) for e in rendered.refused]
        answered, document = self.amphora.call("PUT", "/v2/bundle", self._bundle(tree, rendered, secrets))
        assert answered == status, f"{answered}: {json.dumps(document, indent=1)}\n{rendered.text}"
        return Pushed(answered, document, rendered)

    def _bundle(self, tree: LoadBalancer, rendered: Rendered, secrets: dict[str, str]) -> bytes:
        files = tuple(
            BundleFile(name=each.name, content=Secret(_content(each, secrets).encode())) for each in rendered.files
        )
        content = Given(text=rendered.text, files=files, pings=dict(rendered.pings))
        return bundle(tree, next(self.lab.generations), self.amphora.id, (_PLUGGED,), content)

    # -- HAProxy's state ---------------------------------------------------------------------------------------

    def statistics(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return HAProxy's statistics by proxy and server name ("FRONTEND" and "BACKEND" for proxies)."""
        text = self.amphora.ask_haproxy("show stat").removeprefix("# ")
        return {(row["pxname"], row["svname"]): row for row in csv.DictReader(io.StringIO(text))}

    def status(self, member_id: str) -> set[str]:
        """Return the states of a member in all its backends: UP, DOWN, DRAIN, MAINT, no check …"""
        return {row["status"] for (_, name), row in self.statistics().items() if name == member_id}

    def states(self, pool: str, *names: str, port: int = 80) -> dict[str, str]:
        """Return the states of a pool's members by name; "" before the end of the first check."""
        backend, rows = f"{id_of('pool', pool)}:{id_of('listener', port)}", self.statistics()
        found = {}
        for name in names:
            row = rows[backend, id_of("member", name)]
            # A running check reports the state of its connection. A member is up until the end of its first check.
            begun = row["status"] == "UP" and row["check_status"] in ("* L4OK", "* L6OK")
            unknown = begun or row["check_status"].removeprefix("* ") in ("", "INI")
            found[name] = "" if unknown and row["status"] not in ("no check", "MAINT") else row["status"]
        return found

    def until_states(self, pool: str, wanted: dict[str, str], *, port: int = 80, seconds: float = DEADLINE) -> None:
        """Wait until members of a pool behind one listener have these states, found by a check."""
        try:
            eventually(lambda: self.states(pool, *wanted, port=port) == wanted, "states", seconds)
        except AssertionError:
            found = self.states(pool, *wanted, port=port)
            raise AssertionError(f"not within {seconds} s: {wanted}, but {found}") from None

    def until_learned(self, entries: int) -> None:
        """Wait until a new worker has received the stick-table entries of its predecessor.

        The worker serves before it receives them (HAProxy's peers): some 100 ms on an idle machine.
        """
        used = re.compile(r"^# table: .*used:(\d+)", re.MULTILINE)
        eventually(
            lambda: sum(map(int, used.findall(self.amphora.ask_haproxy("show table")))) >= entries,
            f"the stick tables have {entries} entries",
        )

    def until(self, member_id: str, *wanted: str, seconds: float = DEADLINE) -> None:
        """Wait until a member has one of these states everywhere."""
        eventually(
            lambda: (found := self.status(member_id)) and found <= set(wanted),
            f"member {member_id} is {' or '.join(wanted)}",
            seconds,
        )


def _content(file: File, secrets: dict[str, str]) -> str:
    """Return the rendered content of a file, or the secret of its reference."""
    return secrets[file.secret.ref] if file.secret is not None else file.content
