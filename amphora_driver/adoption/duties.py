# SPDX-License-Identifier: Apache-2.0
"""The thread of a controller that performs adoptions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from amphora_driver.adoption import survey
from amphora_driver.adoption.adopter import DUTY, Adopter
from amphora_driver.adoption.cloud import OpenStackCloud
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.adoption.step_results import AdoptionContext

if TYPE_CHECKING:
    from amphora_driver.reconcile.context import ReconcileContext


def create_duties(context: ReconcileContext, owner: str, on_due: Callable[[], None]) -> dict[str, Callable[..., None]]:
    """Return the thread of adoptions, by its name; empty unless Octavia's database is configured."""
    conf = context.conf
    url = conf.amp_adoption.octavia_connection
    if not url:
        return {}
    made = Adopter(
        AdoptionContext(
            conf=conf,
            database=context.database,
            catalogue=context.catalogue,
            agents=context.agents,
            octavia=OctaviaDatabase(url),
            cloud=OpenStackCloud(conf),
            library=partial(survey.connect_library, conf),
            on_due=on_due,
        ),
        owner,
    )
    return {DUTY: made.run}
