# SPDX-License-Identifier: Apache-2.0
"""The agent's certificate: accepted and refused ones, and the rollback after a failure."""

from __future__ import annotations

import time
import uuid

import pytest

from amphora_agent.errors import CertificateRefused, MachineError
from amphora_agent.paths import Paths
from amphora_agent.tls_identity import Identity
from amphora_driver.certificates.ca import Authority, create_authority

AMPHORA = uuid.UUID("0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11")
CONTROLLERS = ((("commonName", "controllers"),),)


def authority(name, ahead=0.0):
    certificate, key = create_authority(name)
    return certificate.decode(), Authority(certificate, key, clock=lambda: time.time() + ahead)


def pem(authority, days=1.0, name=AMPHORA):
    return authority.issue_server(str(name), days).bundle().reveal().decode()


class AmphoraFiles:
    """An amphora's files; the CA of the controllers is not the CA of the amphorae."""

    def __init__(self, directory):
        self.paths = Paths(directory)
        self.paths.etc.mkdir(parents=True)
        self.paths.var.mkdir(parents=True)
        self.controllers, _ = authority("controllers")
        self.amphorae, self.issuer = authority("amphorae")
        self.own = self.paths.etc / "server.pem"
        self.own.write_text(pem(self.issuer))
        (self.paths.etc / "client_ca.pem").write_text(self.controllers)
        self.identity = Identity(self.paths, AMPHORA)

    def take(self, new, *, prove=None, **more):
        """The proof reads the certificate of new handshakes."""
        authorities = {"client_ca": None, "server_ca": None, **more}
        shown = prove or (lambda anchor: self.identity.certificate().fingerprint)
        return self.identity.replace(new, caller=CONTROLLERS, prove=shown, **authorities)

    def files(self):
        return {file.name: file.read_text() for file in self.paths.etc.iterdir()}


@pytest.fixture
def place(tmp_path):
    return AmphoraFiles(tmp_path)


def test_the_present_certificate_is_described_even_if_invalid(place):
    assert place.identity.certificate().expires == pytest.approx(time.time() + 86400, abs=60)
    _, past = authority("amphorae", ahead=-200)
    place.own.write_text(pem(past, 100 / 86400, uuid.uuid4()))
    assert place.identity.certificate().expires < time.time()


def test_without_a_ca_all_other_properties_are_verified(place):
    """Octavia's worker creates such amphorae: the agent does not know the CA of its certificate."""
    new = pem(place.issuer, 2)
    assert place.take(new).expires > time.time() + 86400
    assert place.own.read_text() == new
    with pytest.raises(CertificateRefused, match="Hostname mismatch"):
        place.take(pem(place.issuer, name=uuid.uuid4()))


def test_reported_state_is_authoritative(place):
    (place.paths.etc / "server_ca.pem").write_text(place.amphorae)
    _, other = authority("amphorae")
    with pytest.raises(CertificateRefused, match="a controller would not accept it"):
        place.take(pem(other))
    newer, issuer = authority("newer")
    with pytest.raises(CertificateRefused, match="a controller would not accept it"):
        place.take(pem(issuer))
    place.take(pem(issuer), server_ca=newer)
    place.take(pem(issuer))


@pytest.mark.parametrize("what", ["shows another one", "fails", "cannot be reached"])
def test_an_unusable_certificate_is_rolled_back(place, what):
    newer, issuer = authority("newer")
    before = place.files()
    seen = []

    def prove(anchor):
        seen.append((anchor, place.own.read_text()))
        if what == "shows another one":
            return "00"
        raise ConnectionRefusedError(111, "refused") if what == "cannot be reached" else MachineError("x", "y")

    new = pem(issuer)
    with pytest.raises(MachineError, match="in use again"):
        place.take(new, prove=prove, server_ca=newer, client_ca=place.controllers + newer)
    assert seen == [(newer, new)]
    assert place.files() == before


def test_the_caller_must_stay_authorised(place):
    other, _ = authority("others")
    with pytest.raises(CertificateRefused, match="none of the CAs"):
        place.take(pem(place.issuer), client_ca=other)
    place.take(pem(place.issuer), client_ca=other + place.controllers)
    assert (place.paths.etc / "client_ca.pem").read_text() == other + place.controllers


def test_a_refused_candidate_leaves_no_files(place):
    with pytest.raises(CertificateRefused) as caught:
        place.take("-----BEGIN PRIVATE KEY-----\ncanary\n-----END PRIVATE KEY-----\n")
    assert "canary" not in str(caught.value)
    assert set(place.files()) == {"server.pem", "client_ca.pem"}


def booted(place, client_ca):
    """A new agent with the config drive's CAs."""
    (place.paths.etc / "client_ca.pem").write_text(client_ca)
    place.identity = Identity(place.paths, AMPHORA)
    place.identity.context()
    return (place.paths.etc / "client_ca.pem").read_text()


def test_removed_ca_stays_removed_after_a_boot(place):
    place.identity.context()
    newer, _ = authority("newer")
    place.take(pem(place.issuer), client_ca=place.controllers + newer)
    place.identity.context()
    place.take(pem(place.issuer), client_ca=place.controllers)
    assert booted(place, place.controllers) == place.controllers
    place.take(pem(place.issuer), client_ca=newer + place.controllers)
    for _ in range(2):
        assert booted(place, place.controllers) == newer + place.controllers


def test_files_of_the_operator_are_used(place):
    """The controllers lost their certificates: the operator replaces the file, and the next boot keeps it."""
    place.identity.context()
    rescue, _ = authority("rescue")
    assert booted(place, rescue) == rescue
    assert booted(place, place.controllers) == rescue


@pytest.mark.parametrize("content", ["", "nonsense", "[]", '{"client_ca": "nonsense", "replaced": []}'])
def test_an_unreadable_copy_blocks_no_client(place, content):
    place.paths.callers.write_text(content)
    assert booted(place, place.controllers) == place.controllers
    newer, _ = authority("newer")
    assert booted(place, newer) == newer
    assert booted(place, place.controllers) == newer


def test_a_certificate_that_a_boot_would_discard_is_refused(place):
    place.identity.context()
    place.paths.callers.unlink()
    place.paths.callers.mkdir()  # the agent cannot replace the file, as on a full disk
    newer, _ = authority("newer")
    before = place.files()
    with pytest.raises(MachineError, match="in use again"):
        place.take(pem(place.issuer), client_ca=place.controllers + newer)
    assert place.files() == before


def test_the_tls_context_changes_only_with_the_files(place):
    first = place.identity.context()
    assert place.identity.context() is first
    place.own.write_text("nonsense")
    assert place.identity.context() is first
    place.own.write_text(pem(place.issuer))
    assert place.identity.context() is not first
