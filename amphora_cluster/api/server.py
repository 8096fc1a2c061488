# SPDX-License-Identifier: Apache-2.0
"""The process amphora-cluster-api: gunicorn with the application.

Invariant: no log contains a token. There is no access log, and errors of gunicorn are written without the value of the
parameter `token`, because gunicorn quotes the URL of a request that it cannot serve. Without TLS, the API listens on
loopback only, unless the operator states that a proxy has TLS.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import sys
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger

from amphora_cluster import config
from amphora_cluster.api.attempts import FailedAttempts
from amphora_cluster.api.connections import make_context
from amphora_cluster.api.counters import SharedCounters
from amphora_cluster.api.worker import Worker
from amphora_driver import log_context
from amphora_driver.errors import AmphoraDriverError, ConfigurationError

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

NAME = "amphora-cluster-api"
_TOKEN = re.compile(r"(?i)(token=)[^&\s'\"]+")
_SPARE_SECONDS = 30.0


class RedactingLogger(Logger):
    """gunicorn's log, without tokens."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers:
            handler.setFormatter(_Redacting(self.error_fmt, self.datefmt))


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def redact(text: str) -> str:
    """Return a text without the values of `token` parameters."""
    return _TOKEN.sub(r"\1***", text)


class Server(BaseApplication):
    """gunicorn with the settings of the options only, none from files or the environment."""

    def __init__(self, conf: ConfigOpts) -> None:
        self._conf = conf
        # The counters and the failed attempts exist before gunicorn forks its workers, so that all workers share both.
        self._counters = SharedCounters()
        self._attempts = FailedAttempts(conf.amp_cluster_api.failed_attempts)
        super().__init__()

    def load_config(self) -> None:
        for name, value in gunicorn_options(self._conf).items():
            # Older versions of gunicorn lack some of these settings, so only known settings are set.
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Any:
        # Each worker process needs its own database connections. So each worker imports the application after the fork.
        from amphora_cluster.api.app import create_app  # noqa: PLC0415

        return create_app(self._conf, self._counters, self._attempts)


def gunicorn_options(conf: ConfigOpts) -> dict[str, object]:
    """Return the settings of gunicorn.

    Raises:
        ConfigurationError: the API would send tokens through a network without TLS.
    """
    own = conf.amp_cluster_api
    address = ipaddress.ip_address(own.bind_address) if _is_address(own.bind_address) else None
    local = address is not None and address.is_loopback
    if not (own.certificate or own.tls_proxy or local):
        happened = f"[amp_cluster_api] bind_address is {own.bind_address}, without a certificate"
        remedy = "Set certificate and private_key, or tls_proxy if a proxy has TLS."
        raise ConfigurationError("start the API", happened, remedy)
    host = f"[{own.bind_address}]" if address is not None and address.version == 6 else own.bind_address
    options: dict[str, object] = {
        "bind": f"{host}:{own.bind_port}",
        "workers": own.workers,
        "worker_class": Worker,
        "threads": own.threads,
        # The number is below the usual limit of open files of a process. At that limit, accept() fails and ends the
        # worker of gunicorn.
        "worker_connections": 800,
        "timeout": int(own.longest_wait + _SPARE_SECONDS),
        "graceful_timeout": 5,
        # The worker reads only the first request of a connection, so keep-alive is disabled.
        "keepalive": 0,
        "limit_request_line": 4094,
        "limit_request_fields": 50,
        "accesslog": None,
        "loglevel": "warning",
        "logger_class": RedactingLogger,
        "proc_name": NAME,
        "control_socket_disable": True,
    }
    if own.certificate:
        options |= {"certfile": own.certificate, "keyfile": own.private_key, "ssl_context": make_context}
    return options


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def main() -> None:
    """Run the API."""
    try:
        conf = config.load()
        gunicorn_options(conf)
        config.load_vault(conf)
    except AmphoraDriverError as error:
        sys.exit(str(error))
    log_context.setup(conf, NAME)
    Server(conf).run()


if __name__ == "__main__":
    main()
