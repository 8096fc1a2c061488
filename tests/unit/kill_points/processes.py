# SPDX-License-Identifier: Apache-2.0
"""Controller, provider agent and health manager in one process, one after the other in each round.

SIGKILL ends all three at once and so loses more than the end of one process.
"""

import time

from amphora_driver.certificates.renewal import CertificateMaintenance
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.failover.failure_detector import FailureDetector
from amphora_driver.failover.failure_rules import ProbeOutcome, ProbeResult
from amphora_driver.health.service import HealthManager
from amphora_driver.maintenance.housekeeping import Housekeeping
from amphora_driver.maintenance.image_rotation import ImageRotator
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.queue.jobs import Jobs
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.reconciler import Reconciler
from amphora_driver.store import amphorae, process_registry

# Duties beside jobs, barriers, reports and housekeeping.
HEALTH, DETECTION, ROTATION, CERTIFICATES = "health", "detection", "rotation", "certificates"
_HOUSEKEEPING_EVERY = 3.0
# More jobs in one round are a loop without end.
_MOST_JOBS = 40


class ControlPlane:
    """One set of processes of the control plane.

    Args:
        deployment: the deployment that the processes serve.
        name: of the controller; no other controller has this name.
        duties: further duties of the processes.
    """

    def __init__(self, deployment, name, duties):
        self._deployment = deployment
        conf, database = deployment.conf, deployment.database
        trust = TrustStore(conf, database, deployment.vault)
        # Each round reads the CAs again.
        trust._max_age = 0.0
        backends = ReconcileContext(
            conf=conf,
            database=database,
            catalogue=deployment.catalogue,
            agents=deployment.cloud,
            authority=None,
            vault=deployment.vault,
            trust=trust,
        )
        self._jobs = Jobs(database, name, conf.amp_controller.lease)
        self._reconciler = Reconciler(backends, self._jobs, lambda: None)
        self._housekeeping = Housekeeping(conf, database, deployment.catalogue, name, deployment.vault)
        self._housekeeping_at = time.monotonic() + _HOUSEKEEPING_EVERY
        # A reporter has the name of the previous reporter, and so gets its duty at once.
        self._reporter = Reporter(conf, database, "reporter")
        turns = {
            HEALTH: lambda: _Health(deployment, name).run_round,
            DETECTION: lambda: _detector(deployment, name).run_once,
            ROTATION: lambda: ImageRotator(conf, database, deployment.catalogue, name, lambda: None).advance,
            CERTIFICATES: lambda: CertificateMaintenance(conf, database, trust).run_once,
        }
        self._rounds = [make() for duty, make in turns.items() if duty in duties]

    def round(self):
        """Do all due work once.

        Housekeeping removes no orphans here, because a kill must not leave one.
        """
        for run_round in self._rounds:
            run_round()
        self._work()
        self._reporter.try_run_once()
        if time.monotonic() >= self._housekeeping_at:
            self._housekeeping_at = time.monotonic() + _HOUSEKEEPING_EVERY
            self._housekeeping.release_unused_vips()

    def pause(self):
        """Seconds until the next work may be due."""
        if self._rounds:
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
    """A health manager without its threads; heartbeats come from the fake cloud."""

    def __init__(self, deployment, name):
        self._deployment = deployment
        self._manager = HealthManager(deployment.conf)
        # The collected reports get the heartbeats directly.
        self._manager._receiver.close()
        self._manager._database = self._manager._writer._database = deployment.database
        self._manager._writer._batches._database = deployment.database
        self._manager._reports.load_orders(deployment.database.read(amphorae.last_heartbeats))
        self._registry = process_registry.ProcessRegistration(
            deployment.database, name, process_registry.ProcessKind.HEALTH_MANAGER
        )

    def run_round(self):
        for heartbeat in self._deployment.cloud.heartbeats(self._deployment.octavia_trees()):
            self._manager._accept(heartbeat)
        self._manager._flush()
        self._registry.heartbeat(working=True)


class _Answers:
    """The answers of agents to the detector, without threads."""

    def __init__(self, cloud):
        self._world = cloud
        self._answers = {}

    def start(self, amphora_id, _address):
        off = amphora_id in self._world.kept.read()["off"]
        how = ProbeOutcome.NO_ANSWER if off else ProbeOutcome.ANSWERED
        self._answers[amphora_id] = ProbeResult(outcome=how, at=time.monotonic(), detail="timed out" if off else "")

    def result(self, amphora_id):
        return self._answers.get(amphora_id)

    def retain(self, amphora_ids):
        self._answers = {one: said for one, said in self._answers.items() if one in amphora_ids}


def _detector(deployment, name):
    made = FailureDetector(deployment.conf, deployment.database, None, name, lambda _role: None)
    made._probe.close()
    made._probe = _Answers(deployment.cloud)
    return made
