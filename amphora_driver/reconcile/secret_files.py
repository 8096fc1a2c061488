# SPDX-License-Identifier: Apache-2.0
"""From files that are named to files that hold something.

Invariant: no I/O. A secret leaves the vault here, wrapped, and is in clear only in the document that is sent. One that
is missing, or that no key opens, costs its own listener or pool and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from amphora_driver.errors import StoreError
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.reconcile.tls_tickets import ticket_keys
from amphora_driver.render.bundle import BundleFile
from amphora_driver.secret import Secret
from amphora_driver.store.sealed_secrets import secret_location

if TYPE_CHECKING:
    from amphora_driver.database.vault import Vault
    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.render.tls import File
    from amphora_driver.store.sealed_secrets import SealedSecret


def filled(
    files: Iterable[File], sealed: Mapping[SecretName, SealedSecret], vault: Vault
) -> tuple[tuple[BundleFile, ...], dict[str, str]]:
    """The files with their contents, in the same order.

    Args:
        files: as the renderer names them.
        sealed: what is kept of the load balancer's secrets.
        vault: what opens them.

    Returns:
        The files, and reasons by object id for listeners and pools that lack one.
    """
    found: list[BundleFile] = []
    lost: dict[str, str] = {}
    for file in files:
        if file.secret is None:
            found.append(BundleFile(name=file.name, content=Secret((file.content or "").encode())))
            continue
        opened = _open(file.secret, sealed, vault)
        if isinstance(opened, Secret):
            found.append(BundleFile(name=file.name, content=opened))
        else:
            lost.setdefault(file.secret.object_id, opened)
    return tuple(found), lost


def lacking(tree: LoadBalancer, sealed: Mapping[SecretName, SealedSecret]) -> dict[str, str]:
    """Pools of which a secret is not known, whether or not anything leads to them: reasons by id."""
    pools = {pool.id for pool in tree.pools}
    return {
        name.object_id: _why(name, one)
        for name, one in sealed.items()
        if one.content is None and name.object_id in pools
    }


def _why(name: SecretName, one: SealedSecret | None) -> str:
    reason = "" if one is None else one.reason
    return reason or f"the {name.purpose} under {name.ref} was never handed over: set the reference again"


def _open(name: SecretName, sealed: Mapping[SecretName, SealedSecret], vault: Vault) -> Secret | str:
    """The secret, or why it cannot be had."""
    one = sealed.get(name)
    if one is None or one.content is None:
        return _why(name, one)
    try:
        opened = vault.open(one.content, secret_location(name))
        if name.purpose is Purpose.TICKETS:
            return ticket_keys(opened)
    except StoreError as error:
        return f"the {name.purpose} under {name.ref} cannot be opened: {error.happened}"
    if not opened.reveal().isascii():
        # Noticed later, it would be an error of Python's with the whole secret in it.
        return f"the {name.purpose} under {name.ref} is not in PEM format: set the reference again"
    return opened
