# SPDX-License-Identifier: Apache-2.0
"""A rebooted amphora has the files of its first boot, and refuses a withdrawn authority."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path

import pytest
from amphora_lab import eventually
from throwaway_authority import CLIENT, SERVER, Authority

pytestmark = pytest.mark.root


def test_a_rotated_authority_survives_a_boot(amphora, network):
    old, new = amphora.authority, Authority("newer")
    etc = Path(amphora.write("x", "")).parent / "etc"
    drive = {name: (etc / name).read_text() for name in ("client_ca.pem", "server.pem", "agent.conf", "heartbeat.key")}
    former = amphora.client_certificate

    def put(client_ca: str) -> int:
        document = {"certificate": old.issue(amphora.id, SERVER), "client_ca": client_ca, "server_ca": None}
        return amphora.call("PUT", "/v2/certificate", document)[0]

    assert put(old.pem + new.pem) == 200
    amphora.disconnect()
    # The authority of the amphorae does not change.
    amphora.client_certificate = amphora.write("newer.pem", new.issue("controller", CLIENT))
    assert put(new.pem) == 200
    amphora.power_off()
    for file in etc.iterdir():
        file.unlink()
    for name, content in drive.items():
        (etc / name).write_text(content)
    network.unplug()
    network.plug()
    amphora.start()
    eventually(amphora.answers, "the agent answers the controllers of the new authority")
    amphora.disconnect()
    amphora.client_certificate = former
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        amphora.call("GET", "/v2/info")
