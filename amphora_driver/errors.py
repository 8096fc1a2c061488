# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the control plane. A class with `final` means that a retry is not expected to succeed."""

from __future__ import annotations


class AmphoraDriverError(Exception):
    """Base of all errors.

    Args:
        wanted: the attempted operation, as an infinitive ("boot amphora 1234").
        happened: the failure, as the failing component describes it.
        remedy: what the reader can do; empty if a retry may help.
    """

    final = False

    def __init__(self, wanted: str, happened: str, remedy: str = "") -> None:
        super().__init__(wanted, happened, remedy)
        self.wanted, self.happened, self.remedy = wanted, happened, remedy

    def __str__(self) -> str:
        tail = f" {self.remedy}" if self.remedy else ""
        return f"Could not {self.wanted}: {self.happened}.{tail}"


class ConfigurationError(AmphoraDriverError):
    """An option of the operator is missing or contradicts another one."""

    final = True


class RequestError(AmphoraDriverError):
    """A user's request cannot be served."""

    final = True


class UnsupportedOption(RequestError):
    """This provider does not support the option or its value."""


class Conflict(RequestError):
    """The request conflicts with an existing object."""


class ModelError(AmphoraDriverError):
    """A recorded load balancer cannot be rendered; the objects other than `object_id` are valid."""

    final = True

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, object_id: str | None = None) -> None:
        super().__init__(wanted, happened, remedy)
        self.object_id = object_id


class QuotingError(ModelError):
    """HAProxy has no quoting for a value."""


class StoreError(AmphoraDriverError):
    """The database refused or did not answer."""


class UnknownObject(StoreError):
    """No object with this id is recorded."""


class ContentRefused(StoreError):
    """The database answered, and refused the values of a transaction. A repetition has the same result."""


class SchemaMismatch(StoreError):
    """The database schema does not fit this version."""


class LeaseLost(StoreError):
    """Another process owns the load balancer now."""


class BackendError(AmphoraDriverError):
    """A network or compute backend failed; `final` if a retry needs a change, of a quota for example."""

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, final: bool = False) -> None:
        super().__init__(wanted, happened, remedy)
        self.final = final


class NetworkError(BackendError):
    """An address, port or subnet is not available."""


class ComputeError(BackendError):
    """An amphora could not be booted, found or removed."""


class OctaviaError(AmphoraDriverError):
    """Octavia did not answer, or did not accept a status."""


class CertificateError(AmphoraDriverError):
    """A certificate could not be issued or read."""


class DeadlinePassed(AmphoraDriverError):
    """An operation has exceeded its deadline."""


class Superseded(AmphoraDriverError):
    """A request of higher priority or the end of this process preempts a job, which runs again later."""


class HeartbeatRefused(AmphoraDriverError):
    """A datagram is not a heartbeat of the amphora it names; `reason` is a word for the metric."""

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, reason: str = "") -> None:
        super().__init__(wanted, happened, remedy)
        self.reason = reason


class CrashLoop(AmphoraDriverError):
    """Several processes in a row ended while they worked on a load balancer, without progress."""

    final = True


class AgentError(AmphoraDriverError):
    """An agent did not execute a call."""


class AgentUnreachable(AgentError):
    """No response in time."""


class AgentRefused(AgentError):
    """The agent refused the call with a reason.

    Args:
        object_id: the listener, pool or member that the reason names; None if unknown.
        status: HTTP status of the response; 0 if unknown.
        generation: the served generation; None if unknown.
    """

    def __init__(
        self,
        wanted: str,
        happened: str,
        remedy: str = "",
        *,
        object_id: str | None = None,
        status: int = 0,
        generation: int | None = None,
    ) -> None:
        super().__init__(wanted, happened, remedy)
        self.object_id, self.status, self.generation = object_id, status, generation
        # A repeated request to the agent may succeed after a server error (5xx), but not after a refusal (4xx).
        self.final = 400 <= status < 500


class AgentUntrusted(AgentError):
    """The peer has not proven to be the intended amphora."""
