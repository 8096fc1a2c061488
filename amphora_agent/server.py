# SPDX-License-Identifier: Apache-2.0
"""The process of the agent: a worker of gunicorn behind mutual TLS.

Invariants:
* An HTTP request needs TLS 1.3 and a certificate of the controllers' CA.
* The agent is one process, without gunicorn's master, which would need 13 MiB. The service manager restarts the agent,
  and a timer of the kernel ends an agent that hangs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
from typing import Any

from gunicorn import sock
from gunicorn.config import Config
from gunicorn.workers.gthread import ThreadWorker

from amphora_agent import config
from amphora_agent.config import Settings
from amphora_agent.errors import SettingsError
from amphora_agent.paths import Paths
from amphora_agent.services import sd_notify
from amphora_agent.services.sd_notify import NOTHING_INHERITED, Inherited

THREADS = 16
KEEPALIVE_SECONDS = 75
# After SIGTERM, open requests have this number of seconds to finish.
GRACEFUL_SECONDS = 5
# The kernel ends an agent that does not serve within this number of seconds after its start. The limit is long,
# because the processor of an amphora may be slow or busy.
START_SECONDS = 120.0
# The main loop runs at least once per second. The kernel ends the agent after this number of seconds without a pass.
HANG_SECONDS = 30.0
# After an error has ended the main loop, the process has this number of seconds to log the error and exit.
EXIT_SECONDS = 1.0
_M_ARENA_MAX = -8
# Python's threads take turns after this number of seconds. With the default of 5 ms, a thread that reads many counters
# would delay configuration changes.
SWITCH_SECONDS = 0.0005


class Worker(ThreadWorker):
    """A worker of gunicorn without a master.

    SIGALRM ends the process, also if a thread never releases the interpreter's lock.
    """

    def init_process(self) -> None:
        # The parent may have ignored or blocked SIGALRM, and this process inherits both.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        # On SIGALRM, the log gets the stack of each thread. Then the signal's default action ends the process.
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
        try:
            super().init_process()
        finally:
            # After an error, the interpreter would first wait for all threads with an open request.
            signal.setitimer(signal.ITIMER_REAL, EXIT_SECONDS)

    def notify(self) -> None:
        """Restart the timer. gunicorn's main loop calls this method in each pass."""
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)

    def handle_quit(self, _number: int, _frame: Any) -> None:
        """Stop at once, on SIGINT and SIGQUIT. gunicorn's handler may wait for a lock that its main loop has."""
        os._exit(0)


class Server:
    """The application for gunicorn, with the agent's settings only, none from files or the environment.

    The agent uses the notification socket and descriptors of systemd (`inherited`).
    """

    def __init__(self, settings: Settings, paths: Paths, inherited: Inherited = NOTHING_INHERITED) -> None:
        self._settings = settings
        self._paths = paths
        self._inherited = inherited
        self._identity: Any = None

    def run(self) -> None:
        """Serve until SIGTERM; does not return."""
        serve(self, self._options())

    def _options(self) -> Any:
        options = Config()
        values = {
            "bind": self._settings.bind,
            "threads": THREADS,
            "keepalive": KEEPALIVE_SECONDS,
            "worker_tmp_dir": str(self._paths.run),
            "graceful_timeout": GRACEFUL_SECONDS,
            "loglevel": "debug" if self._settings.log_level == logging.DEBUG else "warning",
            "post_worker_init": self._install_tls_gate,
        }
        for name, value in values.items():
            options.set(name, value)
        return options

    def wsgi(self) -> Any:
        """Create the application; called by gunicorn's worker."""
        sys.setswitchinterval(SWITCH_SECONDS)
        # Imports create many objects and no garbage. Searches for garbage among these objects would cost time.
        gc.disable()
        from amphora_agent import app  # noqa: PLC0415 (the socket listens before this import)
        from amphora_agent.tls_identity import Identity  # noqa: PLC0415

        self._identity = Identity(self._paths, self._settings.amphora_id)
        self._identity.context()
        made = app.create(self._settings, self._paths, self._identity, self._inherited)
        # The objects of the imports are never garbage, so later collections skip them.
        gc.freeze()
        gc.enable()
        return made

    def _install_tls_gate(self, worker: Any) -> None:
        """Replace gunicorn's listening sockets by the TLS gate, which has the same methods."""
        from amphora_agent.tls_gate import TlsGate  # noqa: PLC0415

        worker.sockets = [TlsGate(listener, self._identity) for listener in worker.sockets]
        sd_notify.notify_ready(self._inherited)


def serve(application: Any, options: Any) -> None:
    """Serve an application with gunicorn's options until SIGTERM; does not return."""
    log = options.logger_class(options)
    sockets = sock.create_sockets(options, log)
    Worker(1, os.getppid(), sockets, application, HANG_SECONDS, options, log).init_process()
    # A normal exit would wait for the threads of requests that are still open after the grace period.
    os._exit(0)


def main() -> None:
    """Run the agent."""
    inherited = sd_notify.take_inherited(os.environ, os.getpid())
    # All threads share one heap, so that each thread reuses the memory that others have freed (mallopt(3)).
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    paths = Paths()
    try:
        settings = config.load(paths)
    except SettingsError as error:
        sys.exit(str(error))
    logging.getLogger().setLevel(settings.log_level)
    paths.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The responder and the L4 daemon run as other users, and open files in this directory.
    paths.run.chmod(0o711)
    paths.var.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths.empty.mkdir(exist_ok=True, mode=0o755)
    Server(settings, paths, inherited).run()


if __name__ == "__main__":
    main()
