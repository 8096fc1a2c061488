# SPDX-License-Identifier: Apache-2.0
"""Conversion of Octavia's agent configuration to settings of this agent.

Invariant: the agent uses Octavia's options for heartbeats and topology only. They never change the address of this
agent or its trusted certificates. Only `stored` and `keep` do I/O.
"""

from __future__ import annotations

import configparser
import logging
import uuid
from contextlib import suppress
from dataclasses import replace

from amphora_agent.config import Settings, parse_targets
from amphora_agent.errors import RequestRefused
from amphora_agent.paths import Paths, write_atomically

_log = logging.getLogger(__name__)
_REFUSED = "Unable to update amphora-agent configuration."
_FILE = "octavia.conf"


def changed(settings: Settings, text: str) -> Settings:
    """Return the settings after an upload; heartbeats then have Octavia's format.

    Raises RequestRefused for an invalid text, or for the text of another amphora.
    """
    parser = configparser.ConfigParser(interpolation=None, strict=False, default_section="\0none")
    try:
        parser.read_string(text)
        own = uuid.UUID(parser.get("amphora_agent", "amphora_id", fallback=str(settings.amphora_id)))
        targets = parser.get("health_manager", "controller_ip_port_list", fallback=None)
        interval = parser.getfloat("health_manager", "heartbeat_interval", fallback=settings.interval)
        key = parser.get("health_manager", "heartbeat_key", fallback=None)
        topology = parser.get("controller_worker", "loadbalancer_topology", fallback="")
        found = settings.targets if targets is None else parse_targets(targets.strip("[]"))
    except configparser.Error as error:
        # The text of the parser's error may repeat the line with the heartbeat key, so only the type of the error is
        # reported.
        raise RequestRefused(_REFUSED, f"{type(error).__name__}", 500) from None
    except ValueError as error:
        raise RequestRefused(_REFUSED, str(error), 500) from error
    if own != settings.amphora_id:
        raise RequestRefused(_REFUSED, f"it is for amphora {own}, this is {settings.amphora_id}", 500)
    if interval <= 0:
        raise RequestRefused(_REFUSED, f"heartbeat_interval = {interval} is not positive", 500)
    return replace(
        settings,
        heartbeat_format="octavia",
        targets=found,
        interval=interval,
        heartbeat_key=settings.heartbeat_key if key is None else key.encode(),
        pair=topology == "ACTIVE_STANDBY" if topology else settings.pair,
    )


def stored(settings: Settings, paths: Paths) -> Settings:
    """Return the settings of the last upload."""
    with suppress(FileNotFoundError):
        text = (paths.etc / _FILE).read_text(encoding="utf-8")
        try:
            return changed(settings, text)
        except RequestRefused as error:
            _log.error(
                "The agent ignores the configuration that Octavia's worker has uploaded (file %s), and uses its own "
                "settings: %s",
                _FILE,
                error,
            )
    return settings


def keep(text: str, paths: Paths) -> None:
    """Store an upload for the next start of the agent. Raises OSError."""
    write_atomically(paths.etc / _FILE, text)
