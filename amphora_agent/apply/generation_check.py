# SPDX-License-Identifier: Apache-2.0
"""Whether a bundle may take the place of what is served.

Invariant: pure. An amphora serves one load balancer, and of that no older state than one it has confirmed.
"""

from __future__ import annotations

import uuid

from amphora_agent.bundle import Bundle
from amphora_agent.errors import BundleRefused
from amphora_agent.octavia_api_v1.stored_state import OCTAVIA


def refuse_foreign(bundle: Bundle, amphora_id: uuid.UUID, confirmed: Bundle | None) -> None:
    """Refuse one that is not for this amphora.

    Raises:
        BundleRefused: it is for another one.
    """
    if bundle.amphora_id != amphora_id:
        raise BundleRefused(
            f"apply generation {bundle.generation}",
            f"it is for amphora {bundle.amphora_id}, this is {amphora_id}",
            generation=confirmed.generation if confirmed is not None else None,
        )


def refuse_stale(bundle: Bundle, confirmed: Bundle | None, *, lost: bool) -> None:
    """Refuse one that would lead backwards.

    Args:
        confirmed: the one that was confirmed last.
        lost: it cannot be served any more, and is welcome once more whatever is in it.

    Raises:
        BundleRefused: it is of another load balancer, older, or the same generation with another content.
    """
    if confirmed is None:
        return
    wanted = f"apply generation {bundle.generation}"
    if bundle.load_balancer_id != confirmed.load_balancer_id:
        raise BundleRefused(
            wanted,
            "this amphora is driven through Octavia's API 1.0"
            if confirmed.load_balancer_id == OCTAVIA
            else f"this amphora serves load balancer {confirmed.load_balancer_id}",
            generation=confirmed.generation,
        )
    if bundle.generation < confirmed.generation:
        raise BundleRefused(
            wanted,
            f"generation {confirmed.generation} is applied already",
            "A newer controller was here; read the wanted state again.",
            generation=confirmed.generation,
        )
    if bundle.generation == confirmed.generation and bundle != confirmed and not lost:
        raise BundleRefused(
            wanted,
            "this generation is applied already, with another content",
            "Every change takes a new generation.",
            generation=confirmed.generation,
        )
