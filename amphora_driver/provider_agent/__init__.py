# SPDX-License-Identifier: Apache-2.0
"""The part of this provider that lives beside Octavia and speaks to it.

octavia-driver-agent starts `run` in a process of its own (entry point octavia.driver_agent.provider_agents).
"""

from __future__ import annotations

import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

from amphora_driver import config
from amphora_driver.provider_agent.reporter import Reporter
from amphora_driver.queue import jobs
from amphora_driver.store.engine import Database
from amphora_driver.store.processes import Kind

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from multiprocessing.synchronize import Event

    from oslo_config.cfg import ConfigOpts

LOG = logging.getLogger(__name__)
# Seconds before a reporter that has died is replaced: one that dies again and again must not keep a processor busy.
_RESTART_PAUSE = 0.2
# Seconds between two looks whether Octavia's agent ends: an Event of another process cannot be selected on.
_POLL_SECONDS = 0.5
# Seconds a reporter has to come to an end.
_PATIENCE = 3.0
# What is read at once: each read that is not answered keeps one of them busy for half a minute.
_READERS = 4


def run(exit_event: Event) -> None:
    """Report to Octavia until told to stop.

    Octavia starts us once and never looks again: what a crash ends, it does not bring back. So the work is done by a
    child, which is replaced when it dies. If we are the one that dies, the child goes on alone.

    Args:
        exit_event: set when octavia-driver-agent ends.
    """
    processes, name = multiprocessing.get_context("fork"), jobs.process_name()
    while not exit_event.is_set():
        worker = processes.Process(target=_work, args=(name, exit_event), name="reporter")
        worker.start()
        while worker.is_alive() and not exit_event.is_set():
            worker.join(_POLL_SECONDS)
        worker.join(_PATIENCE)
        if worker.is_alive():
            # It waits for an answer of Octavia's, which is ending too. All it would do is done again.
            worker.kill()
            worker.join()
        if not exit_event.is_set():
            LOG.warning("the reporter ended (%s): starting another one", worker.exitcode)
            exit_event.wait(_RESTART_PAUSE)


def _work(name: str, exit_event: Event) -> None:
    conf = config.shared()
    hands, auditing = ThreadPoolExecutor(_READERS, "reader"), ThreadPoolExecutor(1, "auditor")
    try:
        reporter = Reporter(conf, Database(conf.store.connection, durable=False), name, hands, auditing)
        with _watched(conf, name, reporter):
            reporter.run(exit_event)
    finally:
        for pool in (hands, auditing):
            pool.shutdown(wait=False, cancel_futures=True)


def _watched(conf: ConfigOpts, name: str, reporter: Reporter) -> AbstractContextManager[object]:
    """Status page and metrics around what the reporter does, where a port was chosen for them."""
    if not conf.status.provider_agent_port:
        return nullcontext()
    # Octavia's process is not ours to fill: it is imported only where it is wanted.
    from amphora_driver.telemetry.server import Telemetry  # noqa: PLC0415

    return Telemetry(conf, Kind.PROVIDER_AGENT, name, reporter.does_its_duty)
