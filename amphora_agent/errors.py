# SPDX-License-Identifier: Apache-2.0
"""The agent's exception tree.

AgentError                      what was wanted, what happened, what to do; the HTTP status of the answer
├── MalformedBundle             400: the body is not a bundle
├── BundleRefused               409: stale, or meant for another amphora
├── RequestRefused              400, 403, 404, 409: Octavia's API has no such request here, or not now
├── MalformedCertificate        400: the body is no request for another certificate
├── CertificateRefused          422: the certificate is not this amphora's, or nobody could call any more
├── NotElected                  409: the VIPs are not here, or nobody can take them
├── ConfigurationRefused        422: HAProxy, or we on its behalf, refuse the text; names the object
└── MachineError                500: this machine could not do it; the last good configuration serves
    ├── SettingsError           agent.conf, or a file beside it, is missing or wrong
    ├── ServiceError            a daemon could not be started, stopped or signalled
    ├── HaproxyError            HAProxy does not answer, or not what means success
    ├── KeepalivedError         keepalived refuses its configuration
    ├── InterfaceError          an interface is missing, or the kernel refused an address or a route
    ├── FirewallError           who may connect cannot be restricted
    └── VirtualServersError     UDP or SCTP cannot be forwarded, or the checker does not answer

Invariant: nothing else than these leaves the agent's own code as an answer to the controller.
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of all errors.

    Args:
        wanted: what was being attempted, as an infinitive ("add member 1234").
        happened: what went wrong, in the words of whoever knows best.
        remedy: what the reader can do; may be empty.
        object_id: the listener, pool or member it is about, where that is known.
    """

    status = 500

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, object_id: str | None = None) -> None:
        super().__init__(wanted, happened, remedy)
        self.wanted = wanted
        self.happened = happened
        self.remedy = remedy
        self.object_id = object_id

    def __str__(self) -> str:
        tail = f" {self.remedy}" if self.remedy else ""
        return f"Could not {self.wanted}: {self.happened}.{tail}"

    def document(self) -> dict[str, object]:
        """What the controller is told."""
        return {"error": {"wanted": self.wanted, "happened": self.happened, "remedy": self.remedy}}


class MalformedBundle(AgentError):
    """The body is not a bundle."""

    status = 400


class MalformedCertificate(AgentError):
    """The body is no request for another certificate."""

    status = 400


class CertificateRefused(AgentError):
    """The certificate is not this amphora's, or not valid, or with it nobody could call any more."""

    status = 422


class BundleRefused(AgentError):
    """The bundle is older than what is served, or belongs to another amphora.

    Args:
        generation: the one this amphora has confirmed.
    """

    status = 409

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, generation: int | None) -> None:
        super().__init__(wanted, happened, remedy)
        self.generation = generation

    def document(self) -> dict[str, object]:
        return {**super().document(), "generation": self.generation}


class RequestRefused(AgentError):
    """A request of Octavia's amphora API cannot be served as it is (docs/reference/amphora-api-v1.md).

    Args:
        message: what Octavia's API says in this case.
        details: why.
        status: of the answer.
    """

    def __init__(self, message: str, details: str, status: int = 400) -> None:
        super().__init__("serve Octavia's request", f"{message}: {details}")
        self.message = message
        self.details = details
        self.status = status

    def document(self) -> dict[str, object]:
        return {"message": self.message, "details": self.details}


class NotElected(AgentError):
    """The VIPs are not here, or there is nobody to take them."""

    status = 409


class ConfigurationRefused(AgentError):
    """The load balancer's configuration text cannot be loaded."""

    status = 422

    def document(self) -> dict[str, object]:
        return {**super().document(), "object_id": self.object_id}


class MachineError(AgentError):
    """This machine could not do it."""


class SettingsError(MachineError):
    """agent.conf, or a file beside it, is missing or wrong."""


class ServiceError(MachineError):
    """A daemon could not be started, stopped or signalled."""


class HaproxyError(MachineError):
    """HAProxy does not answer, or not what is known to mean success."""


class KeepalivedError(MachineError):
    """keepalived refuses its configuration."""


class InterfaceError(MachineError):
    """An interface is missing, or the kernel refused an address or a route."""


class FirewallError(MachineError):
    """Who may connect cannot be restricted: the kernel or the machine lacks nftables, or refused the rules."""


class VirtualServersError(MachineError):
    """UDP or SCTP listeners cannot be served: the kernel refused, or the checker does not answer."""
