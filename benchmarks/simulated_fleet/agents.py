# SPDX-License-Identifier: Apache-2.0
"""One process that serves the agents of all simulated amphorae.

    python -m simulated_fleet.agents FOLDER

Each amphora has a loopback address, a certificate and a heartbeat key of its own. One TCP socket listens on all
addresses: the agent of a connection follows from the address that the client has chosen, and the TLS handshake shows
the certificate of the amphora that the client expects. A client without a certificate of the controllers is refused.
An amphora without `has_power` sends no heartbeats and reads no data. The amphorae of a pair elect the
holder of the VIPs.

`FOLDER/agents.json` has the options, `FOLDER/amphorae.jsonl` the amphorae, `FOLDER/control` is the socket for commands.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import socket
import ssl
import struct
import sys
import time
import uuid
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amphora_agent.stats import heartbeat_codec
from amphora_driver.certificates.ca import Authority
from simulated_fleet import shape

VERSION = "fleet"
_HEADER = struct.Struct("!4s16sQQ")
_TICK = 0.05
_MOST_CONTEXTS = 2048
_DAYS = 7
_REASONS = {200: "OK", 403: "Forbidden", 404: "Not Found", 421: "Misdirected Request", 503: "Service Unavailable"}
_LINE = re.compile(r"^(frontend|backend|\s+server) (\S+)", re.MULTILINE)


@dataclass(slots=True)
class Amphora:
    """One simulated amphora."""

    id: str
    address: str
    key: bytes
    load_balancer_id: str = ""
    listeners: list[str] = field(default_factory=list)
    pools: dict[str, list[str]] = field(default_factory=dict)
    generation: int | None = None
    digest: str | None = None
    settings_digest: str | None = None
    holds_vip: bool | None = None
    certificate: bytes | None = None
    busy: bool = False
    connections: int = 0
    sequence: int = 0
    packed: bytes = b""
    has_power: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.has_power.set()

    def document(self) -> dict[str, Any]:
        counters = {
            "status": "OPEN",
            "active_connections": 2 if self.connections else 0,
            "bytes_in": 730 * self.connections,
            "bytes_out": 1460 * self.connections,
            "request_errors": 0,
            "total_connections": self.connections,
        }
        return {
            "generation": self.generation,
            "holds_vip": self.holds_vip,
            "agent_version": VERSION,
            "usage": {"connections": 1, "cpu": 3, "memory": 30, "file_descriptors": 2, "conntrack": 1},
            "listeners": dict.fromkeys(self.listeners, counters),
            "pools": {
                pool: {"status": "UP", "members": dict.fromkeys(members, "UP")} for pool, members in self.pools.items()
            },
        }


class Agents:
    """All agents, their heartbeats, and the commands of the measuring program."""

    def __init__(self, folder: Path) -> None:
        options = json.loads((folder / "agents.json").read_text())
        self._folder = folder
        self._port: int = options["port"]
        self._interval: float = options["interval"]
        self._targets = [(host, int(port)) for host, _, port in (one.rpartition(":") for one in options["targets"])]
        self._authority = Authority.load(options["ca_certificate"], options["ca_private_key"])
        self._client_ca: str = options["client_ca"]
        self._context = self._server_context(self._authority.issue_server("fleet", _DAYS).bundle().reveal())
        self._context.sni_callback = self._choose_certificate
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()
        self._epoch = time.time_ns()
        self._at: dict[str, Amphora] = {}
        self._by_id: dict[str, Amphora] = {}
        self._of: defaultdict[str, list[Amphora]] = defaultdict(list)
        self._applied: list[tuple[str, str, int, float]] = []
        self._counts: Counter[str] = Counter()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        self._next = 0
        with (folder / "amphorae.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                values = json.loads(line)
                self._add(Amphora(**{**values, "key": bytes.fromhex(values["key"])}))

    def _add(self, amphora: Amphora) -> None:
        self._at[amphora.address] = self._by_id[amphora.id] = amphora
        self._next = max(self._next, len(self._by_id))
        if amphora.load_balancer_id:
            self._of[amphora.load_balancer_id].append(amphora)

    def _elect(self, load_balancer_id: str, leaving: Amphora | None = None) -> None:
        """Let a configured amphora of a pair take the VIPs if no other one holds them."""
        able = [one for one in self._of[load_balancer_id] if one is not leaving and one.has_power.is_set()]
        able = [one for one in able if one.generation and one.holds_vip is not None]
        if able and not any(one.holds_vip for one in able):
            able[0].holds_vip, able[0].packed = True, b""

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    async def send_heartbeats(self) -> None:
        """Send each heartbeat at its phase of the interval, a few of them in each tick."""
        begun, sent = time.monotonic(), 0
        while True:
            everyone = list(self._by_id.values())
            due = int((time.monotonic() - begun) / self._interval * len(everyone))
            # The number of amphorae changes with fail-overs. A tick therefore never repeats more than one interval.
            sent = max(sent, due - len(everyone))
            for number in range(sent, due):
                self._send(everyone[number % len(everyone)])
            sent = max(sent, due)
            await asyncio.sleep(_TICK)

    def _send(self, amphora: Amphora) -> None:
        if not amphora.has_power.is_set():
            return
        if amphora.busy:
            amphora.connections += 3
            amphora.packed = b""
        if not amphora.packed:
            amphora.packed = zlib.compress(json.dumps(amphora.document(), separators=(",", ":")).encode())
        for datagram in self._datagrams(amphora):
            amphora.sequence += 1
            for target in self._targets:
                # A full socket buffer loses datagrams, as a network does.
                with suppress(OSError):
                    self._socket.sendto(datagram, target)
            self._counts["datagrams"] += 1

    def _datagrams(self, amphora: Amphora) -> Iterator[bytes]:
        """Yield the datagrams of a heartbeat. Small ones are signed from the stored compressed document."""
        own, first = uuid.UUID(amphora.id), amphora.sequence + 1
        if len(amphora.packed) > heartbeat_codec.LARGEST - _HEADER.size - hashlib.sha256().digest_size:
            yield from heartbeat_codec.datagrams(own, amphora.key, self._epoch, first, amphora.document())
            return
        signed = _HEADER.pack(heartbeat_codec.MAGIC, own.bytes, self._epoch, first) + amphora.packed
        yield signed + hmac.digest(amphora.key, signed, hashlib.sha256)

    # --- TLS ----------------------------------------------------------------------------------------------------------

    def _server_context(self, pem: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        file = os.memfd_create("certificate")
        try:
            os.write(file, pem)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        # OpenSSL verifies the client with the authorities of the context that `_choose_certificate` has chosen.
        context.load_verify_locations(self._client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _choose_certificate(self, connection: Any, name: str | None, _context: ssl.SSLContext) -> int | None:
        amphora = self._by_id.get(name or "")
        if amphora is None:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        if amphora.id not in self._contexts:
            if amphora.certificate is None:
                amphora.certificate = self._authority.issue_server(amphora.id, _DAYS).bundle().reveal()
            self._contexts[amphora.id] = self._server_context(amphora.certificate)
            if len(self._contexts) > _MOST_CONTEXTS:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(amphora.id)
        connection.context = self._contexts[amphora.id]
        self._counts["handshakes"] += 1
        return None

    # --- API of the agents --------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Accept connections. A connection to a lost amphora stays open without an answer."""
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("0.0.0.0", self._port), backlog=1024, reuse_port=False)
        listener.setblocking(False)
        tasks: set[asyncio.Task[None]] = set()
        while True:
            connection, _peer = await loop.sock_accept(listener)
            task = loop.create_task(self._serve_connection(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve_connection(self, connection: socket.socket) -> None:
        amphora = self._at.get(connection.getsockname()[0])
        if amphora is None:
            connection.close()
            return
        await amphora.has_power.wait()
        writer = None
        try:
            loop = asyncio.get_running_loop()
            reader = asyncio.StreamReader(limit=64 << 20)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            while await self._answer(amphora, reader, writer):
                pass
        except (OSError, ssl.SSLError, asyncio.IncompleteReadError, ValueError):
            self._counts["broken"] += 1
        finally:
            if writer is not None:
                writer.close()
            connection.close()

    async def _answer(self, amphora: Amphora, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        await amphora.has_power.wait()
        status, document = self._handle(amphora, method, path, body)
        self._counts[f"{method} {path}"] += 1
        text = json.dumps(document).encode()
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            "Content-Type: application/json",
            f"Content-Length: {len(text)}",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + text)
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    def _handle(self, amphora: Amphora, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        match method, path:
            case "GET", "/v2/info":
                known = {"amphora_id": amphora.id, "agent_version": VERSION, "hostname": amphora.id[:8]}
                return 200, {**known, "generation": amphora.generation, "holds_vip": amphora.holds_vip}
            case "GET", "/v2/bundle":
                found = {"generation": amphora.generation, "digest": amphora.digest}
                return 200, {**found, "settings_digest": amphora.settings_digest}
            case "PUT", "/v2/bundle":
                return 200, self._apply(amphora, body)
            case "PUT", "/v2/settings":
                wanted = json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode()
                amphora.settings_digest = hashlib.sha256(wanted).hexdigest()
                return 200, {"digest": amphora.settings_digest}
            case "PUT", "/v2/certificate":
                return 200, self._renew(amphora, json.loads(body)["certificate"].encode())
            case "GET", "/v2/vrrp":
                return 200, {"holds_vip": amphora.holds_vip, "connections": 0, "draining": None}
            case "POST", "/v2/vrrp/expect":
                amphora.holds_vip, amphora.packed = True, b""
                return 200, {}
            case "POST", "/v2/vrrp/release":
                amphora.holds_vip, amphora.packed = False, b""
                self._elect(amphora.load_balancer_id, leaving=amphora)
                return 200, {"holds_vip": False, "connections": 0, "draining": None}
        return 404, {"error": {"wanted": f"{method} {path}", "happened": "it is unknown", "remedy": ""}}

    def _apply(self, amphora: Amphora, body: bytes) -> dict[str, Any]:
        document = json.loads(body)
        amphora.generation = document["generation"]
        amphora.digest = hashlib.sha256(body).hexdigest()
        amphora.listeners, amphora.pools, members = [], {}, []
        for kind, name in _LINE.findall(document.get("haproxy") or ""):
            if kind == "frontend":
                amphora.listeners.append(name)
            elif kind == "backend":
                members = amphora.pools.setdefault(name, [])
            else:
                members.append(name)
        amphora.packed = b""
        if not amphora.load_balancer_id:
            amphora.load_balancer_id = document["load_balancer_id"]
            self._of[amphora.load_balancer_id].append(amphora)
        if document["vrrp"] is not None:
            amphora.holds_vip = bool(amphora.holds_vip)
            self._elect(amphora.load_balancer_id)
        self._applied.append((amphora.load_balancer_id, amphora.id, amphora.generation or 0, time.time()))
        self._send(amphora)
        return {
            "generation": amphora.generation,
            "how": "runtime",
            "loaded": {"members": sum(map(len, amphora.pools.values()))},
        }

    def _renew(self, amphora: Amphora, pem: bytes) -> dict[str, Any]:
        context = self._server_context(pem)
        amphora.certificate = pem
        self._contexts[amphora.id] = context
        der = ssl.PEM_cert_to_DER_cert(pem[: pem.index(b"-----END CERTIFICATE-----") + 25].decode())
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _DAYS * 86400))
        return {"expires_at": expires, "fingerprint": hashlib.sha256(der).hexdigest()}

    # --- commands -----------------------------------------------------------------------------------------------------

    async def obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Execute commands: one line of JSON in each direction."""
        while line := await reader.readline():
            request = json.loads(line)
            answer = getattr(self, f"_do_{request.pop('do')}")(**request)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    def _do_boot(self, amphora_id: str, key: str, certificate: str) -> str:
        """Boot an amphora without a configuration; a repeated command returns the same address."""
        known = self._by_id.get(amphora_id)
        if known is None:
            known = Amphora(id=amphora_id, address=shape.amphora_address(self._next), key=bytes.fromhex(key))
            known.certificate = certificate.encode()
            self._next += 1
            self._add(known)
        return known.address

    def _do_machines(self) -> dict[str, str]:
        return {one.id: one.address for one in self._by_id.values()}

    def _do_get(self, amphora_id: str) -> str | None:
        known = self._by_id.get(amphora_id)
        return None if known is None else known.address

    def _do_destroy(self, amphora_id: str) -> None:
        known = self._by_id.pop(amphora_id, None)
        if known is not None:
            self._at.pop(known.address, None)
            self._contexts.pop(amphora_id, None)
            if known in self._of[known.load_balancer_id]:
                self._of[known.load_balancer_id].remove(known)
            self._elect(known.load_balancer_id)

    def _do_lose(self, amphora_ids: list[str]) -> None:
        """Take the power of amphorae; their partners take the VIPs."""
        lost = [self._by_id[one] for one in amphora_ids]
        for one in lost:
            one.has_power.clear()
        for one in lost:
            self._elect(one.load_balancer_id)

    def _do_applied(self) -> list[tuple[str, str, int, float]]:
        """Return and forget the bundles since the last call: load balancer, amphora, generation, time."""
        found, self._applied = self._applied, []
        return found

    def _do_busy(self, percent: float) -> int:
        """Let the counters of this share of the amphorae grow with each heartbeat."""
        chosen = 0
        for number, one in enumerate(self._by_id.values()):
            one.busy = number % 1000 < 10 * percent
            chosen += one.busy
        return chosen

    def _do_counts(self) -> dict[str, int]:
        return dict(self._counts)


async def main(folder: Path) -> None:
    """Serve until a signal ends the process."""
    agents = Agents(folder)
    await asyncio.start_unix_server(agents.obey, folder / "control", limit=1 << 22)
    await asyncio.gather(agents.serve(), agents.send_heartbeats())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
