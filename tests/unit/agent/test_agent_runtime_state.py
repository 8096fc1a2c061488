# SPDX-License-Identifier: Apache-2.0
"""The state that HAProxy reports, compared with the wanted state."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from amphora_agent.haproxy import runtime_state
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.x509 import revoked_serials, shown_serials

STAT = "# pxname,svname,qcur,qmax,scur,smax,slim,stot\nl,FRONTEND,,,0,0,{limit},0\n\n"
STATE = "1\n# head\n4 p:l 1 {name} {address} 2 {admin} {weight} 1 0 1 0 2 0 0 0 0 - {port} - 0 {checked} {at} - 0\n\n"
SAME = {"name": "a", "address": "192.0.2.1", "admin": 0, "weight": 1, "port": 80, "checked": 0, "at": "-"}


def find_difference(server="server a 192.0.2.1:80", limit=7, **said) -> str:
    text = f"frontend l\n    bind 198.51.100.5:80\n    maxconn 7\nbackend p:l\n    {server}\n"
    parse_servers = runtime_state.parse_servers(STATE.format(**{**SAME, **said}))
    return runtime_state.find_difference(
        parse(text), runtime_state.listener_limits(STAT.format(limit=limit)), parse_servers
    )


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("server a 192.0.2.1:80", {}),
        ("server a [2001:db8:0::1]:80", {"address": "2001:db8::1"}),
        ("server a 192.0.2.1:80 check addr 192.0.2.9 port 8", {"checked": 8, "at": "192.0.2.9"}),
        ("server a 192.0.2.1:80 addr 192.0.2.9 port 8", {}),
        ("server a name.example:80", {}),
        ("server a 192.0.2.1:80 disabled", {"admin": 5}),
        ("server a 192.0.2.1:80 agent-check", {"weight": 3, "admin": 8}),
    ],
)
def test_an_equal_state_has_no_difference(server, said):
    assert find_difference(server, **said) == ""


@pytest.mark.parametrize(
    ("server", "said", "words"),
    [
        ("server a 192.0.2.1:80", {"port": 81}, "is at 192.0.2.1 port 81, not at 192.0.2.1:80"),
        ("server a 192.0.2.1:80", {"address": "192.0.2.2"}, "is at 192.0.2.2"),
        ("server a 192.0.2.1:80", {"name": "b"}, "member a of p:l is missing or unexpected"),
        ("server a 192.0.2.1:80", {"weight": 2}, "has (weight, maintenance) (2, False), not (1, False)"),
        ("server a 192.0.2.1:80", {"admin": 1}, "(1, True), not (1, False)"),
        ("server a 192.0.2.1:80", {"admin": 8}, "gets no new requests"),
        ("server a 192.0.2.1:80 check addr 192.0.2.9", {"at": "192.0.2.8"}, "is monitored at 192.0.2.8"),
        ("server a 192.0.2.1:80 check port 8", {"checked": 9}, "is monitored on port 9"),
        ("server a 192.0.2.1:80", {"limit": 8}, "listener l accepts 8 connections, not 7"),
    ],
)
def test_a_different_state_has_a_difference(server, said, words):
    assert words in find_difference(server, **said)


def revoking(*serials: int) -> str:
    now = datetime.now(timezone.utc)
    builder = x509.CertificateRevocationListBuilder().last_update(now).next_update(now + timedelta(days=1))
    builder = builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")]))
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(entry.build())
    return (
        builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )


def test_revoked_clients_are_compared():
    many = tuple(range(1, 300))
    assert revoked_serials(revoking()) == (1, [])
    assert revoked_serials(revoking(2**100, 0x80) + revoking(*many)) == (2, sorted([0x80, 2**100, *many]))
    answer = "Certificate Revocation List #1:\nRevoked Certificates:\n    Serial Number: 5E51A7\n"
    assert shown_serials(answer) == (1, [0x5E51A7])


@pytest.mark.parametrize("body", ["", "AAAA", "MIIB", "!", "MAA=", "MIL/"])
def test_an_unreadable_list_is_not_compared(body):
    found = revoked_serials(f"-----BEGIN X509 CRL-----\n{body}\n-----END X509 CRL-----\n")
    assert found in (None, (1, []))
