# SPDX-License-Identifier: Apache-2.0
"""What an amphora would be given if it were pushed now.

Invariant: pure. A push and an audit ask the same functions, so that what an audit takes for a difference is what a push
would change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.errors import ModelError
from amphora_driver.model.secret_refs import ticket_secret_name as ticket_seed
from amphora_driver.reconcile import secret_files, vrrp_peers
from amphora_driver.reconcile.defaults import advert_interval, defaults, limited
from amphora_driver.render.bundle import Served, bundle
from amphora_driver.render.haproxy import render
from amphora_driver.render.udp import virtual_servers

if TYPE_CHECKING:
    from collections.abc import Collection

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.vault import Vault
    from amphora_driver.model.amphora import Amphora, AttachedPort
    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.model.secret_refs import SecretName
    from amphora_driver.store.sealed_secrets import SealedSecret


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one load balancer that decides what its amphorae are given, of one moment.

    Attributes:
        tree: as it is wanted.
        generation: the newest one.
        amphorae: all of them, the oldest first.
        networks: those it needs.
        failed: what is known not to be servable: reasons by object id.
        secrets: sealed.
        tickets: how often its TLS ticket keys were made or rotated; None if it never needed any.
        priorities: who is preferred to have the VIPs, by role; empty where nobody takes over.
    """

    tree: LoadBalancer
    generation: int
    amphorae: tuple[Amphora, ...]
    networks: frozenset[str]
    failed: dict[str, str]
    secrets: dict[SecretName, SealedSecret]
    tickets: int | None
    priorities: dict[str, int]


def body(
    tree: LoadBalancer,
    generation: int,
    amphora: Amphora,
    everyone: Sequence[Amphora],
    served: Served,
    networks: Collection[str],
    priorities: Mapping[str, int],
    interval: float,
) -> bytes:
    """The document for one amphora.

    Args:
        tree: with the limits of its processes filled in (`configured.limited`).
        generation: which one this is.
        amphora: whom it is for.
        everyone: all amphorae of the load balancer.
        served: what serves clients.
        networks: those the load balancer needs; a port on another one is about to be taken away.
        priorities: who is preferred to have the VIPs, by role.
        interval: seconds between two advertisements.
    """
    # One whose connections go on takes no VIPs from those that stay.
    leaves = amphora.drains_until is not None
    priority = priorities.get(amphora.role)
    priority = vrrp_peers.LAST_PRIORITY if leaves and priority is not None else priority
    pair = vrrp_peers.vrrp(amphora, everyone, tree.vip, priority, interval)
    return bundle(tree, generation, amphora.id, needed(amphora.plugged, networks), served, pair)


def needed(plugged: Sequence[AttachedPort], networks: Collection[str]) -> tuple[AttachedPort, ...]:
    """The ports that are not about to be taken away."""
    return tuple(one for one in plugged if one.port.network_id in networks)


def bodies(recorded: Recorded, conf: ConfigOpts, vault: Vault) -> dict[str, bytes]:
    """What each amphora would be given, by its id.

    Raises:
        ModelError: what TLS ticket keys are made from is still to be made, or nothing can be served.
    """
    tree = limited(recorded.tree, conf)
    failed = dict(recorded.failed)
    while True:
        usual = defaults(conf)
        rendered = render(tree, failed=failed, defaults=usual, shared_tickets=True)
        virtual = virtual_servers(tree, failed=failed, defaults=usual)
        seed = ticket_seed(tree.id)
        if recorded.tickets is None and any(file.secret == seed for file in rendered.files):
            raise ModelError(f"compare load balancer {tree.id}", "it has no TLS ticket keys yet")
        refused = (*rendered.refused, *virtual.refused)
        failed |= {one.object_id: str(one) for one in refused if one.object_id}
        files, lost = secret_files.filled(rendered.files, recorded.secrets, vault)
        if not lost:
            break
        if lost.keys() <= failed.keys():
            raise ModelError(f"compare load balancer {tree.id}", str(lost))
        failed |= lost
    served = Served(text=rendered.text, files=files, pings=dict(rendered.pings), virtual=virtual.servers)
    return {
        one.id: body(
            tree,
            recorded.generation,
            one,
            recorded.amphorae,
            served,
            recorded.networks,
            recorded.priorities,
            advert_interval(tree, conf),
        )
        for one in recorded.amphorae
    }
