# SPDX-License-Identifier: Apache-2.0
"""What keeps a client on its member.

Invariant: what a client is remembered by survives a reload (`peers amphora`, or nothing is kept here at all), and
members come and go at run time: no server line takes part in it.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import PersistenceType
from amphora_driver.model.loadbalancer import Pool
from amphora_driver.render import quoting
from amphora_driver.render.quoting import Quoted

DEFAULT_COOKIE = "SRV"


class Persistence(msgspec.Struct, frozen=True, kw_only=True):
    """One of three: by address, by a cookie of ours (`cookie`), by one of the application (`asked`, `answered`)."""

    by_address: bool = False
    cookie: Quoted | None = None
    key: Quoted | None = None
    asked: Quoted | None = None
    answered: Quoted | None = None


def persistence(pool: Pool) -> Persistence | None:
    """How a pool keeps its clients; None if it does not."""
    wanted = pool.session_persistence
    if wanted is None:
        return None
    if wanted.type is PersistenceType.SOURCE_IP:
        return Persistence(by_address=True)
    name = wanted.cookie_name or DEFAULT_COOKIE
    if wanted.type is PersistenceType.HTTP_COOKIE:
        # A dynamic cookie is computed from key and address: the same in every amphora, and no word on the server line,
        # where HAProxy 2.6 would refuse it at run time.
        return Persistence(
            cookie=quoting.text(name, "the cookie's name", pool.id),
            key=quoting.identifier(pool.id, "the pool's id", pool.id),
        )
    # A digest, because a table's key has a fixed length and a cookie has not.
    return Persistence(
        asked=quoting.sample("req.cook", name, ",sha1", "the cookie's name", pool.id),
        answered=quoting.sample("res.cook", name, ",sha1", "the cookie's name", pool.id),
    )
