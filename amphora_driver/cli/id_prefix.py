# SPDX-License-Identifier: Apache-2.0
"""Which object is meant by the beginning of its id.

Invariant: what is meant is one object or none: a beginning that several ids share is refused with their list, so that
nothing is ever done to the wrong one. A pool of warm spares is no load balancer.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from amphora_driver.database.tables import amphora, request, work
from amphora_driver.database.tables_fleet import failover
from amphora_driver.errors import UnknownObject

# A pool of warm spares is a row of the same table, by this word.
SPARES = "spares"
IS_LOAD_BALANCER = work.c.op != SPARES
# So many ids are named where a beginning does not say which one is meant.
_NAMED = 10


def load_balancer(connection: sa.Connection, text: str, *, gone: bool = False) -> str:
    """The id of the load balancer that is meant.

    Args:
        connection: of a reading transaction.
        text: an id, or the beginning of one.
        gone: also one of which only requests or fail-overs are remembered.

    Raises:
        UnknownObject: no id begins so, or several do.
    """
    sought = [sa.select(work.c.load_balancer_id.label("id")).where(IS_LOAD_BALANCER)]
    if gone:
        sought += [sa.select(table.c.load_balancer_id.label("id")) for table in (request, failover)]
    return _only(connection, sought, "load balancer", text)


def amphora_id(connection: sa.Connection, text: str) -> str:
    """The id of the amphora that is meant, also of a spare; arguments and errors as above."""
    return _only(connection, [sa.select(amphora.c.id.label("id"))], "amphora", text)


def _only(connection: sa.Connection, sought: list[sa.Select[Any]], noun: str, text: str) -> str:
    every = sa.union(*sought).subquery()
    query = sa.select(every.c.id).where(every.c.id.startswith(text, autoescape=True)).order_by(every.c.id)
    found = list(connection.execute(query.limit(_NAMED + 1)).scalars()) if text else []
    # A whole id is meant even where another one begins with it.
    if text in found:
        return text
    if not found:
        raise UnknownObject(f"find {noun} {text}", "nothing is recorded under this id")
    if len(found) > 1:
        more = " and others" if len(found) > _NAMED else ""
        listed = ", ".join(found[:_NAMED])
        raise UnknownObject(f"find {noun} {text}", f"{listed}{more} begin so", "Give more of the id.")
    return str(found[0])
