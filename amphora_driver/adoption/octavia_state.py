# SPDX-License-Identifier: Apache-2.0
"""A load balancer as Octavia's tables describe it. Pure.

Invariant: `fingerprint` depends on the configuration only. Statuses and times do not change it, because Octavia's
health manager writes statuses at any time.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

AMPHORA_PROVIDERS = frozenset({"amphora", "amphorav2", "octavia"})
"""Names of Octavia's own provider. A row without a provider belongs to it too."""
LOCKED = "PENDING_UPDATE"
# Columns that change without a change of the configuration. An adoption itself changes the last two.
_VOLATILE = {
    *("provisioning_status", "operating_status", "created_at", "updated_at", "peer_port"),
    *("provider", "server_group_id"),
}

Row = dict[str, Any]


class OldAmphora(msgspec.Struct, frozen=True, kw_only=True):
    """An amphora of Octavia's provider. `port_id` is its port on the VIP network."""

    id: str
    status: str | None
    role: str | None
    compute_id: str | None
    port_id: str | None
    address: str | None = None


class OctaviaState(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one load balancer.

    Attributes:
        provider: the name in Octavia's table; None for a row without one.
        status: the provisioning status.
        vip_owned: Octavia has created the VIP port; None if the table does not say it.
        vnic_types: the types of the VIP port and of the members' ports.
        amphorae: the amphorae that are not deleted.
        member_ports: the ids of the amphorae's ports on other networks.
        unsettled: children that are not ACTIVE: provisioning statuses by id.
        fingerprint: a hash of the configuration.
        saved: the complete rows that an adoption deletes, by table; values are JSON.
    """

    load_balancer_id: str
    project_id: str
    provider: str | None
    status: str
    topology: str | None
    vip_port_id: str | None
    vip_owned: bool | None = True
    availability_zone: str | None = None
    server_group_id: str | None = None
    vnic_types: frozenset[str] = frozenset()
    amphorae: tuple[OldAmphora, ...] = ()
    member_ports: tuple[str, ...] = ()
    unsettled: dict[str, str] = {}
    fingerprint: str = ""
    saved: dict[str, list[Row]] = {}

    @property
    def is_amphora(self) -> bool:
        """Whether the load balancer belongs to Octavia's own provider."""
        return self.provider is None or self.provider in AMPHORA_PROVIDERS


def describe_change(before: OctaviaState, now: OctaviaState) -> str:
    """Return what changed since the lock that an adoption depends on; empty if nothing did."""
    if now.provider != before.provider:
        return f"its provider is {now.provider}, and was {before.provider}"
    if now.status != LOCKED:
        return f"its provisioning status is {now.status}, so the lock is lost"
    if now.unsettled:
        return f"a change of {', '.join(sorted(now.unsettled))} is in progress"
    if now.fingerprint != before.fingerprint:
        return "its configuration has changed"
    if now.amphorae != before.amphorae or now.member_ports != before.member_ports:
        return "its amphorae have changed"
    return ""


def fingerprint(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a hash of the configuration in these rows, by table."""
    lines = sorted(
        f"{table} {sorted((name, repr(value)) for name, value in row.items() if name not in _VOLATILE)}"
        for table, found in rows.items()
        for row in found
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def to_json(row: Mapping[str, Any]) -> Row:
    """Return a row whose values JSON can represent; see `from_json`."""
    return {name: _encode(value) for name, value in row.items()}


def from_json(row: Mapping[str, Any]) -> Row:
    """Return the row that `to_json` encoded."""
    return {name: _decode(value) for name, value in row.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return {"time": value.isoformat()}
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return dt.datetime.fromisoformat(value["time"]) if "time" in value else bytes.fromhex(value["bytes"])
