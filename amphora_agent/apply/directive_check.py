# SPDX-License-Identifier: Apache-2.0
"""Checks a load balancer's configuration and crt-lists against the allowed directives.

Invariant: pure. The check comes before HAProxy reads the text. Each line is checked once: the result is cached with
the parsed line.
"""

from __future__ import annotations

from collections.abc import Iterable

from amphora_agent.bundle import File
from amphora_agent.directives import crt_lists
from amphora_agent.errors import ConfigurationRefused
from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration, Server

_ACTION = "read the load balancer's configuration"


def refuse_directives(configuration: Configuration, files: Iterable[File]) -> None:
    """Refuse a configuration with a directive that no load balancer may have.

    Args:
        configuration: with the lines of its sections.
        files: of the bundle. A stored file without content was checked when it was received.

    Raises:
        ConfigurationRefused: a line or a crt-list is not allowed; the error names the line and the directive.
    """
    for section in configuration.sections:
        if section.refused:
            raise _refusal(configuration)
    named = tls_diff.crt_lists(configuration)
    for file in files:
        if file.name not in named or file.content is None:
            continue
        number = crt_lists.refused_line(file.content)
        if number is not None:
            raise ConfigurationRefused(
                _ACTION,
                f"{file.name}, line {number}: a list of certificates names files of its bundle and ALPN only",
                "Name each certificate as tls/<object id>/<name>.",
                object_id=file.object_id,
            )


def _refusal(configuration: Configuration) -> ConfigurationRefused:
    """Return the error about the first line that is refused."""
    for number, row in enumerate(configuration.rows, start=1):
        line = row.line if isinstance(row, Server) else row
        if line is not None and line.refusal is not None:
            return ConfigurationRefused(
                _ACTION,
                f"line {number}: {line.refusal}",
                "The image may be older than the controller. See docs/reference/agent-api.md for the directives.",
                object_id=configuration.object_at(number),
            )
    raise AssertionError("a section is refused, and none of its lines")
