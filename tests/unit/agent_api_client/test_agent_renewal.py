# SPDX-License-Identifier: Apache-2.0
"""The renewal of an agent's certificate: an expired certificate is accepted, other faults are refused."""

from __future__ import annotations

import json
import time

import pytest

from amphora_driver.certificates.ca import CLOCK_SKEW, Authority, create_authority
from amphora_driver.errors import AgentRefused, AgentUntrusted

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
HOST = "127.0.0.1"
DAY = 86400.0
RENEWED = (200, {"expires_at": "2030-01-01T00:00:00Z", "fingerprint": "ab"})


@pytest.fixture
def authority(lab):
    """A CA that the controller trusts, and its clock."""
    certificate, key = create_authority("amphorae")
    lab.trust.write_bytes(certificate)
    return lambda ahead=0.0: Authority(certificate, key, clock=lambda: time.time() + ahead)


def expired(authority, name=AMPHORA):
    return authority(-200).issue_server(name, 100 / DAY)


def test_a_renewal_sends_certificate_and_cas(lab, authority):
    agent = lab.agent(issued=authority().issue_server(AMPHORA, 1))
    agent.answer = RENEWED
    new = authority().issue_server(AMPHORA, 2).bundle()
    said = lab.client(agent.port).renew(AMPHORA, HOST, new, client_ca=lab.client_ca)
    assert (said.expires_at.year, said.fingerprint) == (2030, "ab")
    [(method, path, body, _)] = agent.requests
    assert (method, path) == ("PUT", "/v2/certificate")
    assert json.loads(body) == {"certificate": new.reveal().decode(), "client_ca": lab.client_ca.decode()}


def test_an_expired_certificate_is_accepted_for_renewal_only(lab, authority):
    agent = lab.agent(issued=expired(authority))
    agent.answer = RENEWED
    client = lab.client(agent.port)
    for _ in range(2):
        client.renew(AMPHORA, HOST, authority().issue_server(AMPHORA, 1).bundle())
        with pytest.raises(AgentUntrusted, match="expired"):
            client.info(AMPHORA, HOST)
    assert [path for _, path, _, _ in agent.requests] == ["/v2/certificate"] * 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda authority, other: expired(authority, "11111111-7f0e-4a55-9f0c-2f6f3a1f9c11"), "Hostname mismatch"),
        (lambda authority, other: other.issue_server(AMPHORA, 1), "not accepted"),
        (lambda authority, other: authority(-200).issue_client(AMPHORA, 100 / DAY), "purpose"),
        (lambda authority, other: authority(2 * CLOCK_SKEW).issue_server(AMPHORA, 1), "not yet valid"),
    ],
    ids=["another amphora", "another authority", "no server", "not yet valid"],
)
def test_a_renewal_verifies_all_other_certificate_fields(lab, authority, make, why):
    other = Authority(*create_authority("amphorae"))
    agent = lab.agent(issued=make(authority, other))
    agent.answer = RENEWED
    with pytest.raises(AgentUntrusted, match=why):
        lab.client(agent.port).renew(AMPHORA, HOST, other.issue_server(AMPHORA, 1).bundle())
    assert agent.requests == []


def test_no_key_is_in_an_error(lab, authority):
    agent = lab.agent(issued=expired(authority))
    agent.answer = (422, {"error": {"wanted": "install a new certificate", "happened": "it is not", "remedy": ""}})
    new = authority().issue_server(AMPHORA, 1).bundle()
    with pytest.raises(AgentRefused, match="it is not") as caught:
        lab.client(agent.port).renew(AMPHORA, HOST, new)
    line = new.reveal().decode().partition("PRIVATE KEY-----\n")[2].splitlines()[0]
    assert line not in f"{caught.value} {caught.value!r}"
