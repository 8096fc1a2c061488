# SPDX-License-Identifier: Apache-2.0
"""Asks the running HAProxy for its features over the stats socket.

Invariant: no feature is derived from a version. The questions do not change HAProxy, because each of them ends with an
unknown keyword.
"""

from __future__ import annotations

from dataclasses import dataclass

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.config_parser import AGENT_PREFIX
from amphora_agent.haproxy.runtime_socket import Socket

_UNKNOWN_KEYWORD = "amphora-asks"


@dataclass(frozen=True)
class Features:
    """The features that differ between HAProxy versions.

    Attributes:
        cookies: an added server has its cookie at once (2.8).
        wait_command: the command ``wait`` returns when a server can be removed (3.0).
        init_state: an added server can start in the state "down" (3.1).
        limits: the connection limit of a full listener can be raised. HAProxy 2.6.12 then aborts ("watchdog", SIGABRT),
            which no question shows. Tests have shown that versions with `cookies` do not abort.
    """

    cookies: bool = False
    wait_command: bool = False
    init_state: bool = False
    limits: bool = False


MINIMAL_FEATURES = Features()
"""The features of the oldest supported HAProxy."""


def probe_features(worker: Socket) -> Features:
    """Return the features of a worker; a feature without an answer is missing."""
    try:
        cookies = _knows_keyword(worker, "cookie x")
        return Features(
            cookies=cookies,
            wait_command="wait {" in worker.ask("help wait"),
            init_state=_knows_keyword(worker, "init-state down"),
            limits=cookies,
        )
    except HaproxyError:
        return MINIMAL_FEATURES


def _knows_keyword(worker: Socket, keyword: str) -> bool:
    """Whether HAProxy complains about the unknown keyword only."""
    command = f"add server {AGENT_PREFIX}metrics/asked 127.0.0.1:1 {keyword} {_UNKNOWN_KEYWORD}"
    return _UNKNOWN_KEYWORD in worker.ask(command)
