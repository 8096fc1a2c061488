# SPDX-License-Identifier: Apache-2.0
"""GET /v2/vrrp, POST /v2/vrrp/expect, POST /v2/vrrp/release.

Invariant: the agent reports a release as successful only after the VIPs have moved.
"""

from __future__ import annotations

import json
from typing import Any

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
        handover.expect_vips(_read_seconds(_read_body("seconds"), "seconds", None))
        return handover.describe()

    @routes.post("/v2/vrrp/release")
    def post_release() -> ResponseReturnValue:
        body = _read_body("drain", "direct_answers")
        direct_answers = body.get("direct_answers", True)
        if not isinstance(direct_answers, bool):
            raise MalformedBundle("read direct_answers", "the value must be true or false")
        handover.release_vips(_read_seconds(body, "drain", 0.0), direct_answers=direct_answers)
        return handover.describe()

    return routes


def _read_body(*keys: str) -> dict[str, Any]:
    """Return the request as a dictionary with no other keys. Raises MalformedBundle for another request."""
    wanted = f"read {' and '.join(keys)}"
    try:
        document = json.loads(request.get_data() or b"{}")
    except ValueError as error:
        raise MalformedBundle(wanted, str(error), "See docs/reference/agent-api.md for the format.") from error
    if not isinstance(document, dict) or not document.keys() <= set(keys):
        raise MalformedBundle(wanted, "the body must be an object without other keys")
    return document


def _read_seconds(document: dict[str, Any], name: str, default: float | None) -> float:
    value = document.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST_SECONDS:
        raise MalformedBundle(f"read {name}", f"the value must be 0 to {LONGEST_SECONDS} seconds")
    return float(value)
