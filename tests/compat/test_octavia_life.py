# SPDX-License-Identifier: Apache-2.0
"""An amphora under Octavia's worker: its state after a reboot, and its refusal of a second manager."""

from __future__ import annotations

import pytest
from amphora_lab import CONTROLLER, eventually, get
from balancers import LB, TLS, WEB, balancer, listener, member, plug, pool
from octavia_process import Refused

KEY = "another key"
SECURE = listener(id=TLS, protocol="TERMINATED_HTTPS", protocol_port=443, tls_certificate_id="one.test")


@pytest.fixture(scope="module")
def client(compat_network):
    return compat_network.thread("cl")


@pytest.mark.extended
def test_a_reboot_restores_the_load_balancer(worker, booted, client, compat_network):
    amphora = booted()
    worker.drive(amphora)
    plug(worker)
    options = {"heartbeat_key": KEY, "controller_ip_port_list": [f"{CONTROLLER}:5603"], "heartbeat_interval": 1}
    worker("configure", "SINGLE", **options)
    worker("update", balancer(listener(), pool(member("m1"))))
    again(amphora, compat_network)
    # All of the configuration is on disk, so the amphora serves without a request.
    eventually(lambda: served(client) == "m1", "member m1 answers")

    worker("update", balancer(listener(), SECURE, pool(member("m1"))))
    worker("listen", KEY, CONTROLLER, 5603)
    again(amphora, compat_network)
    # The key of a certificate was in memory only. Octavia's health manager detects the missing listeners and acts.
    assert worker("heartbeats", 4)[-1][1]["listeners"] == {}
    assert served(client) is None
    # Any update of the load balancer sends the complete configuration again.
    worker("update", balancer(listener(), SECURE, pool(member("m2"))))
    assert served(client) == "m2"
    eventually(lambda: set(worker("heartbeats", 1)[0][1]["listeners"]) == {WEB, TLS}, "heartbeats report all listeners")


def again(amphora, network):
    amphora.power_off()
    network.unplug()
    network.plug()
    amphora.start()
    eventually(amphora.answers, "the agent answers")


def served(client):
    try:
        return client.run(get, timeout=1.0)[1]
    except OSError:
        return None


def test_an_amphora_of_this_provider_refuses_octavias_worker(worker, booted, client):
    amphora = booted()
    worker.drive(amphora)
    assert amphora.push(1, None)[0] == 200
    # Octavia's worker takes a 409 to the plug request for success, so the agent answers 403.
    for call, error in (
        (lambda: plug(worker), "Forbidden"),
        (lambda: worker("call", "upload_config", LB, "defaults\n"), "Conflict"),
        (lambda: worker("call", "upload_cert_pem", LB, "a.pem", "x"), "Conflict"),
        (lambda: worker("configure", "SINGLE"), "Conflict"),
    ):
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.name == error
    assert worker("call", "get_info")["api_version"] == "1.0"
    assert amphora.call("GET", "/v2/bundle")[1]["generation"] == 1
