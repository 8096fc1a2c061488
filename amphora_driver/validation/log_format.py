# SPDX-License-Identifier: Apache-2.0
"""Validation of an operator's log-format (HAProxy configuration manual, section 8.2.6).

Invariant: the agent accepts every accepted format, and HAProxy can parse the format in an HTTP frontend. The arguments
of sample expressions in `%[…]` differ between HAProxy's versions, so this module does not check them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from amphora_agent.directives.expressions import EXPRESSION
from amphora_driver.errors import UnsupportedOption

# Log-format variables of HAProxy 2.6 and all newer versions.
_VARIABLES = (
    "o B CC CS H HM HP HPO HQ HU HV ID ST T Ta Tc Td Th Ti Tl Tq TR Tr Ts Tt Tu Tw U ac b bc bi bp bq ci cp f fc fi fp "
    "ft hr hrl hs hsl lc ms pid r rc rt s sc si sp sq sslc sslv t tr trg trl ts tsc"
)
VARIABLES = frozenset(_VARIABLES.split())
_PIECE = re.compile(
    r"[^%]+ | %% | % (?:\{ (?P<flags>[^{}]*) \})? (?: (?P<variable>[A-Za-z0-9]+) | \[ (?P<expression>[^\[\]]+) \] )",
    re.VERBOSE,
)
_EXPRESSION = re.compile(EXPRESSION)
_FLAGS = re.compile(r"[+-][QXE](?:,[+-][QXE])*")
_LISTENER_FIRST = re.compile(r"(?:\{\{ ?(?:project_id|lb_id) ?\}\} ){0,2}%f(?: .*)?")
_PLACE = re.compile(r"\{\{ ?(project_id|lb_id) ?\}\}")


def check_log_format(text: str) -> None:
    """Raise UnsupportedOption for a format that HAProxy cannot parse."""
    at = 0
    while at < len(text):
        piece = _PIECE.match(text, at)
        if piece is None:
            raise _refusal(f"HAProxy cannot parse it from {text[at : at + 20]!r} on", "Write %% for a percent sign.")
        variable, flags = piece["variable"], piece["flags"]
        if variable is not None and variable not in VARIABLES:
            manual = "See section 8.2.6 of HAProxy's configuration manual."
            raise _refusal(f"HAProxy has no variable %{variable}", manual)
        if flags is not None and not _FLAGS.fullmatch(flags):
            raise _refusal(f"{{{flags}}} are not valid flags", "Use +Q, +X, +E, -Q, -X or -E.")
        expression = piece["expression"]
        if expression is not None and not _EXPRESSION.fullmatch(expression):
            raise _refusal(
                f"the sample expression {expression!r} is not permitted",
                "Use an expression that reads no file and no environment variable (docs/reference/agent-api.md).",
            )
        at = piece.end()


def with_listener(text: str) -> str:
    """Return the format with the listener before all values of clients.

    The log forwarder reads the listener of a line there (amphora_agent/log_forwarder/records.py).
    """
    return text if _LISTENER_FIRST.fullmatch(text) else f"%f {text}"


def insert_ids(text: str, ids: Mapping[str, str]) -> str:
    """Return the format with the values of `project_id` and `lb_id`, with `%` escaped."""
    return _PLACE.sub(lambda match: ids[match[1]].replace("%", "%%"), text)


def _refusal(happened: str, remedy: str) -> UnsupportedOption:
    return UnsupportedOption("use the flavor key 'log_format'", happened, remedy)
