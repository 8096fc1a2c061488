# SPDX-License-Identifier: Apache-2.0
"""Errors of OpenStack's services, as errors of this provider.

Invariant: the reason is the service's own message. A quota and a missing right are final, because a retry does not
help; failures of the service and of the connection are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from amphora_driver.errors import AmphoraDriverError, ConfigurationError, Conflict, NetworkError, UnsupportedOption

_MOST = 500


class ApiError(Exception):
    """A service refused a request.

    Attributes:
        request: method and path.
        status: the HTTP status.
        kind: the name of the error, as the service sends it; empty if unknown.
        message: the message of the service.
    """

    def __init__(self, request: str, status: int, kind: str, message: str) -> None:
        super().__init__(f"{request}: {status} {kind} {message}")
        self.request = request
        self.status = status
        self.kind = kind
        self.message = message

    @classmethod
    def of(cls, method: str, path: str, status: int, body: str) -> ApiError:
        """Return the error of an answer."""
        kind, message = read_message(body)
        return cls(f"{method} {path}", status, kind, message or f"HTTP status {status}")


def read_message(body: str) -> tuple[str, str]:
    """Return name and message of an error, from the body of an answer; the length is limited."""
    try:
        answer = json.loads(body)
        found = next(iter(answer.values())) if isinstance(answer, dict) else None
    except (ValueError, StopIteration):
        found = None
    if isinstance(found, dict):
        kind, message = str(found.get("type") or found.get("title") or ""), str(found.get("message") or "")
    else:
        kind, message = "", found if isinstance(found, str) else body
    return kind, " ".join(message.split()).rstrip(".")[:_MOST]


def translate(error: ApiError, wanted: str) -> AmphoraDriverError:
    """Return the error for the caller of a backend.

    Args:
        error: the refusal.
        wanted: the attempted operation, as an infinitive.
    """
    reason = f"{error.message} ({error.request})"
    match error.status:
        case 401:
            return ConfigurationError(wanted, reason, "Check the service account in [amp_openstack].")
        case 403:
            remedy = "Give the service account the roles in docs/reference/neutron.md."
            return NetworkError(wanted, f"the service account lacks a right: {reason}", remedy, final=True)
        case 409 if "overquota" in error.kind.lower():
            return NetworkError(wanted, f"a quota is used up: {reason}", "Raise the quota of the project.", final=True)
        case 409:
            return Conflict(wanted, reason)
        case 400 | 404:
            return UnsupportedOption(wanted, reason)
        case _:
            return NetworkError(wanted, f"status {error.status}: {reason}")


@contextmanager
def translated(wanted: str) -> Iterator[None]:
    """Translate the refusals of a service within the block."""
    try:
        yield
    except ApiError as error:
        raise translate(error, wanted) from error


def transport_error(error: Exception, wanted: str) -> AmphoraDriverError:
    """Return the error for a service that did not answer."""
    from keystoneauth1 import exceptions  # noqa: PLC0415 - a slow import, and octavia-api may never connect

    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST]
    if isinstance(error, exceptions.ConnectTimeout):
        return TimedOut(wanted, reason)
    if isinstance(error, exceptions.Unauthorized | exceptions.Forbidden):
        # A rejected service account must not become a `NetworkError`, because Octavia shows the text of a final
        # `NetworkError` to the user.
        return ConfigurationError(wanted, reason, "Check the service account in [amp_openstack].")
    if isinstance(error, exceptions.MissingRequiredOptions | exceptions.NoMatchingPlugin):
        return ConfigurationError(wanted, reason, "Correct the options of keystoneauth in [amp_openstack].")
    return NetworkError(wanted, reason)


class TimedOut(NetworkError):
    """A service did not answer in time. It may have executed the request."""
