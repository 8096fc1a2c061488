# SPDX-License-Identifier: Apache-2.0
"""A load balancer as HAProxy's `defaults`, `frontend` and `backend` sections.

The module `render.udp` renders listeners and pools of UDP and SCTP.

Invariant: `render` is a pure function. `Rendered.refused` names each object that is missing in the text because of an
error. An omission never admits more clients: HAProxy serves no listener without its policies. One load balancer gives
the same bytes in any order of its children, and a changed member changes its own lines only.

Names: a frontend is `<listener id>`, a backend `<pool id>:<listener id>` (one for each listener that uses the
pool), a server `<member id>`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import msgspec

from amphora_driver.errors import ModelError
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Pool
from amphora_driver.render import quoting, render_errors
from amphora_driver.render.backend import ExaminedPool, examined, once
from amphora_driver.render.effective_defaults import DEFAULTS, Defaults, effective_defaults, timeout_limits
from amphora_driver.render.frontend import ListenerContext, RenderedListener, frontend, named_pools, pool_facts
from amphora_driver.render.template import PREAMBLE
from amphora_driver.render.tls import File
from amphora_driver.validation import options


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered load balancer, with the member id and address of each member that the agent has to ping.

    Attributes:
        text: the sections; None without an enabled listener, or for a disabled load balancer.
        refused: one error with `object_id` for each recorded object that is not in the text.
        files: the files that the text names, relative to the TLS directory of the amphora.
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
    """Render a load balancer. A bad value raises no error, because one object must not affect the others.

    Args:
        load_balancer: the complete tree, without children in deletion.
        failed: the ids of objects that HAProxy refused. The text omits them and each listener with a failed policy or
            rule, and `Rendered.refused` does not repeat them.
        shared_tickets: whether the load balancer has shared TLS ticket keys. Their secret is then among the files.
    """
    refused: list[ModelError] = []
    omitted = frozenset(failed)
    render_errors.try_render(partial(options.check_loadbalancer, load_balancer), load_balancer.id, refused)

    def is_valid(address: str) -> bool:
        quote = partial(quoting.address, address, "the VIP address", load_balancer.id)
        return render_errors.try_render(quote, load_balancer.id, refused) is not None

    addresses = tuple(vip.address for vip in load_balancer.vips if is_valid(vip.address))
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
            pools=tuple(pool_facts(pool_id, pools, l4_pools) for pool_id in named_pools(listener)),
            limits=timeout_limits(load_balancer.profile),
            shared_tickets=shared_tickets,
        )
        made = frontend(listener, context, omitted & _policy_ids(listener) if omitted else omitted)
        refused.extend(made.refused)
        if made.text is None or not listener.admin_state_up:
            continue
        if listener.protocol_port in ports:
            reason = f"another listener has port {listener.protocol_port}"
            refused.append(render_errors.refused_object(listener.id, reason))
            continue
        ports.add(listener.protocol_port)
        served.append(made)
    if not (load_balancer.admin_state_up and addresses and served):
        return Rendered(text=None, refused=tuple(refused))
    return _whole(served, pools, refused)


def _pools(
    pools: Iterable[Pool], failed: frozenset[str], chosen: Defaults, refused: list[ModelError]
) -> dict[str, ExaminedPool | None]:
    """Return all pools by id, also unused ones; None for a pool that HAProxy refused."""
    found: dict[str, ExaminedPool | None] = {}
    for pool in once(pools, refused):
        if pool.id in failed:
            found[pool.id] = None
            continue
        ids = {member.id for member in pool.members} if failed else set()
        monitor = {pool.healthmonitor.id} if pool.healthmonitor else set()
        result = examined(pool, failed & (ids | monitor), chosen)
        refused.extend(result.refused)
        found[pool.id] = result
    return found


def _policy_ids(listener: Listener) -> set[str]:
    policies = listener.l7policies
    return {policy.id for policy in policies} | {rule.id for policy in policies for rule in policy.rules}


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
