# SPDX-License-Identifier: Apache-2.0
"""The process of the agent: gunicorn behind mutual TLS.

Invariant: an HTTP request needs TLS 1.3 and a certificate of the controllers' CA. The worker ends with the master, so
that no process answers after a kill of the agent.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from typing import Any

from gunicorn.app.base import BaseApplication

from amphora_agent import config
from amphora_agent.config import Settings
from amphora_agent.errors import SettingsError
from amphora_agent.paths import Paths
from amphora_agent.services import sd_notify
from amphora_agent.services.sd_notify import NOTHING_INHERITED, Inherited

THREADS = 16
KEEPALIVE_SECONDS = 75
_PR_SET_PDEATHSIG = 1
_M_ARENA_MAX = -8
# Seconds between switches of Python's threads. With the default of 5 ms, a thread that reads many counters would delay
# configuration changes.
SWITCH_SECONDS = 0.0005


class Server(BaseApplication):
    """gunicorn with the agent's settings only, none from files or the environment.

    The worker uses the notification socket and descriptors of systemd (`inherited`).
    """

    def __init__(self, settings: Settings, paths: Paths, inherited: Inherited = NOTHING_INHERITED) -> None:
        self._settings = settings
        self._paths = paths
        self._inherited = inherited
        self._identity: Any = None
        super().__init__()

    def load_config(self) -> None:
        options = {
            "bind": self._settings.bind,
            "workers": 1,
            "worker_class": "gthread",
            "threads": THREADS,
            "keepalive": KEEPALIVE_SECONDS,
            "worker_tmp_dir": str(self._paths.run),
            "graceful_timeout": 5,
            "loglevel": "debug" if self._settings.log_level == logging.DEBUG else "warning",
            "control_socket_disable": True,
            "post_fork": _exit_with_master,
            "post_worker_init": self._install_tls_gate,
        }
        if self._inherited.address is not None:
            options["child_exit"] = _exit_with_worker
        for name, value in options.items():
            if name in self.cfg.settings:
                # Older versions of gunicorn lack some of the options, so only known options are set.
                self.cfg.set(name, value)

    def load(self) -> Any:
        # Only the worker imports the application. After an import in gunicorn's master, reference counting would copy
        # nearly all shared memory pages.
        sys.setswitchinterval(SWITCH_SECONDS)
        # Imports create no garbage, so a disabled garbage collector saves time.
        gc.disable()
        from amphora_agent import app  # noqa: PLC0415
        from amphora_agent.tls_identity import Identity  # noqa: PLC0415

        self._identity = Identity(self._paths, self._settings.amphora_id)
        self._identity.context()
        made = app.create(self._settings, self._paths, self._identity, self._inherited)
        gc.freeze()
        gc.enable()
        return made

    def _install_tls_gate(self, worker: Any) -> None:
        """Replace gunicorn's listening sockets by the TLS gate, which has the same methods."""
        from amphora_agent.tls_gate import TlsGate  # noqa: PLC0415 (only the worker needs this module)

        worker.sockets = [TlsGate(listener, self._identity) for listener in worker.sockets]
        sd_notify.notify_ready(self._inherited)


def _exit_with_master(_arbiter: Any, _worker: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _exit_with_worker(_arbiter: Any, _worker: Any) -> None:
    """End the master: systemd passes stored descriptors to a new process, not to a new worker."""
    os.kill(os.getpid(), signal.SIGTERM)


def _reduce_memory() -> None:
    """Use one heap for all threads, so that freed memory is reused (mallopt(3)); share the master's pages."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    # The garbage collector does not write to frozen objects, so gunicorn's master and worker share their memory pages.
    gc.collect()
    gc.freeze()


def main() -> None:
    """Run the agent."""
    inherited = sd_notify.take_inherited(os.environ, os.getpid())
    _reduce_memory()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    paths = Paths()
    try:
        settings = config.load(paths)
    except SettingsError as error:
        sys.exit(str(error))
    logging.getLogger().setLevel(settings.log_level)
    paths.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The responder and the L4 daemon run as other users and must enter this directory.
    paths.run.chmod(0o711)
    paths.var.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths.empty.mkdir(exist_ok=True, mode=0o755)
    Server(settings, paths, inherited).run()


if __name__ == "__main__":
    main()
