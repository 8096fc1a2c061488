# SPDX-License-Identifier: Apache-2.0
"""GET /v2/vrrp, POST /v2/vrrp/expect, POST /v2/vrrp/release.

Invariant: the agent reports a release as successful only after the VIPs have moved.
"""

from __future__ import annotations

import json

from flask import Blueprint, request
from flask.typing import ResponseReturnValue

from amphora_agent.errors import MalformedBundle
from amphora_agent.keepalived.vip_handover import VipHandover

LONGEST_SECONDS = 86_400


def blueprint(handover: VipHandover) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("vrrp", __name__)

    @routes.get("/v2/vrrp")
    def get_vrrp() -> ResponseReturnValue:
        return handover.describe()

    @routes.post("/v2/vrrp/expect")
    def post_expect() -> ResponseReturnValue:
        handover.expect_vips(_seconds("seconds", None))
        return handover.describe()

    @routes.post("/v2/vrrp/release")
    def post_release() -> ResponseReturnValue:
        handover.release_vips(_seconds("drain", 0.0))
        return handover.describe()

    return routes


def _seconds(name: str, default: float | None) -> float:
    """Return the value of the only key of a request. Raises MalformedBundle for another request."""
    wanted = f"read {name}"
    try:
        document = json.loads(request.get_data() or b"{}")
    except ValueError as error:
        raise MalformedBundle(wanted, str(error), "See docs/reference/agent-api.md for the format.") from error
    value = document.get(name, default) if isinstance(document, dict) and document.keys() <= {name} else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST_SECONDS:
        raise MalformedBundle(wanted, f"the value must be 0 to {LONGEST_SECONDS} seconds, and the only key")
    return float(value)
