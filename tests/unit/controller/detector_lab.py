# SPDX-License-Identifier: Apache-2.0
"""A failure detector with a real database; a test decides which amphorae send heartbeats."""

import time
from types import SimpleNamespace

import sqlalchemy as sa

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, amphora_heartbeat, job, object_status
from amphora_driver.database.tables_fleet import process, silent_amphora
from amphora_driver.failover.failure_detector import FailureDetector
from amphora_driver.failover.failure_rules import ProbeOutcome, ProbeResult
from amphora_driver.store import circuit_breaker, failovers

OPTIONS = """
[amp_failover]
silent_after = 7
mute_after = 30
breaker_trial_after = 100
breaker_close_after = 10
most_at_once = 2
backoff_first = 20
"""
STEP = 1.0
BEGIN = 1_900_000_000.0


class Agents:
    """Prepared probe results and a record of the probed agents. The agents in `saying` answer."""

    def __init__(self, lab):
        self.lab = lab
        self.saying = {}
        self.asked = []
        self.answers = {}

    def start(self, amphora_id, _address):
        self.asked.append(amphora_id)
        how = self.saying.get(amphora_id, ProbeOutcome.NO_ANSWER)
        words = "timed out" if how is ProbeOutcome.NO_ANSWER else ""
        self.answers[amphora_id] = ProbeResult(outcome=how, at=self.lab.now, detail=words)

    def result(self, amphora_id):
        return self.answers.get(amphora_id)

    def retain(self, amphora_ids):
        self.answers = {one: said for one, said in self.answers.items() if one in amphora_ids}

    def close(self):
        """Return whether no probe is in progress."""


class DetectorLab:
    """Load balancers with one amphora each (`a0` of `lb0`, ...), a health manager, and a fake clock."""

    def __init__(self, folder, monkeypatch, number=20, options=OPTIONS):
        self.now, self.ahead, self.told = 5000.0, 0.0, []
        moved = SimpleNamespace(monotonic=lambda: self.now, time=self.wall, sleep=time.sleep)
        for place in (
            "failover.failure_detector",
            "failover.detector_records",
            "database.clock",
            "database.engine",
            "store.status_outbox",
        ):
            monkeypatch.setattr(f"amphora_driver.{place}.time", moved)
        path = folder / "driver.conf"
        path.write_text(f"[amp_database]\nconnection = sqlite:///{folder}/driver.sqlite\n{options}")
        self.conf = config.load([str(path)])
        self.database = Database(self.conf.amp_database.connection, durable=False)
        self.detector = self.made("me")
        self.sequence = 0
        self.speaking = set()
        self.hearing = True
        self.write(process.insert().values(name="hm", kind="health-manager", host="h", started_at=0, seen_at=0, beat=1))
        for index in range(number):
            self.balancer(f"lb{index}", f"a{index}")

    def wall(self):
        """Return the seconds since 1970 of the shared clock."""
        return BEGIN + self.now + self.ahead

    def made(self, owner):
        detector = FailureDetector(self.conf, self.database, None, owner, self.told.append)
        detector._probe.close()
        detector._probe = self.agents = Agents(self)
        return detector

    def write(self, *statements):
        return self.database.write(lambda c: [c.execute(one).rowcount for one in statements])

    def read(self, query):
        return self.database.read(lambda c: c.execute(query).all())

    def balancer(self, load_balancer_id, *amphora_ids, op="apply"):
        row = {"load_balancer_id": load_balancer_id, "op": op, "generation": 1, "committed": 1, "dirty": False}
        said = {"object_id": load_balancer_id, "kind": "loadbalancers", "provisioning": "ACTIVE", "operating": "ONLINE"}
        self.write(job.insert().values(**row), object_status.insert().values(load_balancer_id=load_balancer_id, **said))
        for one in amphora_ids:
            self.amphora(load_balancer_id, one)

    def amphora(self, load_balancer_id, amphora_id, state="ready"):
        row = {"id": amphora_id, "load_balancer_id": load_balancer_id, "role": "STANDALONE", "state": state}
        more = {"heartbeat_key": b"", "created_at": 1.0, "ready_at": self.now, "management_address": "203.0.113.7"}
        self.write(amphora.insert().values(**row, **more))
        self.speaking.add(amphora_id)

    def go(self, seconds, detector=None):
        """Advance the time and record heartbeats."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self.sequence += 1
            self.database.write(self._receive_heartbeats)
            (detector or self.detector).run_once()
        return self

    def _receive_heartbeats(self, connection):
        known = set(connection.execute(sa.select(amphora_heartbeat.c.amphora_id)).scalars())
        place = {"epoch": 1, "sequence": self.sequence, "seen_at": self.wall()}
        if old := self.speaking & known:
            connection.execute(
                amphora_heartbeat.update().where(amphora_heartbeat.c.amphora_id.in_(old)).values(**place)
            )
        for one in self.speaking - known:
            connection.execute(amphora_heartbeat.insert().values(amphora_id=one, **place))
        if self.hearing:
            connection.execute(process.update().values(beat=process.c.beat + 1))

    def silence(self, *amphora_ids):
        self.speaking -= set(amphora_ids)
        return self

    # Results that a test reads.

    def replaced(self):
        return {row.id for row in self.read(sa.select(amphora.c.id).where(amphora.c.state == "retiring"))}

    def verdicts(self):
        return {row.amphora_id: (row.kind, row.verdict) for row in self.read(sa.select(silent_amphora))}

    def breaker(self, name=circuit_breaker.AUTOMATIC):
        return self.database.read(circuit_breaker.read_breaker_rows)[name]

    def operating(self, load_balancer_id):
        (row,) = self.read(
            sa.select(object_status.c.operating, object_status.c.reason).where(
                object_status.c.object_id == load_balancer_id
            )
        )
        return tuple(row)

    def served(self, load_balancer_id, amphora_id):
        """Do the controller's part: replace the retired amphorae by others that serve."""
        self.write(amphora.delete().where(amphora.c.load_balancer_id == load_balancer_id))
        self.amphora(load_balancer_id, amphora_id)
        self.database.write(lambda c: failovers.record_served(c, load_balancer_id, self.wall()))


def small(tmp_path, monkeypatch, number, options=""):
    return DetectorLab(tmp_path, monkeypatch, number=number, options=OPTIONS + options)
