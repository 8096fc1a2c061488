# SPDX-License-Identifier: Apache-2.0
"""The checks of a received bundle: its owner, its generation, and its directives.

Invariant: pure. An amphora serves one load balancer, and never a generation older than the confirmed one. HAProxy reads
a text only after the check of its directives.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from amphora_agent.bundle import OCTAVIA_API_V1_ID, Bundle, File
from amphora_agent.directives import allowed
from amphora_agent.errors import BundleRefused, ConfigurationRefused
from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration, Server

_ACTION = "read the load balancer's configuration"


def refuse_foreign(bundle: Bundle, amphora_id: uuid.UUID, confirmed: Bundle | None) -> None:
    """Raise BundleRefused for a bundle of another amphora."""
    if bundle.amphora_id != amphora_id:
        raise BundleRefused(
            f"apply generation {bundle.generation}",
            f"it is for amphora {bundle.amphora_id}, this is {amphora_id}",
            generation=confirmed.generation if confirmed is not None else None,
        )


def refuse_stale(bundle: Bundle, confirmed: Bundle | None, *, lost: bool) -> None:
    """Raise BundleRefused for a bundle that contradicts the last confirmed one.

    It has another load balancer, an older generation, or the same generation with another content. After a loss of the
    confirmed files, the same generation is accepted with any content.
    """
    if confirmed is None:
        return
    why, remedy = "", ""
    if bundle.load_balancer_id != confirmed.load_balancer_id:
        why = f"this amphora serves load balancer {confirmed.load_balancer_id}"
        if confirmed.load_balancer_id == OCTAVIA_API_V1_ID:
            why = "this amphora is driven through Octavia's API 1.0"
    elif bundle.generation < confirmed.generation:
        why = f"generation {confirmed.generation} is applied already"
        remedy = "A newer controller has pushed it; read the desired state again."
    elif bundle.generation == confirmed.generation and bundle != confirmed and not lost:
        why = "this generation is applied already, with another content"
        remedy = "Each change needs a new generation."
    if why:
        raise BundleRefused(f"apply generation {bundle.generation}", why, remedy, generation=confirmed.generation)


def refuse_directives(configuration: Configuration, files: Iterable[File]) -> None:
    """Raise ConfigurationRefused for a forbidden directive, with its line.

    A stored file has no content here, because the agent checked the file when it was received.
    """
    for section in configuration.sections:
        if section.refused:
            raise _refusal(configuration)
    named = tls_diff.files_of_binds(configuration, "crt-list")
    for file in files:
        checked = file.content if file.name in named else None
        if checked is not None and (number := allowed.refused_crt_list_line(checked)) is not None:
            raise ConfigurationRefused(
                _ACTION,
                f"{file.name}, line {number}: a list of certificates names files of its bundle and ALPN only",
                "Name each certificate as tls/<object id>/<name>.",
                object_id=file.object_id,
            )


def _refusal(configuration: Configuration) -> ConfigurationRefused:
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
