# SPDX-License-Identifier: Apache-2.0
"""The checks that a bundle may replace the confirmed one.

Invariant: pure. An amphora serves one load balancer, and never a generation older than the confirmed one.
"""

from __future__ import annotations

import uuid

from amphora_agent.bundle import OCTAVIA_API_V1_ID, Bundle
from amphora_agent.errors import BundleRefused


def refuse_foreign(bundle: Bundle, amphora_id: uuid.UUID, confirmed: Bundle | None) -> None:
    """Refuse a bundle for another amphora.

    Raises:
        BundleRefused: the bundle has another amphora id.
    """
    if bundle.amphora_id != amphora_id:
        raise BundleRefused(
            f"apply generation {bundle.generation}",
            f"it is for amphora {bundle.amphora_id}, this is {amphora_id}",
            generation=confirmed.generation if confirmed is not None else None,
        )


def refuse_stale(bundle: Bundle, confirmed: Bundle | None, *, lost: bool) -> None:
    """Refuse a bundle that is older than the confirmed one, or contradicts it.

    Args:
        confirmed: the bundle that was confirmed last.
        lost: the files of the confirmed bundle are lost, so the same generation is accepted with any content.

    Raises:
        BundleRefused: it has another load balancer, an older generation, or the same generation with another content.
    """
    if confirmed is None:
        return
    action = f"apply generation {bundle.generation}"
    if bundle.load_balancer_id != confirmed.load_balancer_id:
        raise BundleRefused(
            action,
            "this amphora is driven through Octavia's API 1.0"
            if confirmed.load_balancer_id == OCTAVIA_API_V1_ID
            else f"this amphora serves load balancer {confirmed.load_balancer_id}",
            generation=confirmed.generation,
        )
    if bundle.generation < confirmed.generation:
        raise BundleRefused(
            action,
            f"generation {confirmed.generation} is applied already",
            "A newer controller has pushed it; read the desired state again.",
            generation=confirmed.generation,
        )
    if bundle.generation == confirmed.generation and bundle != confirmed and not lost:
        raise BundleRefused(
            action,
            "this generation is applied already, with another content",
            "Each change needs a new generation.",
            generation=confirmed.generation,
        )
