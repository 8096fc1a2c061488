# SPDX-License-Identifier: Apache-2.0
"""The bundle that a push would send to an amphora now.

Invariant: pure. Push and drift audit use the same functions, so the audit reports exactly what a push would change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.errors import ModelError
from amphora_driver.model.secret_refs import ticket_secret_name as ticket_seed
from amphora_driver.reconcile import secret_files, vrrp_peers
from amphora_driver.reconcile.defaults import advert_interval, rendering_defaults, with_process_limits
from amphora_driver.render.bundle import Served, bundle
from amphora_driver.render.haproxy import render
from amphora_driver.render.udp import virtual_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.vault import Vault
    from amphora_driver.model.amphora import Amphora, AttachedPort
    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.model.secret_refs import SecretName
    from amphora_driver.render.tls import File
    from amphora_driver.store.sealed_secrets import SealedSecret


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a load balancer that can be served, and the objects that it omits.

    Attributes:
        served: configuration, files and UDP listeners.
        omitted: all omitted objects: reasons by object id.
        without_secret: the omitted objects without a usable secret: reasons by object id.
    """

    served: Served
    omitted: dict[str, str]
    without_secret: dict[str, str]


class BundleInputs(msgspec.Struct, frozen=True, kw_only=True):
    """All values of one load balancer that determine its bundles, at one moment.

    Attributes:
        tree: the desired configuration.
        generation: the newest one.
        amphorae: all amphorae, the oldest one first.
        networks: the networks it needs.
        failed: objects that cannot be served: reasons by object id.
        secrets: its sealed secrets.
        tickets: how often its TLS ticket keys were created or rotated; None if it has none.
        priorities: VRRP priorities by role; empty for a topology without VIP fail-over.
    """

    tree: LoadBalancer
    generation: int
    amphorae: tuple[Amphora, ...]
    networks: frozenset[str]
    failed: dict[str, str]
    secrets: dict[SecretName, SealedSecret]
    tickets: int | None
    priorities: dict[str, int]


def build_bundle(
    tree: LoadBalancer,
    generation: int,
    amphora: Amphora,
    everyone: Sequence[Amphora],
    served: Served,
    networks: Collection[str],
    priorities: Mapping[str, int],
    interval: float,
) -> bytes:
    """Return the bundle of one amphora as a document.

    Args:
        tree: with the limits of its processes filled in (`defaults.with_process_limits`).
        generation: of the bundle.
        amphora: the recipient.
        everyone: all amphorae of the load balancer.
        served: configuration, files and UDP listeners that serve clients.
        networks: the networks the load balancer needs; a port on another network will be detached.
        priorities: VRRP priorities by role.
        interval: seconds between two VRRP advertisements.
    """
    # A draining amphora must not take the VIPs from the amphorae that stay.
    leaves = amphora.drains_until is not None
    priority = priorities.get(amphora.role)
    priority = vrrp_peers.LAST_PRIORITY if leaves and priority is not None else priority
    pair = vrrp_peers.vrrp_instance(amphora, everyone, tree.vip, priority, interval)
    return bundle(tree, generation, amphora.id, needed_ports(amphora.plugged, networks), served, pair)


def needed_ports(plugged: Sequence[AttachedPort], networks: Collection[str]) -> tuple[AttachedPort, ...]:
    """Return the ports that stay attached."""
    return tuple(one for one in plugged if one.port.network_id in networks)


def render_servable(
    tree: LoadBalancer,
    failed: Mapping[str, str],
    conf: ConfigOpts,
    vault: Vault,
    secrets_for: Callable[[Sequence[File]], Mapping[SecretName, SealedSecret]],
) -> Rendered:
    """Render the load balancer repeatedly, until rendering refuses no object and no file lacks its secret.

    Args:
        tree: with the limits of its processes filled in (`defaults.with_process_limits`).
        failed: objects that cannot be served: reasons by object id.
        conf: of this process.
        vault: opens the secrets.
        secrets_for: returns the sealed secrets that the rendered files need.

    Raises:
        ModelError: an object without a usable secret cannot be omitted.
    """
    usual = rendering_defaults(conf)
    omitted = dict(failed)
    without_secret: dict[str, str] = {}
    while True:
        rendered = render(tree, failed=omitted, defaults=usual, shared_tickets=True)
        virtual = virtual_servers(tree, failed=omitted, defaults=usual)
        refused = (*rendered.refused, *virtual.refused)
        omitted |= {one.object_id: str(one) for one in refused if one.object_id}
        files, lost = secret_files.fill_files(rendered.files, secrets_for(rendered.files), vault)
        if not lost:
            served = Served(text=rendered.text, files=files, pings=dict(rendered.pings), virtual=virtual.servers)
            return Rendered(served=served, omitted=omitted, without_secret=without_secret)
        if lost.keys() <= omitted.keys():
            raise ModelError(f"omit the objects of load balancer {tree.id} without a usable secret", str(lost))
        omitted |= lost
        without_secret |= lost


def build_bundles(recorded: BundleInputs, conf: ConfigOpts, vault: Vault) -> dict[str, bytes]:
    """Return the bundle of each amphora, by amphora id.

    Raises:
        ModelError: the seed of the TLS ticket keys does not exist yet, or nothing can be served.
    """
    tree = with_process_limits(recorded.tree, conf)
    seed = ticket_seed(tree.id)

    def secrets_for(files: Sequence[File]) -> Mapping[SecretName, SealedSecret]:
        if recorded.tickets is None and any(file.secret == seed for file in files):
            raise ModelError(f"compare load balancer {tree.id}", "it has no TLS ticket keys yet")
        return recorded.secrets

    rendered = render_servable(tree, recorded.failed, conf, vault, secrets_for)
    return {
        one.id: build_bundle(
            tree,
            recorded.generation,
            one,
            recorded.amphorae,
            rendered.served,
            recorded.networks,
            recorded.priorities,
            advert_interval(tree, conf),
        )
        for one in recorded.amphorae
    }
