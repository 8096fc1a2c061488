# SPDX-License-Identifier: Apache-2.0
"""Certificates, authorities and revocation lists for Octavia's certificate manager in tests.

Invariant: it contains every reference that `whole_model` uses; authorities of this module issued all certificates.
"""

from pathlib import Path

from dataplane.pki import Authority

ROOT = Authority("root")
MIDDLE = Authority("middle", ROOT)
CLIENTS = Authority("clients")
ONE, TWO, THREE = (
    MIDDLE.issue(f"{name}.example.com", number=number) for number, name in enumerate(("one", "two", "three"), start=10)
)
ADA, EVE, BOB = (CLIENTS.issue(name, number=20) for name in ("ada", "eve", "bob"))
AUTHORITIES = MIDDLE.pem + ROOT.pem


def keep_all(settings):
    """Write all references into Octavia's certificate manager."""
    folder = Path(settings.tls)
    for ref, certificate in (("one", ONE), ("two", TWO), ("three", THREE)):
        (folder / f"{ref}.key").write_text(certificate.key_pem)
        (folder / f"{ref}.int").write_text(certificate.chain_pem)
        (folder / f"{ref}.crt").write_text(certificate.certificate_pem)
    texts = {
        "clients": CLIENTS.pem,
        "revoked": CLIENTS.revoke(EVE),
        "authorities": AUTHORITIES,
        # One list of each authority in the chain: OpenSSL refuses every certificate without them.
        "lost": MIDDLE.revoke(THREE) + ROOT.revoke(),
    }
    for ref, text in texts.items():
        (folder / f"{ref}.crt").write_text(text)
