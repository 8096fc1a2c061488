# SPDX-License-Identifier: Apache-2.0
"""The request that changes the settings of an agent, also of an agent that does not know it."""

import pytest

from amphora_driver.errors import AgentRefused

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
HOST = "127.0.0.1"


def test_settings_are_sent_and_their_digest_is_returned(lab):
    agent = lab.agent()
    agent.answer = (200, {"digest": "ab", "a_later_key": 1})
    assert lab.client(agent.port).put_settings(AMPHORA, HOST, b'{"x":1}').digest == "ab"
    [(method, path, body, _)] = agent.requests
    assert (method, path, body) == ("PUT", "/v2/settings", b'{"x":1}')


def test_an_old_agent_refuses_with_404(lab):
    agent = lab.agent()
    agent.answer = (404, {"error": {"wanted": "serve the request", "happened": "not found", "remedy": ""}})
    with pytest.raises(AgentRefused) as caught:
        lab.client(agent.port).put_settings(AMPHORA, HOST, b"{}")
    assert caught.value.status == 404


def test_an_old_agent_reports_no_digest_of_settings(lab):
    agent = lab.agent()
    agent.answer = (200, {"generation": 1, "applied_at": None, "digest": None, "lost_generation": None})
    assert lab.client(agent.port).bundle_state(AMPHORA, HOST).settings_digest is None
