# SPDX-License-Identifier: Apache-2.0
"""The part of this provider that lives beside Octavia and speaks to it.

octavia-driver-agent starts `run` in a process of its own (entry point octavia.driver_agent.provider_agents).
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import select
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import connection
from typing import TYPE_CHECKING

from amphora_driver import config
from amphora_driver.database.engine import Database
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.queue import jobs
from amphora_driver.store.process_registry import ProcessKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from multiprocessing.context import ForkProcess
    from multiprocessing.synchronize import Event

    from oslo_config.cfg import ConfigOpts

LOG = logging.getLogger(__name__)
# Seconds before one that has died is replaced: one that dies again and again must not keep a processor busy.
_RESTART_PAUSE = 0.2
# Seconds between two looks whether Octavia's agent ends, or a process has. Nobody waits on its event: one that was
# killed there would have Octavia's agent wait for it without end.
_POLL_SECONDS = 0.5
# Seconds a child has to come to an end.
_PATIENCE = 3.0
# What is read at once: each read that is not answered keeps one of them busy for half a minute.
_READERS = 4


class _Octavia:
    """The process that has started us: octavia-driver-agent. A child asks by the same descriptor.

    It says that it ends; killed with -9 it says nothing, its successor starts others of us, and we would go on beside
    them for ever. (`multiprocessing.parent_process` looks at a pipe, which children it starts after us keep open.)
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        try:
            # Linux 5.3; some containers forbid it. We are asked to end then, as by everybody who does end.
            self._poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
        except OSError as error:
            LOG.info("whether octavia-driver-agent is there is not seen: %s", error)

    def is_gone(self) -> bool:
        return bool(self._poll.poll(0))


class _Alone:
    """The end of all of us, or of the process that watches over this one, whichever comes first.

    Args:
        ending: says the former; it has no lock, unlike the event of Octavia's agent: who is killed while it looks at
            that has everybody wait who looks at it later, Octavia's own processes too. So one of us looks alone.
        watcher: the process.
    """

    def __init__(self, ending: ctypes.c_bool, watcher: int) -> None:
        self._ending = ending
        self._watcher = watcher

    def is_set(self) -> bool:
        return self._ending.value or os.getppid() != self._watcher


def run(exit_event: Event) -> None:
    """Report to Octavia until told to stop, or until nobody is there who could say so.

    Octavia starts us once and never looks again: what a crash ends, it does not bring back. So the work is done by a
    child, which is replaced when it dies. If we are the one that dies, a second child takes our place. It does nothing
    until then, and so has no threads: who forks should have none.

    Args:
        exit_event: set when octavia-driver-agent ends.
    """
    _watch_over(exit_event, _Octavia())


def _watch_over(exit_event: Event, octavia: _Octavia) -> None:
    processes, me, name = multiprocessing.get_context("fork"), os.getpid(), jobs.process_name()
    ending = processes.RawValue(ctypes.c_bool, False)
    # In this order: where there is a reporter, there is somebody to take our place.
    targets: dict[str, Callable[[], None]] = {
        "standby": lambda: _stand_by(me, ending, exit_event, octavia),
        "reporter": lambda: _work(name, me, ending),
    }
    running: dict[str, ForkProcess] = {}
    while not (octavia.is_gone() or exit_event.is_set()):
        for title, target in targets.items():
            if title in running and running[title].is_alive():
                continue
            if title in running:
                LOG.warning("the %s ended (%s): starting another one", title, running[title].exitcode)
                time.sleep(_RESTART_PAUSE)
            running[title] = processes.Process(target=target, name=title)
            running[title].start()
        connection.wait([one.sentinel for one in running.values()], _POLL_SECONDS)
    ending.value = True
    for child in running.values():
        child.join(_PATIENCE)
        if child.is_alive():
            # It waits for an answer of Octavia's, which is ending too. All it would do is done again.
            child.kill()
            child.join()


def _stand_by(watcher: int, ending: ctypes.c_bool, exit_event: Event, octavia: _Octavia) -> None:
    alone = _Alone(ending, watcher)
    while not alone.is_set():
        time.sleep(_POLL_SECONDS)
    if not (ending.value or octavia.is_gone() or exit_event.is_set()):
        LOG.warning("who watched over the reporter has died: going on in its place")
        _watch_over(exit_event, octavia)


def _work(name: str, watcher: int, ending: ctypes.c_bool) -> None:
    """Report; without a watcher no longer, since nobody would bring this one back. Its successor has another name."""
    conf = config.shared()
    hands, auditing = ThreadPoolExecutor(_READERS, "reader"), ThreadPoolExecutor(1, "auditor")
    try:
        reporter = Reporter(conf, Database(conf.store.connection, durable=False), name, hands, auditing)
        with _watched(conf, name, reporter):
            reporter.run(_Alone(ending, watcher))
    finally:
        for pool in (hands, auditing):
            pool.shutdown(wait=False, cancel_futures=True)


def _watched(conf: ConfigOpts, name: str, reporter: Reporter) -> AbstractContextManager[object]:
    """Status page and metrics around what the reporter does, where a port was chosen for them."""
    if not conf.status.provider_agent_port:
        return nullcontext()
    # Octavia's process is not ours to fill: it is imported only where it is wanted.
    from amphora_driver.telemetry.http_server import Telemetry  # noqa: PLC0415

    return Telemetry(conf, ProcessKind.PROVIDER_AGENT, name, reporter.does_its_duty)
