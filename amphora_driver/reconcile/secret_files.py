# SPDX-License-Identifier: Apache-2.0
"""Contents of the rendered files, with secrets opened by the vault.

Invariant: no I/O. An opened secret stays wrapped in `Secret` and is plain text only in the bundle that is sent. A
secret that is missing or cannot be opened affects only its own listener or pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.reconcile.tls_tickets import ticket_keys
from amphora_driver.render.bundle import BundleFile
from amphora_driver.render.tls import File
from amphora_driver.secret import Secret
from amphora_driver.store.sealed_secrets import SealedSecret, secret_location


def fill_files(
    files: Iterable[File], sealed: Mapping[SecretName, SealedSecret], vault: Vault
) -> tuple[tuple[BundleFile, ...], dict[str, str]]:
    """Return the files with their contents, in the same order.

    The second result has the reasons by object id for listeners and pools without a usable secret.
    """
    found: list[BundleFile] = []
    lost: dict[str, str] = {}
    for file in files:
        if file.secret is None:
            found.append(BundleFile(name=file.name, content=Secret((file.content or "").encode())))
            continue
        opened = open_secret(file.secret, sealed, vault)
        if isinstance(opened, Secret):
            found.append(BundleFile(name=file.name, content=opened))
        else:
            lost.setdefault(file.secret.object_id, opened)
    return tuple(found), lost


def pools_without_secret(tree: LoadBalancer, sealed: Mapping[SecretName, SealedSecret]) -> dict[str, str]:
    """Return the pools with a missing secret, also pools that no listener uses: reasons by id."""
    pools = {pool.id for pool in tree.pools}
    missing = {name: one for name, one in sealed.items() if one.content is None and name.object_id in pools}
    return {name.object_id: _missing_reason(name, one) for name, one in missing.items()}


def _missing_reason(name: SecretName, one: SealedSecret | None) -> str:
    reason = "" if one is None else one.reason
    return reason or f"the {name.purpose} under {name.ref} was never handed over: set the reference again"


def open_secret(name: SecretName, sealed: Mapping[SecretName, SealedSecret], vault: Vault) -> Secret | str:
    """Return the secret, or the reason why the secret cannot be used."""
    one = sealed.get(name)
    if one is None or one.content is None:
        return _missing_reason(name, one)
    try:
        opened = vault.open(one.content, secret_location(name))
        if name.purpose is Purpose.TICKETS:
            return ticket_keys(opened)
    except StoreError as error:
        return f"the {name.purpose} under {name.ref} cannot be opened: {error.happened}"
    if not opened.reveal().isascii():
        # A text in PEM format is ASCII. Other characters are refused here, because `render/bundle.py` would replace
        # them without an error.
        return f"the {name.purpose} under {name.ref} is not in PEM format: set the reference again"
    return opened
