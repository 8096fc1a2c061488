# SPDX-License-Identifier: Apache-2.0
"""A load balancer's configuration and its lists of certificates, judged before HAProxy reads them.

Invariant: pure. A line that was judged once is not judged again.
"""

from __future__ import annotations

from collections.abc import Iterable

from amphora_agent.bundle import File
from amphora_agent.directives import lists
from amphora_agent.errors import ConfigurationRefused
from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration, Server

_READ = "read the load balancer's configuration"


def check(configuration: Configuration, files: Iterable[File]) -> None:
    """Refuse what a load balancer may not have HAProxy do.

    Args:
        configuration: with the lines of its sections.
        files: of the bundle. The content of one that was stored before is not at hand and was judged then.

    Raises:
        ConfigurationRefused: a line or a list of certificates is not accepted; the error names line and directive.
    """
    for section in configuration.sections:
        if section.refused:
            raise _refused(configuration)
    named = tls_diff.lists(configuration)
    for file in files:
        if file.name not in named or file.content is None:
            continue
        number = lists.refused_line(file.content)
        if number is not None:
            raise ConfigurationRefused(
                _READ,
                f"{file.name}, line {number}: a list of certificates names files of its bundle and ALPN only",
                "Name each certificate as tls/<object id>/<name>.",
                object_id=file.object_id,
            )


def _refused(configuration: Configuration) -> ConfigurationRefused:
    """The error about the first line that is refused."""
    for number, row in enumerate(configuration.rows, start=1):
        line = row.line if isinstance(row, Server) else row
        if line is not None and line.refusal is not None:
            return ConfigurationRefused(
                _READ,
                f"line {number}: {line.refusal}",
                "The amphora's image may be older than the controller: docs/agent-api.md lists what an agent accepts.",
                object_id=configuration.object_at(number),
            )
    raise AssertionError("a section is refused, and none of its lines")
