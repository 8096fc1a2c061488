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
            LOG.warning("the work of the controller's duty %s failed, and the next round repeats it: %s", duty, error)
        except Exception:
            # If the thread of a duty ended, no controller would do the work of the duty, and no component would report
            # the failure.
            LOG.exception("the work of the controller's duty %s failed unexpectedly, trying again in %g s", duty, every)
    try:
        release()
    except AmphoraDriverError as error:
        LOG.info("the controller could not release the duty %s, which expires by itself: %s", duty, error)
