# SPDX-License-Identifier: Apache-2.0
"""References to secrets: the object that uses a secret, its purpose, and the user's reference.

Invariant: a `SecretName` contains no secret, so rendered configurations and logs may contain it. The content is a
`SecretMaterial` (as delivered by Octavia) or a `Secret` (one PEM text for HAProxy), which do not print it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from amphora_driver.model.enums import StringEnum
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Node, Pool
from amphora_driver.secret import Secret


class Purpose(StringEnum):
    """Purpose of a secret; a certificate includes intermediates and private key.

    The driver creates the secret from which a load balancer's TLS ticket keys are derived.
    """

    CERTIFICATE = "certificate"
    CA = "ca"
    CRL = "crl"
    TICKETS = "tickets"


class SecretName(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One secret of one listener or pool; two objects with the same reference have two secrets."""

    object_id: str
    purpose: Purpose
    ref: str


class SecretMaterial(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one secret as delivered by Octavia: PEM, not validated.

    `option` is the name of the API option in error messages, `text` the certificate, the CA certificates, or the
    revocation list.
    """

    option: str
    text: Secret
    private_key: Secret | None = None
    passphrase: Secret | None = None
    intermediates: tuple[Secret, ...] = ()


def ticket_secret_name(load_balancer_id: str) -> SecretName:
    """Return the name of the secret for TLS ticket keys: one per load balancer."""
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
# Fields of listeners and pools that refer to secrets, and the purpose of each secret.
SECRET_FIELDS: dict[type, tuple[tuple[str, Purpose], ...]] = {Listener: _LISTENER_FIELDS, Pool: _POOL_FIELDS}


def secrets_of_object(node: Node) -> dict[SecretName, str]:
    """Return the secrets of an object without its children, with the referring field."""
    return secrets_in_fields(node, (field for field, _ in SECRET_FIELDS.get(type(node), ())))


def secrets_in_fields(node: Node, fields: Iterable[str]) -> dict[SecretName, str]:
    """Return the secrets that these fields of an object refer to, with the field."""
    selected = set(fields)
    found: dict[SecretName, str] = {}
    for field, purpose in SECRET_FIELDS.get(type(node), ()):
        if field in selected:
            refs = getattr(node, field) or ()
            for ref in (refs,) if isinstance(refs, str) else refs:
                found.setdefault(SecretName(node.id, purpose, ref), field)
    return found


def secrets_of_tree(tree: LoadBalancer) -> Iterator[SecretName]:
    """Yield every secret of a load balancer."""
    nodes: tuple[Node, ...] = (*tree.listeners, *tree.pools)
    for node in nodes:
        yield from secrets_of_object(node)
