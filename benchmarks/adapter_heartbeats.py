# SPDX-License-Identifier: Apache-2.0
"""The cases `hb_*` of the harness: heartbeats from agents and their processing in the health manager.

Like the incumbent, this adapter writes the time of every heartbeat to the database.
"""

import hashlib
import threading
import time
import uuid

import sqlalchemy as sa

from amphora_agent.paths import Paths
from amphora_agent.stats import heartbeat_codec
from amphora_agent.stats.collector import Collector
from amphora_driver.database import tables
from amphora_driver.health import status_writer, write_batch
from amphora_driver.health.amphora_reports import AmphoraReports
from amphora_driver.health.heartbeat_codec import decode_datagram, read_amphora_id
from amphora_driver.health.receiver import Receiver
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae

GENERATION = 1
# Datagrams that the UDP case prepares for each one it sends. The harness sends the same datagrams in every run, and the
# receiver refuses replays.
_VARIANTS = 24
_ROUNDS = 10_000
_TIMEOUT = 60.0


class Heard:
    """The receiving side: single heartbeats, and heartbeats through a socket."""

    def hb_setup(self, key):  # noqa: ARG002 - here every amphora has its own key
        self._keys = {}
        self._numbers = {}
        self._epoch, self._offset = 1, 0
        self._variants, self._batch, self._drained = 0, [], False
        self._ledger = AmphoraReports()
        self._unwritten = set()
        # Write the time of every heartbeat; the default interval of one second is longer than a run.
        write_batch._HEARTBEAT_WRITE_INTERVAL = 0.0  # noqa: SLF001
        self._bookkeeper = status_writer.StatusWriter(self.database, self._ledger)

    def hb_encode(self, message):
        if self._drained:
            self._drained, self._batch = False, []
            self._epoch += _VARIANTS
            self._offset += _VARIANTS * _ROUNDS
        made = Sent()
        self._encode(made, message)
        made.later = [self._datagrams(message, variant)[0] for variant in range(1, _VARIANTS * self._variants)]
        self._batch += [made] * self._variants
        return made

    def _encode(self, made, message):
        self._numbers[message["id"]] = self._numbers.get(message["id"], 0) + 1
        first, *rest = self._datagrams(message, 0)
        made[:] = first
        made.rest = rest
        made.message, made.used = message, False

    def _datagrams(self, message, variant):
        """Datagrams as from an agent. Counters are absolute, so that the deltas of the message are added."""
        number = self._numbers[message["id"]]
        times = number + self._offset + variant * _ROUNDS
        listeners = {
            listener: {
                "status": said["status"],
                "active_connections": said["stats"]["conns"],
                "bytes_in": said["stats"]["rx"] * times,
                "bytes_out": said["stats"]["tx"] * times,
                "request_errors": said["stats"]["ereq"] * times,
                "total_connections": said["stats"]["totconns"] * times,
            }
            for listener, said in message["listeners"].items()
        }
        document = {"generation": GENERATION, "listeners": listeners, "pools": message["pools"]}
        amphora = message["id"]
        key = self._keys.setdefault(amphora, heartbeat_key(amphora)).reveal()
        return list(heartbeat_codec.datagrams(uuid.UUID(amphora), key, self._epoch + variant, number << 8, document))

    def hb_decode(self, datagram):
        for part in (datagram, *datagram.rest):
            decode_datagram(part, self._keys[read_amphora_id(part)])

    def hb_apply(self, datagram):
        if datagram.used:  # the harness applies its first batch twice, and the receiver refuses replays
            self._encode(datagram, datagram.message)
        datagram.used = True
        if datagram.message["id"] in self._unwritten:
            self.hb_flush()
        for part in (datagram, *datagram.rest):
            self._hear(decode_datagram(part, self._keys[read_amphora_id(part)]))

    def _hear(self, heartbeat):
        if not self._ledger.accept(heartbeat, time.monotonic()):
            raise RuntimeError(f"heartbeat {heartbeat.epoch}/{heartbeat.sequence} was refused")
        self._unwritten.add(heartbeat.amphora_id)

    def hb_flush(self):
        """Flush once a round. A batch has several load balancers, but one heartbeat of each amphora."""
        self._bookkeeper.flush()
        self._unwritten.clear()

    def hb_check(self, lb_id):
        def read(connection):
            rows = connection.execute(
                sa.select(tables.object_status).where(tables.object_status.c.load_balancer_id == lb_id)
            ).all()
            counters = tables.listener_statistics.c
            total = sa.select(sa.func.sum(counters.total_connections)).where(counters.load_balancer_id == lb_id)
            seen = (
                sa.select(sa.func.max(tables.amphora_heartbeat.c.seen_at))
                .join(tables.amphora, tables.amphora.c.id == tables.amphora_heartbeat.c.amphora_id)
                .where(tables.amphora.c.load_balancer_id == lb_id)
            )
            return {
                "lb": next(row.operating for row in rows if row.object_id == lb_id),
                "members": {row.object_id: row.operating for row in rows if row.kind == "members"},
                "stats_total_connections": int(connection.execute(total).scalar() or 0),
                "amp_age_s": time.time() - connection.execute(seen).scalar(),
            }

        return self.database.read(read)

    # --- heartbeats over UDP ------------------------------------------------------------------------------------------

    def udp_start(self, port, workers):  # noqa: ARG002 - one process receives, the others are on standby
        self._variants = 1
        self._left, self._gate, self._done = 0, threading.Event(), threading.Event()
        self._receiver = Receiver("127.0.0.1", port, self._new_keys, self._received)
        threading.Thread(target=self._receiver.run, daemon=True).start()

    def _new_keys(self, known):
        return self.database.read(lambda connection: amphorae.read_heartbeat_keys(connection, self._vault, known))

    def _received(self, heartbeat):
        # All datagrams wait in the socket until the measurement starts.
        self._gate.wait()
        if heartbeat.amphora_id in self._unwritten:
            self.hb_flush()
        self._hear(heartbeat)
        self._left -= 1
        if self._left == 0:
            self.hb_flush()
            self._gate.clear()
            self._done.set()

    def udp_drain(self, n):
        self._left = n
        self._done.clear()
        self._gate.set()
        if not self._done.wait(_TIMEOUT) or self._receiver.refused:
            raise RuntimeError(f"{self._left} of {n} datagrams are missing; refused: {self._receiver.refused}")
        self._drained = True
        for one in self._batch:
            one[:] = one.later.pop(0)


class Beats:
    """The sending side: the agent."""

    def beat_setup(self, lb_id, sock, pid, config, key):  # noqa: ARG002
        paths = Paths(self.folder / f"beat-{lb_id}")
        for folder in (paths.run, paths.var):
            folder.mkdir(parents=True, exist_ok=True)
        paths.stats_socket.unlink(missing_ok=True)
        paths.stats_socket.symlink_to(sock)
        self._agent_ledger = Collector(paths)
        self._amphora, self._sequence = uuid.UUID(lb_id), 0

    def beat(self):
        """One cycle of the agent's sender: sample, store the counters, send the complete heartbeat."""
        self._agent_ledger.sample()
        document = self._agent_ledger.document(GENERATION)
        self._agent_ledger.write()
        self._sequence += 1
        key = heartbeat_key(str(self._amphora)).reveal()
        (datagram,) = heartbeat_codec.datagrams(self._amphora, key, 1, self._sequence, document)
        return datagram

    def beat_members(self, datagram):
        report = decode_datagram(datagram, heartbeat_key(str(self._amphora))).report
        return sum(len(pool.members) for pool in report.pools.values())


class Sent(bytearray):
    """A datagram that can be replaced in place, and its source message."""

    __slots__ = ("later", "message", "rest", "used")


def heartbeat_key(amphora_id):
    """The heartbeat key of an amphora."""
    return Secret(hashlib.sha256(amphora_id.encode()).digest())
