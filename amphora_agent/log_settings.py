# SPDX-License-Identifier: Apache-2.0
"""The targets of log lines, as a controller sends them (docs/reference/agent-api.md).

Invariant: a target is an IP address, because an amphora has no resolver. A valid target contains no user name and no
control character. Controller, agent and log forwarder use this module; it imports the standard library only.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import asdict, dataclass, field
from typing import Any

# Loopback address and UDP port to which HAProxy and the L4 daemon send log lines.
LOG_ADDRESS, LOG_PORT = "127.0.0.1", 9102
SCHEMES = ("udp", "tcp", "tls", "https")
ENCRYPTED = ("tls", "https")
MOST_TARGETS = 4
"""Maximum number of targets for administrative logs, and for tenant flow logs."""
DEFAULT_QUEUE = 4 << 20
SMALLEST_QUEUE, LARGEST_QUEUE = 64 << 10, 64 << 20
_MOST_AUTHORITIES = 48 << 10
LARGEST_CERTIFICATE = 16 << 10
"""Maximum number of characters of a client certificate with its chain and its key."""
_LAST_PORT = 65535
_URL = re.compile(r"(?P<scheme>[a-z]+)://(?P<host>\[[0-9A-Fa-f:.]+\]|[0-9.]+):(?P<port>[0-9]{1,5})(?P<path>/.*)?")
_PATH = re.compile(r"/[A-Za-z0-9._~/%?&=+:@,;-]{0,1023}")
_HEADER = re.compile(r"[!-~](?:[ -~]{0,4094}[!-~])?")
_ID = re.compile(r"[ -~]{0,255}")


@dataclass(frozen=True)
class Endpoint:
    """The parts of a target's URL. ``path`` is empty if the scheme is not https."""

    scheme: str
    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True)
class LogTarget:
    """One target. All values except the URL are secret.

    ``authorization`` is the value of the HTTP header Authorization. ``client_certificate`` has the certificate that the
    amphora shows, its chain and its private key in PEM.
    """

    url: str
    authorization: str = field(default="", repr=False)
    client_certificate: str = field(default="", repr=False)

    @property
    def has_secrets(self) -> bool:
        return bool(self.authorization or self.client_certificate)

    def to_document(self, hidden: str | None) -> dict[str, str]:
        """Return JSON values; with ``hidden``, this word replaces each secret.

        Without a client certificate there is no key for it, and the digest is that of earlier versions.
        """
        shown = {"url": self.url, "authorization": self.authorization, "client_certificate": self.client_certificate}
        if hidden is not None:
            secrets = shown.keys() - {"url"}
            shown |= {name: hidden for name in secrets if shown[name]}
        if not shown["client_certificate"]:
            del shown["client_certificate"]
        return shown


@dataclass(frozen=True)
class LogSettings:
    """The targets of an amphora, and the ids that its lines have.

    ``authorities`` has the CA certificates of the targets in PEM. ``queue_bytes`` limits the waiting lines of each
    target.
    """

    admin: tuple[LogTarget, ...] = ()
    tenant: tuple[LogTarget, ...] = ()
    authorities: str = ""
    queue_bytes: int = DEFAULT_QUEUE
    project_id: str = ""
    load_balancer_id: str = ""

    def __bool__(self) -> bool:
        """Whether any target exists."""
        return bool(self.admin or self.tenant)

    @property
    def has_secrets(self) -> bool:
        return any(one.has_secrets for one in (*self.admin, *self.tenant))

    def to_document(self, *, hidden: str | None = None) -> dict[str, Any]:
        """Return JSON values; with ``hidden``, this word replaces each secret."""
        targets = {"admin": self.admin, "tenant": self.tenant}
        shown = {kind: [one.to_document(hidden) for one in found] for kind, found in targets.items()}
        return {**asdict(self), **shown}


NO_LOGS = LogSettings()


def parse_endpoint(url: str) -> Endpoint:
    """Parse the URL of a target; raises ValueError with the reason."""
    found = _URL.fullmatch(url)
    if found is None or found["scheme"] not in SCHEMES:
        raise ValueError(f"{url[:80]!r} is not udp://, tcp://, tls:// or https:// with an IP address and a port")
    port, path = int(found["port"]), found["path"] or ""
    if not 0 < port <= _LAST_PORT:
        raise ValueError(f"{url[:80]!r} has no port from 1 to {_LAST_PORT}")
    host = str(ipaddress.ip_address(found["host"].strip("[]")))
    if found["scheme"] != "https":
        if path:
            raise ValueError(f"{url[:80]!r} has a path, which only https:// has")
        return Endpoint(found["scheme"], host, port)
    if path and not _PATH.fullmatch(path):
        raise ValueError(f"{url[:80]!r} has a path with characters that need an escape")
    return Endpoint("https", host, port, path or "/")


def check_authorization(value: str) -> str:
    """Return the value of an HTTP header; raises ValueError, without the value."""
    if value and not _HEADER.fullmatch(value):
        raise ValueError("the authorization is not one line of printable ASCII characters")
    return value


def check_client_certificate(value: str) -> str:
    """Return a client certificate with its key; raises ValueError, without the value."""
    if value and not (value.isascii() and len(value) <= LARGEST_CERTIFICATE and "-----BEGIN" in value):
        raise ValueError(f"the client certificate is not PEM of at most {LARGEST_CERTIFICATE} characters")
    return value


def parse(document: Any) -> LogSettings:
    """Read the settings from JSON values; raises ValueError, which names the invalid value."""
    names = ("admin", "tenant", "authorities", "queue_bytes", "project_id", "load_balancer_id")
    if not isinstance(document, dict) or document.keys() != set(names):
        raise ValueError(f"logs has other keys than {', '.join(names)}")
    authorities, queue = document["authorities"], document["queue_bytes"]
    if not isinstance(authorities, str) or len(authorities) > _MOST_AUTHORITIES:
        raise ValueError(f"logs.authorities is not a text of at most {_MOST_AUTHORITIES} characters")
    if isinstance(queue, bool) or not isinstance(queue, int) or not SMALLEST_QUEUE <= queue <= LARGEST_QUEUE:
        raise ValueError(f"logs.queue_bytes is not a number from {SMALLEST_QUEUE} to {LARGEST_QUEUE}")
    for name in ("project_id", "load_balancer_id"):
        if not isinstance(document[name], str) or not _ID.fullmatch(document[name]):
            raise ValueError(f"logs.{name} is not an id")
    admin, tenant = (_targets(document[name], f"logs.{name}") for name in ("admin", "tenant"))
    if not authorities and any(parse_endpoint(one.url).scheme in ENCRYPTED for one in (*admin, *tenant)):
        raise ValueError("logs.authorities is empty, but a target needs a CA certificate")
    return LogSettings(admin, tenant, authorities, queue, document["project_id"], document["load_balancer_id"])


def _targets(value: Any, name: str) -> tuple[LogTarget, ...]:
    if not isinstance(value, list) or len(value) > MOST_TARGETS:
        raise ValueError(f"{name} is not a list of at most {MOST_TARGETS} targets")
    found = []
    for one in value:
        if not isinstance(one, dict) or one.keys() - {"client_certificate"} != {"url", "authorization"}:
            raise ValueError(f"{name} has a target with other keys than url, authorization, client_certificate")
        if not all(isinstance(part, str) for part in one.values()):
            raise ValueError(f"{name} has a target whose values are no texts")
        endpoint, authorization = parse_endpoint(one["url"]), check_authorization(one["authorization"])
        if authorization and endpoint.scheme != "https":
            raise ValueError(f"{name} has an authorization for {endpoint}, which is not https")
        certificate = check_client_certificate(one.get("client_certificate", ""))
        if certificate and endpoint.scheme not in ENCRYPTED:
            raise ValueError(f"{name} has a client certificate for {endpoint}, which is not tls or https")
        found.append(LogTarget(str(endpoint), authorization, certificate))
    if len({one.url for one in found}) != len(found):
        raise ValueError(f"{name} has a target twice")
    return tuple(found)
