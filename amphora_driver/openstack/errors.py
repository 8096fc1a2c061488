# SPDX-License-Identifier: Apache-2.0
"""Errors of OpenStack's services, as errors of this provider.

Invariant: the reason is the service's own message. An exceeded quota and a missing permission are final,
because a retry does not help. Failures of the service and of the connection are not final. The request of a user can
cause a refusal by Neutron, but not a refusal by Nova or Glance, which therefore becomes a `ComputeError`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from amphora_driver.errors import (
    AmphoraDriverError,
    ComputeError,
    ConfigurationError,
    Conflict,
    NetworkError,
    RequestError,
    UnsupportedOption,
)

_MOST = 500
_HTML_HEAD, _HTML_TAG = re.compile(r"<head\b.*?</head>", re.DOTALL | re.IGNORECASE), re.compile(r"<[^>]*>")
_QUOTA_REMEDY = "Raise the quota of the project."


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
        name, found = next(iter(answer.items())) if isinstance(answer, dict) else ("", None)
    except (ValueError, StopIteration):
        name, found = "", None
    if isinstance(found, dict):
        # Nova sends the name of an error as the key of the answer, for example {"forbidden": {"code": 403, "message":
        # ...}}.
        kind = str(found.get("type") or found.get("title") or (name if "code" in found else ""))
        message = str(found.get("message") or "")
    else:
        kind, message = "", found if isinstance(found, str) else _strip_html(body)
    return kind, " ".join(message.split()).rstrip(".")[:_MOST]


def _strip_html(body: str) -> str:
    """Return the text of a page, which Glance sends for an error; other texts stay."""
    if not body.lstrip().startswith("<"):
        return body
    return html.unescape(_HTML_TAG.sub(" ", _HTML_HEAD.sub("", body))).strip() or body


def translate(error: ApiError, wanted: str) -> AmphoraDriverError:
    """Return the error for the caller of a network backend.

    Args:
        error: the refusal.
        wanted: the attempted operation, as an infinitive.
    """
    reason = f"{error.message} ({error.request})"
    match error.status:
        case 401:
            return _rejected_account(wanted, reason)
        case 403:
            return NetworkError(wanted, *_missing_right(reason, "docs/reference/neutron.md"), final=True)
        case 409 if "overquota" in error.kind.lower():
            return NetworkError(wanted, f"a quota is used up: {reason}", _QUOTA_REMEDY, final=True)
        case 409:
            return Conflict(wanted, reason)
        case 400 | 404:
            return UnsupportedOption(wanted, reason)
        case _:
            return NetworkError(wanted, f"status {error.status}: {reason}")


def translate_compute(error: ApiError, wanted: str) -> AmphoraDriverError:
    """Return the error for the caller of a compute backend; see `translate`."""
    reason = f"{error.message} ({error.request})"
    match error.status:
        case 401:
            return _rejected_account(wanted, reason)
        case 403 if "quota" in error.message.lower():
            return ComputeError(wanted, f"a quota is used up: {reason}", _QUOTA_REMEDY, final=True)
        case 403:
            return ComputeError(wanted, *_missing_right(reason, "docs/reference/nova.md"), final=True)
        case 400 | 406:
            return ComputeError(wanted, reason, final=True)
        case _:
            return ComputeError(wanted, f"status {error.status}: {reason}")


def _rejected_account(wanted: str, reason: str) -> ConfigurationError:
    return ConfigurationError(wanted, reason, "Check the service account in [amp_openstack].")


def _missing_right(reason: str, page: str) -> tuple[str, str]:
    return f"the service account lacks a right: {reason}", f"Give the service account the roles in {page}."


@contextmanager
def translated(wanted: str) -> Iterator[None]:
    """Translate the refusals of a service within the block, for the caller of a network backend."""
    try:
        yield
    except ApiError as error:
        raise translate(error, wanted) from error


@contextmanager
def translated_for_compute(wanted: str) -> Iterator[None]:
    """Translate refusals within the block, also those of the network backend, to `ComputeError`."""
    try:
        yield
    except ApiError as error:
        raise translate_compute(error, wanted) from error
    except (NetworkError, RequestError) as error:
        raise ComputeError(wanted, f"{error.wanted}: {error.happened}", error.remedy, final=error.final) from error


def transport_error(error: Exception, wanted: str) -> AmphoraDriverError:
    """Return the error for a service that did not answer."""
    from keystoneauth1 import exceptions  # noqa: PLC0415 - a slow import, and octavia-api may never connect

    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST]
    if isinstance(error, exceptions.ConnectTimeout):
        return TimedOut(wanted, reason)
    if isinstance(error, exceptions.Unauthorized | exceptions.Forbidden):
        # Octavia shows the text of a `NetworkError` to users, but only operators can correct the service account. So
        # the driver raises a `ConfigurationError`.
        return ConfigurationError(wanted, reason, "Check the service account in [amp_openstack].")
    if isinstance(error, exceptions.MissingRequiredOptions | exceptions.NoMatchingPlugin):
        return ConfigurationError(wanted, reason, "Correct the options of keystoneauth in [amp_openstack].")
    return NetworkError(wanted, reason)


class TimedOut(NetworkError):
    """A service did not answer in time. It may have executed the request."""
