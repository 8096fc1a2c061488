# SPDX-License-Identifier: Apache-2.0
"""Settings: agent.conf and the key beside it.

Invariant: either every setting is there and of its type, or the agent does not start and says which one is
not.
"""

from __future__ import annotations

import configparser
import ipaddress
import logging
import uuid
from dataclasses import dataclass, field

from amphora_agent.errors import SettingsError
from amphora_agent.paths import Paths

HEARTBEAT_KEY_BYTES = 32
AUDIT_SECONDS = 30.0
_FORMATS = ("native", "octavia")
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING}


@dataclass(frozen=True)
class Target:
    """Where heartbeats go."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Settings:
    """Everything the compute backend decided at boot.

    ``heartbeat_format`` is "native" or "octavia" (docs/reference/amphora-api-v1.md); in the latter the key is any text.
    ``pair`` tells that this amphora is one of two in Octavia's topology. ``audit_interval`` is the time between two
    drift checks in seconds.
    """

    amphora_id: uuid.UUID
    bind_address: str
    bind_port: int
    services: str
    log_level: int
    interval: float
    targets: tuple[Target, ...]
    heartbeat_key: bytes = field(repr=False)
    heartbeat_format: str = "native"
    pair: bool = False
    audit_interval: float = AUDIT_SECONDS

    @property
    def bind(self) -> str:
        return str(Target(self.bind_address, self.bind_port))


def load(paths: Paths) -> Settings:
    """Read the settings.

    Raises:
        SettingsError: naming the setting that is missing or wrong.
    """
    parser = configparser.ConfigParser(interpolation=None)
    file = paths.etc / "agent.conf"
    try:
        with file.open(encoding="utf-8") as text:
            parser.read_file(text)
        heartbeat_format = _format(parser.get("heartbeat", "format", fallback="native"))
        return Settings(
            amphora_id=uuid.UUID(parser.get("agent", "amphora_id")),
            bind_address=str(ipaddress.ip_address(parser.get("agent", "bind_address"))),
            bind_port=parser.getint("agent", "bind_port", fallback=9443),
            services=parser.get("agent", "services", fallback="systemd"),
            log_level=_level(parser.get("agent", "log_level", fallback="INFO")),
            interval=_positive(parser.getfloat("heartbeat", "interval", fallback=3.0)),
            targets=_targets(parser.get("heartbeat", "targets", fallback="")),
            heartbeat_key=_key((paths.etc / "heartbeat.key").read_text(encoding="ascii"), heartbeat_format),
            heartbeat_format=heartbeat_format,
            pair=parser.getboolean("octavia", "pair", fallback=False),
            audit_interval=_positive(parser.getfloat("audit", "interval", fallback=AUDIT_SECONDS)),
        )
    except (OSError, configparser.Error, ValueError) as error:
        raise SettingsError(
            f"read {file}", str(error), "The compute backend writes it at boot; see docs/reference/agent-api.md."
        ) from error


def _level(name: str) -> int:
    if name not in _LEVELS:
        raise ValueError(f"log_level = {name} is none of {', '.join(_LEVELS)}")
    return _LEVELS[name]


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError(f"interval = {value} is not positive")
    return value


def _format(name: str) -> str:
    if name not in _FORMATS:
        raise ValueError(f"format = {name} is none of {', '.join(_FORMATS)}")
    return name


def _key(text: str, heartbeat_format: str) -> bytes:
    if heartbeat_format == "octavia":
        return text.strip().encode()
    key = bytes.fromhex(text.strip())
    if len(key) != HEARTBEAT_KEY_BYTES:
        raise ValueError(f"heartbeat.key has {len(key)} bytes, {HEARTBEAT_KEY_BYTES} are needed")
    return key


def _targets(text: str) -> tuple[Target, ...]:
    targets = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        host, _, port = item.rpartition(":")
        address = ipaddress.ip_address(host.strip("[]"))
        targets.append(Target(str(address), int(port)))
    return tuple(targets)
