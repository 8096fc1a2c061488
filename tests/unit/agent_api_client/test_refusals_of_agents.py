# SPDX-License-Identifier: Apache-2.0
"""The text of an agent's refusal is truncated and printable."""

import pytest

from amphora_driver.errors import AgentRefused

AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
HOST = "127.0.0.1"


def test_the_text_of_a_refusal_is_truncated_and_printable(lab):
    """The text fits in a database column and cannot forge a log line."""
    agent = lab.agent()
    words = {"wanted": "w\x00" * 5000, "happened": "h\nERROR forged\U0001f600" * 50_000, "remedy": "\x1b" * 5000}
    agent.answer = (422, {"error": words, "object_id": "o\x00" * 1000})
    with pytest.raises(AgentRefused) as caught:
        lab.client(agent.port).put_bundle(AMPHORA, HOST, b"{}")
    text = str(caught.value)
    assert (text.isprintable(), text.isascii(), len(text) < 7000, len(caught.value.object_id) <= 80) == (True,) * 4
