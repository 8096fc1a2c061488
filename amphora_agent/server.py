# SPDX-License-Identifier: Apache-2.0
"""The agent's process: gunicorn with mutual TLS.

Invariant: nobody gets as far as HTTP without a certificate of the controllers' authority, and nobody below
TLS 1.3.
"""

from __future__ import annotations

import logging
import ssl
import sys
from collections.abc import Callable
from typing import Any

from gunicorn.app.base import BaseApplication

from amphora_agent import config
from amphora_agent.config import Settings
from amphora_agent.errors import SettingsError
from amphora_agent.paths import Paths

THREADS = 8
KEEPALIVE_SECONDS = 75


def _tls(_: Any, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    context = default()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class Server(BaseApplication):
    """gunicorn with our settings, and none from files or the environment."""

    def __init__(self, settings: Settings, paths: Paths) -> None:
        self._settings = settings
        self._paths = paths
        super().__init__()

    def load_config(self) -> None:
        certificate = str(self._paths.etc / "server.pem")
        options = {
            "bind": self._settings.bind,
            "workers": 1,
            "worker_class": "gthread",
            "threads": THREADS,
            "keepalive": KEEPALIVE_SECONDS,
            "certfile": certificate,
            "keyfile": certificate,
            "ca_certs": str(self._paths.etc / "client_ca.pem"),
            "cert_reqs": int(ssl.CERT_REQUIRED),
            "ssl_context": _tls,
            "worker_tmp_dir": str(self._paths.run),
            "graceful_timeout": 5,
            "loglevel": "debug" if self._settings.log_level == logging.DEBUG else "warning",
            "control_socket_disable": True,
        }
        for name, value in options.items():
            if name in self.cfg.settings:  # older versions of gunicorn have no control socket
                self.cfg.set(name, value)

    def load(self) -> Any:
        # Imported in the worker alone. Sharing the modules with the master was measured: counting references copies
        # nearly every page, and both together take more memory than this way.
        from amphora_agent import app  # noqa: PLC0415

        return app.create(self._settings, self._paths)


def main() -> None:
    """Console entry."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    paths = Paths()
    try:
        settings = config.load(paths)
    except SettingsError as error:
        sys.exit(str(error))
    logging.getLogger().setLevel(settings.log_level)
    paths.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths.var.mkdir(parents=True, exist_ok=True, mode=0o700)
    Server(settings, paths).run()


if __name__ == "__main__":
    main()
