# SPDX-License-Identifier: Apache-2.0
"""Drops notifications that will never be sent, so that their table has a limited size.

Invariant: a notification is dropped if it has been due for too long, if its load balancer is gone, or if too many wait
for a result. Too many wait if octavia-api records notifications while octavia-driver-agent does not.
"""

from __future__ import annotations

import logging

from amphora_driver import metrics
from amphora_driver.database.engine import Database
from amphora_driver.notifications import outbox

LOG = logging.getLogger(__name__)
# Maximum number of notifications that wait for the result of a request. The limit is far above the number of concurrent
# requests, because notifications of load balancers in ERROR also wait.
MOST_WAITING = 100_000
# Maximum number of notifications that one transaction drops, and maximum number of such transactions in one round.
_MOST_AT_ONCE, _MOST_CHUNKS = 1000, 100


def purge_notifications(database: Database, max_age: float) -> None:
    """Drop notifications that are too old or have no load balancer, and the oldest of too many that wait."""
    database.write(outbox.delete_ownerless)
    _drop_excess(database)
    # A jump of the database clock makes the ages of notifications unreliable, so none is dropped soon after a jump.
    if database.seconds_since_clock_jump() < max_age:
        return
    if dropped := database.write(lambda connection: outbox.delete_old(connection, max_age)):
        metrics.count_notifications("dropped", dropped)
        LOG.error(
            "the controller dropped %d notifications, because no controller could send them for %g s. Check the "
            "message bus and [amp_notifications] url",
            dropped,
            max_age,
        )


def _drop_excess(database: Database) -> None:
    dropped = 0
    for _ in range(_MOST_CHUNKS):
        number = database.write(lambda connection: outbox.delete_excess(connection, MOST_WAITING, _MOST_AT_ONCE))
        dropped += number
        if number < _MOST_AT_ONCE:
            break
    if dropped:
        metrics.count_notifications("dropped", dropped)
        LOG.error(
            "more than %d notifications wait for the result of their request; the controller dropped the oldest %d. "
            "Set [amp_notifications] enabled to the same value for octavia-api and octavia-driver-agent on every host.",
            MOST_WAITING,
            dropped,
        )
