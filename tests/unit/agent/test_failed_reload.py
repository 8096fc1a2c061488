# SPDX-License-Identifier: Apache-2.0
"""A reload that fails: the agent waits for the old worker, so that a verification does not find closed listeners."""

from types import SimpleNamespace

import pytest

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy import process, runtime_state
from amphora_agent.haproxy.process import Haproxy

LISTENER = "1abe924e-a830-5789-8436-40a95460ec0e"


def listing(status):
    """HAProxy's answer with one listener; the status is the eighteenth column (management guide 9.1)."""
    row = [LISTENER, "FRONTEND", *[""] * 15, status]
    return "# pxname,svname\n" + ",".join(row) + ",\n"


PAUSED, OPEN, REFUSED = listing("PAUSED"), listing("OPEN"), None


def wait(answers, *, running=True):
    """Wait for open listeners; return the number of questions."""
    questions = []

    def ask(question):
        assert question == runtime_state.PROXIES
        answer = answers[min(len(questions), len(answers) - 1)]
        questions.append(question)
        if answer is REFUSED:
            raise HaproxyError("ask HAProxy", "no answer: Connection refused")
        return answer

    Haproxy._await_open_listeners(SimpleNamespace(worker=SimpleNamespace(ask=ask), is_running=lambda: running))
    return len(questions)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([OPEN], 1),
        ([PAUSED, PAUSED, OPEN], 3),
        # The pause of a worker includes its statistics socket.
        ([REFUSED, PAUSED, REFUSED, OPEN], 4),
    ],
)
def test_the_agent_waits_until_the_old_worker_accepts_connections(answers, asked):
    assert runtime_state.closed_listeners(PAUSED) == [LISTENER]
    assert wait(answers) == asked


def test_the_wait_ends_with_haproxy():
    assert wait([REFUSED], running=False) == 1


def test_the_wait_for_an_operators_closed_listener_is_limited(monkeypatch):
    monkeypatch.setattr(process, "_OPENING_SECONDS", 0.05)
    assert wait([PAUSED]) > 1
