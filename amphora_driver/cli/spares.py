# SPDX-License-Identifier: Apache-2.0
"""Commands about warm spares.

Invariant: what is shown is what the rows say; a spare that is booting is never counted as one that can be taken.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from cliff.lister import Lister

from amphora_driver.cli.formatting import Counts
from amphora_driver.database.tables import amphora, work
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store import spare_pools
from amphora_driver.store.spare_pools import SparePoolSpec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

HEAD = (
    *("Pool", "Compute", "Flavor", "Zone", "Image tag", "Wanted", "Ready", "Booting", "Leaving", "Load balancers"),
    *("Images", "Attempts", "Error"),
)


class ListSpares(Lister):
    """Pools of warm spares: what they keep, how many are ready, and how many load balancers take from them."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Column names and rows."""
        number = self.app.conf.spares.number
        return HEAD, self.app.read(lambda connection: _rows(connection, number))


def _rows(connection: sa.Connection, configured: int) -> list[tuple[Any, ...]]:
    pools = spare_pools.list_pools(connection)
    there = connection.execute(
        sa.select(amphora.c.load_balancer_id, amphora.c.state, amphora.c.image)
        .join(work, work.c.load_balancer_id == amphora.c.load_balancer_id)
        .where(work.c.op == spare_pools.OP)
    ).all()
    counted = sa.select(work.c.spare_pool, sa.func.count()).where(work.c.spare_pool.is_not(None))
    users: dict[str | None, int] = dict(connection.execute(counted.group_by(work.c.spare_pool)).tuples().all())
    return [
        _row(pool, [one for one in there if one.load_balancer_id == pool.load_balancer_id], users, configured)
        for pool in pools
    ]


def _row(pool: Any, there: Sequence[Any], users: dict[str | None, int], configured: int) -> tuple[Any, ...]:
    spec = msgspec.json.decode(pool.spares, type=SparePoolSpec)
    takers = users.get(pool.load_balancer_id, 0)
    wanted = (configured if spec.number is None else spec.number) if takers else 0
    states = Counter(one.state for one in there)
    images = Counter(one.image for one in there if one.image and one.state == AmphoraState.READY.value)
    return (
        *(pool.load_balancer_id, spec.compute, spec.compute_flavor, spec.compute_zone, spec.image_tag, wanted),
        *(
            states[AmphoraState.READY.value],
            states[AmphoraState.BOOTING.value],
            states[AmphoraState.RETIRING.value],
            takers,
        ),
        *(Counts(images), pool.attempts, pool.error),
    )
