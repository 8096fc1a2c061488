# SPDX-License-Identifier: Apache-2.0
"""The agent's process: gunicorn behind a gate of mutual TLS.

Invariant: nobody gets as far as HTTP without a certificate of the controllers' authority, and nobody below
TLS 1.3. The worker ends with the master: an agent that was killed leaves nobody who answers in its name.
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
# Whoever reads ten thousand counters lets a change go on sooner than after the usual 5 ms; a change waits for HAProxy
# and the disk a dozen times, and each time has to get the interpreter back.
SWITCH_SECONDS = 0.0005


class Server(BaseApplication):
    """gunicorn with our settings, and none from files or the environment.

    Args:
        inheritance: what systemd gave this process; the worker has it too.
    """

    def __init__(self, settings: Settings, paths: Paths, inheritance: Inherited = NOTHING_INHERITED) -> None:
        self._settings = settings
        self._paths = paths
        self._inheritance = inheritance
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
            "post_fork": _end_with_the_master,
            "post_worker_init": self._put_up_the_gate,
        }
        if self._inheritance.address is not None:
            options["child_exit"] = _end_with_the_worker
        for name, value in options.items():
            if name in self.cfg.settings:  # older versions of gunicorn have no control socket
                self.cfg.set(name, value)

    def load(self) -> Any:
        # Imported in the worker alone. Sharing the modules with the master was measured: counting references copies
        # nearly every page, and both together take more memory than this way.
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.disable()  # nothing of what is imported is garbage
        from amphora_agent import app  # noqa: PLC0415
        from amphora_agent.tls_identity import Identity  # noqa: PLC0415

        self._identity = Identity(self._paths, self._settings.amphora_id)
        self._identity.context()
        made = app.create(self._settings, self._paths, self._identity, self._inheritance)
        gc.freeze()
        gc.enable()
        return made

    def _put_up_the_gate(self, worker: Any) -> None:
        """Between the listening sockets and gunicorn, which takes what it is given for sockets."""
        from amphora_agent.tls_gate import Gate  # noqa: PLC0415 (in the worker alone, as above)

        worker.sockets = [Gate(listener, self._identity) for listener in worker.sockets]
        sd_notify.notify_ready(self._inheritance)


def _end_with_the_master(_arbiter: Any, _worker: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _end_with_the_worker(_arbiter: Any, _worker: Any) -> None:
    """What the worker had systemd keep is given to a process that systemd starts, not to another worker."""
    os.kill(os.getpid(), signal.SIGTERM)


def _spare_memory() -> None:
    """One heap for all threads: they take turns anyway, and what one has freed another can use (mallopt(3))."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    # What the master has imported is never garbage; not looking through it leaves the worker's pages shared.
    gc.collect()
    gc.freeze()


def main() -> None:
    """Console entry."""
    inheritance = sd_notify.take_inherited(os.environ, os.getpid())
    _spare_memory()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    paths = Paths()
    try:
        settings = config.load(paths)
    except SettingsError as error:
        sys.exit(str(error))
    logging.getLogger().setLevel(settings.log_level)
    paths.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths.run.chmod(0o711)  # responder and checker, users of their own, get to what is theirs in it
    paths.var.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths.empty.mkdir(exist_ok=True, mode=0o755)
    Server(settings, paths, inheritance).run()


if __name__ == "__main__":
    main()
