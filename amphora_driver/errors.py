# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the control plane.

AmphoraDriverError              base; has the attempted operation, the failure and the remedy
├── ConfigurationError          an option of the operator is missing or contradicts another one
├── RequestError                a user's request cannot be served
│   ├── UnsupportedOption       this provider does not support the option or its value
│   └── Conflict                the request conflicts with an existing object
├── ModelError                  a recorded load balancer cannot be rendered (names the object)
│   └── QuotingError            HAProxy has no quoting for a value
├── StoreError                  the database refused or did not answer
│   ├── UnknownObject           no object with this id is recorded
│   ├── SchemaMismatch          the database schema does not fit this version
│   └── LeaseLost               another process owns the load balancer; stop without further writes
├── NetworkError                an address, port or subnet is not available
├── ComputeError                an amphora could not be booted, found or removed
├── CertificateError            a certificate could not be issued or read
├── DeadlinePassed              an operation has exceeded its deadline
├── CrashLoop                   several processes ended while they worked on a load balancer
├── Superseded                  a request of higher priority preempts the job
├── HeartbeatRefused            a datagram is not a heartbeat of the amphora it names
└── AgentError                  an agent did not execute a call
    ├── AgentUnreachable        no response in time: try again later
    ├── AgentRefused            the agent refused the call with a reason (an invalid configuration, for example)
    └── AgentUntrusted          the peer is not the intended amphora
"""

from __future__ import annotations


class AmphoraDriverError(Exception):
    """Base of all errors.

    Args:
        wanted: the attempted operation, as an infinitive ("boot amphora 1234").
        happened: the failure, as the failing component describes it.
        remedy: what the reader can do; empty if a retry may help.

    Attributes:
        final: a retry is not expected to succeed, so the user is informed at once.
    """

    final = False

    def __init__(self, wanted: str, happened: str, remedy: str = "") -> None:
        super().__init__(wanted, happened, remedy)
        self.wanted = wanted
        self.happened = happened
        self.remedy = remedy

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
    """A recorded load balancer cannot be rendered.

    Args:
        object_id: the faulty object; the other objects of the load balancer are valid.
    """

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


class NetworkError(AmphoraDriverError):
    """An address, port or subnet is not available.

    Args:
        final: a retry cannot succeed without a change: a quota, for example.
    """

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, final: bool = False) -> None:
        super().__init__(wanted, happened, remedy)
        self.final = final


class ComputeError(AmphoraDriverError):
    """An amphora could not be booted, found or removed.

    Args:
        final: a retry cannot succeed without a change: a quota or a missing flavor, for example.
    """

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, final: bool = False) -> None:
        super().__init__(wanted, happened, remedy)
        self.final = final


class CertificateError(AmphoraDriverError):
    """A certificate could not be issued or read."""


class DeadlinePassed(AmphoraDriverError):
    """An operation has exceeded its deadline."""


class Superseded(AmphoraDriverError):
    """A request of higher priority or the end of this process preempts a job, which runs again later."""


class HeartbeatRefused(AmphoraDriverError):
    """A datagram is not a heartbeat of the amphora it names.

    Args:
        reason: one word for the metric of refusals.
    """

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
        self.object_id = object_id
        self.status = status
        self.generation = generation
        # A retry may succeed after a server error (5xx), but not after a refusal (4xx).
        self.final = 400 <= status < 500


class AgentUntrusted(AgentError):
    """The peer has not proven to be the intended amphora."""
