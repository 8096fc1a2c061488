# SPDX-License-Identifier: Apache-2.0
"""The exception tree.

AmphoraDriverError              every error of ours; carries what was wanted, what happened, what to do
├── ConfigurationError          an operator's option is missing or contradicts another
├── RequestError                a user asked for something that cannot be had
│   ├── UnsupportedOption       an option, or a value of it, that this provider does not serve
│   └── Conflict                it collides with something that exists
├── ModelError                  a recorded load balancer cannot be expressed (names the object)
│   └── QuotingError            a value HAProxy has no way to write
├── StoreError                  the database said no
│   ├── UnknownObject           nothing is recorded under this id
│   ├── SchemaMismatch          the database's schema is not the one this version works with
│   └── LeaseLost               another process owns the load balancer now; stop without a trace
├── NetworkError                an address, port or subnet could not be had
├── ComputeError                an amphora could not be booted, found or removed
├── CertificateError            a certificate could not be issued or read
├── DeadlinePassed              an operation had its time
├── Deadly                      processes that worked on it ended, one after the other
├── Superseded                  something that goes first was asked for; this gives way to it
├── HeartbeatRefused            a datagram is not a heartbeat of the amphora it names
└── AgentError                  an amphora's agent did not do as asked
    ├── AgentUnreachable        no answer in time: try again later
    ├── AgentRefused            it answered no, with a reason (a bad configuration, for example)
    └── AgentUntrusted          it is not who it should be
"""

from __future__ import annotations


class AmphoraDriverError(Exception):
    """Base of all errors.

    Args:
        wanted: what was being attempted, as an infinitive ("boot amphora 1234").
        happened: what went wrong, in the words of whoever knows best.
        remedy: what the reader can do; may be empty where nothing but waiting helps.

    Attributes:
        final: another attempt is not expected to end otherwise, so that the user hears of it at once.
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
    """An operator's option is missing or contradicts another."""

    final = True


class RequestError(AmphoraDriverError):
    """A user asked for something that cannot be had."""

    final = True


class UnsupportedOption(RequestError):
    """An option, or a value of it, that this provider does not serve."""


class Conflict(RequestError):
    """The request collides with something that exists."""


class ModelError(AmphoraDriverError):
    """A recorded load balancer cannot be expressed.

    Args:
        object_id: the object at fault; everything else of the load balancer is well.
    """

    final = True

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, object_id: str | None = None) -> None:
        super().__init__(wanted, happened, remedy)
        self.object_id = object_id


class QuotingError(ModelError):
    """A value HAProxy has no way to write."""


class StoreError(AmphoraDriverError):
    """The database said no."""


class UnknownObject(StoreError):
    """Nothing is recorded under this id."""


class ContentRefused(StoreError):
    """The database answered, and refused the values of a transaction. A repetition has the same result."""


class SchemaMismatch(StoreError):
    """The database's schema is not the one this version works with."""


class LeaseLost(StoreError):
    """Another process owns the load balancer now."""


class NetworkError(AmphoraDriverError):
    """An address, port or subnet could not be had.

    Args:
        final: nothing but a change by somebody helps: a quota, for example.
    """

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, final: bool = False) -> None:
        super().__init__(wanted, happened, remedy)
        self.final = final


class ComputeError(AmphoraDriverError):
    """An amphora could not be booted, found or removed.

    Args:
        final: nothing but a change by somebody helps: a quota, or a flavor that does not exist, for example.
    """

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, final: bool = False) -> None:
        super().__init__(wanted, happened, remedy)
        self.final = final


class CertificateError(AmphoraDriverError):
    """A certificate could not be issued or read."""


class DeadlinePassed(AmphoraDriverError):
    """An operation had its time."""


class Superseded(AmphoraDriverError):
    """Something that goes first was asked for meanwhile, or this process ends: the work is left to be taken up anew."""


class HeartbeatRefused(AmphoraDriverError):
    """A datagram is not a heartbeat of the amphora it names.

    Args:
        reason: one word, by which refusals are counted.
    """

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, reason: str = "") -> None:
        super().__init__(wanted, happened, remedy)
        self.reason = reason


class Deadly(AmphoraDriverError):
    """Processes that worked on a load balancer ended, one after the other, before anything had come of it."""

    final = True


class AgentError(AmphoraDriverError):
    """An amphora's agent did not do as asked."""


class AgentUnreachable(AgentError):
    """No answer in time."""


class AgentRefused(AgentError):
    """The agent answered no, with a reason.

    Args:
        object_id: the listener, pool or member its reason points at, where it could tell.
        status: the HTTP status of its answer; 0 where that is not known.
        generation: the one it serves, where it said so.
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
        # One whose machine failed (5xx) may do better next time; one that understood and refused will not.
        self.final = 400 <= status < 500


class AgentUntrusted(AgentError):
    """The answering side could not prove to be the amphora it should be."""
