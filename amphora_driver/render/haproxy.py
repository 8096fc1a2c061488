# SPDX-License-Identifier: Apache-2.0
"""A load balancer as HAProxy's `defaults`, `frontend` and `backend` sections.

Listeners and pools of UDP and SCTP are not part of the text; `render.udp` renders them and reports their errors.

Invariant: `render` is a pure function. An object that cannot be rendered is named in `Rendered.refused` and left out;
all other objects are in the text. An omission never admits more clients: a listener is not served without its policies.
The same load balancer gives the same bytes in any order of its children, and a changed member changes its own lines
only.

Names: a frontend is `<listener id>`, a backend `<pool id>:<listener id>` (one for each listener that uses the
pool), a server `<member id>`.

Rendered objects are cached one by one (`cache`); `clear_caches` empties the caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import msgspec

from amphora_driver.errors import ModelError
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Pool
from amphora_driver.render import cache, quoting, render_errors
from amphora_driver.render.backend import ExaminedPool, examined, once
from amphora_driver.render.effective_defaults import DEFAULTS, Defaults, effective_defaults
from amphora_driver.render.frontend import ListenerContext, RenderedListener, frontend, named_pools, pool_facts
from amphora_driver.render.template import PREAMBLE
from amphora_driver.render.tls import File
from amphora_driver.validation import options

NOTHING: frozenset[str] = frozenset()


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered load balancer.

    Attributes:
        text: the sections; None if nothing is served (no enabled listener, or a disabled load balancer).
        refused: one error for each recorded object that is not in the text; `object_id` is always set.
        files: the files that the text names, relative to the TLS directory of the amphora.
        pings: member id and address of each member that the agent has to ping.
    """

    text: str | None
    refused: tuple[ModelError, ...]
    files: tuple[File, ...] = ()
    pings: tuple[tuple[str, str], ...] = ()


def render(
    load_balancer: LoadBalancer,
    *,
    failed: Collection[str] = (),
    defaults: Defaults = DEFAULTS,
    shared_tickets: bool = False,
) -> Rendered:
    """Render a load balancer.

    Args:
        load_balancer: the complete tree, without children that are being deleted.
        failed: the ids of objects that HAProxy refused. They are left out, and a listener with a failed policy or rule
            is not served. They are not in `refused` again.
        defaults: the values for options that neither an object nor the profile sets.
        shared_tickets: whether the load balancer has shared TLS ticket keys; their secret is then among the files.

    Returns:
        The text, and the objects that could not be part of it. A bad value raises no error: one object must not affect
        the others.
    """
    refused: list[ModelError] = []
    omitted = frozenset(failed)
    render_errors.try_render(partial(options.check_loadbalancer, load_balancer), load_balancer.id, refused)
    addresses = tuple(
        vip.address
        for vip in load_balancer.vips
        if render_errors.try_render(partial(_vip, vip.address, load_balancer.id), load_balancer.id, refused)
    )
    chosen = effective_defaults(load_balancer.profile, defaults)
    pools = _pools([pool for pool in load_balancer.pools if not pool.uses_l4], omitted, chosen, refused)
    l4_pools = {pool.id: pool.protocol for pool in load_balancer.pools if pool.uses_l4}
    served: list[RenderedListener] = []
    ports: set[int] = set()
    for listener in once(load_balancer.listeners, refused):
        if listener.uses_l4 or listener.id in omitted:
            continue
        context = ListenerContext(
            load_balancer_id=load_balancer.id,
            project_id=load_balancer.project_id,
            addresses=addresses,
            settings=chosen,
            pools=tuple(pool_facts(pool_id, pools, l4_pools) for pool_id in dict.fromkeys(named_pools(listener))),
            shared_tickets=shared_tickets,
        )
        made = frontend(listener, context, _of_listener(listener, omitted) if omitted else NOTHING)
        refused.extend(made.refused)
        if made.text is None or not listener.admin_state_up:
            continue
        if listener.protocol_port in ports:
            refused.append(
                render_errors.refused_object(listener.id, f"another listener has port {listener.protocol_port}")
            )
            continue
        ports.add(listener.protocol_port)
        served.append(made)
    if not (load_balancer.admin_state_up and addresses and served):
        return Rendered(text=None, refused=tuple(refused))
    return _whole(served, pools, refused)


def clear_caches() -> None:
    """Empty all caches of rendered objects."""
    cache.clear_caches()
    effective_defaults.cache_clear()


def _vip(address: str, object_id: str) -> quoting.Quoted:
    return quoting.address(address, "the VIP address", object_id)


def _pools(
    pools: Iterable[Pool], failed: frozenset[str], chosen: Defaults, refused: list[ModelError]
) -> dict[str, ExaminedPool | None]:
    """Return all pools by id, examined, used or not; None for a pool that HAProxy refused."""
    found: dict[str, ExaminedPool | None] = {}
    for pool in once(pools, refused):
        if pool.id in failed:
            found[pool.id] = None
            continue
        result = examined(pool, _of_pool(pool, failed) if failed else NOTHING, chosen)
        refused.extend(result.refused)
        found[pool.id] = result
    return found


def _of_pool(pool: Pool, failed: frozenset[str]) -> frozenset[str]:
    monitor = {pool.healthmonitor.id} if pool.healthmonitor else set()
    return failed & ({member.id for member in pool.members} | monitor)


def _of_listener(listener: Listener, failed: frozenset[str]) -> frozenset[str]:
    return failed & {object_id for policy in listener.l7policies for object_id in _ids(policy)}


def _ids(policy: L7Policy) -> list[str]:
    return [policy.id, *(rule.id for rule in policy.rules)]


def _whole(
    served: list[RenderedListener], pools: dict[str, ExaminedPool | None], refused: list[ModelError]
) -> Rendered:
    backends: list[str] = []
    files = {file.name: file for made in served for file in made.files}
    pings: dict[str, str] = {}
    for made in served:
        for pool_id in made.pools:
            pool = pools[pool_id]
            if pool is None or made.route is None:
                continue
            found = render_errors.try_render(partial(pool.text, made.route), pool_id, refused)
            backends += [found] if found else []
            files.update((file.name, file) for file in pool.files)
            pings.update(pool.pings)
    return Rendered(
        text="".join([PREAMBLE, *(made.text or "" for made in served), *backends]),
        refused=tuple(refused),
        files=tuple(files.values()),
        pings=tuple(pings.items()),
    )
