# SPDX-License-Identifier: Apache-2.0
"""Errors of the cloud's APIs.

Invariant: the reason is the service's own message, and its length is limited. No error contains a token or a secret.
`final` means that a retry is not expected to help before the user or an operator changes something.
"""

from __future__ import annotations

from collections.abc import Mapping

from amphora_driver.errors import BackendError, ConfigurationError
from amphora_driver.openstack.errors import ApiError
from amphora_driver.openstack.pages import is_refused_marker
from amphora_driver.untrusted_text import printable

_MOST = 500
# Octavia's refusals contain these words while another change is in progress: "immutable" for an object, "Invalid state
# PENDING_UPDATE" for its load balancer.
_PENDING = ("immutable", "invalid state pending_")


class CloudError(BackendError):
    """A service refused a request, or did not answer."""


class CredentialRefused(CloudError):
    """Keystone does not accept the application credential, or it lacks a right."""


class Missing(CloudError):
    """An object of the user does not exist."""


class ListChanged(CloudError):
    """The last object of a page was deleted, so the service cannot continue the list after it."""


class Busy(CloudError):
    """The load balancer accepts no change now, because another one is in progress.

    Attributes:
        refused: servers whose step failed for good before, with the reasons.
    """

    def __init__(
        self, wanted: str, happened: str, remedy: str = "", *, refused: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(wanted, happened, remedy)
        self.refused: dict[str, str] = dict(refused or {})


def translate(error: ApiError, wanted: str) -> CloudError:
    """Return the error for a refusal of a service.

    Args:
        error: the refusal.
        wanted: the attempted operation, as an infinitive.
    """
    reason = printable(f"{error.message} ({error.request})", _MOST)
    match error.status:
        case 400 if is_refused_marker(error):
            return ListChanged(wanted, reason)
        case 401:
            remedy = "Give the group a new application credential."
            return CredentialRefused(wanted, reason, remedy, final=True)
        case 403 if "quota" in error.message.lower():
            return CloudError(wanted, f"a quota is used up: {reason}", "Raise the quota of the project.", final=True)
        case 403:
            remedy = "Give the application credential the roles member and reader, and those of Octavia's policy."
            return CredentialRefused(wanted, f"the application credential lacks a right: {reason}", remedy, final=True)
        case 404:
            return Missing(wanted, reason, final=True)
        case 409 if any(text in error.message.lower() for text in _PENDING):
            return Busy(wanted, reason)
        case 429:
            return CloudError(wanted, f"the service limits the rate of requests: {reason}")
        case status if 400 <= status < 500 or status == 501:
            # Octavia answers 501 if the provider does not support an option, so a repetition would not help.
            return CloudError(wanted, reason, final=True)
        case status:
            return CloudError(wanted, f"status {status}: {reason}")


def no_answer(error: Exception, wanted: str) -> CloudError | ConfigurationError:
    """Return the error for a service that did not answer, or for a failed authentication."""
    from keystoneauth1 import exceptions  # noqa: PLC0415 - a slow import, which the API of webhooks does not need

    reason = printable(f"{type(error).__name__}: {error}", _MOST)
    if isinstance(error, exceptions.Unauthorized | exceptions.NotFound) and not isinstance(
        error, exceptions.EndpointNotFound
    ):
        # Keystone answers 401 for a wrong secret and 404 for a deleted application credential. In both cases, the group
        # needs a new application credential.
        remedy = "Give the group a new application credential."
        return CredentialRefused(wanted, reason, remedy, final=True)
    if isinstance(error, exceptions.MissingRequiredOptions | exceptions.EndpointNotFound):
        return ConfigurationError(wanted, reason, "Check [amp_cluster_cloud].")
    return CloudError(wanted, reason)
