# SPDX-License-Identifier: Apache-2.0
"""The agent's exceptions: the action, the cause, the remedy, and the HTTP status of the answer.

Invariant: the agent's own code answers the controller with these errors only.
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of all errors.

    ``wanted`` is the attempted action as an infinitive ("add member 1234"). ``happened`` is the cause in the words of
    the failed component, and ``remedy`` the next action of the reader. ``object_id`` is the listener, pool or member
    with the error.
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
        return {"error": {"wanted": self.wanted, "happened": self.happened, "remedy": self.remedy}}


class MalformedBundle(AgentError):
    """The body is not a bundle."""

    status = 400


class MalformedCertificate(AgentError):
    """The body is not a request for a new certificate."""

    status = 400


class MalformedSettings(AgentError):
    """The body is not a document with settings."""

    status = 400


class SettingsRefused(AgentError):
    """Another control plane sets the heartbeats of this amphora."""

    status = 409


class CertificateRefused(AgentError):
    """The certificate belongs to another amphora, is not valid, or would lock out the controllers."""

    status = 422


class BundleRefused(AgentError):
    """The bundle is older than the confirmed `generation`, or belongs to another amphora."""

    status = 409

    def __init__(self, wanted: str, happened: str, remedy: str = "", *, generation: int | None) -> None:
        super().__init__(wanted, happened, remedy)
        self.generation = generation

    def document(self) -> dict[str, object]:
        return {**super().document(), "generation": self.generation}


class RequestRefused(AgentError):
    """The agent cannot serve a request of Octavia's amphora API.

    The API defines the `message` for each case.
    """

    def __init__(self, message: str, details: str, status: int = 400) -> None:
        super().__init__("serve Octavia's request", f"{message}: {details}")
        self.message = message
        self.details = details
        self.status = status

    def document(self) -> dict[str, object]:
        return {"message": self.message, "details": self.details}


class NotElected(AgentError):
    """This amphora does not hold the VIPs, or no partner can take them."""

    status = 409


class ConfigurationRefused(AgentError):
    """The load balancer's configuration text cannot be loaded."""

    status = 422

    def document(self) -> dict[str, object]:
        return {**super().document(), "object_id": self.object_id}


class MachineError(AgentError):
    """The machine could not carry out the action; the last good configuration serves."""


class SettingsError(MachineError):
    """agent.conf or a file beside it is missing or invalid."""


class ServiceError(MachineError):
    """A daemon could not be started, stopped or signalled."""


class HaproxyError(MachineError):
    """HAProxy does not answer, or its answer does not mean success."""


class KeepalivedError(MachineError):
    """keepalived refuses its configuration."""


class InterfaceError(MachineError):
    """An interface is missing, or the kernel refused an address or a route."""


class FirewallError(MachineError):
    """The rules that restrict clients cannot be set: nftables is missing or refused them."""


class VirtualServersError(MachineError):
    """UDP or SCTP cannot be forwarded: the kernel refused, or the L4 daemon does not answer."""
