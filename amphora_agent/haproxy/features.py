# SPDX-License-Identifier: Apache-2.0
"""What the HAProxy that runs can do, asked of itself.

Invariant: nothing is guessed from a version. Every question leaves HAProxy as it was: a server is never added, because
the command that asks ends with a word that no HAProxy knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.config_parser import OWN
from amphora_agent.haproxy.runtime_socket import Socket

_NONSENSE = "amphora-asks"


@dataclass(frozen=True)
class Abilities:
    """What is not the same everywhere.

    Attributes:
        cookies: a server that is added has its cookie at once (2.8).
        waiting: it says when a server can be removed (3.0).
        init_state: a server that is added can begin as one that is down (3.1).
        limits: a listener's limit of connections can be raised while it is reached. 2.6.12 ends itself then
            ("watchdog", SIGABRT), which no question shows: those that know `cookies` were tried and do not.
    """

    cookies: bool = False
    waiting: bool = False
    init_state: bool = False
    limits: bool = False


FEWEST = Abilities()
"""Those of the oldest HAProxy."""


def ask(worker: Socket) -> Abilities:
    """What a worker can do; what it does not answer it cannot."""
    try:
        cookies = _takes(worker, "cookie x")
        return Abilities(
            cookies=cookies,
            waiting="wait {" in worker.ask("help wait"),
            init_state=_takes(worker, "init-state down"),
            limits=cookies,
        )
    except HaproxyError:
        return FEWEST


def _takes(worker: Socket, keyword: str) -> bool:
    """Whether a server may be added with a keyword: then HAProxy complains of the nonsense after it."""
    return _NONSENSE in worker.ask(f"add server {OWN}metrics/asked 127.0.0.1:1 {keyword} {_NONSENSE}")
