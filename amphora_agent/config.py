# SPDX-License-Identifier: Apache-2.0
"""Settings: agent.conf and the key beside it.

Invariant: the agent starts only if each setting is valid. Otherwise the error names the setting.
"""

from __future__ import annotations

import configparser
import ipaddress
import logging
import math
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

from amphora_agent.errors import SettingsError
from amphora_agent.log_settings import NO_LOGS, LogSettings
from amphora_agent.paths import Paths

HEARTBEAT_KEY_BYTES = 32
AUDIT_SECONDS = 30.0
# Longest interval in seconds in the settings. Timers of the kernel and of Python refuse much longer intervals.
LONGEST_INTERVAL = 1e9
_LAST_PORT = 65535
_FORMATS = ("native", "octavia")
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING}


@dataclass(frozen=True)
class Target:
    """An address and port that receives heartbeats."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Settings:
    """The settings of an amphora, which the compute backend writes. Intervals are in seconds.

    With the ``heartbeat_format`` "octavia" (docs/reference/amphora-api-v1.md) the key is any text; the other format is
    "native". ``pair``: this amphora is one of two in Octavia's topology. ``logs`` come from a controller only.
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
    logs: LogSettings = NO_LOGS

    @property
    def bind(self) -> str:
        return str(Target(self.bind_address, self.bind_port))


def load(paths: Paths) -> Settings:
    """Read the settings; a `SettingsError` names a missing or wrong setting."""
    parser = configparser.ConfigParser(interpolation=None)
    file = paths.etc / "agent.conf"
    try:
        with file.open(encoding="utf-8") as text:
            parser.read_file(text)
        heartbeat_format = _one_of(_FORMATS, "format", parser.get("heartbeat", "format", fallback="native"))
        return Settings(
            amphora_id=uuid.UUID(parser.get("agent", "amphora_id")),
            bind_address=str(ipaddress.ip_address(parser.get("agent", "bind_address"))),
            bind_port=parser.getint("agent", "bind_port", fallback=9443),
            services=parser.get("agent", "services", fallback="systemd"),
            log_level=_LEVELS[_one_of(_LEVELS, "log_level", parser.get("agent", "log_level", fallback="INFO"))],
            interval=check_interval(parser.getfloat("heartbeat", "interval", fallback=3.0)),
            targets=parse_targets(parser.get("heartbeat", "targets", fallback="")),
            heartbeat_key=_key((paths.etc / "heartbeat.key").read_text(encoding="ascii"), heartbeat_format),
            heartbeat_format=heartbeat_format,
            pair=parser.getboolean("octavia", "pair", fallback=False),
            audit_interval=check_interval(parser.getfloat("audit", "interval", fallback=AUDIT_SECONDS)),
        )
    except (OSError, configparser.Error, ValueError) as error:
        raise SettingsError(
            f"read {file}", str(error), "The compute backend writes it at boot; see docs/reference/agent-api.md."
        ) from error


def _one_of(known: Collection[str], setting: str, name: str) -> str:
    if name not in known:
        raise ValueError(f"{setting} = {name} is none of {', '.join(known)}")
    return name


def check_interval(value: float) -> float:
    """Return an interval in seconds. Raises ValueError if it is not positive or too long."""
    if math.isnan(value) or not 0 < value <= LONGEST_INTERVAL:
        raise ValueError(f"interval = {value} is not above 0 and at most {LONGEST_INTERVAL:.0f}")
    return value


def _key(text: str, heartbeat_format: str) -> bytes:
    if heartbeat_format == "octavia":
        return text.strip().encode()
    key = bytes.fromhex(text.strip())
    if len(key) != HEARTBEAT_KEY_BYTES:
        raise ValueError(f"heartbeat.key has {len(key)} bytes, {HEARTBEAT_KEY_BYTES} are needed")
    return key


def parse_targets(text: str) -> tuple[Target, ...]:
    """Parse addresses with ports, separated by commas and perhaps in quotes. Raises ValueError."""
    return tuple(parse_target(item) for item in filter(None, (part.strip("'\" ") for part in text.split(","))))


def parse_target(text: str) -> Target:
    """Parse one address with a port. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= _LAST_PORT):
        raise ValueError(f"{text!r} does not end with a port from 1 to {_LAST_PORT}")
    return Target(str(ipaddress.ip_address(host.strip("[]"))), int(port))
