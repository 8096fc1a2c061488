# SPDX-License-Identifier: Apache-2.0
"""Secrets by name: who uses them, what for, and under which reference the user knows them.

Invariant: a `SecretName` says nothing about the content, so that names travel where secrets must not: through the
rendered configuration, through comparisons and logs. Content travels as `SecretMaterial` (as Octavia handed it over) or
`Secret` (one PEM text, as HAProxy reads it), neither of which shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from amphora_driver.model.enums import StringEnum
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Pool
from amphora_driver.secret import Secret

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from amphora_driver.model.loadbalancer import Node


class Purpose(StringEnum):
    """What an object uses a secret for."""

    # Certificate, intermediates and private key together.
    CERTIFICATE = "certificate"
    CA = "ca"
    CRL = "crl"
    # What the TLS ticket keys of a load balancer are made from; it is ours, no user names it.
    TICKETS = "tickets"


class SecretName(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One secret of one listener or pool. Secrets are never shared: two objects with one reference have two."""

    object_id: str
    purpose: Purpose
    ref: str


class SecretMaterial(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one secret, as it was handed over: PEM, but nobody has looked yet.

    Attributes:
        option: the option that names it, as a refusal calls it.
        text: the certificate, the authorities' certificates, or the revocation list.
        intermediates: certificates between it and the authority.
    """

    option: str
    text: Secret
    private_key: Secret | None = None
    passphrase: Secret | None = None
    intermediates: tuple[Secret, ...] = ()


def ticket_secret_name(load_balancer_id: str) -> SecretName:
    """What the TLS ticket keys of a load balancer are made from: one for all of its listeners and amphorae."""
    return SecretName(load_balancer_id, Purpose.TICKETS, "")


_LISTENER_FIELDS = (
    ("default_tls_container_ref", Purpose.CERTIFICATE),
    ("sni_container_refs", Purpose.CERTIFICATE),
    ("client_ca_tls_container_ref", Purpose.CA),
    ("client_crl_container_ref", Purpose.CRL),
)
_POOL_FIELDS = (
    ("tls_container_ref", Purpose.CERTIFICATE),
    ("ca_tls_container_ref", Purpose.CA),
    ("crl_container_ref", Purpose.CRL),
)
# The fields that name secrets, by the kind of object that has them.
SECRET_FIELDS: dict[type, tuple[tuple[str, Purpose], ...]] = {Listener: _LISTENER_FIELDS, Pool: _POOL_FIELDS}


def secrets_of_object(node: Node) -> dict[SecretName, str]:
    """The secrets an object itself refers to, with the field that does; its children's are theirs."""
    return secrets_in_fields(node, (field for field, _ in SECRET_FIELDS.get(type(node), ())))


def secrets_in_fields(node: Node, fields: Iterable[str]) -> dict[SecretName, str]:
    """The secrets that these fields of an object refer to."""
    wanted = set(fields)
    found: dict[SecretName, str] = {}
    for field, purpose in SECRET_FIELDS.get(type(node), ()):
        if field in wanted:
            for ref in _refs(getattr(node, field)):
                found.setdefault(SecretName(node.id, purpose, ref), field)
    return found


def secrets_of_tree(tree: LoadBalancer) -> Iterator[SecretName]:
    """Every secret a load balancer uses."""
    nodes: tuple[Node, ...] = (*tree.listeners, *tree.pools)
    for node in nodes:
        yield from secrets_of_object(node)


def _refs(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if not value:
        return ()
    return (value,) if isinstance(value, str) else value
