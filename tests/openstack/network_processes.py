# SPDX-License-Identifier: Apache-2.0
"""Processes that use the network backend `neutron` at the same moment, as several controllers and octavia-api do.

A process that has imported the modules forks them. Each process has its own backend, connections and cache.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from contextlib import ExitStack, contextmanager

from amphora_driver import config
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.network.neutron import NeutronNetwork

_SECONDS = 120
# The product imports most of them at its first connection.
_IMPORTED = [
    "amphora_driver.maintenance.orphan_cleanup",
    "amphora_driver.network.neutron",
    "keystoneauth1.loading",
    "openstack.connection",
    "openstack.network.v2._proxy",
]


class _Unexpected(str):
    """The traceback of an error that no caller of the backend expects."""

    __slots__ = ()


class Processes:
    """Processes that wait for calls; `run` lets each one begin its call at the same moment."""

    def __init__(self, pipes, barrier):
        self._pipes = pipes
        self._barrier = barrier
        self.ids = {pipe.recv() for pipe in pipes}

    def run(self, *calls):
        """Call one function in each process with its backend; return the results, or errors of the product."""
        for pipe, call in zip(self._pipes, calls, strict=True):
            pipe.send(call)
        self._barrier.wait(_SECONDS)
        found = []
        for pipe in self._pipes:
            assert pipe.poll(_SECONDS), "a process does not answer"
            found.append(pipe.recv())
        unexpected = [one for one in found if isinstance(one, _Unexpected)]
        assert not unexpected, unexpected
        return found


@contextmanager
def processes(files):
    """Run a process for each configuration file inside the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with ExitStack() as closing:
        barrier = context.Barrier(len(files) + 1)
        pipes = []
        for file in files:
            ours, theirs = context.Pipe()
            started = context.Process(target=_serve, args=(str(file), theirs, barrier), daemon=True)
            started.start()
            theirs.close()
            closing.callback(started.close)
            closing.callback(started.join, _SECONDS)
            closing.callback(ours.close)
            pipes.append(ours)
        yield Processes(pipes, barrier)


def _serve(file, pipe, barrier):
    """Perform calls until the other end of the pipe is closed."""
    network = NeutronNetwork(config.load([file]), None)
    # Without this request, the processes would wait for tokens instead of each other.
    network._neutron.project_id()
    pipe.send(os.getpid())
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        barrier.wait(_SECONDS)
        try:
            pipe.send(call(network))
        except AmphoraDriverError as error:
            pipe.send(error)
        except Exception:  # noqa: BLE001 - the test fails with this text
            pipe.send(_Unexpected(traceback.format_exc()))
