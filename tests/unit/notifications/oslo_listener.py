# SPDX-License-Identifier: Apache-2.0
"""A consumer of notifications on oslo.messaging, as Ceilometer and Designate use it: one JSON line per notification.

    python oslo_listener.py URL EXCHANGE TOPIC

The line `ready` says that its queue exists. It ends with its standard input.
"""

import json
import sys

import oslo_messaging
from oslo_config import cfg


def say(document):
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class Endpoint:
    """Writes what oslo.messaging passes to an endpoint for the priority `info`."""

    filter_rule = oslo_messaging.NotificationFilter(event_type=r"^octavia\.loadbalancer\.")

    def info(self, ctxt, publisher_id, event_type, payload, metadata):
        context = {"project_id": ctxt.get("project_id"), "request_id": ctxt.get("request_id")}
        say(
            {
                "context": context,
                "publisher_id": publisher_id,
                "event_type": event_type,
                "payload": payload,
                "metadata": metadata,
            }
        )
        return oslo_messaging.NotificationResult.HANDLED


def main(url, exchange, topic):
    conf = cfg.ConfigOpts()
    conf([], project="listener")
    transport = oslo_messaging.get_notification_transport(conf, url=url)
    targets = [oslo_messaging.Target(topic=topic, exchange=exchange)]
    listener = oslo_messaging.get_notification_listener(transport, targets, [Endpoint()], executor="threading")
    listener.start()
    say("ready")
    sys.stdin.read()
    listener.stop()
    listener.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
