# SPDX-License-Identifier: Apache-2.0
"""Reading the log-format an operator wrote (HAProxy configuration guide, 8.2.6).

Invariant: what is accepted here the agent accepts, and HAProxy can read it in an HTTP frontend, except that the
arguments of sample expressions in `%[…]` are HAProxy's own to judge: they differ between its versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from amphora_agent.directives.expressions import EXPRESSION
from amphora_driver.errors import UnsupportedOption

# Those of HAProxy 2.6; newer ones know them too.
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
_PLACE = re.compile(r"\{\{ ?(project_id|lb_id) ?\}\}")


def check(text: str) -> None:
    """Refuse what HAProxy could not read.

    Raises:
        UnsupportedOption: naming the variable, or the place.
    """
    at = 0
    while at < len(text):
        piece = _PIECE.match(text, at)
        if piece is None:
            raise _refusal(
                f"nothing that HAProxy knows begins at {text[at : at + 20]!r}", "Write %% for a percent sign."
            )
        variable, flags = piece["variable"], piece["flags"]
        if variable is not None and variable not in VARIABLES:
            raise _refusal(f"HAProxy has no variable %{variable}", "See its configuration guide, 8.2.6.")
        if flags is not None and not _FLAGS.fullmatch(flags):
            raise _refusal(f"{{{flags}}} are no flags", "Flags are +Q, +X and +E, and the same with a minus sign.")
        expression = piece["expression"]
        if expression is not None and not _EXPRESSION.fullmatch(expression):
            raise _refusal(
                f"amphorae do not accept the sample expression {expression!r}",
                "See docs/reference/agent-api.md: none reads a file or the environment.",
            )
        at = piece.end()


def with_ids(text: str, ids: Mapping[str, str]) -> str:
    """The same with ids of a load balancer in their places, in which HAProxy reads nothing.

    Args:
        ids: of `project_id` and `lb_id`.
    """
    return _PLACE.sub(lambda match: ids[match[1]].replace("%", "%%"), text)


def _refusal(happened: str, remedy: str) -> UnsupportedOption:
    return UnsupportedOption("use the flavor key 'log_format'", happened, remedy)
