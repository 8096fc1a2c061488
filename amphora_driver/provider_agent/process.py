# SPDX-License-Identifier: Apache-2.0
"""The provider agent process, which reports to Octavia.

octavia-driver-agent starts `run` in a new process (entry point octavia.driver_agent.provider_agents).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import select
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event

from oslo_config.cfg import ConfigOpts

from amphora_driver import config, repeated_messages
from amphora_driver.database.engine import Database
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.queue import jobs
from amphora_driver.store.process_registry import ProcessKind

LOG = logging.getLogger(__name__)
# Seconds before a restart of a child process. A child that always fails would otherwise use a whole processor.
_RESTART_DELAY = 0.2
# Seconds between two checks for a stop request. The provider agent cannot wait for the event of octavia-driver-agent:
# if a waiting process dies, `set` of the event blocks for ever.
_POLL_INTERVAL = 0.5
# Seconds after which a child process that does not stop is killed.
_STOP_TIMEOUT = 3.0
# Number of threads that read from Octavia. A read that Octavia cannot answer blocks one thread for half a minute, and
# the other threads continue.
_READER_THREADS = 4


class _DriverAgent:
    """The parent process octavia-driver-agent. Children share the file descriptor.

    octavia-driver-agent sets an event at its end, but not after a kill -9. Then its successor starts a second provider
    agent, and the first one must detect the death. (The pipe of `multiprocessing.parent_process` stays open in
    processes that octavia-driver-agent starts later.)
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        try:
            # pidfd_open needs Linux 5.3, and some containers forbid it. Without pidfd_open, a crash of
            # octavia-driver-agent is not detected.
            self._poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
        except OSError as error:
            LOG.info(
                "the provider agent cannot detect a crash of octavia-driver-agent, and would continue to run after "
                "such a crash: %s",
                error,
            )

    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))


def _is_stopped(stopping: ctypes.c_bool, supervisor: int) -> bool:
    """Return whether the provider agent stops (`stopping`), or the supervisor of this child has died.

    A killed reader of the event of octavia-driver-agent would block all other processes. So only the supervisor reads
    that event, and its children read the value `stopping` without a lock.
    """
    return stopping.value or os.getppid() != supervisor


def run(exit_event: Event, driver_agent: _DriverAgent | None = None) -> None:
    """Report to Octavia until octavia-driver-agent ends or sets the event.

    octavia-driver-agent starts this process once and does not restart it after a crash. So a child process reports, and
    this process, the supervisor, replaces a dead child. If the supervisor dies, a second child, the standby, takes its
    place. The standby has no threads, because a process with threads must not fork.
    """
    # octavia-driver-agent has configured the log handlers of this process, and its children inherit the filter.
    repeated_messages.add_filter(logging.getLogger())
    parent = driver_agent or _DriverAgent()
    processes, own_pid, name = multiprocessing.get_context("fork"), os.getpid(), jobs.process_name()
    stopping = processes.RawValue(ctypes.c_bool, False)
    # The supervisor starts the standby before the reporter, so that the standby exists even if the supervisor dies
    # during the start.
    targets: dict[str, Callable[[], None]] = {
        "standby": lambda: _run_standby(own_pid, stopping, exit_event, parent),
        "reporter": lambda: _run_reporter(name, own_pid, stopping),
    }
    running: dict[str, ForkProcess] = {}
    while not (parent.has_ended() or exit_event.is_set()):
        for title, target in targets.items():
            if title in running and running[title].is_alive():
                continue
            if title in running:
                LOG.warning(
                    "the %s process of the provider agent ended with exit code %s; the supervisor restarts it",
                    title,
                    running[title].exitcode,
                )
                time.sleep(_RESTART_DELAY)
            running[title] = processes.Process(target=target, name=title)
            running[title].start()
        connection.wait([one.sentinel for one in running.values()], _POLL_INTERVAL)
    stopping.value = True
    for child in running.values():
        child.join(_STOP_TIMEOUT)
        if child.is_alive():
            # The child still waits for an answer of Octavia. The supervisor may kill the child, because the next
            # reporter repeats the child's work.
            child.kill()
            child.join()


def _run_standby(supervisor: int, stopping: ctypes.c_bool, exit_event: Event, driver_agent: _DriverAgent) -> None:
    while not _is_stopped(stopping, supervisor):
        time.sleep(_POLL_INTERVAL)
    if not (stopping.value or driver_agent.has_ended() or exit_event.is_set()):
        LOG.warning(
            "the supervisor process of the provider agent has died; the standby process takes over as supervisor"
        )
        run(exit_event, driver_agent)


def _run_reporter(name: str, supervisor: int, stopping: ctypes.c_bool) -> None:
    """Run a reporter until its supervisor stops or dies. After a death, the standby starts a new reporter."""
    # The garbage collector writes to each object that it examines. Without the objects of octavia-driver-agent, most of
    # their memory stays shared between the processes.
    gc.freeze()
    conf = config.shared()
    readers, auditors = ThreadPoolExecutor(_READER_THREADS, "reader"), ThreadPoolExecutor(1, "auditor")
    try:
        reporter = Reporter(conf, Database(conf.amp_database.connection, durable=False), name, readers, auditors)
        with _start_telemetry(conf, name, reporter):
            reporter.run(lambda: _is_stopped(stopping, supervisor))
    finally:
        for pool in (readers, auditors):
            pool.shutdown(wait=False, cancel_futures=True)


def _start_telemetry(conf: ConfigOpts, name: str, reporter: Reporter) -> AbstractContextManager[object]:
    if not conf.amp_status_page.provider_agent_port:
        return nullcontext()
    # octavia-driver-agent, in which this code runs, must not load modules that the configuration does not need.
    from amphora_driver.telemetry.http_server import Telemetry  # noqa: PLC0415

    return Telemetry(conf, ProcessKind.PROVIDER_AGENT, name, reporter.is_working)
