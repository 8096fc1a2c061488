# SPDX-License-Identifier: Apache-2.0
"""Options of the notifications about new jobs: group [amp_queue]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_queue": {
        cfg.StrOpt("engine", default="embedded", choices=["embedded", "celery"]): (
            "How processes on other hosts learn of a new job. embedded: they poll the database every poll_interval. "
            "celery: they receive a message over RabbitMQ and poll as well."
        ),
        cfg.StrOpt("broker_url", default="amqp://127.0.0.1:5672//", secret=True): (
            "URL of RabbitMQ: amqp://user:password@host:5672/vhost. Several URLs are separated by semicolons and "
            "tried in this order. Used only with engine = celery."
        ),
        cfg.StrOpt("socket_dir", default="/run/amphora-driver"): (
            "Directory of the unix sockets by which processes of one host notify each other of new jobs."
        ),
        cfg.FloatOpt("poll_interval", default=1.0, min=0.01): (
            "Seconds between two reads of the database without a notification. At least 0.01."
        ),
    }
}
