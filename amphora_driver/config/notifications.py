# SPDX-License-Identifier: Apache-2.0
"""Options of the notifications for other OpenStack services: group [amp_notifications]."""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_notifications": {
        cfg.BoolOpt("enabled", default=False): (
            "Send octavia.loadbalancer.create.end, update.end and delete.end to other OpenStack services. Set it on "
            "every host: octavia-api records the requests, octavia-driver-agent their results, and a controller sends. "
            "Off by default."
        ),
        cfg.StrOpt("url", secret=True): (
            "URL of the message bus: amqp://user:password@host:5672/vhost, or amqps://user:password@host:5671/vhost "
            "for TLS. Several URLs are separated by semicolons and tried in turn. Only controllers read it. There is "
            "no default: enabled = true needs a URL."
        ),
        cfg.StrOpt("ca_certificate"): (
            "PEM file with the CA certificates for amqps. The certificate of the server must contain the host of "
            "`url`. The default is the CA certificates of the operating system."
        ),
        cfg.StrOpt("exchange", default="octavia"): (
            "Topic exchange of the notifications. The same as control_exchange in octavia.conf."
        ),
        cfg.ListOpt("topics", default=["notifications"]): (
            "Topics, separated by commas. Each topic has a queue with the routing key TOPIC.info. The same as "
            "[oslo_messaging_notifications] topics in octavia.conf."
        ),
        cfg.StrOpt("publisher_id"): (
            "Value of publisher_id in each notification. The default is none, as in the notifications of Octavia."
        ),
        cfg.BoolOpt("durable_queues", default=False): (
            "Create a missing exchange and missing queues as durable ones. The same as [oslo_messaging_rabbit] "
            "amqp_durable_queues in octavia.conf. Existing ones are used as they are."
        ),
        cfg.BoolOpt("quorum_queues", default=False): (
            "Create missing queues as quorum queues, and a missing exchange as a durable one. The same as "
            "[oslo_messaging_rabbit] rabbit_quorum_queue in octavia.conf."
        ),
        cfg.FloatOpt("max_age", default=86400.0, min=1.0): (
            "Seconds after which a notification that no message bus has accepted is dropped and counted. At least 1."
        ),
    }
}
