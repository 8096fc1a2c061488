# SPDX-License-Identifier: Apache-2.0
"""Controller, provider agent and health manager as the forks and their successors run them: a turn of each in a round.

They die together: a death in one of them takes the memory of all of them. That is worse than what one process loses.
"""

import time

from amphora_driver.certificates.trust import Trust
from amphora_driver.controller.detection import Answer, How
from amphora_driver.controller.detector import Detector
from amphora_driver.controller.housekeeping import Housekeeping
from amphora_driver.controller.reconcile import Reconciler
from amphora_driver.controller.renewal import Certificates
from amphora_driver.controller.rotator import Rotator
from amphora_driver.controller.steps import Backends
from amphora_driver.health.service import HealthManager
from amphora_driver.provider_agent.reporter import Reporter
from amphora_driver.queue.jobs import Jobs
from amphora_driver.store import amphorae, processes

# What the processes do beside jobs, barriers, reports and housekeeping, where a story needs it.
HEALTH, DETECTION, ROTATION, CERTIFICATES = "health", "detection", "rotation", "certificates"
_HOUSEKEEPING_EVERY = 3.0
# No story has more jobs than that in one round.
_MOST_JOBS = 40


class ControlPlane:
    """One set of processes.

    Args:
        estate: where they work.
        name: of the controller; no other one ever had it.
        duties: what they do beside.
    """

    def __init__(self, estate, name, duties):
        self._estate = estate
        conf, database = estate.conf, estate.database
        trust = Trust(conf, database, estate.vault)
        # What was read of authorities is not believed in the next round.
        trust._fresh = 0.0
        backends = Backends(
            conf=conf,
            database=database,
            catalogue=estate.catalogue,
            agents=estate.world,
            authority=None,
            vault=estate.vault,
            trust=trust,
        )
        self._jobs = Jobs(database, name, conf.controller.lease)
        self._reconciler = Reconciler(backends, self._jobs, lambda: None)
        self._housekeeping = Housekeeping(conf, database, estate.catalogue, name)
        self._housekeeping_at = time.monotonic() + _HOUSEKEEPING_EVERY
        # A reporter takes the place of the one before under its name.
        self._reporter = Reporter(conf, database, "reporter")
        turns = {
            HEALTH: lambda: _Health(estate, name).turn,
            DETECTION: lambda: _detector(estate, name).turn,
            ROTATION: lambda: Rotator(conf, database, estate.catalogue, name, lambda: None).look,
            CERTIFICATES: lambda: Certificates(conf, database, trust).attend,
        }
        self._turns = [make() for duty, make in turns.items() if duty in duties]

    def round(self):
        """What is due now, once.

        Orphans are not swept: no single death leaves one.
        """
        for turn in self._turns:
            turn()
        self._work()
        self._reporter.attempt()
        if time.monotonic() >= self._housekeeping_at:
            self._housekeeping_at = time.monotonic() + _HOUSEKEEPING_EVERY
            self._housekeeping.sweep()

    def pause(self):
        """Seconds after which something may be due that is not due now."""
        if self._turns:
            return 1.0
        due = self._jobs.next_due()
        return 1.0 if due is None else min(max(due - time.time() + 0.01, 0.1), 3.0)

    def _work(self):
        for _ in range(_MOST_JOBS):
            lease = self._jobs.claim()
            if lease is None:
                return
            self._reconciler.reconcile(lease)
        raise AssertionError(f"more than {_MOST_JOBS} jobs in one round")


class _Health:
    """A health manager without its threads; heartbeats come from the world."""

    def __init__(self, estate, name):
        self._estate = estate
        self._manager = HealthManager(estate.conf)
        # One datagram more or less is a matter of the socket's own tests.
        self._manager._receiver.close()
        self._manager._database = self._manager._bookkeeper._database = estate.database
        self._manager._ledger.resume(estate.database.read(amphorae.last_heard))
        self._registry = processes.Registry(estate.database, name, processes.Kind.HEALTH_MANAGER)

    def turn(self):
        for heartbeat in self._estate.world.heartbeats(self._estate.octavia_trees()):
            self._manager._heard(heartbeat)
        self._manager._flush()
        self._registry.sign(does_its_duty=True)


class _Answers:
    """The agents' own answers to the detector, without threads that wait for them."""

    def __init__(self, world):
        self._world = world
        self._answers = {}

    def ask(self, amphora_id, _address):
        off = amphora_id in self._world.kept.read()["off"]
        how = How.UNANSWERED if off else How.ANSWERS
        self._answers[amphora_id] = Answer(how=how, at=time.monotonic(), words="timed out" if off else "")

    def answer(self, amphora_id):
        return self._answers.get(amphora_id)

    def keep(self, amphora_ids):
        self._answers = {one: said for one, said in self._answers.items() if one in amphora_ids}


def _detector(estate, name):
    made = Detector(estate.conf, estate.database, None, name, lambda _role: None)
    made._witnesses.close()
    made._witnesses = _Answers(estate.world)
    return made
