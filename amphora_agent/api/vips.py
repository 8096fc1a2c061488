# SPDX-License-Identifier: Apache-2.0
"""POST /v2/vips/announce.

Invariant: the agent announces only VIPs of its confirmed configuration, and never while it changes them.
"""

from __future__ import annotations

from flask import Blueprint
from flask.typing import ResponseReturnValue

from amphora_agent.apply.applier import Applier
from amphora_agent.bundle import Bundle
from amphora_agent.network import interfaces
from amphora_agent.network.namespace import Namespace


def blueprint(applier: Applier, inner: Namespace) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("vips", __name__)

    def announce(bundle: Bundle) -> list[str]:
        vips = interfaces.own_vips(interfaces.wanted_network(bundle))
        interfaces.announce_vips(inner, vips)
        return [str(one.vip) for one in vips]

    @routes.post("/v2/vips/announce")
    def post_announce() -> ResponseReturnValue:
        return {"announced": applier.run_on_confirmed(announce)}

    return routes
