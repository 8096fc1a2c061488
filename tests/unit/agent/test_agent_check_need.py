# SPDX-License-Identifier: Apache-2.0
"""A change needs no check by another HAProxy if the running HAProxy has accepted each line of the file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amphora_agent.haproxy.config_check import is_needed
from amphora_agent.haproxy.config_diff import Runtime, compare_configurations
from amphora_agent.haproxy.config_file import Document
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.features import Features

FRONT = "defaults\n    mode http\n\nfrontend f\n    bind 127.0.0.1:80\n    default_backend b\n"
A, B, C = (f"    server {name} 192.0.2.1:80{number} weight 1 check\n" for number, name in enumerate("abc"))
ABC = "backend b\n" + A + B + C
LONG = "    server b 192.0.2.1:801" + " check" * 57


def decided(old: str, new: str) -> tuple[bool, Runtime]:
    """Return whether the change of two texts needs a check."""
    head = Document("global\n", FRONT + old)
    before, after = parse(head.text), parse(FRONT + new)
    decision = compare_configurations(before, after, features=Features(limits=True, init_state=True, cookies=True))
    assert isinstance(decision, Runtime)
    return is_needed(head, replace(head, text=FRONT + new), after, decision.actions), decision


@pytest.mark.parametrize(
    ("old", "new", "needed"),
    [
        pytest.param(ABC, ABC.replace(B, B.replace("weight 1", "weight 256")), False, id="a weight"),
        pytest.param(ABC.replace("weight 1", "weight 3"), ABC.replace(" weight 1", ""), False, id="the default weight"),
        pytest.param(ABC, ABC.replace(B, B.replace("weight 1", "weight 0002")), True, id="another notation"),
        pytest.param(ABC, ABC.replace("check", "check disabled"), False, id="all disabled"),
        pytest.param(ABC.replace("check", "disabled check"), ABC, False, id="all enabled"),
        pytest.param(ABC, ABC.replace(B, ""), False, id="one removed"),
        pytest.param(ABC, "backend b\n", False, id="all removed"),
        pytest.param(ABC, ABC.replace(A, "").replace(B, B.replace("weight 1", "weight 7")), False, id="two members"),
        pytest.param(ABC, "backend b\n" + B + A + C, True, id="another order"),
        pytest.param(ABC, ABC + "    server d 192.0.2.1:80 check\n", True, id="one added"),
        pytest.param(ABC, ABC.replace(B, B.replace("192.0.2.1:801", "192.0.2.1:80")), True, id="another address"),
        pytest.param(ABC, ABC.replace(B, B.replace("check", "check inter 5s")), True, id="another keyword"),
        pytest.param(ABC, ABC.replace(B, "# x" * 2000 + "\n" + A.replace("1 check", "2 check")), True, id="a comment"),
        pytest.param(
            ABC.replace(B, LONG + "\n"), ABC.replace(B, LONG + " weight 2\n"), True, id="a line of many words"
        ),
        pytest.param(
            ABC + "    use-server c if TRUE\n", ABC.replace(B, "") + "    use-server c if TRUE\n", True, id="rule"
        ),
        pytest.param(
            ABC + "    acl up srv_is_up(b/a)\n", "backend b\n" + A + "    acl up srv_is_up(b/a)\n", True, id="fetch"
        ),
        pytest.param(
            ABC + "backend c\n    server x 192.0.2.9:80 track b/a\n",
            ABC.replace(A, "") + "backend c\n    server x 192.0.2.9:80 track b/a\n",
            True,
            id="another backend tracks the removed server",
        ),
    ],
)
def test_only_what_haproxy_has_accepted_needs_no_check(old, new, needed):
    assert decided(old, new)[0] is needed


def test_another_head_needs_a_check():
    """The head names the directory of the TLS files."""
    new = ABC.replace(B, B.replace("weight 1", "weight 2"))
    decision = decided(ABC, new)[1]
    before, after = Document("global\n", FRONT + ABC), Document("global\n    nbthread 2\n", FRONT + new)
    assert is_needed(before, after, parse(after.text), decision.actions)


def test_a_removed_server_of_the_same_name_remains():
    """HAProxy refuses a name that occurs twice, so the agent does not derive the check of such a backend."""
    after = parse("backend b\n" + A + A + C)
    before, wanted = Document("", "backend b\n" + A + A + B + C), Document("", after.text)
    assert is_needed(before, wanted, after, [])
