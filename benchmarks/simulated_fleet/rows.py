# SPDX-License-Identifier: Apache-2.0
"""Inserts the rows of a fleet that runs for days: applied, reported, with heartbeats and certificates.

The objects, bundles, keys and trust lists are made by the product's own code. Ages are spread, as in a fleet that has
grown over time: certificates over the period until their renewal, drift audits over their interval.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from oslo_config.cfg import ConfigOpts

from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.database import tables
from amphora_driver.database.engine import Database
from amphora_driver.database.rows import chunks
from amphora_driver.database.vault import Vault
from amphora_driver.model.amphora import Amphora, AmphoraState, AttachedPort
from amphora_driver.model.enums import Kind, Operating, Provisioning
from amphora_driver.plugins import Catalogue
from amphora_driver.reconcile import vrrp_peers
from amphora_driver.reconcile.defaults import agent_settings
from amphora_driver.reconcile.desired_bundle import BundleInputs, build_bundles
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, desired_objects
from amphora_driver.store.generations import Op
from simulated_fleet import shape

_BATCH = 50
# Age of the oldest certificate as a part of the time until its renewal, so that no renewal is due during a measurement.
_OLDEST = 0.8
_DAY = 86400.0


class FleetRows:
    """The rows of one fleet, and the description of its amphorae for the process of the agents."""

    def __init__(self, conf: ConfigOpts, database: Database, folder: Path) -> None:
        self._conf, self._database, self._folder = conf, database, folder
        self._vault = Vault.load(conf.amp_database.encryption_key_file)
        self._trusts = TrustStore(conf, database, self._vault).credentials().desired.trusts
        self._catalogue = Catalogue(conf, database)
        self._settings = agent_settings(conf).digest
        self._now = time.time()

    def insert(self, number: int, members: dict[int, int] | None = None, *, bundles: bool = True) -> int:
        """Insert the first load balancers; `members` has other numbers of members. Returns the number of amphorae.

        Without `bundles`, the agents have no digests of their bundles: the rows only can be used.
        """
        self._bundles = bundles
        machines, count = iter(shape.amphorae(number)), 0
        with (self._folder / "amphorae.jsonl").open("w", encoding="utf-8") as file:
            for some in _batches(number):
                found: dict[str, list[dict[str, Any]]] = {}
                trees = []
                for balancer in some:
                    tree = shape.load_balancer(balancer, (members or {}).get(balancer))
                    mine = [next(machines) for _ in shape.amphora_roles(balancer)]
                    count += len(mine)
                    lines = self._balancer(tree, mine, found)
                    file.writelines(json.dumps(line) + "\n" for line in lines)
                    trees.append(tree)
                self._database.write(lambda connection, trees=trees, found=found: _write(connection, trees, found))
        return count

    def _balancer(self, tree: Any, mine: list[Any], found: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        """Add the rows of one load balancer, except its objects; yield the lines of its amphorae."""
        common = {"load_balancer_id": tree.id}
        found.setdefault("job", []).append(
            {
                **common,
                "project_id": tree.project_id,
                "topology": tree.profile.topology.value,
                "compute": tree.profile.compute,
                "network": tree.profile.network,
                "op": Op.APPLY,
                "generation": 1,
                "committed": 1,
                "applied": 1,
                "dirty": False,
                "due_at": 0.0,
                "attempts": 0,
            }
        )
        found.setdefault("request", []).append(
            {
                **common,
                "generation": 1,
                "action": "create loadbalancer",
                "object_id": tree.id,
                "accepted_at": self._now - _DAY,
                "applied_at": self._now - _DAY + 1,
                "outcome": "applied",
            }
        )
        for node in desired_objects.iter_subtree(tree):
            kind = desired_objects.kind_of(node)
            measured = Operating.NO_MONITOR if kind is Kind.HEALTH_MONITOR else Operating.ONLINE
            status = {**common, "object_id": node.id, "kind": kind.value, "provisioning": Provisioning.ACTIVE.value}
            status |= {"operating": measured.value, "since": self._now - _DAY}
            found.setdefault("object_status", []).append({**status, "version": 1, "settled": 1, "reported": 1})
        machines = tuple(self._amphora(tree, one) for one in mine)
        digests = self._digests(tree, machines)
        for (number, _, _, role), machine in zip(mine, machines, strict=True):
            key = hashlib.sha256(machine.id.encode()).digest()
            holds = None if role == "STANDALONE" else role == "MASTER"
            found.setdefault("amphora", []).append(self._amphora_row(machine, number, key))
            heard = {"amphora_id": machine.id, "seen_at": self._now, "generation": 1, "epoch": 1, "sequence": 1}
            found.setdefault("amphora_heartbeat", []).append({**heard, "holds_vip": holds, "agent_version": "fleet"})
            yield {
                "id": machine.id,
                "address": machine.management_address,
                "load_balancer_id": tree.id,
                "key": key.hex(),
                "generation": 1,
                "digest": digests[machine.id],
                "settings_digest": self._settings,
                "holds_vip": holds,
                "listeners": [one.id for one in tree.listeners],
                "pools": {
                    f"{pool.id}:{listener.id}": [one.id for one in pool.members]
                    for pool, listener in zip(tree.pools, tree.listeners, strict=True)
                },
            }

    def _amphora(self, tree: Any, mine: tuple[int, int, str, str]) -> Amphora:
        number, _, amphora_id, role = mine
        plugged = AttachedPort(port=shape.port_of(amphora_id), subnets=(shape.SUBNETS[shape.VIP_SUBNET],))
        return Amphora(
            id=amphora_id,
            load_balancer_id=tree.id,
            role=role,
            state=AmphoraState.READY,
            compute_id=amphora_id,
            management_address=shape.amphora_address(number),
            confirmed=1,
            plugged=(plugged,),
        )

    def _amphora_row(self, machine: Amphora, number: int, key: bytes) -> dict[str, Any]:
        options = self._conf.amp_certificates
        # The golden ratio spreads the ages evenly over any number of amphorae.
        share = number * 0.618034 % 1.0
        issued = self._now - share * _OLDEST * options.renew_at * options.validity_days * _DAY
        return {
            "id": machine.id,
            "load_balancer_id": machine.load_balancer_id,
            "role": machine.role,
            "state": machine.state.value,
            "compute_id": machine.id,
            "image": "fleet",
            "management_address": machine.management_address,
            "confirmed": 1,
            "confirmed_at": self._now - _DAY,
            "heartbeat_key": self._vault.seal(Secret(key), amphorae.key_location(machine.id)),
            "plugged": msgspec.json.encode(machine.plugged).decode(),
            "certificate_issued_at": issued,
            "certificate_expires_at": issued + options.validity_days * _DAY,
            "trusts": self._trusts,
            "audited_at": self._now - share * self._conf.amp_drift.interval,
            "drifts": False,
            "created_at": self._now - 7 * _DAY,
            "booted_at": self._now - 7 * _DAY,
            "ready_at": self._now - 7 * _DAY,
        }

    def _digests(self, tree: Any, machines: tuple[Amphora, ...]) -> dict[str, str]:
        """The digests of the bundles that the amphorae have confirmed."""
        if not self._bundles:
            return dict.fromkeys((one.id for one in machines), "")
        recorded = BundleInputs(
            tree=tree,
            generation=1,
            amphorae=machines,
            networks=frozenset({shape.VIP_NETWORK}),
            failed={},
            secrets={},
            tickets=None,
            priorities=vrrp_peers.find_priorities(self._catalogue, tree.profile.topology.value, machines),
        )
        made = build_bundles(recorded, self._conf, self._vault)
        return {one: hashlib.sha256(body).hexdigest() for one, body in made.items()}


def _batches(number: int) -> Iterator[range]:
    return (range(begin, min(begin + _BATCH, number)) for begin in range(0, number, _BATCH))


def _write(connection: Any, trees: list[Any], found: dict[str, list[dict[str, Any]]]) -> None:
    for tree in trees:
        desired_objects.insert_objects(connection, tree.id, 1, desired_objects.iter_subtree(tree))
    for name, rows in found.items():
        for some in chunks(rows):
            connection.execute(tables.metadata.tables[name].insert(), some)
