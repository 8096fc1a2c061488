# SPDX-License-Identifier: Apache-2.0
"""Function calls in the load balancer's network namespace.

Invariant: exactly one thread of the agent is in that namespace. The thread enters once and never leaves. All other
threads stay in the management namespace. No process is forked.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from amphora_agent.errors import InterfaceError

CLONE_NEWNET = 0x40000000
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Namespace:
    """A thread inside a network namespace that runs functions there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "inner-namespace", initializer=self._enter)

    def _enter(self) -> None:
        # Python has os.setns() only since version 3.12, so the function of the C library is called.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(descriptor)

    def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in the namespace and return its result; raises InterfaceError."""
        try:
            return self._thread.submit(function, *args, **kwargs).result()
        except BrokenExecutor as error:
            raise InterfaceError(f"enter the network namespace {self._path}", "it cannot be opened") from error

    def start(self, function: Callable[[], _T]) -> Future[_T]:
        """Start a function in the namespace and return at once; raises RuntimeError after `close`."""
        return self._thread.submit(function)

    def close(self) -> None:
        self._thread.shutdown()
