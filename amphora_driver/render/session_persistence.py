# SPDX-License-Identifier: Apache-2.0
"""Session persistence of a pool.

Invariant: a client stays on its member over a reload (`peers amphora`, or no state at all). No server line contains
keywords of persistence, so that the agent can add and remove members at run time.
"""

from __future__ import annotations

import msgspec

from amphora_driver.model.enums import PersistenceType
from amphora_driver.model.loadbalancer import Pool
from amphora_driver.render import quoting
from amphora_driver.render.quoting import Quoted

DEFAULT_COOKIE = "SRV"


class Persistence(msgspec.Struct, frozen=True, kw_only=True):
    """Session persistence: by address, by HAProxy's cookie with its key, or by the application's cookie.

    The samples `asked` and `answered` are the application's cookie in a request and in a response.
    """

    by_address: bool = False
    cookie: Quoted | None = None
    key: Quoted | None = None
    asked: Quoted | None = None
    answered: Quoted | None = None


def persistence(pool: Pool) -> Persistence | None:
    """Return the persistence of a pool; None without persistence."""
    wanted = pool.session_persistence
    if wanted is None:
        return None
    if wanted.type is PersistenceType.SOURCE_IP:
        return Persistence(by_address=True)
    name = wanted.cookie_name or DEFAULT_COOKIE
    if wanted.type is PersistenceType.HTTP_COOKIE:
        # HAProxy computes a dynamic cookie from a key and the member's address, so all amphorae use the same cookie.
        # With the server option `cookie`, HAProxy 2.6 could not add servers at run time.
        key = quoting.identifier(pool.id, "the pool's id", pool.id)
        return Persistence(cookie=quoting.text(name, "the cookie's name", pool.id), key=key)
    # A key of HAProxy's stick table has a fixed length, so the table contains a digest of the cookie.
    return Persistence(
        asked=quoting.sample("req.cook", name, ",sha1", "the cookie's name", pool.id),
        answered=quoting.sample("res.cook", name, ",sha1", "the cookie's name", pool.id),
    )
