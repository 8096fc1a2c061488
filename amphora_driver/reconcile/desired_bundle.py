# SPDX-License-Identifier: Apache-2.0
"""The bundle that a push would send to an amphora now.

Invariant: rendering is pure. Push and drift audit use the same functions, so the audit reports exactly the changes that
a push would make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import sqlalchemy as sa
from oslo_config.cfg import ConfigOpts

from amphora_driver.database.tables import job
from amphora_driver.database.vault import Vault
from amphora_driver.errors import ModelError
from amphora_driver.model.amphora import Amphora
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import SecretName
from amphora_driver.model.secret_refs import ticket_secret_name as ticket_seed
from amphora_driver.reconcile import secret_files, vrrp_peers
from amphora_driver.reconcile.defaults import advert_interval, rendering_defaults, with_process_limits
from amphora_driver.render.bundle import Served, bundle
from amphora_driver.render.haproxy import render
from amphora_driver.render.tls import File
from amphora_driver.render.udp import virtual_servers
from amphora_driver.store.amphorae import RecordedJob
from amphora_driver.store.sealed_secrets import SealedSecret

# Interval in seconds of the VRRP advertisements while a pair takes the VIPs of Octavia's own amphorae.
_TAKING_INTERVAL = 0.2


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a load balancer that can be served, and the objects that it omits.

    `omitted` has all omitted objects, `without_secret` those of them without a usable secret: reasons by object id.
    """

    served: Served
    omitted: dict[str, str]
    without_secret: dict[str, str]


class BundleInputs(msgspec.Struct, frozen=True, kw_only=True):
    """All values of one load balancer that determine its bundles, at one moment.

    Attributes:
        networks: the networks that the load balancer needs; a port on another network will be detached.
        sr_iov_networks: the same for the additional SR-IOV ports.
        failed: objects that cannot be served: reasons by object id.
        tickets: number of rotations of the TLS ticket keys; None without keys.
        priorities: VRRP priorities by role, see `topology.effective_priorities`; empty without VRRP.
        vips_held: the amphorae get the configuration without the VIPs, because others still serve them.
        takes_vips: the amphorae take the VIPs of others, and no amphora serves until then.
    """

    tree: LoadBalancer
    generation: int
    amphorae: tuple[Amphora, ...]
    networks: frozenset[str]
    sr_iov_networks: frozenset[str] = frozenset()
    failed: dict[str, str]
    secrets: dict[SecretName, SealedSecret]
    tickets: int | None
    priorities: dict[str, int]
    vips_held: bool = False
    takes_vips: bool = False


def build_bundle(recorded: BundleInputs, amphora: Amphora, served: Served, conf: ConfigOpts) -> bytes:
    """Return the bundle of one amphora as a document.

    The recorded tree has the limits of its processes (`defaults.with_process_limits`).
    """
    priority = recorded.priorities.get(amphora.role)
    if priority is not None and amphora.drains_until is not None:
        # A draining amphora gets the lowest VRRP priority, so that it takes no VIP from an amphora that stays.
        priority = vrrp_peers.LAST_PRIORITY
    interval = advert_interval(recorded.tree, conf)
    if recorded.takes_vips:
        # No amphora serves until the pair takes the VIPs, after more than three intervals (RFC 9568, section 6.1). So
        # the interval is short.
        interval = min(interval, _TAKING_INTERVAL)
    everyone = vrrp_peers.participants(recorded.amphorae, recorded.priorities)
    pair = vrrp_peers.vrrp_instance(amphora, everyone, recorded.tree.vip, priority, interval)
    ports = tuple(
        one
        for one in amphora.plugged
        if one.port.network_id in (recorded.sr_iov_networks if one.sr_iov else recorded.networks)
    )
    if recorded.vips_held:
        return bundle(recorded.tree, recorded.generation, amphora.id, ports, served, vips_held=True)
    return bundle(recorded.tree, recorded.generation, amphora.id, ports, served, pair)


def render_servable(
    tree: LoadBalancer,
    failed: Mapping[str, str],
    conf: ConfigOpts,
    vault: Vault,
    secrets_for: Callable[[Sequence[File]], Mapping[SecretName, SealedSecret]],
) -> Rendered:
    """Render the load balancer repeatedly, until rendering refuses no object and no file lacks its secret.

    Args:
        tree: with the limits of its processes (`defaults.with_process_limits`).
        failed: objects that cannot be served: reasons by object id.
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
    recorded = msgspec.structs.replace(recorded, tree=tree)
    seed = ticket_seed(tree.id)

    def secrets_for(files: Sequence[File]) -> Mapping[SecretName, SealedSecret]:
        if recorded.tickets is None and any(file.secret == seed for file in files):
            raise ModelError(f"compare load balancer {tree.id}", "it has no TLS ticket keys yet")
        return recorded.secrets

    rendered = render_servable(tree, recorded.failed, conf, vault, secrets_for)
    return {one.id: build_bundle(recorded, one, rendered.served, conf) for one in recorded.amphorae}


class OmittedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that a generation omits, as `job.omitted` stores them: reasons by object id.

    Invariant: the transaction that records amphorae's confirmations also records the omitted objects. The job that
    confirms the generation may run later, in another process: it reports the objects to the user and clears the record.
    """

    generation: int
    reasons: dict[str, str]


def read_omitted_objects(row: RecordedJob) -> dict[str, str]:
    """Return the omitted objects of the newest generation from a row of `job`: reasons by object id."""
    if row.omitted is None:
        return {}
    found = msgspec.json.decode(row.omitted, type=OmittedObjects)
    return found.reasons if found.generation == row.generation else {}


def record_omitted_objects(
    connection: sa.Connection, load_balancer_id: str, generation: int | None, reasons: Mapping[str, str]
) -> None:
    """Record the omitted objects of a generation, or clear the record; the caller holds the lease."""
    text = None
    if generation is not None:
        text = msgspec.json.encode(OmittedObjects(generation=generation, reasons=dict(reasons))).decode()
    connection.execute(job.update().where(job.c.load_balancer_id == load_balancer_id).values(omitted=text))
