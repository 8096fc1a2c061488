# SPDX-License-Identifier: Apache-2.0
"""The message of a notification in the format 2.0 of oslo.messaging (driver `messagingv2`)."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

from amphora_driver.notifications.outbox import Notification

PRIORITY = "info"


def build_message(one: Notification, publisher_id: str | None = None) -> dict[str, str]:
    """Return the message; a repeated message has the same ids, so that a consumer can recognize it."""
    payload = json.loads(one.payload)
    content = {
        "message_id": one.message_id,
        "publisher_id": publisher_id,
        "event_type": f"octavia.loadbalancer.{one.event.value}.end",
        "priority": PRIORITY.upper(),
        "payload": payload,
        # oslo.messaging sends times in UTC without a time zone.
        "timestamp": f"{dt.datetime.fromtimestamp(one.ready_at, dt.timezone.utc):%Y-%m-%d %H:%M:%S.%f}",
        # Consumers of oslo.messaging recognize a repeated message by this id.
        "_unique_id": one.message_id.replace("-", ""),
        **{f"_context_{key}": value for key, value in _build_context(one, payload["project_id"]).items()},
    }
    return {"oslo.version": "2.0", "oslo.message": json.dumps(content)}


def _build_context(one: Notification, project_id: str) -> dict[str, Any]:
    """Return a request context with a project and without a user, in the form of oslo.context."""
    unset = ("user", "system_scope", "domain", "user_domain", "project_domain", "auth_token", "global_request_id")
    return {
        **dict.fromkeys((*unset, "resource_uuid")),
        "project": project_id,
        "project_id": project_id,
        "user_identity": f"- {project_id} - - -",
        "request_id": f"req-{one.message_id}",
        "roles": [],
        "is_admin": False,
        "is_admin_project": True,
        "read_only": False,
        "show_deleted": False,
    }
