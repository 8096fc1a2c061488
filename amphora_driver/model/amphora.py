# SPDX-License-Identifier: Apache-2.0
"""An amphora as it is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from amphora_driver.model.network import Port, Subnet


class AmphoraState(str, Enum):
    """Life cycle of an amphora."""

    BOOTING = "booting"
    READY = "ready"
    RETIRING = "retiring"


class Resource(str, Enum):
    """A limited resource of an amphora, by its name in heartbeats (docs/reference/heartbeat.md)."""

    CONNECTIONS = "connections"
    LISTENER_CONNECTIONS = "listener_connections"
    CPU = "cpu"
    MEMORY = "memory"
    FILE_DESCRIPTORS = "file_descriptors"
    CONNTRACK = "conntrack"

    @property
    def words(self) -> str:
        """The name in a sentence."""
        return _RESOURCE_WORDS.get(self.value, self.value.replace("_", " "))


_RESOURCE_WORDS = {
    "cpu": "CPU",
    "conntrack": "tracked connections",
    "listener_connections": "connections of a listener",
}


def describe_resources(names: Iterable[str]) -> str:
    """Return the resources with these names as words; unknown names stay."""
    known = {one.value: one.words for one in Resource}
    return ", ".join(known.get(name, name) for name in names)


class AttachedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of the machine with its subnets.

    Attributes:
        sr_iov: the port is an additional one of its network, for the members that request SR-IOV.
    """

    port: Port
    subnets: tuple[Subnet, ...]
    sr_iov: bool = False

    @property
    def key(self) -> tuple[str, bool]:
        """The network, and `sr_iov`: an amphora has at most one port with this key."""
        return self.port.network_id, self.sr_iov


class Partner(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Another amphora of the same load balancer, with its address on the VIP's network."""

    id: str
    address: str


class Amphora(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded amphora, see `tables.amphora`; times are seconds since 1970.

    `heard_at` and `holds_vip` are from the last heartbeat; `holds_vip` is None if its values were not read. `host` and
    `zone` are the location of the machine when its agent first answered, see `compute.interface.Location`. A `dead`
    amphora is being replaced because it sends no heartbeats and does not answer; no step depends on it.
    """

    id: str
    load_balancer_id: str
    role: str
    state: AmphoraState
    compute_id: str | None
    management_address: str | None
    confirmed: int
    plugged: tuple[AttachedPort, ...]
    booted_at: float | None = None
    confirmed_at: float | None = None
    partners: tuple[Partner, ...] = ()
    heard_at: float | None = None
    holds_vip: bool | None = None
    handed_over: bool = False
    drains_until: float | None = None
    dead: bool = False
    certificate_issued_at: float | None = None
    certificate_expires_at: float | None = None
    certificate_authority: int | None = None
    trusts: str | None = None
    host: str | None = None
    zone: str | None = None
