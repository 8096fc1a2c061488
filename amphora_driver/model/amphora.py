# SPDX-License-Identifier: Apache-2.0
"""An amphora as it is recorded."""

from __future__ import annotations

from enum import Enum

import msgspec

from amphora_driver.model.network import Port, Subnet


class AmphoraState(str, Enum):
    """Life cycle of an amphora."""

    BOOTING = "booting"
    READY = "ready"
    RETIRING = "retiring"


class AttachedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of the machine with its subnets."""

    port: Port
    subnets: tuple[Subnet, ...]


class Partner(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Another amphora of the same load balancer, with its address on the VIP's network."""

    id: str
    address: str


class Amphora(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded amphora, without its heartbeat key; times are seconds since 1970.

    Attributes:
        booted_at: time of the boot request.
        confirmed: the newest generation it has confirmed.
        confirmed_at: time of that confirmation.
        partners: its VRRP peers at that confirmation.
        heard_at: time of the last heartbeat; None if never.
        holds_vip: its report in that heartbeat; None if it made none.
        handed_over: it was asked to hand its VIPs over before its removal.
        drains_until: end of the connection drain after the handover; None while it may still hold VIPs.
        dead: it is being replaced because it sends no heartbeats and does not answer. No step depends on it.
        certificate_authority: id of the CA that issued its certificate; None for the configured files.
        trusts: the CAs of client certificates that it accepts (see `certificates.ca_rotation`).
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
