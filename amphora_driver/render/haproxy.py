# SPDX-License-Identifier: Apache-2.0
"""A load balancer as HAProxy's `defaults`, `frontend` and `backend` sections.

Listeners and pools of UDP and SCTP are not HAProxy's: nothing of them is in the text, and what is wrong with them is
said elsewhere (`controller.virtual_servers`).

Invariant: `render` is a pure function.  An object that cannot be expressed is named in `Rendered.refused` and
is not in the text; everything else of the load balancer is.  What is left out never widens what is served: a
listener whose policies cannot be expressed is not served without them.  The same load balancer gives the same
bytes, in whatever order its children come, and a changed member changes its own lines only.

Names: a frontend is `<listener id>`, a backend `<pool id>:<listener id>` (one for each listener that uses the
pool), a server `<member id>`.

What was rendered is remembered object by object (`remember`); `forget` empties that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import msgspec

from amphora_driver.errors import ModelError
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Pool
from amphora_driver.render import cache, quoting, render_errors
from amphora_driver.render.backend import Examined, examined, once
from amphora_driver.render.effective_defaults import DEFAULTS, Defaults, settings
from amphora_driver.render.frontend import Made, Surroundings, behind, frontend, named_pools
from amphora_driver.render.template import PREAMBLE
from amphora_driver.render.tls import File
from amphora_driver.validation import options

NOTHING: frozenset[str] = frozenset()


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome.

    Attributes:
        text: the sections; None when nothing is to be served (no enabled listener, or all is disabled).
        refused: one error for each object that is not in the text although it is recorded; `object_id` is
            always set.
        files: what the text names, relative to the machine's own directory.
        pings: member and address of those whose ICMP echo the agent has to ask for.
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
        load_balancer: the complete tree. Children that are being deleted are not in it.
        failed: ids of objects that HAProxy refused. They are treated as those that cannot be expressed: left out, and a
            listener whose policy or rule is among them is not served. They are not listed again.
        defaults: what applies where neither an object nor the load balancer's profile says anything.
        shared_tickets: whether there are TLS ticket keys of the load balancer's own: `model.secrets.tickets` is then
            among the secrets that the files name.

    Returns:
        The text and what could not be part of it. Nothing is raised for a bad value: one object must not take
        the others down.
    """
    refused: list[ModelError] = []
    left_out = frozenset(failed)
    render_errors.attempt(partial(options.check_loadbalancer, load_balancer), load_balancer.id, refused)
    addresses = tuple(
        vip.address
        for vip in load_balancer.vips
        if render_errors.attempt(partial(_vip, vip.address, load_balancer.id), load_balancer.id, refused)
    )
    chosen = settings(load_balancer.profile, defaults)
    pools = _pools([pool for pool in load_balancer.pools if not pool.uses_l4], left_out, chosen, refused)
    strangers = {pool.id: pool.protocol for pool in load_balancer.pools if pool.uses_l4}
    served: list[Made] = []
    ports: set[int] = set()
    for listener in once(load_balancer.listeners, refused):
        if listener.uses_l4 or listener.id in left_out:
            continue
        surroundings = Surroundings(
            load_balancer_id=load_balancer.id,
            project_id=load_balancer.project_id,
            addresses=addresses,
            settings=chosen,
            pools=tuple(behind(pool_id, pools, strangers) for pool_id in dict.fromkeys(named_pools(listener))),
            shared_tickets=shared_tickets,
        )
        made = frontend(listener, surroundings, _of_listener(listener, left_out) if left_out else NOTHING)
        refused.extend(made.refused)
        if made.text is None or not listener.admin_state_up:
            continue
        if listener.protocol_port in ports:
            refused.append(render_errors.because(listener.id, f"another listener has port {listener.protocol_port}"))
            continue
        ports.add(listener.protocol_port)
        served.append(made)
    if not (load_balancer.admin_state_up and addresses and served):
        return Rendered(text=None, refused=tuple(refused))
    return _whole(served, pools, refused)


def forget() -> None:
    """Empty everything that is remembered."""
    cache.forget()
    settings.cache_clear()


def _vip(address: str, object_id: str) -> quoting.Quoted:
    return quoting.address(address, "the VIP address", object_id)


def _pools(
    pools: Iterable[Pool], failed: frozenset[str], chosen: Defaults, refused: list[ModelError]
) -> dict[str, Examined | None]:
    """Every pool by id, examined, whether or not it is used; None for one that HAProxy refused."""
    found: dict[str, Examined | None] = {}
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


def _whole(served: list[Made], pools: dict[str, Examined | None], refused: list[ModelError]) -> Rendered:
    backends: list[str] = []
    files = {file.name: file for made in served for file in made.files}
    pings: dict[str, str] = {}
    for made in served:
        for pool_id in made.pools:
            pool = pools[pool_id]
            if pool is None or made.route is None:
                continue
            found = render_errors.attempt(partial(pool.text, made.route), pool_id, refused)
            backends += [found] if found else []
            files.update((file.name, file) for file in pool.files)
            pings.update(pool.pings)
    return Rendered(
        text="".join([PREAMBLE, *(made.text or "" for made in served), *backends]),
        refused=tuple(refused),
        files=tuple(files.values()),
        pings=tuple(pings.items()),
    )
