# SPDX-License-Identifier: Apache-2.0
"""The loop of a thread whose work one controller at a time does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

from amphora_driver.errors import AmphoraDriverError

LOG = logging.getLogger(__name__)


def run_duty(
    duty: str, every: float, stop: Event, draining: Event, *, work: Callable[[], object], release: Callable[[], None]
) -> None:
    """Call `work` every few seconds until `stop` is set; `work` acquires the duty.

    The loop calls `release` while `draining` is set and at its end, so that another controller can acquire the duty.
    """
    while not stop.wait(every):
        try:
            if draining.is_set():
                release()
            else:
                work()
        except AmphoraDriverError as error:
            LOG.warning(
                "the controller could not perform its recurring task '%s', and tries again in the next round: %s",
                duty,
                error,
            )
        except Exception:
            # An error must not end the thread of a recurring task, because no other component would notice the missing
            # task.
            LOG.exception(
                "the controller failed unexpectedly in its recurring task '%s', and tries again in %g s", duty, every
            )
    try:
        release()
    except AmphoraDriverError as error:
        text = (
            "the controller could not release its recurring task '%s'; another controller takes over "
            "the task when the lease expires: %s"
        )
        LOG.info(text, duty, error)
