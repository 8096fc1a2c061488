# SPDX-License-Identifier: Apache-2.0
"""Records when the certificates of users expire, for warnings to operators.

Invariant: each certificate is opened once after it was stored. A certificate that no key opens is tried again in each
round, because the key may follow; `amphoractl secrets status` counts such secrets. A private key never leaves this
module.
"""

from __future__ import annotations

from cryptography import x509

from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.secret import Secret
from amphora_driver.store import sealed_secrets
from amphora_driver.store.sealed_secrets import UnreadCertificate

# Maximum number of certificates in one transaction.
_BATCH = 100


def record_tls_expiries(database: Database, vault: Vault) -> int:
    """Record the expiry of each certificate without one; return the number of recorded ones.

    Raises:
        StoreError: the database refused a transaction; earlier batches stay recorded.
    """
    recorded = 0
    after = None
    while True:
        found = database.read(lambda c, after=after: sealed_secrets.list_unread_certificates(c, after, _BATCH))  # type: ignore[misc]
        expiries = [(one, at) for one in found if (at := _read_expiry(one, vault)) is not None]
        if expiries:
            recorded += database.write(lambda c, some=expiries: sealed_secrets.record_expiries(c, some))  # type: ignore[misc]
        if len(found) < _BATCH:
            return recorded
        after = found[-1].name


def read_expiry(pem: Secret) -> float:
    """Return the end of validity (seconds since 1970) of the first certificate, which is the server's own.

    Raises:
        ValueError: the text begins with no certificate.
    """
    return x509.load_pem_x509_certificate(pem.reveal()).not_valid_after_utc.timestamp()


def _read_expiry(one: UnreadCertificate, vault: Vault) -> float | None:
    try:
        return read_expiry(vault.open(one.content, sealed_secrets.secret_location(one.name)))
    except (StoreError, ValueError, x509.InvalidVersion):
        return None
