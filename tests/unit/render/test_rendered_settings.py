# SPDX-License-Identifier: Apache-2.0
"""Settings of agents: the spelling of heartbeat targets, and the intervals in the boot file."""

import pytest

from amphora_driver.render.agent_conf import render_agent_conf
from amphora_driver.render.agent_settings import render_agent_settings


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("192.0.2.10:9879", "192.0.2.10:9879"),
        (" '[2001:DB8:0::1]:80' ", "[2001:db8::1]:80"),
        ("2001:db8::1:80", "[2001:db8::1]:80"),
    ],
)
def test_a_target_has_one_spelling(given, canonical):
    assert render_agent_settings([given], 3, 30).heartbeat.targets == (canonical,)


def test_agent_conf_has_exact_intervals():
    made = render_agent_settings(["192.0.2.1:1", "[2001:db8::1]:2"], 1234567.25, 0.1)
    text = render_agent_conf("am", port=9443, services="systemd", settings=made)
    assert "interval = 1234567.25\ntargets = 192.0.2.1:1, [2001:db8::1]:2\n" in text
    assert "[audit]\ninterval = 0.1\n" in text
