# SPDX-License-Identifier: Apache-2.0
"""PUT and GET /v2/bundle.

Invariant: the agent answers a PUT after the amphora serves the bundle, or after the rollback.
"""

from __future__ import annotations

from flask import Blueprint, request
from flask.typing import ResponseReturnValue

from amphora_agent.apply.applier import Applier


def blueprint(applier: Applier) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("bundle", __name__)

    @routes.put("/v2/bundle")
    def put_bundle() -> ResponseReturnValue:
        return applier.apply_body(request.get_data()).document()

    @routes.get("/v2/bundle")
    def get_bundle() -> ResponseReturnValue:
        confirmed, lost = applier.confirmed, applier.lost
        return {
            "generation": applier.generation,
            "applied_at": confirmed.applied_at if confirmed is not None else None,
            "digest": confirmed.digest if confirmed is not None else None,
            "lost_generation": lost.bundle.generation if lost is not None else None,
        }

    return routes
